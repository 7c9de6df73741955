"""Gradients of many devices -> the same update on all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from parallel.devices import AXIS, replicate, spmd

Tree = Any

# Bytes that cross in one collective, as in PyTorch's DistributedDataParallel.
BUCKET = 25_000_000


def pmean_complex_safe(tree: Tree, axis_name: str = AXIS) -> Tree:
    """Mean of each leaf over the device axis, for real and complex floating dtypes; dtypes are kept.

    A complex leaf is averaged as its real and imaginary parts, which every backend's collectives support.
    Call it inside `spmd`. Raises TypeError for a leaf of another dtype, whose mean could not keep it.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if wrong := {str(x.dtype) for x in leaves if not jnp.issubdtype(x.dtype, jnp.inexact)}:
        raise TypeError(
            f"the mean over devices is defined for float and complex arrays, not {', '.join(sorted(wrong))}"
        )
    parts, structure = jax.tree.flatten([(x.real, x.imag) if jnp.iscomplexobj(x) else (x,) for x in leaves])
    if jax.lax.axis_size(axis_name) > 1:
        parts = _means(parts, axis_name)
    means = structure.unflatten(parts)
    return treedef.unflatten([jax.lax.complex(*mean) if len(mean) == 2 else mean[0] for mean in means])


def _means(arrays: list[jax.Array], axis_name: str) -> list[jax.Array]:
    """The mean of each over devices, of as many at once as make BUCKET bytes.

    XLA would join the collectives of small arrays too; but it takes what they give apart by a kernel for each array,
    where here the update reads its part in place.
    """
    means: dict[int, jax.Array] = {}
    for bucket in _buckets(arrays):
        flat = jax.lax.pmean(jnp.concatenate([arrays[i].ravel() for i in bucket]), axis_name)
        ends = np.cumsum([arrays[i].size for i in bucket])
        for i, part in zip(bucket, jnp.split(flat, ends[:-1]), strict=True):
            means[i] = part.reshape(arrays[i].shape)
    return [means[i] for i in range(len(arrays))]


def _buckets(arrays: list[jax.Array]) -> list[list[int]]:
    """Numbers of arrays of one dtype, in their order, each list but its last array less than BUCKET bytes."""
    buckets: list[list[int]] = []
    for dtype in {x.dtype: None for x in arrays}:
        room = 0
        for i, x in enumerate(arrays):
            if x.dtype != dtype:
                continue
            if room <= 0:
                buckets.append([])
                room = BUCKET
            buckets[-1].append(i)
            room -= x.nbytes
    return buckets


def conjugate(tree: Tree) -> Tree:
    """Conjugate the complex leaves: gradients as jax.grad returns them -> directions of steepest ascent.

    For a real loss L of z = x + iy, jax.grad gives dL/dx - i dL/dy; descent goes along -(dL/dx + i dL/dy).
    """
    return jax.tree.map(lambda x: jnp.conj(x) if jnp.iscomplexobj(x) else x, tree)


def global_norm(tree: Tree) -> jax.Array:
    """sqrt(sum |x|^2) over every element of every leaf; a real scalar, also for complex leaves."""
    return optax.tree.norm(tree)


def clip_by_norm(tree: Tree, norm: jax.Array, limit: float) -> Tree:
    """Scale a tree of global norm `norm` down to norm `limit` where it is longer; 0 is no limit."""
    if not limit:
        return tree
    return jax.tree.map(lambda x: jnp.where(norm < limit, x, (x / norm.astype(x.dtype)) * limit), tree)


Backward = Callable[[Tree, Tree], tuple[Tree, Tree, Tree]]
Finish = Callable[[Tree, Tree, Tree, Tree, Tree], tuple[Tree, Tree]]


@dataclass(frozen=True)
class Replicated:
    """Parameters and optimizer state are whole on every device; the devices average the gradients.

    A strategy says where the state lies and how gradients of many devices become one update. Other strategies
    (HostMean here, those of parallel.sharded) keep this contract and give the same results. All methods but
    `program` see one device's values, inside `spmd`. Where a strategy gives `tx` a part of the parameters, `tx` must
    treat every element by itself; clipping by the global norm is therefore done here.
    """

    grad_clip: float = 0.0

    def init(self, tx: optax.GradientTransformation, params: Tree, index: int | jax.Array) -> tuple[Tree, Tree]:
        """(params, opt_state) as device `index` holds them, from whole fresh parameters."""
        return params, tx.init(params)

    def whole(self, params: Tree, spared: Callable[[str], bool] = lambda name: False) -> Tree:
        """Parameters as a model takes them, except for the spared entries, which it makes whole itself."""
        return params

    def mean(self, tree: Tree) -> Tree:
        """Mean over devices of what is not a gradient."""
        return pmean_complex_safe(tree)

    def reduce(self, grads: Tree) -> Tree:
        """Mean over devices of jax.grad's gradients of each one's mean loss, laid out as the optimizer state is."""
        return pmean_complex_safe(grads)

    def apply(
        self, tx: optax.GradientTransformation, grads: Tree, params: Tree, opt_state: Tree
    ) -> tuple[Tree, Tree, jax.Array]:
        """One update from the gradients that `reduce` returned: (params, opt_state, grad_norm).

        grad_norm is that before clipping.
        """
        grads = conjugate(grads)
        norm = global_norm(grads)
        updates, opt_state = tx.update(clip_by_norm(grads, norm, self.grad_clip), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, norm

    def program(self, backward: Backward, finish: Finish, devices: Sequence[jax.Device]) -> Callable:
        """The compiled step (state, sums, batch) -> (state, sums); the state is donated.

        backward(state, batch) -> (grads, shared, own): the last two are to be averaged over devices, and not.
        finish(state, sums, grads, shared, own) -> (state, sums), given averaged gradients and shared values.
        """

        def step(state: Tree, sums: Tree, batch: Tree) -> tuple[Tree, Tree]:
            grads, shared, own = backward(state, batch)
            return finish(state, sums, self.reduce(grads), self.mean(shared), own)

        return spmd(step, devices, donate_argnums=0)


@dataclass(frozen=True)
class HostMean(Replicated):
    """As Replicated, without any collective: gradients go to the host, are averaged there, and are sent back.

    For machines whose collectives do not work; one process only.
    """

    def program(self, backward: Backward, finish: Finish, devices: Sequence[jax.Device]) -> Callable:
        """As Replicated.program, in two programs with the host between them."""
        first, second = spmd(backward, devices), spmd(finish, devices, donate_argnums=0)

        def step(state: Tree, sums: Tree, batch: Tree) -> tuple[Tree, Tree]:
            grads, shared, own = first(state, batch)
            grads, shared = replicate(host_mean((grads, shared)), devices)
            return second(state, sums, grads, shared, own)

        return step


def host_mean(tree: Tree) -> Tree:
    """Numpy mean of each leaf [D, ...] over D, summed in double precision; dtypes are kept."""

    def mean(rows: np.ndarray) -> np.ndarray:
        wide = np.complex128 if np.iscomplexobj(rows) else np.float64
        with np.errstate(invalid="ignore", over="ignore"):  # the step sees to what is not finite
            return rows.astype(wide).mean(axis=0).astype(rows.dtype)

    return jax.tree.map(mean, jax.device_get(tree))
