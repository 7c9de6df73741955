"""What a program of the fused scan does, forward and backward, and how it finds its numbers: see cssm.fused."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from cssm.spectral import Packed, Spectrum, is_packed

Tree = Any
States = tuple[Spectrum, ...]


class Operands(NamedTuple):
    """What a scan is given, or its gradients, or a kernel's references to them: see cssm.scan.linear_scan."""

    constants: Tree
    gates: Tree
    read_gates: Tree
    inputs: Any
    offset: Any


@dataclass(frozen=True)
class Plan:
    """Sizes of a scan, and how it is cut. planes: 2, or 1 of real numbers. parts: of the batch, going backward.

    shown: steps that have an input of their own; those after them see the last one. copies: recurrences side by side.
    rows, block: frequencies and channels of a program, which takes one copy.
    """

    batch: int
    time: int
    planes: int
    frequencies: int
    copies: int
    channels: int
    num_states: int
    num_inputs: int
    num_read: int
    dtype: jnp.dtype  # of the results
    shown: int
    last_only: bool
    rows: int
    block: int
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
    def columns(self) -> int:
        """Programs that share the frequencies."""
        return -(-self.frequencies // self.rows)

    @property
    def kept(self) -> int:
        """States that are kept: of all steps but the last, and that one where only it is read."""
        return self.time - 1 + self.last_only

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a program's numbers: a row of channels, or several."""
        return (self.block,) if self.rows == 1 else (self.rows, self.block)

    def grid(self, examples: int) -> tuple[int, ...]:
        """Programs; the last axis has blocks of channels within copies."""
        return (examples, self.columns, self.blocks * self.copies)

    def zero(self) -> jax.Array:
        return jnp.zeros(self.shape, self.carry)

    def zeros(self, count: int) -> States:
        return tuple(Spectrum(self.zero(), self.zero()) for _ in range(count))

    def part_of(self, gate: jax.Array | Packed) -> jax.ShapeDtypeStruct | Packed:
        """What the programs leave as a gate's gradient, to be summed over what they share: see `fused._gathered`."""
        if isinstance(gate, Packed):
            return Packed(jax.ShapeDtypeStruct((self.copies, *gate.array.shape), gate.array.dtype), gate.count)
        frequencies = self.columns if gate.shape[2] == 1 else self.frequencies
        channels = self.blocks if gate.shape[3] == 1 else self.channels
        return jax.ShapeDtypeStruct((self.copies, self.batch, gate.shape[1], frequencies, channels), self.carry)

    def packed(self, steps: int, count: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        shape = (self.batch, steps, self.planes, self.frequencies, self.copies, count * self.channels)
        return jax.ShapeDtypeStruct(shape, dtype)


@dataclass(frozen=True)
class Work:
    """What a kernel does at each step."""

    plan: Plan
    make_step: Callable
    read: Callable

    def whole(self, constants: Tree, h: States, gates: Tree, u: States, read_gates: Tree) -> tuple[States, States]:
        """(the next states, what is read of them)."""
        h = self.make_step(*constants)(h, gates, u)
        return h, self.read(h, read_gates)

    def step(self, constants: Tree, h: States, gates: Tree, u: States) -> States:
        return self.make_step(*constants)(h, gates, u)


class Place:
    """Where a program is, and how it reads and writes there."""

    def __init__(self, plan: Plan, b: jax.Array, f: jax.Array, c: jax.Array):
        self.plan, self.b, self.column = plan, b, f
        self.copy, self.c = (c // plan.blocks, c % plan.blocks) if plan.copies > 1 else (c * 0, c)
        self.zero = c * 0  # Pallas' interpreter wants traced indices
        self.row = f if plan.rows == 1 else pl.ds(f * plan.rows, plan.rows)
        self.frequencies = f * plan.rows + jnp.arange(plan.rows)
        self.channels = self.c * plan.block + jnp.arange(plan.block) < plan.channels

    def _channels(self, number: int = 0) -> Any:
        """Of one of several spectra side by side."""
        return pl.ds(self.c * self.plan.block + number * self.plan.channels, self.plan.block)

    def _there(self, where: Any = None) -> jax.Array | None:
        """Which of a program's numbers there are, and only where `where`: None for all."""
        plan, masks = self.plan, [] if where is None else [where]
        if plan.channels % plan.block:
            masks.append(self.channels)
        if plan.frequencies % plan.rows:
            masks.append((self.frequencies < plan.frequencies)[:, None])
        return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), plan.shape) if masks else None

    def load(self, ref: Any, *index: Any, number: int = 0, where: Any = None) -> jax.Array:
        """A block, zeros beyond the last frequency and channel, and where not `where`."""
        return self._read(ref.at[(*index, self._channels(number))], self._there(where))

    def store(self, ref: Any, value: jax.Array, *index: Any, number: int = 0, where: Any = None) -> None:
        at = ref.at[(*index, self._channels(number))]
        plt.store(at, value.astype(ref.dtype), mask=self._there(where))

    def _read(self, at: Any, mask: jax.Array | None) -> jax.Array:
        loaded = plt.load(at) if mask is None else plt.load(at, mask=mask, other=0.0)
        return loaded.astype(self.plan.carry)

    def unpack(self, ref: Any, t: Any, count: int, where: Any = None) -> States:
        """`count` spectra of the copy, packed [B, T, planes, F, copies, count C], at step t."""
        load = lambda p, i: self.load(ref, self.b, t, self.zero + p, self.row, self.copy, number=i, where=where)
        imaginary = lambda i: load(1, i) if self.plan.planes == 2 else self.plan.zero()
        return tuple(Spectrum(load(0, i), imaginary(i)) for i in range(count))

    def pack(self, ref: Any, spectra: States, t: Any, where: Any = None) -> None:
        for i, spectrum in enumerate(spectra):
            for p in range(self.plan.planes):
                self.store(ref, spectrum[p], self.b, t, self.zero + p, self.row, self.copy, number=i, where=where)

    def constants(self, refs: Tree) -> Tree:
        return jax.tree.map(lambda ref: self.load(ref, self.row), refs)

    def gates(self, refs: Tree, t: Any) -> Tree:
        """A number for each frequency where all channels share it, else a block of them; what is packed as spectra."""
        plan = self.plan

        def one(ref):
            if isinstance(ref, Packed):
                load = lambda p, i: self.load(ref.array, self.b, t, self.zero + p, self.row, number=i)
                return tuple(Spectrum(load(0, i), load(1, i)) for i in range(ref.count))
            b = self.b if ref.shape[0] > 1 else self.zero
            _, _, frequencies, channels = ref.shape
            if channels > 1 and frequencies > 1:
                return self.load(ref, b, t, self.row)
            if channels > 1:
                return self._read(ref.at[b, t, self.zero, self._channels()], self.channels)
            if frequencies == 1 or plan.rows == 1:
                return plt.load(ref.at[b, t, self.zero if frequencies == 1 else self.row, self.zero]).astype(plan.carry)
            return self._read(ref.at[b, t, self.row, self.zero], self.frequencies < frequencies)[:, None]

        return jax.tree.map(one, refs, is_leaf=is_packed)

    def write_gates(self, d_refs: Tree, values: Tree, refs: Tree, t: Any) -> None:
        """Write this program's part of the gradients of `gates`, as Plan.part_of shapes it."""
        plan, here = self.plan, (self.copy, self.b, t)
        refs, structure = jax.tree.flatten(refs, is_leaf=is_packed)
        for d_ref, value, ref in zip(*map(structure.flatten_up_to, (d_refs, values)), refs, strict=True):
            if isinstance(ref, Packed):
                for i, spectrum in enumerate(value):
                    for p in range(2):
                        self.store(d_ref.array, spectrum[p], *here, self.zero + p, self.row, number=i)
                continue
            _, _, frequencies, channels = ref.shape
            f = self.row if frequencies > 1 else self.column
            if channels > 1 and frequencies > 1:
                self.store(d_ref, value, *here, f)
            elif channels > 1:
                plt.store(d_ref.at[*here, f, self._channels()], value, mask=self.channels)
            elif frequencies > 1 and plan.rows > 1:
                plt.store(d_ref.at[*here, f, self.c], value.reshape(-1), mask=self.frequencies < frequencies)
            else:
                plt.store(d_ref.at[*here, f, self.c], value)

    def shown(self, t: Any) -> Any:
        """The step whose input step t sees."""
        return t if self.plan.shown == self.plan.time else jnp.minimum(t, self.plan.shown - 1)

    def inputs(self, refs: Operands, t: Any) -> States:
        u = self.unpack(refs.inputs, self.shown(t), self.plan.num_inputs)
        if refs.offset is None:
            return u
        return tuple(Spectrum(z.re + self._at_zero(refs.offset, i), z.im) for i, z in enumerate(u))

    def _at_zero(self, ref: Any, number: int) -> jax.Array:
        """Of [copies, count C] at frequency 0, zeros elsewhere."""
        first, at = self.frequencies == 0, ref.at[self.copy, self._channels(number)]
        if self.plan.rows == 1:
            return self._read(at, self.channels & (self.column == 0))
        return jnp.where(first[:, None], self._read(at, self.channels), 0.0)


def _repeat(times: int, body: Callable, carry: Tree) -> Tree:
    # The loop's own index would be int64 where jax has float64, and Pallas wants indices of one type.
    return jax.lax.fori_loop(0, times, lambda i, carry: body(i.astype(jnp.int32), carry), carry)


def forward_kernel(work: Work, keep: bool) -> Callable:
    """One program: an example. keep: write the states that the backward pass starts from, too."""
    plan = work.plan

    def kernel(refs, out_refs):
        out_ref, kept_ref = out_refs if keep else (out_refs, None)
        place = Place(plan, pl.program_id(0), pl.program_id(1), pl.program_id(2))
        here = place.constants(refs.constants)

        def step(t, h):
            h = work.step(here, h, place.gates(refs.gates, t), place.inputs(refs, t))
            if not plan.last_only:
                place.pack(out_ref, work.read(h, place.gates(refs.read_gates, t)), t)
            if keep:

                @pl.when(t < plan.kept)
                def _():
                    place.pack(kept_ref, h, t)

            return h

        h = _repeat(plan.time, step, plan.zeros(plan.num_states))
        if plan.last_only:
            place.pack(out_ref, work.read(h, place.gates(refs.read_gates, place.zero)), place.zero)

    return kernel


def backward_kernel(work: Work) -> Callable:
    """One program: the examples of its part, one after the other."""
    plan = work.plan
    share = plan.batch // plan.parts

    def kernel(refs, kept_ref, d_out_ref, d_refs):
        part, f, c = pl.program_id(0), pl.program_id(1), pl.program_id(2)

        def example(i, d_constants):
            place = Place(plan, part * share + i, f, c)
            here = place.constants(refs.constants)

            def pull(dh, t, h, g):
                """Of step t, from states h: gradients of (constants, h, gates, inputs)."""
                u = place.inputs(refs, t)
                if plan.last_only:
                    return jax.vjp(work.step, here, h, g, u)[1](dh)
                r = place.gates(refs.read_gates, t)
                d_out = place.unpack(d_out_ref, t, plan.num_read)
                *grads, dr = jax.vjp(work.whole, here, h, g, u, r)[1]((dh, d_out))
                place.write_gates(d_refs.read_gates, dr, refs.read_gates, t)
                return grads

            def step(j, carry):
                dh, d_constants, d_last = carry
                t = plan.time - 1 - j
                h = plan.zeros(plan.num_states)
                if plan.time > 1:
                    h = place.unpack(kept_ref, jnp.maximum(t - 1, 0), plan.num_states, where=t > 0)
                dk, dh, dg, du = pull(dh, t, h, place.gates(refs.gates, t))
                d_constants = jax.tree.map(jnp.add, d_constants, dk)
                place.write_gates(d_refs.gates, dg, refs.gates, t)
                if d_last is not None:  # the sum over all steps that see the last input, or one alone
                    add = lambda total, d: d + jnp.where(t >= plan.shown - 1, total, 0.0)
                    du = d_last = jax.tree.map(add, d_last, du)
                where = None if d_last is None else t < plan.shown
                place.pack(d_refs.inputs, du, place.shown(t), where)
                return dh, d_constants, d_last

            dh = plan.zeros(plan.num_states)
            if plan.last_only:
                h = place.unpack(kept_ref, place.zero + plan.time - 1, plan.num_states)
                d_out = place.unpack(d_out_ref, place.zero, plan.num_read)
                dh, dr = jax.vjp(work.read, h, place.gates(refs.read_gates, place.zero))[1](d_out)
                place.write_gates(d_refs.read_gates, dr, refs.read_gates, place.zero)
            carry = (dh, d_constants, plan.zeros(plan.num_inputs) if plan.shown < plan.time else None)
            return _repeat(plan.time, step, carry)[1]

        total = _repeat(share, example, jax.tree.map(lambda _: plan.zero(), refs.constants))
        place = Place(plan, part, f, c)
        jax.tree.map(lambda ref, v: place.store(ref, v, part, place.copy, place.row), d_refs.constants, total)

    return kernel
