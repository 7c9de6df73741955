"""Norms and activations of rows, as cssm.fused_rows takes them: float32 at least, zeros where no column is.

`there` [C] is 1 for columns that are there, and else 0.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


def layer_norm_rows(x: jax.Array, there: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) scale + bias over whole rows, the variance taken about the mean."""
    return _standardised(x, there, epsilon) * scale + bias


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _standardised(x: jax.Array, there: jax.Array, epsilon: float) -> jax.Array:
    return _standardise(x, there, epsilon)[0]


@_standardised.defjvp
def _standardised_jvp(epsilon, primals, tangents):
    # That of _standardise, in fewer operations than jax finds.
    x, there = primals
    y, spread, mean = _standardise(x, there, epsilon)
    dx = tangents[0]
    return y, spread * (dx - mean(dx) - y * mean(y * dx))


def _standardise(x: jax.Array, there: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array, Callable]:
    """(standardised rows, zeros where none are; what they were multiplied with, the mean over what is there)."""
    count = jnp.sum(there)
    mean = lambda x: jnp.sum(x, -1, keepdims=True) / count
    centred = (x - mean(x * there)) * there
    spread = jax.lax.rsqrt(mean(centred * centred) + epsilon)
    return centred * spread, spread, mean


def activated_norm_rows(
    x: jax.Array,
    there: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    offset: jax.Array | float = 0.0,
    *,
    epsilon: float,
    before: Callable,
    after: Callable,
) -> jax.Array:
    """after(layer_norm_rows of before(x + offset))."""
    return after(layer_norm_rows(before(x + offset), there, scale, bias, epsilon))


def activated_rows(x: jax.Array, there: jax.Array, bias: jax.Array, act: Callable) -> jax.Array:
    """act(x + bias), number by number."""
    return act(x + bias)
