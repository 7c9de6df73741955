"""Causal convolution over time, each channel by itself, and its derivative."""

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import dtypes

from cssm.fused import available
from cssm.fused_rows import fused_steps
from cssm.spectral import total

# Steps that a GPU kernel holds in registers.
FUSED_MAX_STEPS = 16


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
        return [self._convolved(*part, num_steps) for part in zip(parts, *split, strict=True)]

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


def _forward(x, kernel):
    return causal_conv(x, kernel), (x, kernel)


def _backward(residuals, dy):
    """By hand, since the derivative of slices, as JAX takes it, is a padded copy a tap: three times the time."""
    x, kernel = residuals
    full = jnp.promote_types(x.dtype, jnp.float32)
    axes, time = tuple(range(x.ndim - 1)), x.shape[1]
    behind = [min(len(kernel) - 1 - i, time) for i in range(len(kernel))]
    gradient = [jnp.sum(dy[:, s:].astype(full) * x[:, : time - s].astype(full), axes) for s in behind]
    return _shifted(dy, kernel[::-1], before=0), jnp.stack(gradient).astype(kernel.dtype)


causal_conv.defvjp(_forward, _backward)


def _shifted(x: jax.Array, kernel: jax.Array, before: int) -> jax.Array:
    """The sum over i of kernel[i] x[t - before + i], zeros beyond the ends."""
    time, edges = x.shape[1], ((before, len(kernel) - 1 - before), *((0, 0),) * (x.ndim - 2))
    padded = jnp.pad(x, ((0, 0), *edges))
    return total([k * padded[:, i : i + time] for i, k in enumerate(kernel)])
