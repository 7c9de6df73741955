"""Activations whose values and derivatives take few instructions, as kernels (cssm.fused_rows) want them."""

import math

import jax
import jax.numpy as jnp


def gelu(x: jax.Array) -> jax.Array:
    """x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): GELU's tanh form (Hendrycks and Gimpel 2016).

    0.5 (1 + tanh u) = sigmoid(2 u), an exponential and a division, where a GPU's tanh branches.
    """
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


@jax.custom_jvp
def softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)), whose derivative is sigmoid(x)."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@softplus.defjvp
def _softplus_jvp(primals, tangents):
    return softplus(*primals), jax.nn.sigmoid(*primals) * tangents[0]
