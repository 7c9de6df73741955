"""Activations: values and derivatives are those of jax.nn, at the ends of the range too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm import activations


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["gelu", "softplus"])
@pytest.mark.parametrize("dtype,tolerance", [(np.float64, 1e-13), (np.float32, 1e-6)])
def test_values_and_derivatives_are_those_of_jax_in_float64(monkeypatch, platform, name, dtype, tolerance):
    """Or nearly as close as jax.nn's in the same dtype: of GELU at -7, where tanh is nearly -1, they are 9e-6 away."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    x = np.concatenate([np.linspace(-30, 30, 601), [-1e4, 1e4]]).astype(np.float32)
    both = lambda module: jax.vmap(jax.value_and_grad(getattr(module, name)))
    with jax.enable_x64(True):
        want, jaxs = both(jax.nn)(x.astype(np.float64)), both(jax.nn)(x.astype(dtype))
        got = both(activations)(x.astype(dtype))
    assert got[0].dtype == dtype
    for one, a_jax, a in zip(got, jaxs, want, strict=True):
        near = 1.5 * np.abs(np.asarray(a_jax) - np.asarray(a)).max() if platform == "cpu" else 0.0
        np.testing.assert_allclose(one, a, rtol=tolerance, atol=max(tolerance, near))


def test_softplus_keeps_what_is_small():
    """As log(1 + exp(x)) it would be 0 from -17 on in float32."""
    assert activations.softplus(jnp.float32(-30)) == pytest.approx(np.exp(-30.0), rel=1e-5)
