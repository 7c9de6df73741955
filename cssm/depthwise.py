"""Depthwise convolution over space, each channel by itself, and its derivative.

XLA's own is slow on a CPU in every direction, and on a GPU its gradient of the kernel takes 1 or 15 times as long by
what the search for an algorithm finds. Here maps are shifted and added where there is no cuDNN, and the gradient of the
kernel is one GPU kernel (Triton through Pallas; off a GPU it is interpreted, which is for tests), summed in a fixed
order.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from cssm.fused import available

# Numbers of a program at a time, in four warps, and how many sums of so many stay in registers: one for each tap.
TILE, SUMS = 512, 25
# Programs that share the maps: each leaves a partial sum.
PROGRAMS = 4096


class DepthwiseConv(nn.Module):
    """x [..., H, W, C] -> the same shape: depthwise_conv with size x size taps, and a bias a channel."""

    size: int
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (self.size, self.size, 1, channels))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        return depthwise_conv(x.reshape(-1, *x.shape[-3:]), kernel[:, :, 0]).reshape(x.shape) + bias


@jax.custom_vjp
def depthwise_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [N, H, W, C], kernel [k, k, C] -> [N, H, W, C], zeros beyond the border (as SAME of XLA pads): at a pixel the
    sum over (i, j) of kernel[i, j] x[h + i - (k - 1) // 2, w + j - (k - 1) // 2]. In x's dtype, summed in float32 at
    least.
    """
    return _convolved(x, kernel, (kernel.shape[0] - 1) // 2)


def _forward(x, kernel):
    return depthwise_conv(x, kernel), (x, kernel)


def _backward(residuals, dy):
    x, kernel = residuals
    before = (kernel.shape[0] - 1) // 2
    dx = _convolved(dy, kernel[::-1, ::-1], kernel.shape[0] - 1 - before)
    gradient = fused_kernel_gradient if available() and x.dtype != jnp.float64 else kernel_gradient
    return dx, gradient(_padded(x, kernel.shape[0], before), dy).astype(kernel.dtype)


depthwise_conv.defvjp(_forward, _backward)


def _padded(x: jax.Array, size: int, before: int) -> jax.Array:
    after = size - 1 - before
    return jnp.pad(x, ((0, 0), (before, after), (before, after), (0, 0)))


def _convolved(x: jax.Array, kernel: jax.Array, before: int) -> jax.Array:
    """`before`: zeros above and to the left."""
    size, (height, width) = kernel.shape[0], x.shape[1:3]
    if jax.default_backend() == "gpu":
        edges = (before, size - 1 - before)
        return jax.lax.conv_general_dilated(
            x,
            kernel[:, :, None].astype(x.dtype),
            window_strides=(1, 1),
            padding=(edges, edges),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=x.shape[-1],
        )
    dtype, padded = jnp.promote_types(x.dtype, jnp.float32), _padded(x, size, before)
    total = jnp.zeros((), dtype)
    for i in range(size):
        for j in range(size):
            total = total + kernel[i, j].astype(dtype) * padded[:, i : i + height, j : j + width].astype(dtype)
    return total.astype(x.dtype)


def kernel_gradient(padded: jax.Array, dy: jax.Array) -> jax.Array:
    """padded [N, H + k - 1, W + k - 1, C], dy [N, H, W, C] -> the sum of their products at each shift, [k, k, C],
    float32 at least.
    """
    height, width = dy.shape[1:3]
    size = padded.shape[1] - height + 1
    dy = dy.astype(jnp.promote_types(dy.dtype, jnp.float32))

    def row(i: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_slice_in_dim(padded, i, height, axis=1)
        return jnp.stack([jnp.sum(x[:, :, j : j + width].astype(dy.dtype) * dy, (0, 1, 2)) for j in range(size)])

    return jax.lax.map(row, jnp.arange(size))


def fused_kernel_gradient(padded: jax.Array, dy: jax.Array, interpret: bool | None = None) -> jax.Array:
    """As kernel_gradient, by one GPU kernel. interpret None: where there is no GPU.

    A program takes some rows of taps, a strip of columns and a block of channels, and goes down the maps: what one row
    of pixels has read is near when the next one wants it.
    """
    number, height, width, channels = dy.shape
    size, dtype = padded.shape[1] - height + 1, jnp.promote_types(dy.dtype, jnp.float32)
    block = min(64, 1 << (channels - 1).bit_length())
    columns = min(TILE // block, 1 << (width - 1).bit_length())
    across, blocks = -(-width // columns), -(-channels // block)
    taps = max(1, min(size, SUMS // size))
    rows = -(-size // taps)
    strips = number * across
    parts = min(strips, max(1, PROGRAMS // (rows * blocks)))

    def kernel(x_ref, dy_ref, out_ref):
        part, first, c = pl.program_id(0), pl.program_id(1) * taps, pl.program_id(2)
        channel = pl.ds(c * block, block)
        there = c * block + jnp.arange(block) < channels

        def pixels(at, sums):
            at = at.astype(jnp.int32)
            strip, h = at // height * parts + part, at % height
            n, w = strip // across, strip % across * columns
            mask = (w + jnp.arange(columns) < width)[:, None] & there[None, :] & (strip < strips)

            def load(ref, row, column, mask):
                return plt.load(ref.at[n, row, pl.ds(column, columns), channel], mask=mask, other=0.0).astype(dtype)

            d = load(dy_ref, h, w, mask)
            return tuple(
                load(x_ref, h + first + i, w + j, mask & (first + i < size)) * d + sums[i * size + j]
                for i in range(taps)
                for j in range(size)
            )

        zero = jnp.zeros((columns, block), dtype)
        sums = jax.lax.fori_loop(0, -(-strips // parts) * height, pixels, (zero,) * (taps * size))
        for i in range(taps):
            for j in range(size):
                mask = there & (first + i < size)
                plt.store(out_ref.at[part, first + i, c * 0 + j, channel], sums[i * size + j].sum(0), mask=mask)

    partial = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts, size, size, channels), dtype),
        grid=(parts, rows, blocks),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=jax.default_backend() != "gpu" if interpret is None else interpret,
    )(padded, dy)
    return partial.sum(0)
