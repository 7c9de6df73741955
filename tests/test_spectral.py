"""The transform pair against numpy in float64, both backends; kernels against direct circular convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm import spectral
from cssm.spectral import Spectrum

SHAPES = [(8, 10), (7, 9), (1, 4), (5, 1), (16, 16)]


def randn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("backend", ["fft", "dft"])
@pytest.mark.parametrize("height,width", SHAPES)
def test_rfft2_is_numpys(backend, height, width):
    x = randn(2, 3, height, width, 4)
    want = np.fft.rfft2(x, axes=(-3, -2))
    with jax.enable_x64(True):
        ((re, im),) = spectral.unpack(spectral.rfft2(jnp.asarray(x), backend))
        assert re.dtype == jnp.float64
        np.testing.assert_allclose(np.asarray(re) + 1j * np.asarray(im), want, atol=1e-11)


@pytest.mark.parametrize("backend", ["fft", "dft"])
@pytest.mark.parametrize("height,width", SHAPES)
def test_irfft2_is_numpys_also_where_the_spectrum_is_not_symmetric(backend, height, width):
    columns = width // 2 + 1
    x_hat = randn(2, height, columns, 3) + 1j * randn(2, height, columns, 3, seed=1)
    want = np.fft.irfft2(x_hat, s=(height, width), axes=(-3, -2))
    with jax.enable_x64(True):
        packed = spectral.pack(Spectrum(jnp.asarray(x_hat.real), jnp.asarray(x_hat.imag)))
        np.testing.assert_allclose(spectral.irfft2(packed, width, backend), want, atol=1e-12)


def test_packed_spectra_lie_side_by_side_and_come_apart_again():
    spectra = [
        Spectrum(jnp.asarray(randn(2, 3, 4, 5, seed=i)), jnp.asarray(randn(2, 3, 4, 5, seed=i + 9))) for i in range(3)
    ]
    packed = spectral.pack(*spectra)
    assert packed.shape == (2, 2, 3, 4, 15)
    np.testing.assert_array_equal(packed[:, 1, ..., 5:10], spectra[1].im)
    jax.tree.map(np.testing.assert_array_equal, spectral.unpack(packed, 3), tuple(spectra))
    flat = [jax.tree.map(lambda p: p.reshape(2, 12, 5), z) for z in spectra]
    jax.tree.map(np.testing.assert_array_equal, spectral.unpack(spectral.pack(*flat, axis=-3), 3, axis=-3), tuple(flat))


def test_gradients_of_both_backends_agree():
    x = jnp.asarray(randn(2, 6, 8, 3), jnp.float32)
    weight = jnp.asarray(randn(2, 6, 5, 3, seed=2), jnp.float32)

    def loss(x, backend):
        return jnp.sum(jnp.sin(spectral.irfft2(weight * spectral.rfft2(x, backend), 8, backend)))

    fft, dft = jax.grad(loss)(x, "fft"), jax.grad(loss)(x, "dft")
    np.testing.assert_allclose(dft, fft, rtol=1e-4, atol=1e-5)


def test_bf16_stays_bf16_and_close():
    x = jnp.asarray(randn(2, 8, 8, 3), jnp.bfloat16)
    want = np.fft.rfft2(np.asarray(x, np.float64), axes=(-3, -2))
    for backend in ("fft", "dft"):
        packed = spectral.rfft2(x, backend)
        assert packed.dtype == jnp.bfloat16
        for plane, wanted in zip(
            np.moveaxis(np.asarray(packed, np.float64), -4, 0), (want.real, want.imag), strict=True
        ):
            assert np.abs(plane - wanted).max() < 0.02 * np.abs(want).max()
        assert spectral.irfft2(packed, 8, backend).dtype == jnp.bfloat16


def test_auto_takes_products_on_accelerators_for_small_maps_only():
    assert spectral.choose_backend("auto", 56, 56, "gpu") == "dft"
    assert spectral.choose_backend("auto", 128, 128, "gpu") == "fft"
    assert spectral.choose_backend("auto", 8, 8, "cpu") == "fft"
    assert spectral.choose_backend("dft", 128, 128, "cpu") == "dft"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("height,width", [(8, 10), (7, 7)])
def test_a_product_of_spectra_is_circular_convolution_about_the_origin(size, height, width):
    """y(h, w) = sum_ab k(a, b) x(h - (a - c), w - (b - c)) with c the centre tap: local, whatever the map's size."""
    kernel, x = randn(3, size, size), randn(height, width, 3, seed=1)
    want, centre = np.zeros_like(x), (size - 1) // 2
    for a in range(size):
        for b in range(size):
            want += kernel[:, a, b] * np.roll(x, (a - centre, b - centre), axis=(0, 1))
    with jax.enable_x64(True):
        k_hat = spectral.kernel_spectrum(jnp.asarray(kernel), height, width, "origin")
        (x_hat,) = spectral.unpack(spectral.rfft2(jnp.asarray(x)))
        y_hat = spectral.pack(spectral.multiply(k_hat, x_hat))
        np.testing.assert_allclose(spectral.irfft2(y_hat, width), want, atol=1e-12)


def test_image_center_is_the_same_kernel_shifted_to_the_middle():
    kernel = jnp.asarray(randn(2, 3, 3), jnp.float32)
    at_origin = spectral.place_kernel(kernel, 8, 10, "origin")
    in_the_middle = spectral.place_kernel(kernel, 8, 10, "image_center")
    np.testing.assert_array_equal(jnp.roll(at_origin, (3, 4), axis=(1, 2)), in_the_middle)
    assert at_origin[0, 0, 0] == kernel[0, 1, 1]


@pytest.mark.parametrize("origin", ["origin", "image_center"])
def test_a_kernel_larger_than_one_side_is_cropped_about_its_centre(origin):
    kernel = jnp.asarray(randn(1, 11, 11), jnp.float32)
    placed = spectral.place_kernel(kernel, 8, 16, origin)
    assert placed.shape == (1, 8, 16)
    assert placed.max() == kernel[:, 1:9, :].max()
    if origin == "origin":
        assert placed[0, 0, 0] == kernel[0, 5, 5]


def test_bounded_spectra_keep_their_phase_and_stay_below_rho():
    k = randn(500) * 50 + 1j * randn(500, seed=1)
    re, im = spectral.bound_magnitude(Spectrum(jnp.asarray(k.real, jnp.float32), jnp.asarray(k.imag, jnp.float32)))
    bounded = np.asarray(re) + 1j * np.asarray(im)
    assert np.abs(bounded).max() < 0.999
    np.testing.assert_allclose(np.angle(bounded), np.angle(k), atol=1e-5)


def test_bounding_has_a_finite_gradient_at_zero():
    zero = Spectrum(jnp.zeros(3), jnp.zeros(3))
    grads = jax.grad(lambda k: jnp.sum(spectral.bound_magnitude(k).re))(zero)
    np.testing.assert_allclose(grads.re, 0.999, rtol=1e-6)
    np.testing.assert_array_equal(grads.im, 0.0)


@pytest.mark.parametrize("backend", ["fft", "dft"])
def test_the_mean_of_maps_comes_with_their_spectrum(backend):
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 5, 4))
    weights = np.random.default_rng(1).standard_normal((2, 3, 2, 6, 3, 4))
    with jax.enable_x64(True):

        def loss(x, mean):
            x_hat = spectral.rfft2(x, backend)
            x_hat, mean = spectral.with_mean(x_hat, 30) if mean is None else (x_hat, mean(x))
            return jnp.sum(weights * x_hat) + jnp.sum(jnp.sin(mean))

        want = jax.value_and_grad(lambda x: loss(x, lambda x: x.mean((2, 3))))(x)
        got = jax.value_and_grad(lambda x: loss(x, None))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-12), want, got)
