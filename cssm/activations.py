"""Activations whose values and derivatives take few instructions, as kernels (cssm.fused_rows) want them."""

import math

import jax
import jax.numpy as jnp

# 2 u = SLOPE (x + 0.044715 x^3), u as below.
SLOPE, CUBIC = math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """0.5 x (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3): GELU's tanh form (Hendrycks and Gimpel 2016)."""
    return x * _share(x)


@gelu.defjvp
def _gelu_jvp(primals, tangents):
    (x,), share = primals, _share(*primals)
    return x * share, share * (x * (1 - share) * (SLOPE + 3 * CUBIC * (x * x)) + 1) * tangents[0]


def _share(x: jax.Array) -> jax.Array:
    """0.5 (1 + tanh u) = sigmoid(2 u), by what takes less time: tanh takes more instructions in a GPU's kernel."""
    if jax.default_backend() != "gpu":
        return 0.5 + 0.5 * jnp.tanh(x * (SLOPE / 2 + CUBIC / 2 * (x * x)))
    bits = math.log2(math.e)
    return 1 / (1 + jnp.exp2(x * (-SLOPE * bits - CUBIC * bits * (x * x))))


@jax.custom_jvp
def softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)), whose derivative is sigmoid(x)."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@softplus.defjvp
def _softplus_jvp(primals, tangents):
    return softplus(*primals), jax.nn.sigmoid(*primals) * tangents[0]
