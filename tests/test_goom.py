"""Arithmetic in log space is that of complex numbers, beyond their range too, and its slopes are finite everywhere."""

import jax
import jax.numpy as jnp
import numpy as np

from cssm.goom import Goom, add, ceiling, from_goom, multiply, to_goom
from cssm.spectral import Spectrum


def planes(v):
    return Spectrum(jnp.asarray(v.real), jnp.asarray(v.imag))


def number(z):
    v = from_goom(z)
    return np.asarray(v.re) + 1j * np.asarray(v.im)


def test_sums_and_products_are_those_of_complex_numbers():
    rng = np.random.default_rng(5)
    a, b, c = rng.normal(size=(3, 20)) + 1j * rng.normal(size=(3, 20))
    with jax.enable_x64(True):
        za, zb, zc = (to_goom(planes(v)) for v in (a, b, c))
        np.testing.assert_allclose(number(za), a, rtol=1e-14)
        np.testing.assert_allclose(number(add(za, zb, zc)), a + b + c, rtol=1e-13)
        np.testing.assert_allclose(number(multiply(za, zb)), a * b, rtol=1e-13)


def test_sums_hold_far_outside_the_range():
    far = add(*(Goom(jnp.float32(log), jnp.float32(phase)) for log, phase in ((5e3, 0), (5e3, np.pi / 2), (-5e3, 1))))
    np.testing.assert_allclose(far.log, 5000 + np.log(2) / 2, rtol=1e-7)
    np.testing.assert_allclose(far.phase, np.pi / 4, rtol=1e-6)


def test_results_end_at_the_ceiling_and_keep_their_phase():
    top = from_goom(Goom(jnp.float32(5e3), jnp.float32(2.0)))
    np.testing.assert_allclose(np.hypot(*top), np.exp(ceiling(jnp.float32)), rtol=1e-6)
    np.testing.assert_allclose(np.arctan2(top.im, top.re), 2.0, rtol=1e-6)
    assert np.isfinite(np.float32(5e3) * np.square(np.float32(np.hypot(*top))))


def test_a_product_has_the_slopes_of_its_plain_form_at_zero_too():
    """d Re(a b) / da is conj(b), and zero magnitudes are no exception."""
    b = np.array([0.3 - 0.4j, 1.0, -2.0j, 0.0])
    with jax.enable_x64(True):
        for a in (np.zeros(4, complex), np.array([1.0, 1j, -1.0, 2.0])):
            loss = lambda a: jnp.sum(from_goom(multiply(to_goom(a), to_goom(planes(b)))).re)
            slope = jax.grad(loss)(planes(a))
            np.testing.assert_allclose(np.asarray(slope.re) - 1j * np.asarray(slope.im), b, atol=1e-12)
