"""Time: h_t = A_t h_{t-1} + u_t for every frequency and channel, states before t = 0 being zero.

Letters: B batch, T time, F = H * Wf frequencies, C channels, n coupled states. A cell describes its recurrence by one
function, `step(h, gates_t, inputs_t) -> h`, linear in (h, inputs_t) together; all methods are made from it:

    reference     lax.scan over T, the n x n matrices are never formed: O(T) time, O(1) extra memory forward
    chunked       the same, its backward pass keeping the states of every sqrt(T)-th step alone and running the steps
                  between two of them again: one more forward pass, and 2 sqrt(T) states in memory instead of T
    associative   prefix products of the matrices (columns of A_t = step of unit vectors), within blocks of 8 steps all
                  at once, then from block to block: n^2 memory
    goom          lax.scan over T in log space, where nothing overflows within the scan (cssm.goom); slow
    fused         one GPU kernel, whose states stay in registers (cssm.fused)
    auto          reference up to 64 steps, chunked beyond; not yet fused, which in this form no GPU has run so far

All give the same numbers to rounding, goom within its floor and ceiling. The carry is float32 (float64 for float64
inputs) whatever the inputs are; states are returned in the dtype of the inputs.

What lies within a step is computed again in the backward pass by all but associative. For T states that are all read,
chunked keeps those T, as its result, where reference keeps them once more; with last_only, and a still image, nothing
of the size of a state grows faster than sqrt(T).
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from cssm import fused, goom
from cssm.spectral import Spectrum, add, magnitude, multiply, scale, total

States = tuple[Spectrum, ...]
Step = Callable[[States, Any, States], States]
Method = Literal["auto", "reference", "chunked", "associative", "goom", "fused"]


def linear_scan(
    make_step: Callable[..., Step],
    constants: Any,
    num_states: int,
    gates: Any,
    inputs: States,
    method: Method = "auto",
    last_only: bool = False,
    stable: bool = False,
) -> States:
    """Run the recurrence over time.

    make_step(*constants) is the step: (h, gates_t, inputs_t) -> h. h: `num_states` spectra [B, F, C].
    constants: tuple of arrays or spectra that broadcast to [F, C]; the step closes over no other arrays.
    gates: pytree of real arrays [B or 1, T, F or 1, C or 1].
    inputs: spectra [B, T, F, C], or [B, 1, F, C] where the input is the same at every t.
    stable: run `stable_step(step)` instead.
    Returns `num_states` spectra [B, T, F, C]; with last_only, [B, 1, F, C] holding t = T - 1.
    """
    num_steps = jax.tree.leaves(gates)[0].shape[1]
    method = choose_method(method, num_steps)
    if method == "fused":
        make = (lambda *parts: stable_step(make_step(*parts))) if stable else make_step
        return fused.fused_scan(make, constants, num_states, gates, inputs, last_only)
    dtype = jnp.promote_types(inputs[0].re.dtype, jnp.float32)
    gates = jax.tree.map(lambda g: jnp.moveaxis(g, 1, 0), gates)  # [T, B, F, 1]
    inputs = jax.tree.map(lambda u: jnp.moveaxis(u, 1, 0), inputs)  # [T or 1, B, F, C]
    still = inputs[0].re.shape[0] == 1 and num_steps > 1
    start = _zeros(num_states, jnp.zeros(inputs[0].re.shape[1:], dtype))
    states = _RUNS[method](make_step(*constants), stable, start, gates, inputs, still, last_only)
    return jax.tree.map(lambda s: jnp.moveaxis(s, 0, 1), states)


def choose_method(method: Method, num_steps: int) -> Method:
    """What "auto" stands for."""
    if method != "auto":
        return method
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


def _returned(inputs: States) -> Callable[[States], States]:
    """States as they are returned: in the dtype of the inputs."""
    dtype = inputs[0].re.dtype
    return lambda states: jax.tree.map(lambda s: s.astype(dtype), states)


def _reference(step, stable, start, gates, inputs, still, last_only):
    step = stable_step(step) if stable else step
    return _states(*_loop(step, start, gates, inputs, still, last_only, _returned(inputs)), _returned(inputs))


def _states(last, states, returned):
    return jax.tree.map(lambda s: s[None], returned(last)) if states is None else states


def _chunked(step, stable, start, gates, inputs, still, last_only):
    step = stable_step(step) if stable else step
    num_steps = jax.tree.leaves(gates)[0].shape[0]
    size = math.isqrt(num_steps)
    whole = num_steps // size * size
    timed = (gates, None if still else inputs)

    def chunk(h, part):
        return _loop(step, h, part[0], inputs if still else part[1], still, last_only, _returned(inputs))

    chunks = jax.tree.map(lambda a: a[:whole].reshape(-1, size, *a.shape[1:]), timed)
    last, states = jax.lax.scan(jax.checkpoint(chunk, prevent_cse=False), start, chunks)
    states = jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), states)
    if whole < num_steps:  # fewer than sqrt(T) steps are left: their states may stay
        last, rest = chunk(last, jax.tree.map(lambda a: a[whole:], timed))
        states = jax.tree.map(lambda *parts: jnp.concatenate(parts), states, rest)
    return _states(last, states, _returned(inputs))


def _loop(step, start, gates, inputs, still, last_only, returned, unrolled=16) -> tuple[Any, Any]:
    """(the last states, all of them as `returned` makes them or None); up to `unrolled` steps are unrolled where that
    is faster.
    """
    num_steps = jax.tree.leaves(gates)[0].shape[0]
    constant = jax.tree.map(lambda u: u[0], inputs) if still else None

    def body(h, at_t):
        gates_t, inputs_t = at_t
        new = step(h, gates_t, constant if still else inputs_t)
        h = jax.tree.map(lambda s, old: s.astype(old.dtype), new, h)
        return h, None if last_only else returned(h)

    # Only the states are kept for the backward pass; what lies between them is computed again.
    body = jax.checkpoint(body, prevent_cse=False)
    # A GPU wants the loop unrolled (one fused program); on a CPU a rolled loop is many times faster.
    unroll = num_steps if jax.default_backend() == "gpu" and num_steps <= unrolled else 1
    return jax.lax.scan(body, start, (gates, None if still else inputs), unroll=unroll)


# Steps whose prefix products are one program: its length for the compiler grows with them.
BLOCK = 8


def _associative(step, stable, start, gates, inputs, still, last_only):
    """Prefix products within blocks of steps, all blocks at once, then from block to block.

    Over all of 1024 steps at once it took XLA many minutes to compile.
    """
    num_steps, n = jax.tree.leaves(gates)[0].shape[0], len(start)
    if still:
        inputs = jax.tree.map(lambda u: jnp.broadcast_to(u, (num_steps, *u.shape[1:])), inputs)
    zero = jnp.zeros(inputs[0].re.shape, start[0].re.dtype)
    matrix = _matrix(step, stable, n, gates, len(inputs), zero)
    vector = step(_zeros(n, zero), gates, inputs)
    size = min(num_steps, BLOCK)

    def blocks(plane):
        left = -num_steps % size
        padded = jnp.pad(plane.astype(zero.dtype), ((0, left), *[(0, 0)] * (plane.ndim - 1)))
        return padded.reshape(-1, size, *plane.shape[1:])

    prefixes = jax.tree.map(blocks, ([list(row) for row in matrix], list(vector)))
    matrix, vector = jax.lax.associative_scan(_compose, prefixes, axis=1)

    def block(h, prefix):
        matrix, vector = prefix
        states = _apply(matrix, vector, h)
        return [jax.tree.map(lambda s: s[-1], state) for state in states], states

    states = vector if num_steps <= size else jax.lax.scan(block, list(start), (matrix, vector))[1]
    states = jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:])[:num_steps], tuple(states))
    return _returned(inputs)(jax.tree.map(lambda s: s[-1:], states) if last_only else states)


def _compose(earlier, later):
    """(A2, u2) after (A1, u1) is (A2 A1, A2 u1 + u2)."""
    (a1, u1), (a2, u2) = earlier, later
    n = len(u1)
    product = [[add(*(multiply(a2[i][r], a1[r][j]) for r in range(n))) for j in range(n)] for i in range(n)]
    return product, _apply(a2, u2, u1)


def _apply(matrix, vector, h):
    """A h + u."""
    rows = zip(matrix, vector, strict=True)
    return [add(*(multiply(a, s) for a, s in zip(row, h, strict=True)), u) for row, u in rows]


def _goom(step, stable, start, gates, inputs, still, last_only):
    returned = lambda states: _returned(inputs)(tuple(goom.from_goom(state) for state in states))
    step = _log_step(step, stable)
    # A step is large here: unrolled, it would take long to compile.
    return _states(*_loop(step, _to_goom(start), gates, inputs, still, last_only, returned, unrolled=1), returned)


def _log_step(step: Step, stable: bool):
    """The step on states in log space: its matrix times h, plus its input, term by term."""

    def log_step(h: tuple[goom.Goom, ...], gates: Any, inputs: States) -> tuple[goom.Goom, ...]:
        zero = jnp.zeros_like(h[0].log)
        matrix = [_to_goom(row) for row in _matrix(step, stable, len(h), gates, len(inputs), zero)]
        driven = _to_goom(step(_zeros(len(h), zero), gates, inputs))
        carried = [[goom.multiply(a, state) for a, state in zip(row, h, strict=True)] for row in matrix]
        return tuple(goom.add(*terms, u) for terms, u in zip(carried, driven, strict=True))

    return log_step


def _to_goom(states: States) -> tuple[goom.Goom, ...]:
    return tuple(goom.to_goom(state) for state in states)


_RUNS = {
    "reference": _reference,
    "chunked": _chunked,
    "associative": _associative,
    "goom": _goom,
}
