"""The recurrence as one GPU kernel: states stay in registers over time, forward and backward.

One program of the kernel takes an example, a frequency (several, where there are few channels), and a block of channels
of one of the copies through all time steps. The step is the cell's own (cssm.scan), traced into the kernel, and its
derivative there is jax.vjp of it, so that every recurrence has the kernel. For the backward pass the states of all
steps are kept, in the dtype of the results. Sums are taken in a fixed order: results are the same from run to run.

Letters as in cssm.scan. Spectra come and go packed; a program finds its planes and channels in place. Triton through
Pallas; off a GPU the same program is interpreted, which is for tests.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from cssm.fused_kernel import Operands, Plan, States, Tree, Work, backward_kernel, forward_kernel
from cssm.spectral import Packed, Spectrum, is_packed

# Numbers of a program for each plane of a spectrum, one warp. A Triton array holds a power of two of numbers.
BLOCK = 128
# The same where a step has more than SPECTRA at hand (states, inputs, keys, queries): registers do not hold them four
# times over.
SMALL_BLOCK, SPECTRA = 64, 8
# Programs that keep a large GPU busy in the backward pass; more examples in one means fewer partial sums to add.
PROGRAMS = 4096


def available() -> bool:
    """Whether the kernel is made for the default device: NVIDIA from Ampere (compute capability 8.0) on."""
    device = jax.devices()[0]
    if jax.default_backend() != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    return float(device.compute_capability) >= 8.0


def fused_scan(
    make_step: Callable[..., Callable[[States, Any, States], States]],
    constants: Tree,
    counts: tuple[int, int],
    gates: Tree,
    inputs: jax.Array,
    last_only: bool,
    read: Callable[[States, Any], States],
    read_gates: Tree,
    offset: jax.Array | None = None,
    copies: int = 1,
    interpret: bool | None = None,
) -> jax.Array:
    """As cssm.scan.linear_scan; read_gates have as many steps as are read.

    Inside, all are float32 (float64 for float64 inputs). interpret None: where there is no GPU.
    """
    batch, shown, planes, frequencies, channels = inputs.shape
    channels //= copies * counts[1]
    inputs = inputs.reshape(*inputs.shape[:-1], copies, -1)
    offset = offset if offset is None else offset.reshape(copies, -1)
    steps = jax.tree.leaves(gates)[0].shape[1]
    at_hand = sum(counts) + sum(gate.count for gate in _packed((gates, read_gates)))
    numbers = BLOCK if at_hand <= SPECTRA else SMALL_BLOCK
    block = min(numbers, 1 << (channels - 1).bit_length())
    rows = min(numbers // block, 1 << (frequencies - 1).bit_length())
    programs = -(-frequencies // rows) * -(-channels // block) * copies
    zero = Spectrum(jnp.zeros(()), jnp.zeros(()))
    zeros = _of_gates(lambda gate: (zero,) * gate.count if isinstance(gate, Packed) else zero.re, read_gates)
    plan = Plan(
        batch=batch,
        time=steps,
        planes=planes,
        frequencies=frequencies,
        copies=copies,
        channels=channels,
        num_states=counts[0],
        num_inputs=counts[1],
        num_read=len(jax.eval_shape(read, (zero,) * counts[0], zeros)),
        dtype=inputs.dtype,
        shown=shown,
        last_only=last_only,
        rows=rows,
        block=block,
        parts=next(n for n in range(1, batch + 1) if batch % n == 0 and (n * programs >= PROGRAMS or n == batch)),
        interpret=jax.default_backend() != "gpu" if interpret is None else interpret,
    )
    work = Work(plan, make_step, read)

    @jax.custom_vjp
    def scan(operands):
        return _forward(work, operands, keep=False)[0]

    def forward(operands):
        states, kept = _forward(work, operands, keep=True)
        return states, (operands, kept)

    def backward(residuals, d_out):
        operands, kept = residuals
        return (_backward(work, operands, kept, d_out),)

    scan.defvjp(forward, backward)
    constants = jax.tree.map(lambda k: jnp.broadcast_to(k, (frequencies, channels)), constants)
    out = scan(Operands(constants, gates, read_gates, inputs, offset))
    return out.reshape(*out.shape[:-2], -1)


def _call(
    kernel: Callable, plan: Plan, grid: tuple[int, ...], out_shape: Tree, operands: Tree, over: dict[int, int]
) -> Tree:
    """over: which array of the results is written over which one of the operands."""
    return pl.pallas_call(
        kernel,
        out_shape=(out_shape,),  # one argument of the kernel, whatever its structure
        grid=grid,
        input_output_aliases=over,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=plan.interpret,
    )(*operands)[0]


def _forward(work: Work, operands: Operands, keep: bool) -> tuple[jax.Array, jax.Array | None]:
    """(what is read, the kept states if they are to be kept, packed)."""
    plan = work.plan
    keep = keep and plan.kept > 0
    out = plan.packed(1 if plan.last_only else plan.time, plan.num_read, plan.dtype)
    out_shape = (out, plan.packed(plan.kept, plan.num_states, plan.dtype)) if keep else out
    grid = plan.grid(plan.batch)
    result = _call(forward_kernel(work, keep), plan, grid, out_shape, (operands,), over={})
    return result if keep else (result, None)


def _backward(work: Work, operands: Operands, kept: jax.Array | None, d_out: jax.Array) -> Operands:
    """The gradients of the operands."""
    plan, inputs, offset = work.plan, operands.inputs, operands.offset
    partial = jax.ShapeDtypeStruct((plan.parts, plan.copies, plan.frequencies, plan.channels), plan.carry)
    out_shape = Operands(
        jax.tree.map(lambda _: partial, operands.constants),
        _of_gates(plan.part_of, operands.gates),
        _of_gates(plan.part_of, operands.read_gates),
        jax.ShapeDtypeStruct(inputs.shape, inputs.dtype),
        None,
    )
    grid = plan.grid(plan.parts)
    given, over = (operands, kept, d_out), {}
    # Where all states are read at all steps, the gradient of the inputs takes the place of theirs: a program reads
    # there, in one warp, what its own result is made of. Both at once may be the peak of a step.
    if (d_out.shape, d_out.dtype) == (inputs.shape, inputs.dtype):
        over = {len(jax.tree.leaves(given)) - 1: len(jax.tree.leaves(out_shape)) - 1}
    parts = _call(backward_kernel(work), plan, grid, out_shape, given, over)
    d_offset = None
    if offset is not None:
        d_offset = parts.inputs[:, :, 0, 0].astype(plan.carry).sum((0, 1)).astype(offset.dtype)
    return Operands(
        jax.tree.map(lambda d, k: d.sum((0, 1)).astype(k.dtype), parts.constants, operands.constants),
        _of_gates(_gathered, operands.gates, parts.gates),
        _of_gates(_gathered, operands.read_gates, parts.read_gates),
        parts.inputs,
        d_offset,
    )


def _of_gates(function: Callable, *trees: Tree) -> Tree:
    """function of every gate, and of those of the other trees that belong to it."""
    return jax.tree.map(function, *trees, is_leaf=is_packed)


def _packed(gates: Tree) -> list[Packed]:
    return [gate for gate in jax.tree.leaves(gates, is_leaf=is_packed) if isinstance(gate, Packed)]


def _gathered(gate: jax.Array | Packed, parts: Any) -> jax.Array | Packed:
    """The sum of a gate's parts over copies and over the axes that it is shared by."""
    if isinstance(gate, Packed):
        return jax.tree.map(lambda part, array: _sum(part, (0,), array), parts, gate)
    shared = [axis for axis in (0, 2, 3) if gate.shape[axis] == 1]
    total = _sum(parts, (0, *(axis + 1 for axis in shared)), gate)
    return total.reshape(gate.shape)


def _sum(parts: jax.Array, axes: tuple[int, ...], like: jax.Array) -> jax.Array:
    """In float32 at least, then as `like`."""
    return parts.astype(jnp.promote_types(parts.dtype, jnp.float32)).sum(axes).astype(like.dtype)
