"""Depthwise convolutions, over space and over time: each channel by itself. And their derivatives.

Over space, XLA's own is slow on a CPU in every direction, and on a GPU its gradient of the kernel takes 1 or 17 times
as long by what the search for an algorithm finds. Here maps are shifted and added where there is no cuDNN, and the
gradient of the kernel is one GPU kernel (Triton through Pallas; off a GPU it is interpreted, which is for tests),
summed in a fixed order. Over time, all steps of a pixel are taken at once (cssm.fused_rows).
"""

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import dtypes
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from cssm.fused import available
from cssm.fused_rows import fused_steps
from cssm.spectral import total

# A program is one warp and keeps a sum and a pixel for each of up to SUMS taps in registers, of one number a thread, or
# of two where the taps are no more than SUMS_OF_TWO; so many products are written out before its loop comes round.
SUMS, SUMS_OF_TWO, WRITTEN = 49, 25, 200
# Programs that share the maps: each leaves a partial sum.
PROGRAMS = 8192
# Steps in time that a GPU kernel holds in registers.
FUSED_MAX_STEPS = 16


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

    A program takes some rows of taps and a block of channels, of one map or several, and goes along rows of pixels: the
    columns that its taps see stay in registers, so that a pixel is loaded once for all taps of a row.
    """
    number, height, width, channels = dy.shape
    size, dtype = padded.shape[1] - height + 1, jnp.promote_types(dy.dtype, jnp.float32)
    rows = -(-size // max(1, SUMS // size))
    taps = -(-size // rows)
    tile = 32 * (2 if taps * size <= SUMS_OF_TWO else 1)
    # The largest power of two that divides the channels leaves no thread idle; fewer than 16 are no sector of 32 bytes.
    block = max(min(tile, channels & -channels), min(16, _power_of_two(channels)))
    maps, blocks = min(tile // block, _power_of_two(number)), -(-channels // block)
    chunks = -(-width // max(1, WRITTEN // (taps * size)))
    chunk = -(-width // chunks)
    strips = -(-number // maps) * height
    each = -(-strips // max(1, PROGRAMS // (rows * blocks)))
    parts = -(-strips // each)

    def kernel(x_ref, dy_ref, out_ref):
        part, first, c = pl.program_id(0), pl.program_id(1) * taps, pl.program_id(2)
        channel = pl.ds(c * block, block)
        there = c * block + jnp.arange(block) < channels

        def strip(at, sums):
            at = at.astype(jnp.int32)
            n, h = at // height * maps, at % height
            mask = (n + jnp.arange(maps) < number)[:, None] & there[None, :]

            def load(ref, row, column, inside):
                at = ref.at[pl.ds(n, maps), row, column, channel]
                return plt.load(at, mask=mask & inside, other=0.0).astype(dtype)

            def column(w):
                """Of the rows that the taps see."""
                inside = w < width + size - 1
                return [load(x_ref, h + first + i, w, inside & (first + i < size)) for i in range(taps)]

            def pixels(start, carry):
                w = start.astype(jnp.int32) * chunk
                window, sums = carry
                for s in range(chunk):
                    window = [*window, column(w + s + size - 1)]
                    d = load(dy_ref, h, w + s, w + s < width)
                    seen = [x_column[i] for i in range(taps) for x_column in window[-size:]]
                    sums = [x * d + so_far for x, so_far in zip(seen, sums, strict=True)]
                return window[chunk:], sums

            # The index of a load is an array: a number alone is none.
            begin = [column(h * 0 + j) for j in range(size - 1)]
            return jax.lax.fori_loop(0, chunks, pixels, (begin, sums))[1]

        zero = [jnp.zeros((maps, block), dtype)] * (taps * size)
        begin = part * each
        sums = jax.lax.fori_loop(begin, jnp.minimum(begin + each, strips), strip, zero)
        for i in range(taps):
            for j in range(size):
                mask = there & (first + i < size)
                plt.store(out_ref.at[part, first + i, c * 0 + j, channel], sums[i * size + j].sum(0), mask=mask)

    partial = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts, size, size, channels), dtype),
        grid=(parts, rows, blocks),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=jax.default_backend() != "gpu" if interpret is None else interpret,
    )(padded, dy)
    return partial.sum(0)


def _power_of_two(number: int) -> int:
    """The next from a number on."""
    return 1 << (number - 1).bit_length()


class CausalConv(nn.Module):
    """act of a depthwise convolution over a step and the `taps` - 1 before it, zeros before t = 0.

    parts: arrays [B, T, H, W, C] side by side, as the channels of the parameters are; returns the like. order: of the
    channels of each, in terms of the parameters'. Of still images [B, 1, H, W, C], shown num_steps times, the first
    `taps` steps are returned: those after them are like the last. On a GPU one kernel forward and one backward
    (cssm.fused_rows), for up to FUSED_MAX_STEPS.
    """

    taps: int
    act: Callable[[jax.Array], jax.Array] | None = None
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, parts: Sequence[jax.Array], num_steps: int, order: np.ndarray | None = None) -> list[jax.Array]:
        channels = sum(x.shape[-1] for x in parts)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (self.taps, 1, channels))[:, 0]
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        *parts, kernel, bias = dtypes.promote_dtype(*parts, kernel, bias, dtype=self.dtype)
        split = [jnp.split(p, len(parts), axis=-1) for p in (kernel, bias)]
        if order is not None:
            split = [[p[..., order] for p in each] for each in split]
        return [self._convolved(x, k, b, num_steps) for x, k, b in zip(parts, *split, strict=True)]

    def _convolved(self, x: jax.Array, kernel: jax.Array, bias: jax.Array, num_steps: int) -> jax.Array:
        act = self.act or (lambda y: y)
        if x.shape[1] == 1:  # the same input at every step: only how many taps it has reached changes
            reached = jnp.cumsum(kernel[::-1], axis=0)[:num_steps]
            return act(reached[:, None, None, :] * x + bias)
        if available() and x.dtype != jnp.float64 and num_steps <= FUSED_MAX_STEPS:
            return fused_steps(functools.partial(causal_steps, act=act), x, (*kernel, bias), whole=False)
        return act(causal_conv(x, kernel) + bias)


def causal_steps(
    steps: tuple[jax.Array, ...], there: jax.Array, *parameters: jax.Array, act: Callable
) -> tuple[jax.Array, ...]:
    """What CausalConv makes of each step; parameters: the taps of its kernel, each [C], then the bias."""
    *kernel, bias = parameters
    seen = [steps[max(0, t + 1 - len(kernel)) : t + 1] for t in range(len(steps))]
    return tuple(act(total([k * x for k, x in zip(kernel[-len(x_s) :], x_s, strict=True)]) + bias) for x_s in seen)


@jax.custom_vjp
def causal_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [B, T, ..., C], kernel [taps, C] -> at step t the sum over i of kernel[i] x[t - taps + 1 + i]."""
    return _shifted(x, kernel, before=len(kernel) - 1)


def _forward_in_time(x, kernel):
    return causal_conv(x, kernel), (x, kernel)


def _backward_in_time(residuals, dy):
    """By hand, since the derivative of slices, as JAX takes it, is a padded copy a tap: three times the time."""
    x, kernel = residuals
    full = jnp.promote_types(x.dtype, jnp.float32)
    axes, time = tuple(range(x.ndim - 1)), x.shape[1]
    behind = [min(len(kernel) - 1 - i, time) for i in range(len(kernel))]
    gradient = [jnp.sum(dy[:, s:].astype(full) * x[:, : time - s].astype(full), axes) for s in behind]
    return _shifted(dy, kernel[::-1], before=0), jnp.stack(gradient).astype(kernel.dtype)


causal_conv.defvjp(_forward_in_time, _backward_in_time)


def _shifted(x: jax.Array, kernel: jax.Array, before: int) -> jax.Array:
    """The sum over i of kernel[i] x[t - before + i], zeros beyond the ends."""
    time, edges = x.shape[1], ((before, len(kernel) - 1 - before), *((0, 0),) * (x.ndim - 2))
    padded = jnp.pad(x, ((0, 0), *edges))
    return total([k * padded[:, i : i + time] for i, k in enumerate(kernel)])
