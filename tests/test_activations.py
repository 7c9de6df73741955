"""Activations: values and derivatives are those of jax.nn, at the ends of the range too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm import activations


@pytest.mark.parametrize("name", ["gelu", "softplus"])
@pytest.mark.parametrize("dtype,tolerance", [(np.float64, 1e-13), (np.float32, 1e-6)])
def test_values_and_derivatives_are_those_of_jax_in_float64(name, dtype, tolerance):
    x = np.concatenate([np.linspace(-30, 30, 601), [-1e4, 1e4]]).astype(np.float32)
    both = lambda module: jax.vmap(jax.value_and_grad(getattr(module, name)))
    with jax.enable_x64(True):
        want = both(jax.nn)(x.astype(np.float64))
        got = both(activations)(x.astype(dtype))
    assert got[0].dtype == dtype
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance), want, got)


def test_softplus_keeps_what_is_small():
    """As log(1 + exp(x)) it would be 0 from -17 on in float32."""
    assert activations.softplus(jnp.float32(-30)) == pytest.approx(np.exp(-30.0), rel=1e-5)
