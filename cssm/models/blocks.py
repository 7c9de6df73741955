"""Parts of trunks, each defined once: stems, norms, positions, drop path, pooling. What cells need too is with them.

Activations are [B, T, H, W, C] throughout; a still image has T = 1 until a recurrent cell unrolls it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cssm.activations import gelu, softplus
from cssm.cells.core import LayerNorm, SpectralDense, identity, repeat_over_time
from cssm.fused_rows import max_pool_2x2
from cssm.positions import rope, time_code

Act = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Act] = {
    "none": identity,
    "softplus": softplus,
    "gelu": gelu,
    "relu": nn.relu,
    "silu": nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm of maps [B, T, H, W, C], epsilon 1e-6 (batch 1e-5), with a scale and an offset for each channel.

    kind "layer": over channels. "instance": over H and W, each channel and step by itself. "global_layer": over T, H, W
    and C together, so that a later frame changes an earlier one. "batch": over everything but channels, with running
    statistics outside of training, which keep the share `momentum` of what they were; axis: the device axis over which
    they are taken; None: each device's own.
    """

    kind: str
    dtype: jnp.dtype
    axis: str | None = None
    momentum: float = 0.99

    def __call__(self, train: bool, name: str) -> nn.Module:
        """The module; train: whether batch norm uses the batch's statistics, or the running ones."""
        shared = {"use_fast_variance": False, "dtype": self.dtype, "name": name}
        if self.kind == "layer":
            return LayerNorm(self.dtype, name=name)
        if self.kind == "instance":
            return nn.GroupNorm(None, 1, epsilon=1e-6, reduction_axes=(-3, -2, -1), **shared)
        if self.kind == "global_layer":
            return nn.LayerNorm(epsilon=1e-6, reduction_axes=(-4, -3, -2, -1), feature_axes=-1, **shared)
        return nn.BatchNorm(not train, axis_name=self.axis, momentum=self.momentum, epsilon=1e-5, **shared)

    def activated(
        self, train: bool, name: str, before: Act = identity, after: Act = identity, pooled: bool = False
    ) -> Callable[..., jax.Array]:
        """(x, an offset [C] or none) -> after(norm(before(x + offset))), and of that max_pool_2x2 if pooled."""
        if self.kind == "layer":
            return LayerNorm(self.dtype, before, after, pooled, name=name)
        norm, pool = self(train, name), max_pool_2x2 if pooled else identity
        shifted = lambda x, offset=None: x if offset is None else x + offset.astype(x.dtype)
        return lambda x, *offset: pool(after(norm(before(shifted(x, *offset)))))


def sample_frames(x: jax.Array, num_steps: int) -> jax.Array:
    """[B, F, ...] -> [B, num_steps, ...]: step t shows frame floor((t + 1/2) F / num_steps).

    Each step shows the middle of its share of the clip (as temporal segments do, Wang et al. 2016): frames are left out
    at even distance, or shown as often as each other.
    """
    frames = x.shape[1]
    return x if frames == num_steps else x[:, (2 * np.arange(num_steps) + 1) * frames // (2 * num_steps)]


def frames_shown(images: jax.Array, seq_len: int | None) -> tuple[jax.Array, int]:
    """Images [B, H, W, C] or clips [B, F, H, W, C] -> ([B, F or fewer, H, W, C], T): the frames that a step shows.

    T is seq_len, or with None the number of frames; an image is one frame.
    """
    x = images[:, None] if images.ndim == 4 else images
    steps = seq_len or x.shape[1]
    return sample_frames(x, min(steps, x.shape[1])), steps


def as_steps(x: jax.Array, num_steps: int) -> jax.Array:
    """What each step shows of the frames of `frames_shown`, or of maps made from them; one frame stays one."""
    return x if x.shape[1] == 1 else sample_frames(x, num_steps)


def on_frames(module: Callable, x: jax.Array) -> jax.Array:
    """Apply a 2-D module to every frame of [B, T, H, W, C]."""
    y = module(x.reshape(-1, *x.shape[2:]))
    return y.reshape(*x.shape[:2], *y.shape[1:])


class Conv(nn.Conv):
    """nn.Conv of every frame of [B, T, H, W, C]: (without its bias, the bias [features]), which what follows adds."""

    use_bias: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = on_frames(super().__call__, inputs)
        return y, self.param("bias", self.bias_init, (self.features,), self.param_dtype)


class ConvPoolStem(nn.Module):
    """stem_layers times: 3x3 convolution, act, norm, 2x2 max-pool (SAME): side ceil(side / 2^layers)."""

    features: int
    layers: int
    norm: Norm
    act: Callable
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for i in range(self.layers):
            x, bias = Conv(self.features, (3, 3), dtype=self.dtype, name=f"conv_{i}")(x)
            x = self.norm.activated(train, f"norm_{i}", before=self.act, pooled=True)(x, bias)
        return x


class PointwiseStem(nn.Module):
    """1x1 convolution, act, norm; keeps the resolution."""

    features: int
    norm: Norm
    act: Callable
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x, bias = SpectralDense(self.features, self.dtype, name="conv_0")(x)
        return self.norm.activated(train, "norm_0", before=self.act)(x, bias)


class StridedStem(nn.Module):
    """One 3x3 convolution of the given stride (SAME), GELU, norm."""

    features: int
    stride: int
    norm: Norm
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        stride = (self.stride, self.stride)
        x, bias = Conv(self.features, (3, 3), stride, dtype=self.dtype, name="conv")(x)
        return self.norm.activated(train, "norm", before=gelu)(x, bias)


class PatchStem(nn.Module):
    """Non-overlapping p x p patches, one linear map, no norm; a remainder of the image is an error of the caller."""

    features: int
    patch_size: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        size = (self.patch_size, self.patch_size)
        return on_frames(nn.Conv(self.features, size, size, "VALID", dtype=self.dtype, name="conv"), x)


class AddPositions(nn.Module):
    """[B, T or 1, H, W, C] -> the same, or [B, T, H, W, C] where positions in time are added; T = num_steps.

    mode "learnable": a table [H, W, C] ~ N(0, 0.02) added; "sinusoidal": the time code [T, C]; "separate": channels
    turned by spatial_only RoPE, and a table [T, C] ~ N(0, 0.02) added; else nothing.
    """

    mode: str
    num_steps: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.mode == "learnable":
            table = self.param("pos_embed", nn.initializers.normal(0.02), x.shape[-3:])
            return x + table.astype(x.dtype)
        if self.mode == "sinusoidal":
            return x + time_code(self.num_steps, x.shape[-1], x.dtype)[:, None, None, :]
        if self.mode == "separate":
            table = self.param("pos_embed", nn.initializers.normal(0.02), (self.num_steps, x.shape[-1]))
            return rope(x, "spatial_only") + table[:, None, None, :].astype(x.dtype)
        return x


class RegisterTokens(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, count + T, H, W, C]: learned frames, alike at all pixels, before the T = num_steps.

    What registers are to the tokens of a transformer (Darcet et al. 2024), here in time: steps in which the states can
    prepare themselves. N(0, 0.02) at the start.
    """

    count: int
    num_steps: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        table = self.param("tokens", nn.initializers.normal(0.02), (self.count, x.shape[-1]))
        frames = jnp.broadcast_to(table[:, None, None, :].astype(x.dtype), (x.shape[0], self.count, *x.shape[2:]))
        return jnp.concatenate([frames, repeat_over_time(x, self.num_steps)], axis=1)


class DropPath(nn.Module):
    """Drop a residual branch for whole examples with probability `rate`, scaling kept ones by 1 / (1 - rate)."""

    rate: float
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.rate == 0.0 or not self.train:
            return x
        keep = 1.0 - self.rate
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * jax.random.bernoulli(self.make_rng("drop_path"), keep, shape).astype(x.dtype) / keep


class Place(NamedTuple):
    """Where a block stands in a trunk of stages. halves: it opens a stage other than the first, before which maps are
    halved. last: of all blocks.
    """

    number: int
    stage: int
    halves: bool
    last: bool
    drop_path_rate: float


def places(depths: Sequence[int], drop_path_rate: float) -> list[Place]:
    """Of all blocks, in order; the rate rises linearly from 0 to drop_path_rate over them (Huang et al. 2016)."""
    rates = np.linspace(0.0, drop_path_rate, sum(depths))
    pairs = [(stage, first == 0) for stage, depth in enumerate(depths) for first in range(depth)]
    return [
        Place(i, stage, opens and stage > 0, i == len(pairs) - 1, float(rates[i]))
        for i, (stage, opens) in enumerate(pairs)
    ]


def classify(x: jax.Array, num_classes: int, dtype: jnp.dtype) -> jax.Array:
    """Logits [..., num_classes] of x [..., C], float32 at least; in a compact call, parameters "head"."""
    logits = nn.Dense(num_classes, dtype=dtype, name="head")(x)
    return logits.astype(jnp.promote_types(dtype, jnp.float32))


def pool(x: jax.Array, pool_type: str) -> jax.Array:
    """[B, T, H, W, C] -> [B, C] by "mean", "max" or "logsumexp" (minus log of the count: between mean and max)."""
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    if pool_type == "mean":
        return x.mean(axis=1)
    if pool_type == "max":
        # Not x.max(): its gradient divides by the number of x equal to the maximum, which is 0 / 0 where the compiler
        # computes x once more with another rounding. The first maximum takes the whole gradient instead.
        first = jnp.argmax(x, axis=1, keepdims=True)
        return jnp.take_along_axis(x, first, axis=1)[:, 0]
    return jax.nn.logsumexp(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=1) - math.log(x.shape[1])
