"""The recurrence as one GPU kernel: states stay in registers over time, forward and backward.

One program of the kernel takes an example, a frequency and a block of channels through all time steps. The step is the
cell's own (cssm.scan), traced into the kernel, and its derivative there is jax.vjp of it, so that every recurrence has
the kernel. For the backward pass the states are kept every SEGMENT steps and those between are run again, in registers.
Sums are taken in a fixed order: results are the same from run to run.

Letters as in cssm.scan. Triton through Pallas; off a GPU the same program is interpreted, which is for tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

Tree = Any
States = tuple[Tree, ...]

# Channels of a program, one warp. A Triton array holds a power of two of numbers.
BLOCK = 128
# Steps between kept states: more would leave the registers.
SEGMENT = 4
# Programs that keep a large GPU busy in the backward pass; more examples in one means fewer partial sums to add.
PROGRAMS = 4096


@dataclass(frozen=True)
class _Plan:
    """Sizes of a scan, and how it is cut. parts: of the batch, in the backward pass."""

    batch: int
    time: int
    frequencies: int
    channels: int
    state: Any  # the structure of one state
    num_states: int
    dtype: jnp.dtype  # of the results
    still: bool
    last_only: bool
    block: int
    segment: int
    parts: int
    interpret: bool

    @property
    def carry(self) -> jnp.dtype:
        """Of all numbers inside."""
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def blocks(self) -> int:
        return -(-self.channels // self.block)

    @property
    def segments(self) -> int:
        """Whole ones; steps that are left come after them."""
        return self.time // self.segment

    @property
    def kept(self) -> int:
        """States that are kept: at the start of each segment but the first."""
        return -(-self.time // self.segment) - 1

    def states(self, make: Callable[[], Any]) -> States:
        """The tree of all states, each plane made by `make`."""
        tree = self.state
        return tuple(tree.unflatten([make() for _ in range(tree.num_leaves)]) for _ in range(self.num_states))

    def zeros(self) -> States:
        return self.states(lambda: jnp.zeros((self.block,), self.carry))

    def shapes(self, steps: int, dtype: jnp.dtype) -> States:
        shape = (self.batch, steps, self.frequencies, self.channels)
        return self.states(lambda: jax.ShapeDtypeStruct(shape, dtype))


def available() -> bool:
    """Whether the kernel is made for the default device: NVIDIA from Ampere (compute capability 8.0) on."""
    device = jax.devices()[0]
    if jax.default_backend() != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    return float(device.compute_capability) >= 8.0


def fused_scan(
    make_step: Callable[..., Callable[[States, Any, States], States]],
    constants: Tree,
    num_states: int,
    gates: Tree,
    inputs: States,
    last_only: bool = False,
    interpret: bool | None = None,
) -> States:
    """As cssm.scan.linear_scan: `num_states` states [B, T, F, C] in the dtype of the inputs; last_only: [B, 1, F, C].

    make_step(*constants) is the step; constants are arrays that broadcast to [F, C], gates [B or 1, T, F or 1, C or 1],
    inputs [B, T or 1, F, C]. Inside, all are float32 (float64 for float64 inputs). interpret None: where there is no
    GPU.
    """
    batch, still_steps, frequencies, channels = jax.tree.leaves(inputs)[0].shape
    steps = jax.tree.leaves(gates)[0].shape[1]
    block = min(BLOCK, 1 << (channels - 1).bit_length())
    columns = frequencies * -(-channels // block)
    plan = _Plan(
        batch=batch,
        time=steps,
        frequencies=frequencies,
        channels=channels,
        state=jax.tree.structure(inputs[0]),
        num_states=num_states,
        dtype=jax.tree.leaves(inputs)[0].dtype,
        still=still_steps == 1 and steps > 1,
        last_only=last_only,
        block=block,
        segment=min(SEGMENT, steps),
        parts=next(n for n in range(1, batch + 1) if batch % n == 0 and (n * columns >= PROGRAMS or n == batch)),
        interpret=jax.default_backend() != "gpu" if interpret is None else interpret,
    )

    @jax.custom_vjp
    def scan(constants, gates, inputs):
        return _forward(plan, make_step, constants, gates, inputs, keep=False)[0]

    def forward(constants, gates, inputs):
        states, kept = _forward(plan, make_step, constants, gates, inputs, keep=True)
        return states, (constants, gates, inputs, kept)

    def backward(residuals, d_states):
        constants, gates, inputs, kept = residuals
        return _backward(plan, make_step, constants, gates, inputs, kept, d_states)

    scan.defvjp(forward, backward)
    return scan(jax.tree.map(lambda k: jnp.broadcast_to(k, (frequencies, channels)), constants), gates, inputs)


class _Place:
    """Where a program is, and how it reads and writes there."""

    def __init__(self, plan: _Plan, b: jax.Array, f: jax.Array, c: jax.Array):
        self.plan, self.b, self.f = plan, b, f
        self.channels = pl.ds(c * plan.block, plan.block)
        lanes = c * plan.block + jnp.arange(plan.block)
        self.mask = lanes < plan.channels if plan.channels % plan.block else None
        self.zero = c * 0  # Pallas' interpreter wants traced indices

    def read(self, ref: Any, *index: Any, where: Any = None) -> jax.Array:
        """A block of channels, zeros beyond the last one and where not `where`."""
        mask = self.mask
        if where is not None:
            here = jnp.broadcast_to(where, (self.plan.block,))
            mask = here if mask is None else mask & here
        at = ref.at[(*index, self.channels)]
        loaded = plt.load(at) if mask is None else plt.load(at, mask=mask, other=0.0)
        return loaded.astype(self.plan.carry)

    def write(self, ref: Any, value: jax.Array, *index: Any) -> None:
        plt.store(ref.at[(*index, self.channels)], value.astype(ref.dtype), mask=self.mask)

    def constants(self, refs: Tree) -> Tree:
        return jax.tree.map(lambda ref: self.read(ref, self.f), refs)

    def gates(self, refs: Tree, t: Any) -> Tree:
        """A number where all channels share it, else a block of them."""

        def one(ref):
            b = self.b if ref.shape[0] > 1 else self.zero
            f = self.f if ref.shape[2] > 1 else self.zero
            if ref.shape[3] > 1:
                return self.read(ref, b, t, f)
            return plt.load(ref.at[b, t, f, self.zero]).astype(self.plan.carry)

        return jax.tree.map(one, refs)

    def inputs(self, refs: Tree, t: Any) -> Tree:
        t = self.zero if self.plan.still else t
        return jax.tree.map(lambda ref: self.read(ref, self.b, t, self.f), refs)


def _repeat(times: int, body: Callable, carry: Tree) -> Tree:
    # The loop's own index would be int64 where jax has float64, and Pallas wants indices of one type.
    return jax.lax.fori_loop(0, times, lambda i, carry: body(i.astype(jnp.int32), carry), carry)


def _call(kernel: Callable, plan: _Plan, grid: tuple[int, ...], out_shape: Tree, operands: Tree) -> Tree:
    return pl.pallas_call(
        kernel,
        out_shape=(out_shape,),  # one argument of the kernel, whatever its structure
        grid=grid,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=plan.interpret,
    )(*operands)[0]


def _forward(plan: _Plan, make_step, constants, gates, inputs, keep: bool) -> tuple[States, States | None]:
    """(states, those at the start of each segment but the first, if they are to be kept)."""
    keep = keep and plan.kept > 0

    def kernel(constant_refs, gate_refs, input_refs, out_refs):
        state_refs, kept_refs = out_refs if keep else (out_refs, None)
        place = _Place(plan, pl.program_id(0), pl.program_id(1), pl.program_id(2))
        step = make_step(*place.constants(constant_refs))

        def write(refs, h, t):
            jax.tree.map(lambda ref, plane: place.write(ref, plane, place.b, t, place.f), refs, h)

        def segment(h, first, length):
            for s in range(length):
                t = first + s
                h = step(h, place.gates(gate_refs, t), place.inputs(input_refs, t))
                if not plan.last_only:
                    write(state_refs, h, t)
            return h

        def body(i, h):
            h = segment(h, i * plan.segment, plan.segment)
            if keep:

                @pl.when(i < plan.kept)
                def _():
                    write(kept_refs, h, i)

            return h

        h = _repeat(plan.segments, body, plan.zeros())
        left = plan.time % plan.segment
        h = segment(h, place.zero + plan.time - left, left)
        if plan.last_only:
            write(state_refs, h, place.zero)

    states = plan.shapes(1 if plan.last_only else plan.time, plan.dtype)
    out_shape = (states, plan.shapes(plan.kept, plan.carry)) if keep else states
    grid = (plan.batch, plan.frequencies, plan.blocks)
    out = _call(kernel, plan, grid, out_shape, (constants, gates, inputs))
    return out if keep else (out, None)


def _backward_kernel(plan: _Plan, make_step) -> Callable:
    """One program: the examples of its part, one after the other."""
    share = plan.batch // plan.parts
    block_of_zeros = lambda _: jnp.zeros((plan.block,), plan.carry)

    def kernel(constant_refs, gate_refs, input_refs, kept_refs, d_state_refs, out_refs):
        d_constant_refs, d_gate_refs, d_input_refs = out_refs
        part, f, c = pl.program_id(0), pl.program_id(1), pl.program_id(2)

        def example(i, d_constants):
            place = _Place(plan, part * share + i, f, c)
            here = place.constants(constant_refs)
            step = make_step(*here)

            def pull(dh, h, g, u):
                return jax.vjp(lambda k, h, g, u: make_step(*k)(h, g, u), here, h, g, u)[1](dh)

            def d_state(t):
                return jax.tree.map(lambda ref: place.read(ref, place.b, t, f), d_state_refs)

            def write_gate(ref, value, shared, t):
                if shared:
                    plt.store(ref.at[place.b, t, f, c], value)
                else:
                    place.write(ref, value, place.b, t, f)

            def segment(carry, first, length, number):
                dh, d_constants, d_still = carry
                h = plan.zeros()
                if plan.kept:
                    before = jnp.maximum(number - 1, 0)
                    h = jax.tree.map(lambda ref: place.read(ref, place.b, before, f, where=number > 0), kept_refs)
                states, gates_at = [h], []
                for s in range(length):
                    gates_at.append(place.gates(gate_refs, first + s))
                    if s < length - 1:
                        states.append(step(states[-1], gates_at[-1], place.inputs(input_refs, first + s)))
                for s in reversed(range(length)):
                    t = first + s
                    if not plan.last_only:
                        dh = jax.tree.map(jnp.add, dh, d_state(t))
                    dk, dh, dg, du = pull(dh, states[s], gates_at[s], place.inputs(input_refs, t))
                    d_constants = jax.tree.map(jnp.add, d_constants, dk)
                    for ref, value, gate in zip(*map(jax.tree.leaves, (d_gate_refs, dg, gate_refs)), strict=True):
                        write_gate(ref, value, gate.shape[3] == 1, t)
                    if plan.still:
                        d_still = jax.tree.map(jnp.add, d_still, du)
                    else:
                        jax.tree.map(lambda ref, v, t=t: place.write(ref, v, place.b, t, f), d_input_refs, du)
                return dh, d_constants, d_still

            dh = d_state(place.zero) if plan.last_only else plan.zeros()
            carry = (dh, d_constants, jax.tree.map(block_of_zeros, input_refs) if plan.still else None)
            left = plan.time % plan.segment
            if left:
                carry = segment(carry, place.zero + plan.time - left, left, place.zero + plan.segments)

            def body(j, carry):
                number = plan.segments - 1 - j
                return segment(carry, number * plan.segment, plan.segment, number)

            _, d_constants, d_still = _repeat(plan.segments, body, carry)
            if plan.still:
                jax.tree.map(lambda ref, v: place.write(ref, v, place.b, place.zero, f), d_input_refs, d_still)
            return d_constants

        total = _repeat(share, example, jax.tree.map(block_of_zeros, constant_refs))
        place = _Place(plan, part, f, c)
        jax.tree.map(lambda ref, v: place.write(ref, v, part, f), d_constant_refs, total)

    return kernel


def _backward(plan: _Plan, make_step, constants, gates, inputs, kept, d_states) -> tuple[Tree, Tree, Tree]:

    def parts_of(gate):
        last = plan.blocks if gate.shape[3] == 1 else plan.channels
        return jax.ShapeDtypeStruct((plan.batch, plan.time, plan.frequencies, last), plan.carry)

    partial = jax.ShapeDtypeStruct((plan.parts, plan.frequencies, plan.channels), plan.carry)
    out_shape = (
        jax.tree.map(lambda _: partial, constants),
        jax.tree.map(parts_of, gates),
        jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype), inputs),
    )
    grid = (plan.parts, plan.frequencies, plan.blocks)
    operands = (constants, gates, inputs, kept, d_states)
    d_constants, d_gates, d_inputs = _call(_backward_kernel(plan, make_step), plan, grid, out_shape, operands)
    d_constants = jax.tree.map(lambda d, k: d.sum(0).astype(k.dtype), d_constants, constants)
    return d_constants, jax.tree.map(_gathered, d_gates, gates), d_inputs


def _gathered(parts: jax.Array, gate: jax.Array) -> jax.Array:
    """The sum of a gate's parts over the axes that it is shared by."""
    shared = [axis for axis in (0, 2, 3) if gate.shape[axis] == 1]
    return parts.sum(shared, keepdims=True).astype(gate.dtype) if shared else parts.astype(gate.dtype)
