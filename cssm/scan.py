"""Time: h_t = A_t h_{t-1} + u_t for every frequency and channel, states before t = 0 being zero.

Letters: B batch, T time, F = H * Wf frequencies, C channels, n coupled states. A cell describes its recurrence by one
function, `step(h, gates_t, inputs_t) -> h`, linear in (h, inputs_t) together; all methods are made from it:

    reference     lax.scan over T, the n x n matrices are never formed: O(T) time, O(1) extra memory forward
    chunked       the same, its backward pass keeping the states of every sqrt(T)-th step alone and running the steps
                  between two of them again: one more forward pass, and 2 sqrt(T) states in memory instead of T
    associative   prefix products of the matrices (columns of A_t = step of unit vectors), within blocks of 8 steps all
                  at once, then from block to block: n^2 memory
    goom          the same in log space, where nothing overflows within the scan (cssm.goom), as published; slow
    fused         one GPU kernel, whose states stay in registers (cssm.fused)
    auto          fused where there is such a GPU, for up to FUSED_MAX_STATES states; elsewhere reference up to 64
                  steps, chunked beyond

All give the same numbers to rounding, goom within its floor and ceiling. The carry is float32 (float64 for float64
inputs) whatever the inputs are; what is read of the states is returned in the dtype of the inputs.

What lies within a step is computed again in the backward pass by all but associative and goom. For T states that are
all read, chunked keeps those T, as its result, where reference keeps them once more; with last_only, and a still image,
nothing of the size of a state grows faster than sqrt(T).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from cssm import fused, goom, spectral
from cssm.spectral import Packed, Spectrum, add, is_packed, magnitude, pack, scale, total, unpack

States = tuple[Spectrum, ...]
Step = Callable[[States, Any, States], States]
Read = Callable[[States, Any], States]
Method = Literal["auto", "reference", "chunked", "associative", "goom", "fused"]

# Of n states fit into the registers of a GPU's program.
FUSED_MAX_STATES = 4


def every_state(h: States, gates: Any) -> States:
    """Read the states as they are."""
    return h


def linear_scan(
    make_step: Callable[..., Step],
    constants: Any,
    counts: tuple[int, int],
    gates: Any,
    inputs: jax.Array,
    method: Method = "auto",
    last_only: bool = False,
    stable: bool = False,
    read: Read = every_state,
    read_gates: Any = (),
    offset: jax.Array | None = None,
    copies: int = 1,
) -> jax.Array:
    """Run the recurrence over time.

    make_step(*constants) is the step: (h, gates_t, inputs_t) -> h. h, inputs_t: so many spectra [B, F, C] as counts
    says, (states, inputs).
    constants: tuple of arrays or spectra that broadcast to [F, C]; the step closes over no other arrays.
    gates: pytree of real arrays [B or 1, T, F or 1, C or 1], and of Packed spectra [B, T, 2, F, n C], of which a step
    is shown the tuple of n.
    inputs: spectra packed, [B, S, 2, F, n C], the last of S <= T steps standing for those after it: one for a still
    image. With one plane in place of two they are real, and so are all states: their imaginary planes are zero to the
    step, and not returned.
    offset [n C]: added to the real plane of the inputs at frequency 0, at every step: what is constant in space.
    stable: run `stable_step(step)` instead.
    read(h_t, read_gates_t): the spectra to return of a step, linear in h_t; read_gates as gates, with last_only of one
    step or all.
    copies: so many recurrences alike but for their inputs, which lie side by side; so does what is read of them.
    Returns what is read, packed, [B, T, 2, F, m C] in the dtype of the inputs; with last_only, of t = T - 1 alone.
    """
    num_steps = jax.tree.leaves(gates)[0].shape[1]
    method = choose_method(method, num_steps, counts[0], inputs.dtype)
    if last_only:
        read_gates = jax.tree.map(lambda r: r[:, -1:], read_gates)
    if method == "fused":
        make = (lambda *parts: stable_step(make_step(*parts))) if stable else make_step
        return fused.fused_scan(make, constants, counts, gates, inputs, last_only, read, read_gates, offset, copies)
    if offset is not None:
        inputs = inputs.at[:, :, 0, 0].add(offset.astype(inputs.dtype))
    if inputs.shape[1] > 1:
        inputs = repeat_over_time(inputs, num_steps)
    timed = lambda tree: jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tree)
    step = make_step(*constants)
    run = _Run(
        step=lambda h, gates_t, u: step(h, shown(gates_t), u),
        stable=stable,
        counts=counts,
        planes=inputs.shape[2],
        dtype=inputs.dtype,
        num_steps=num_steps,
        last_only=last_only,
        read=lambda h, gates_t: read(h, shown(gates_t)),
    )
    at_steps = _Timed(timed(gates), timed(inputs), timed(read_gates))
    if copies == 1:
        return jnp.moveaxis(_RUNS[method](run, at_steps), 0, 1)
    # What has no input in it is computed once for all of them.
    split = at_steps.inputs.reshape(*at_steps.inputs.shape[:-1], copies, -1)
    one = lambda inputs: _RUNS[method](run, at_steps._replace(inputs=inputs))
    out = jax.vmap(one, in_axes=-2, out_axes=-2)(split)
    return jnp.moveaxis(out.reshape(*out.shape[:-2], -1), 0, 1)


def shown(gates: Any) -> Any:
    """Gates of a step as the step sees them."""
    return jax.tree.map(
        lambda g: unpack(g.array, g.count, -3) if isinstance(g, Packed) else g, gates, is_leaf=is_packed
    )


def repeat_over_time(x: jax.Array, num_steps: int | None) -> jax.Array:
    """[B, S, ...] -> [B, num_steps, ...]: the last of S <= num_steps steps stands for those after it."""
    missing = (num_steps or 0) - x.shape[1]
    if missing <= 0:
        return x
    if x.shape[1] == 1:
        return jnp.broadcast_to(x, (x.shape[0], num_steps, *x.shape[2:]))
    after = jnp.broadcast_to(x[:, -1:], (x.shape[0], missing, *x.shape[2:]))
    return jnp.concatenate([x, after], axis=1)


def choose_method(method: Method, num_steps: int, num_states: int, dtype: jnp.dtype) -> Method:
    """What "auto" stands for."""
    if method != "auto":
        return method
    if fused.available() and num_states <= FUSED_MAX_STATES and dtype != jnp.float64:
        return "fused"
    return "chunked" if num_steps > 64 else "reference"


def stable_step(step: Step) -> Step:
    """The recurrence with each row of A_t divided by the sum of its magnitudes, where that is above 1.

    Then max |h_t| <= max |h_{t-1}| + max |u_t| over the n states: at most linear growth, for every T. A row whose sum
    is below 1 stays as it is.
    """

    def stable(h: States, gates: Any, inputs: States) -> States:
        zero = jnp.zeros_like(h[0].re)
        factors = [_factor(row) for row in _matrix(step, False, len(h), gates, len(inputs), zero)]
        carried = step(h, gates, _zeros(len(inputs), zero))
        driven = step(_zeros(len(h), zero), gates, inputs)
        return tuple(add(scale(f, c), d) for f, c, d in zip(factors, carried, driven, strict=True))

    return stable


def _matrix(step: Step, stable: bool, num_states: int, gates: Any, num_inputs: int, zero: jax.Array) -> list[States]:
    """The rows of A_t, whose columns are the steps of unit vectors without input; zero: the like of a state's plane."""

    def column(j: int) -> States:
        unit = tuple(Spectrum(zero + 1 if i == j else zero, zero) for i in range(num_states))
        return step(unit, gates, _zeros(num_inputs, zero))

    rows = list(zip(*(column(j) for j in range(num_states)), strict=True))
    return [tuple(scale(_factor(row), a) for a in row) for row in rows] if stable else rows


def _factor(row: States) -> jax.Array:
    return 1.0 / jnp.maximum(total([magnitude(a) for a in row]), 1.0)


def _zeros(count: int, zero: jax.Array) -> States:
    return (Spectrum(zero, zero),) * count


class _Timed(NamedTuple):
    """What a step sees, time first. inputs: [T or 1, B, 2, F, n C]."""

    gates: Any
    inputs: jax.Array
    read_gates: Any


@dataclass(frozen=True)
class _Run:
    """A recurrence, as the methods below take it."""

    step: Step
    stable: bool
    counts: tuple[int, int]
    planes: int
    dtype: jnp.dtype
    num_steps: int
    last_only: bool
    read: Read

    def still(self, timed: _Timed) -> bool:
        return timed.inputs.shape[0] == 1 and self.num_steps > 1

    def unpack(self, inputs: jax.Array) -> States:
        return unpack(inputs, self.counts[1], axis=-3)

    def zero(self, timed: _Timed) -> jax.Array:
        """The like of a state's plane, [B, F, C]."""
        _, batch, _, frequencies, channels = timed.inputs.shape
        shape = (batch, frequencies, channels // self.counts[1])
        return jnp.zeros(shape, jnp.promote_types(self.dtype, jnp.float32))

    def out(self, h: States, read_gates: Any) -> jax.Array:
        """What is returned of states, at one step or all."""
        return pack(*self.read(h, read_gates), axis=-3, planes=self.planes).astype(self.dtype)

    def last(self, h: States, timed: _Timed) -> jax.Array:
        return self.out(h, jax.tree.map(lambda r: r[-1], timed.read_gates))[None]


def _reference(run: _Run, timed: _Timed) -> jax.Array:
    step = stable_step(run.step) if run.stable else run.step
    last, states = _loop(run, step, _zeros(run.counts[0], run.zero(timed)), timed)
    return run.last(last, timed) if states is None else states


def _chunked(run: _Run, timed: _Timed) -> jax.Array:
    step = stable_step(run.step) if run.stable else run.step
    size = math.isqrt(run.num_steps)
    whole = run.num_steps // size * size
    still = timed.inputs if run.still(timed) else None
    split = timed._replace(inputs=timed.inputs if still is None else None)
    if run.last_only:
        split = split._replace(read_gates=())

    def chunk(h, part):
        return _loop(run, step, h, part if still is None else part._replace(inputs=still))

    chunks = jax.tree.map(lambda a: a[:whole].reshape(-1, size, *a.shape[1:]), split)
    start = _zeros(run.counts[0], run.zero(timed))
    last, states = jax.lax.scan(jax.checkpoint(chunk, prevent_cse=False), start, chunks)
    states = jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), states)
    if whole < run.num_steps:  # fewer than sqrt(T) steps are left: their states may stay
        last, rest = chunk(last, jax.tree.map(lambda a: a[whole:], split))
        states = jax.tree.map(lambda *parts: jnp.concatenate(parts), states, rest)
    return run.last(last, timed) if states is None else states


# Steps up to which a loop is unrolled on a GPU.
UNROLLED = 16


def _loop(run: _Run, step, start, timed: _Timed) -> tuple[Any, jax.Array | None]:
    """(the last states, what is read of all of them or None)."""
    num_steps = jax.tree.leaves(timed.gates)[0].shape[0]
    still = timed.inputs.shape[0] == 1 and num_steps > 1
    constant = run.unpack(timed.inputs[0]) if still else None

    def body(h, at_t):
        gates_t, inputs_t, read_t = at_t
        new = step(h, gates_t, constant if still else run.unpack(inputs_t))
        h = jax.tree.map(lambda s, old: s.astype(old.dtype), new, h)
        return h, None if run.last_only else run.out(h, read_t)

    # Only the states are kept for the backward pass; what lies between them is computed again.
    body = jax.checkpoint(body, prevent_cse=False)
    # A GPU wants the loop unrolled (one fused program); on a CPU a rolled loop is many times faster.
    unroll = num_steps if jax.default_backend() == "gpu" and num_steps <= UNROLLED else 1
    steps = (timed.gates, None if still else timed.inputs, None if run.last_only else timed.read_gates)
    return jax.lax.scan(body, start, steps, unroll=unroll)


# Steps whose prefix products are one program: its length for the compiler grows with them.
BLOCK = 8


def _associative(run: _Run, timed: _Timed) -> jax.Array:
    return _prefix_products(run, timed, list, list, spectral)


def _goom(run: _Run, timed: _Timed) -> jax.Array:
    enter = lambda states: [goom.to_goom(state) for state in states]
    leave = lambda states: [goom.from_goom(state) for state in states]
    return _prefix_products(run, timed, enter, leave, goom)


def _prefix_products(run: _Run, timed: _Timed, enter, leave, algebra) -> jax.Array:
    """Prefix products within blocks of steps, all blocks at once, then from block to block.

    algebra: `multiply` and `add` of the numbers that `enter` makes of spectra, and `leave` makes spectra of.
    Over all of 1024 steps at once it took XLA many minutes to compile.
    """
    num_steps, n = run.num_steps, run.counts[0]
    inputs = run.unpack(jnp.broadcast_to(timed.inputs, (num_steps, *timed.inputs.shape[1:])))
    zero = jnp.broadcast_to(run.zero(timed), inputs[0].re.shape)
    matrix = _matrix(run.step, run.stable, n, timed.gates, len(inputs), zero)
    vector = run.step(_zeros(n, zero), timed.gates, inputs)
    size = min(num_steps, BLOCK)

    def blocks(plane):
        left = -num_steps % size
        padded = jnp.pad(plane.astype(zero.dtype), ((0, left), *[(0, 0)] * (plane.ndim - 1)))
        return padded.reshape(-1, size, *plane.shape[1:])

    rows, vector = jax.tree.map(blocks, ([list(row) for row in matrix], list(vector)))
    prefixes = [enter(row) for row in rows], enter(vector)
    compose = lambda earlier, later: _compose(earlier, later, algebra)
    matrix, vector = jax.lax.associative_scan(compose, prefixes, axis=1)

    def block(h, prefix):
        matrix, vector = prefix
        states = _apply(matrix, vector, h, algebra)
        return [jax.tree.map(lambda s: s[-1], state) for state in states], states

    start = enter(_zeros(n, zero[0]))
    states = vector if num_steps <= size else jax.lax.scan(block, start, (matrix, vector))[1]
    states = jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:])[:num_steps], states)
    if run.last_only:
        return run.last(leave(jax.tree.map(lambda s: s[-1], states)), timed)
    return run.out(leave(states), timed.read_gates)


def _compose(earlier, later, algebra):
    """(A2, u2) after (A1, u1) is (A2 A1, A2 u1 + u2)."""
    (a1, u1), (a2, u2) = earlier, later
    n = len(u1)
    entry = lambda i, j: algebra.add(*(algebra.multiply(a2[i][r], a1[r][j]) for r in range(n)))
    return [[entry(i, j) for j in range(n)] for i in range(n)], _apply(a2, u2, u1, algebra)


def _apply(matrix, vector, h, algebra):
    """A h + u."""
    rows = zip(matrix, vector, strict=True)
    return [algebra.add(*(algebra.multiply(a, s) for a, s in zip(row, h, strict=True)), u) for row, u in rows]


_RUNS = {
    "reference": _reference,
    "chunked": _chunked,
    "associative": _associative,
    "goom": _goom,
}
