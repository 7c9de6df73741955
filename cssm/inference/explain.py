"""Why a model answers as it does: which pixels its answer depends on, and what its cells hold at each time step."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm.cells import CELLS
from cssm.inference.weights import Trained

_CELLS = tuple(CELLS.values())


def explained(trained: Trained) -> Callable[[Any, jax.Array], tuple[jax.Array, dict[str, Any]]]:
    """(variables, images uint8 [B, *image_shape]) -> (logits [B, classes], what explains them).

    saliency: float32 [B, H, W], of clips [B, T, H, W]: the largest of the channels' |d logit / d pixel|, of the highest
    logit (Simonyan et al. 2013, "Deep Inside Convolutional Networks"). states: by cell, float32 [B, T, h, w]: at each
    step the root mean square over channels of what the cell reads of its states, back in space. Of a model without
    cells there are none.
    """

    def explain(variables: Any, images: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        pixels = images.astype(jnp.float32)

        def highest(pixels: jax.Array) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
            logits, states = with_states(trained, variables, pixels)
            return jnp.sum(jnp.max(logits, axis=-1)), (logits, states)

        slope, (logits, states) = jax.grad(highest, has_aux=True)(pixels)
        return logits, {"saliency": jnp.max(jnp.abs(slope), axis=-1), "states": states}

    return explain


def with_states(trained: Trained, variables: Any, images: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(logits, states of `explained`). Cells that return their last step alone are asked for all."""
    states: dict[str, jax.Array] = {}
    inside: list[str] = []  # a cell may call another, or the class that it is made from

    def watch(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext):
        module = context.module
        if context.method_name != "__call__" or inside or not isinstance(module, _CELLS):
            return call(*args, **kwargs)
        name = "/".join(module.path)
        inside.append(name)
        y = call(*args, **{**kwargs, "last_only": False})
        inside.pop()
        states[name] = jnp.sqrt(jnp.mean(jnp.square(y.astype(jnp.float32)), axis=-1))
        return y[:, -1:] if kwargs.get("last_only") else y

    with nn.intercept_methods(watch):
        logits = trained.apply(variables, images)
    return logits, states
