"""Space <-> frequency: the 2-D real Fourier transform over (H, W), channels last, and spectra of kernels.

A spectrum is two real planes, with Wf = W // 2 + 1 columns: real numbers keep bf16 and broadcasting gates simple. To
compute with it, it is a `Spectrum(re, im)` of two arrays [..., H, Wf, C]; on its way through transforms, projections
and the recurrence it is packed, one array [..., 2, H, Wf, n C] of its planes and of n spectra side by side: each of
these is then one matrix product or one kernel, and nothing is copied in between. Forward transforms are unnormalised,
inverse ones carry 1 / (H W), as in numpy.
"""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

Backend = Literal["auto", "fft", "dft"]

# By which rematerialisation knows what an inverse transform gives (jax.ad_checkpoint).
NAME = "inverse transform"

# On an accelerator, up to this side: matrix products run on its matrix units. On a CPU the FFT was a little faster
# at 16 x 16 already. The bound itself is a choice, not a measurement.
DFT_MAX_SIDE = 64


class Spectrum(NamedTuple):
    """A complex array as two real planes of one shape and dtype."""

    re: jax.Array
    im: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["count"])
@dataclass(frozen=True)
class Packed:
    """`count` spectra side by side (see `pack`), which know that they are. array: or its shape."""

    array: Any
    count: int


def is_packed(node: Any) -> bool:
    """Of a pytree: whether it is Packed."""
    return isinstance(node, Packed)


def choose_backend(backend: Backend, height: int, width: int, platform: str) -> Literal["fft", "dft"]:
    """Resolve "auto": matrix products on accelerators for small maps, the FFT otherwise."""
    if backend != "auto":
        return backend
    return "dft" if platform != "cpu" and max(height, width) <= DFT_MAX_SIDE else "fft"


def pack(*spectra: Spectrum, axis: int = -4, planes: int = 2) -> jax.Array:
    """Spectra [..., H, Wf, C] side by side: [..., planes, H, Wf, n C]; of [..., F, C] with axis -3.

    planes 1: the real parts alone.
    """
    alike = [[spectrum[plane] for spectrum in spectra] for plane in range(planes)]
    return jnp.stack([jnp.concatenate(same, axis=-1) if len(same) > 1 else same[0] for same in alike], axis)


def unpack(packed: jax.Array, count: int = 1, axis: int = -4) -> tuple[Spectrum, ...]:
    """The inverse of `pack`. Of real numbers, which have one plane, the other is zero."""
    planes = [jax.lax.index_in_dim(packed, i, axis, keepdims=False) for i in range(packed.shape[axis])]
    if len(planes) == 1:
        planes.append(jnp.zeros_like(planes[0]))
    return tuple(Spectrum(*parts) for parts in zip(*(jnp.split(p, count, axis=-1) for p in planes), strict=True))


def rfft2(x: jax.Array, backend: Backend = "fft") -> jax.Array:
    """Transform real x [..., H, W, C] over H and W; returns it packed, [..., 2, H, Wf, C].

    "fft" computes in float32 (float64 stays float64); "dft" multiplies in x's dtype (bf16 products
    accumulate in float32 inside each product).
    """
    height, width = x.shape[-3:-1]
    if choose_backend(backend, height, width, jax.default_backend()) == "fft":
        x_hat = jnp.fft.rfft2(x.astype(_full_precision(x.dtype)), axes=(-3, -2))
        return pack(Spectrum(x_hat.real.astype(x.dtype), x_hat.imag.astype(x.dtype)))
    # Both planes in one product: along W to [..., H, 2 Wf, C], then of H and plane together to [..., 2 H, Wf C].
    cos, sin = _dft_matrix(width, width // 2 + 1)
    along_w = np.concatenate([cos, -sin], axis=1)
    cos, sin = _dft_matrix(height, height)
    # From (h, plane) to (plane, g): re = cos re + sin im, im = cos im - sin re.
    along_h = np.stack([np.stack([cos, -sin], 1), np.stack([sin, cos], 1)], 1).reshape(2 * height, 2 * height)
    y = _left(along_w, x).reshape(*x.shape[:-3], 2 * height, -1)
    return _left(along_h, y).reshape(*x.shape[:-3], 2, height, width // 2 + 1, -1)


def with_mean(x_hat: jax.Array, pixels: int) -> tuple[jax.Array, jax.Array]:
    """(x_hat, the mean over H and W [..., C]) of a packed spectrum [..., 2, H, Wf, C] of maps of so many pixels.

    The mean's gradient is added in place, at the one frequency that it comes from: taken from the maps it would be one
    more pass over their gradient.
    """

    @jax.custom_vjp
    def split(x_hat):
        return x_hat, x_hat[..., 0, 0, 0, :] / pixels

    def backward(_, gradients):
        d_hat, d_mean = gradients
        first = d_hat[..., :1, :1, :1, :] + d_mean[..., None, None, None, :] / pixels
        first = jax.lax.optimization_barrier(first)
        return (jax.lax.dynamic_update_slice(d_hat, first, (0,) * d_hat.ndim),)

    split.defvjp(lambda x_hat: (split(x_hat), None), backward)
    return split(x_hat)


def irfft2(x_hat: jax.Array, width: int, backend: Backend = "fft") -> jax.Array:
    """Inverse of `rfft2`: packed [..., 2, H, Wf, C] to real [..., H, width, C].

    As in numpy, what a non-symmetric spectrum would leave as an imaginary remainder is discarded.
    """
    height, columns, dtype = *x_hat.shape[-3:-1], x_hat.dtype
    if choose_backend(backend, height, width, jax.default_backend()) == "fft":
        full = _full_precision(dtype)
        (spectrum,) = unpack(x_hat.astype(full))
        x = jnp.fft.irfft2(jax.lax.complex(*spectrum), s=(height, width), axes=(-3, -2))
        return checkpoint_name(x.astype(dtype), NAME)
    cos, sin = _dft_matrix(height, height, scale=1.0 / height)
    # From (plane, g) to (h, plane): re = cos re - sin im, im = cos im + sin re.
    along_h = np.stack([np.stack([cos, sin], 2), np.stack([-sin, cos], 2)]).reshape(2 * height, 2 * height)
    # Every column but the first (and Nyquist's, for even widths) stands for itself and its conjugate twin.
    twice = np.full(columns, 2.0)
    twice[0] = 1.0
    if width % 2 == 0:
        twice[-1] = 1.0
    cos, sin = _dft_matrix(width, columns, scale=twice / width)
    along_w = np.concatenate([cos.T, -sin.T])
    y = _left(along_h, x_hat.reshape(*x_hat.shape[:-4], 2 * height, -1))
    return checkpoint_name(_left(along_w, y.reshape(*x_hat.shape[:-4], height, 2 * columns, -1)), NAME)


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
    return unpack(rfft2(jnp.moveaxis(placed, 0, -1), "fft"))[0]


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


def _dft_matrix(size: int, columns: int, scale: float | np.ndarray = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of 2 pi j k / size, [size, columns], times scale; j k is reduced first, so that angles stay exact."""
    angle = 2.0 * math.pi * (np.outer(np.arange(size), np.arange(columns)) % size) / size
    return np.cos(angle) * scale, np.sin(angle) * scale


def _left(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """matrix [J, I], x [..., J, N] -> [..., I, N]: the sum over J."""
    batch = x.reshape(-1, *x.shape[-2:])
    # With the matrix repeated for each of them, products come out where they belong: without, XLA transposes x first.
    # Rows of a multiple of 8 numbers are what matrix units take without a copy.
    down = int(matrix.shape[1] % 8 == 0)
    rows = matrix if down else matrix.T
    each = jnp.broadcast_to(jnp.asarray(rows, x.dtype), (batch.shape[0], *rows.shape))
    product = jax.lax.dot_general(each, batch, (((2 - down,), (1,)), ((0,), (0,))))
    return product.reshape(*x.shape[:-2], *product.shape[1:])
