"""Space <-> frequency: the 2-D real Fourier transform over (H, W), channels last, and spectra of kernels.

A spectrum is a `Spectrum(re, im)` of two real arrays [..., H, Wf, C] with Wf = W // 2 + 1: real planes keep bf16 and
broadcasting gates simple. Forward transforms are unnormalised, inverse ones carry 1 / (H W), as in numpy.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Backend = Literal["auto", "fft", "dft"]

# On an accelerator, up to this side: matrix products run on its matrix units. On a CPU the FFT was a little faster
# at 16 x 16 already. The bound itself is a choice, not a measurement.
DFT_MAX_SIDE = 64


class Spectrum(NamedTuple):
    """A complex array as two real planes of one shape and dtype."""

    re: jax.Array
    im: jax.Array


def choose_backend(backend: Backend, height: int, width: int, platform: str) -> Literal["fft", "dft"]:
    """Resolve "auto": matrix products on accelerators for small maps, the FFT otherwise."""
    if backend != "auto":
        return backend
    return "dft" if platform != "cpu" and max(height, width) <= DFT_MAX_SIDE else "fft"


def rfft2(x: jax.Array, backend: Backend = "fft") -> Spectrum:
    """Transform real x [..., H, W, C] over H and W; returns planes [..., H, Wf, C].

    "fft" computes in float32 (float64 stays float64); "dft" multiplies in x's dtype (bf16 products
    accumulate in float32 inside each product).
    """
    height, width = x.shape[-3:-1]
    if choose_backend(backend, height, width, jax.default_backend()) == "fft":
        x_hat = jnp.fft.rfft2(x.astype(_full_precision(x.dtype)), axes=(-3, -2))
        return Spectrum(x_hat.real.astype(x.dtype), x_hat.imag.astype(x.dtype))
    cos_w, sin_w = _dft_matrix(width, width // 2 + 1, x.dtype)
    re, im = _along_w(x, cos_w), _along_w(x, -sin_w)
    cos_h, sin_h = _dft_matrix(height, height, x.dtype)
    return Spectrum(_along_h(re, cos_h) + _along_h(im, sin_h), _along_h(im, cos_h) - _along_h(re, sin_h))


def irfft2(x_hat: Spectrum, width: int, backend: Backend = "fft") -> jax.Array:
    """Inverse of `rfft2`: planes [..., H, Wf, C] to real [..., H, width, C].

    As in numpy, what a non-symmetric spectrum would leave as an imaginary remainder is discarded.
    """
    re, im = x_hat
    height, dtype = re.shape[-3], re.dtype
    if choose_backend(backend, height, width, jax.default_backend()) == "fft":
        full = _full_precision(dtype)
        spectrum = jax.lax.complex(re.astype(full), im.astype(full))
        return jnp.fft.irfft2(spectrum, s=(height, width), axes=(-3, -2)).astype(dtype)
    cos_h, sin_h = _dft_matrix(height, height, dtype, scale=1.0 / height)
    re, im = _along_h(re, cos_h) - _along_h(im, sin_h), _along_h(im, cos_h) + _along_h(re, sin_h)
    # Every column but the first (and Nyquist's, for even widths) stands for itself and its conjugate twin.
    twice = np.full(width // 2 + 1, 2.0)
    twice[0] = 1.0
    if width % 2 == 0:
        twice[-1] = 1.0
    cos_w, sin_w = _dft_matrix(width, width // 2 + 1, dtype, scale=twice / width)
    return _along_w(re, cos_w.T) - _along_w(im, sin_w.T)


def place_kernel(kernel: jax.Array, height: int, width: int, origin: str) -> jax.Array:
    """Zero-pad (or crop about its centre) kernels [C, k, k] to maps [C, H, W].

    origin "origin" puts the centre tap at pixel (0, 0), so that multiplying spectra is a local convolution;
    "image_center" leaves the block in the middle of the map, which adds a circular shift of about half the map to
    every product (the published implementation; kept for parity with its checkpoints).
    """
    size = kernel.shape[-1]
    shifts = []
    for dim, side in ((1, height), (2, width)):
        centre = (size - 1) // 2
        if size > side:
            start = (size - side) // 2
            kernel = jax.lax.slice_in_dim(kernel, start, start + side, axis=dim)
            shifts.append(-(centre - start))
        else:
            before = (side - size) // 2
            pad = [(0, 0)] * 3
            pad[dim] = (before, side - size - before)
            kernel = jnp.pad(kernel, pad)
            shifts.append(-(centre + before))
    return jnp.roll(kernel, shifts, axis=(1, 2)) if origin == "origin" else kernel


def kernel_spectrum(kernel: jax.Array, height: int, width: int, origin: str) -> Spectrum:
    """Spectrum [H, Wf, C] of spatial kernels [C, k, k]; not yet bounded, see `bound_magnitude`."""
    placed = place_kernel(kernel, height, width, origin)
    return rfft2(jnp.moveaxis(placed, 0, -1), "fft")


def bound_magnitude(k_hat: Spectrum, rho: float = 0.999) -> Spectrum:
    """rho * K / (1 + |K|): keeps the phase, guarantees |K| < rho (docs/math.md, equation 2)."""
    scale = rho / (1.0 + magnitude(k_hat))
    return Spectrum(k_hat.re * scale, k_hat.im * scale)


def magnitude(z: Spectrum) -> jax.Array:
    """|z|; its gradient is that of the square root, but 0 at z = 0, where it has none."""
    power = jnp.square(z.re) + jnp.square(z.im)
    return jnp.where(power > 0, jnp.sqrt(jnp.where(power > 0, power, 1.0)), 0.0)


def multiply(a: Spectrum, b: Spectrum) -> Spectrum:
    """Complex product, plane by plane, with broadcasting."""
    return Spectrum(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


def scale(factor: jax.Array | float, a: Spectrum) -> Spectrum:
    """Product of a real array or number with a spectrum."""
    return Spectrum(factor * a.re, factor * a.im)


def add(*terms: Spectrum) -> Spectrum:
    """Sum of spectra."""
    return Spectrum(total([t.re for t in terms]), total([t.im for t in terms]))


def total(arrays: Sequence[jax.Array]) -> jax.Array:
    """Sum of arrays; unlike the built-in `sum` it adds no zero, which would be an operation of its own."""
    return functools.reduce(operator.add, arrays)


def _full_precision(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _dft_matrix(size: int, columns: int, dtype, scale: float | np.ndarray = 1.0) -> tuple[jax.Array, jax.Array]:
    """cos and sin of 2 pi j k / size, [size, columns], times scale; j k is reduced first, so that angles stay exact."""
    angle = 2.0 * math.pi * (np.outer(np.arange(size), np.arange(columns)) % size) / size
    return jnp.asarray(np.cos(angle) * scale, dtype), jnp.asarray(np.sin(angle) * scale, dtype)


def _along_w(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("...hwc,wf->...hfc", x, matrix)


def _along_h(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("...hwc,hg->...gwc", x, matrix)
