"""Gradients of many devices -> the same update on all of them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from parallel.batches import AXIS

Tree = Any


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
    parts = [(x.real, x.imag) if jnp.iscomplexobj(x) else (x,) for x in leaves]
    means = jax.lax.pmean(parts, axis_name)
    return treedef.unflatten([jax.lax.complex(*mean) if len(mean) == 2 else mean[0] for mean in means])


def conjugate(tree: Tree) -> Tree:
    """Conjugate the complex leaves: gradients as jax.grad returns them -> directions of steepest ascent.

    For a real loss L of z = x + iy, jax.grad gives dL/dx - i dL/dy; descent goes along -(dL/dx + i dL/dy).
    """
    return jax.tree.map(lambda x: jnp.conj(x) if jnp.iscomplexobj(x) else x, tree)


def global_norm(tree: Tree) -> jax.Array:
    """sqrt(sum |x|^2) over every element of every leaf; a real scalar, also for complex leaves."""
    return optax.tree.norm(tree)


@dataclass(frozen=True)
class Replicated:
    """Parameters and optimizer state are whole on every device; gradients are averaged before the update.

    Both methods see one device's values; `apply` runs inside `spmd`. Clipping, if any, belongs to `tx`.
    """

    axis_name: str = AXIS

    def init(self, tx: optax.GradientTransformation, params: Tree) -> Tree:
        """Optimizer state for `params`."""
        return tx.init(params)

    def apply(
        self, tx: optax.GradientTransformation, grads: Tree, params: Tree, opt_state: Tree
    ) -> tuple[Tree, Tree, jax.Array]:
        """One update from this device's gradients, as jax.grad of its local mean loss returned them.

        Returns (params, opt_state, grad_norm): the same on every device; grad_norm is that of the averaged
        gradient, before any clipping.
        """
        grads = conjugate(pmean_complex_safe(grads, self.axis_name))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, global_norm(grads)
