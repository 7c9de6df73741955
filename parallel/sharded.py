"""State split over devices: the contract of `sync.Replicated`, with less memory on each.

An array that is split travels as a `Slice`, which knows the shape of the whole. ShardedOptimizer is ZeRO-1 and
ShardedParams is FSDP, also known as ZeRO-3 (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models"), on flattened arrays. Checkpoints hold whole arrays (`fetch`, `place`), so that any strategy
on any number of devices can go on with them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from parallel.devices import AXIS, DeviceError, device_sharding, local, spmd, unreplicate
from parallel.sync import HostMean, Replicated, clip_by_norm, conjugate, global_norm

Tree = Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["piece"], meta_fields=["shape"])
@dataclass(frozen=True)
class Slice:
    """One device's part of an array: `piece` [ceil(n / D)] of its n elements, flattened and padded with zeros.

    shape: of the whole array.
    """

    piece: Any
    shape: tuple[int, ...]


def _is_slice(node: Any) -> bool:
    """Not where optax has masked the piece: of an array without a state, no device holds a part."""
    return isinstance(node, Slice) and not isinstance(node.piece, optax.MaskedNode)


def _on_parts(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """fn of an array, or of the real and the imaginary part of a complex one: no collective is complex."""
    return jax.lax.complex(fn(x.real), fn(x.imag)) if jnp.iscomplexobj(x) else fn(x)


def _padded(x: jax.Array, devices: int) -> jax.Array:
    """Flattened, with zeros behind, to a multiple of `devices`."""
    return jnp.pad(x.reshape(-1), (0, -x.size % devices))


def split(tree: Tree, index: int | jax.Array, devices: int) -> Tree:
    """Each array -> the Slice of device `index` of `devices`."""

    def part(x: jax.Array) -> Slice:
        flat = _padded(x, devices)
        size = flat.size // devices
        return Slice(jax.lax.dynamic_slice_in_dim(flat, index * size, size), x.shape)

    return jax.tree.map(part, tree)


def gather(tree: Tree) -> Tree:
    """Each Slice -> the whole array, from all devices; inside `spmd`. Other leaves stay as they are.

    Its transpose sums the cotangents of all devices and gives each its part: the gradient with respect to a Slice is
    D times that of the mean loss.
    """

    def whole(node: Any) -> Any:
        if not _is_slice(node):
            return node
        flat = _on_parts(lambda x: jax.lax.all_gather(x, AXIS, tiled=True), node.piece)
        return flat[: math.prod(node.shape)].reshape(node.shape)

    return jax.tree.map(whole, tree, is_leaf=_is_slice)


def _scatter_mean(tree: Tree, devices: int) -> Tree:
    """Each array -> this device's Slice of its mean over devices."""

    def part(x: jax.Array) -> Slice:
        flat = _padded(x, devices)
        total = _on_parts(lambda part: jax.lax.psum_scatter(part, AXIS, tiled=True), flat)
        return Slice(total / devices, x.shape)

    return jax.tree.map(part, tree)


@dataclass(frozen=True)
class ShardedOptimizer(Replicated):
    """ZeRO-1: parameters are whole on every device, the optimizer's state is split.

    Gradients are reduced to each device's part, which it updates; then the parameters are gathered.
    """

    devices: int = 1

    def init(self, tx: optax.GradientTransformation, params: Tree, index: int | jax.Array) -> tuple[Tree, Tree]:
        """(whole params, opt_state of slices)."""
        return params, tx.init(split(params, index, self.devices))

    def reduce(self, grads: Tree) -> Tree:
        """Slices of the mean gradient."""
        return _scatter_mean(grads, self.devices)

    def apply(
        self, tx: optax.GradientTransformation, grads: Tree, params: Tree, opt_state: Tree
    ) -> tuple[Tree, Tree, jax.Array]:
        """As Replicated.apply, each device for its slices."""
        own = split(params, jax.lax.axis_index(AXIS), self.devices)
        own, opt_state, norm = self._update(tx, grads, own, opt_state)
        return gather(own), opt_state, norm

    def _update(
        self, tx: optax.GradientTransformation, grads: Tree, params: Tree, opt_state: Tree
    ) -> tuple[Tree, Tree, jax.Array]:
        grads = conjugate(grads)
        norm = jnp.sqrt(jax.lax.psum(global_norm(grads) ** 2, AXIS))
        updates, opt_state = tx.update(clip_by_norm(grads, norm, self.grad_clip), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, norm


@dataclass(frozen=True)
class ShardedParams(ShardedOptimizer):
    """FSDP: parameters and optimizer state are split; a block's parameters are gathered while it runs.

    The gradients' reduction is the transpose of that gathering: it happens once per micro-batch.
    """

    def init(self, tx: optax.GradientTransformation, params: Tree, index: int | jax.Array) -> tuple[Tree, Tree]:
        """(slices of params, opt_state of slices)."""
        own = split(params, index, self.devices)
        return own, tx.init(own)

    def whole(self, params: Tree, spared: Callable[[str], bool] = lambda name: False) -> Tree:
        """Gather all entries but the spared ones, whose modules call `gather` themselves."""
        return {name: entry if spared(name) else gather(entry) for name, entry in params.items()}

    def reduce(self, grads: Tree) -> Tree:
        """The sum over devices, which `gather` has left in the slices, made a mean."""
        return jax.tree.map(lambda g: g / self.devices, grads)

    def apply(
        self, tx: optax.GradientTransformation, grads: Tree, params: Tree, opt_state: Tree
    ) -> tuple[Tree, Tree, jax.Array]:
        """As Replicated.apply, each device for its slices."""
        return self._update(tx, grads, params, opt_state)


def make_strategy(shard: str, sync_backend: str, devices: Sequence[jax.Device], grad_clip: float) -> Replicated:
    """The strategy of --shard none | optimizer | params and --sync_backend auto | nccl | cpu.

    Raises DeviceError for nccl without GPUs, and for cpu with more than one process or with sharded state.
    """
    if sync_backend == "nccl" and (platform := devices[0].platform) != "gpu":
        raise DeviceError(
            f"--sync_backend nccl needs NVIDIA GPUs, these are {platform} devices: leave it out, "
            f"auto takes what the platform has"
        )
    if sync_backend == "cpu":
        if shard != "none" or len(local(devices)) < len(devices):
            what = "--shard" if shard != "none" else "several processes"
            raise DeviceError(f"--sync_backend cpu does without collectives, {what} cannot: leave one of the two out")
        return HostMean(grad_clip)
    if shard == "none":
        return Replicated(grad_clip)
    kind = {"optimizer": ShardedOptimizer, "params": ShardedParams}[shard]
    return kind(grad_clip, len(devices))


def whole_shapes(tree: Tree) -> Tree:
    """jax.ShapeDtypeStruct of the whole array for each Slice and each other leaf of one device's values."""

    def shape(node: Any) -> jax.ShapeDtypeStruct:
        leaf = node.piece if _is_slice(node) else node
        return jax.ShapeDtypeStruct(node.shape, leaf.dtype)

    return jax.tree.map(shape, tree, is_leaf=_is_slice)


def place(tree: Tree, like: Tree, devices: Sequence[jax.Device]) -> Tree:
    """Whole host arrays -> device arrays [D, ...], laid out as `like`, one device's values (or their shapes)."""
    here = local(devices)
    first, sharding = devices.index(here[0]), device_sharding(devices)

    def rows(node: Any, x: Any) -> Any:
        # The copy matters: the CPU backend may share a host array's memory with the device array made of it.
        x = np.array(x)
        if not _is_slice(node):
            return np.broadcast_to(x, (len(here), *x.shape))
        flat = np.pad(x.reshape(-1), (0, -x.size % len(devices)))
        return Slice(flat.reshape(len(devices), -1)[first : first + len(here)], x.shape)

    return jax.device_put(jax.tree.map(rows, like, tree, is_leaf=_is_slice), sharding)


def fetch(tree: Tree, devices: Sequence[jax.Device]) -> Tree:
    """Device arrays [D, ...] -> whole numpy arrays; all processes must call it where there are slices.

    Where slices lie in several processes, one at a time is gathered on every device.
    """

    def whole(node: Any) -> np.ndarray:
        if not _is_slice(node):
            return unreplicate(node)
        if len(local(devices)) < len(devices):
            return unreplicate(_gather_program(tuple(devices))(node))
        flat = jax.device_get(node.piece).reshape(-1)
        return flat[: math.prod(node.shape)].reshape(node.shape)

    return jax.tree.map(whole, tree, is_leaf=_is_slice)


@functools.lru_cache(maxsize=1)
def _gather_program(devices: tuple[jax.Device, ...]) -> Callable[[Slice], jax.Array]:
    return spmd(gather, devices)
