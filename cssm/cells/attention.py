"""spatial_attn, spatiotemporal_attn: transformer blocks in a cell's place, as controls for the recurrences.

docs/math.md. After the attention controls of the published CSSM code: pre-norm, layer scale, a table of positions.
"""

from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import dtypes

from cssm.activations import gelu
from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.depthwise import DepthwiseConv
from cssm.fused import available
from cssm.positions import rope


class SplitDense(nn.Module):
    """`parts` arrays of so many features each: what a Dense layer gives to all of them, split.

    A product each: nothing of the size of x is cut, nor joined in the backward pass. order: of the features of each
    part, which numbers of the size of x need not be moved for.
    """

    parts: int
    features: int
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array, order: np.ndarray | None = None) -> list[jax.Array]:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.parts * self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.parts * self.features,))
        x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        split = [jnp.split(p, self.parts, axis=-1) for p in (kernel, bias)]
        if order is not None:
            split = [[p[..., order] for p in parts] for parts in split]
        return [x @ k + b for k, b in zip(*split, strict=True)]


class SelfAttention(nn.Module):
    """Multi-head self-attention of x [B, T, H, W, C] over the pixels of each frame, or over the steps of each pixel.

    qkv has a bias. over: "space" or "time". last_only: queries of the last step alone; returns [B, 1, H, W, C].
    rope_mode: turns queries and keys by their positions, frequencies running over all channels, not over each head's.
    pos_conv: a depthwise 3x3 convolution of what attention returns is added to it, before the last projection.
    Called as a cell is, so that it can stand in a cell's place; num_steps is not needed.
    """

    num_heads: int
    dtype: jnp.dtype | None = None
    over: str = "space"
    rope_mode: str = "none"
    pos_conv: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        channels = x.shape[-1]
        if channels % self.num_heads:
            raise ValueError(f"{self.num_heads} heads do not divide the {channels} channels")
        q, k, v = SplitDense(3, channels, self.dtype, name="qkv")(x)
        if self.rope_mode != "none":
            q, k = rope(q, self.rope_mode), rope(k, self.rope_mode)
        if last_only:
            q = q[:, -1:]
            if self.over == "space":
                k, v = k[:, -1:], v[:, -1:]
        shape = q.shape
        q, k, v = (self._to_tokens(part) for part in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v, implementation=kernel_of(q.dtype, q.shape[-1], self.over))
        if self.over == "space":
            y = y.reshape(shape)
        else:
            batch, steps, height, width, _ = shape
            y = jnp.moveaxis(y.reshape(batch, height, width, steps, channels), 3, 1)
        if self.pos_conv:
            y = y + DepthwiseConv(3, self.dtype, name="pos_conv")(y)
        return nn.Dense(channels, dtype=self.dtype, name="proj")(y)

    def _to_tokens(self, x: jax.Array) -> jax.Array:
        """[B, T, H, W, C] -> [sequences, tokens, heads, C / heads]."""
        if self.over == "time":
            x = jnp.moveaxis(x, 1, 3)
            return x.reshape(-1, x.shape[3], self.num_heads, x.shape[4] // self.num_heads)
        return x.reshape(-1, x.shape[2] * x.shape[3], self.num_heads, x.shape[4] // self.num_heads)


def kernel_of(dtype: jnp.dtype, head_channels: int, over: str) -> Literal["cudnn"] | None:
    """What computes attention: cuDNN's kernel (as FlashAttention, Dao et al. 2022) where there is one, or XLA.

    It is for 16 bits, heads of up to 128 channels in steps of 8, and worth it for tokens as many as pixels.
    """
    fits = dtype == jnp.bfloat16 and head_channels % 8 == 0 and head_channels <= 128
    return "cudnn" if fits and over == "space" and available() else None


class ScaledDense(nn.Module):
    """scale (Dense(x)), scale [features] or None.

    The weights are scaled, not what they give: the gradient of the scale comes from theirs, and no map is kept for it.
    """

    features: int
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        if scale is not None:
            kernel, bias = kernel * scale, bias * scale
        x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        return x @ kernel + bias


class MLP(nn.Module):
    """Dense(ratio C), act, Dense(C), times scale [C] if there is one; x [..., C].

    dwconv: h + a depthwise 3x3 convolution of h in between, for x [..., H, W, C].
    """

    ratio: float
    dtype: jnp.dtype | None = None
    act: Callable = gelu
    dwconv: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        channels = x.shape[-1]
        hidden = core.ActivatedDense(int(self.ratio * channels), self.act, self.dtype, name="up")(x)
        if self.dwconv:
            hidden = hidden + DepthwiseConv(3, self.dtype, name="dwconv")(hidden)
        return ScaledDense(channels, self.dtype, name="down")(hidden, scale)


class LayerScale(nn.Module):
    """A factor for each channel, [channels], started at `init_value` (Touvron et al. 2021)."""

    init_value: float

    @nn.compact
    def __call__(self, channels: int) -> jax.Array:
        return self.param("gamma", nn.initializers.constant(self.init_value), (channels,))


class AttentionBlock(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C], less x, so that a residual sum is what the block makes of x.

    Attention over the pixels of each frame, with over_time also over the steps of each pixel (in both directions:
    earlier outputs depend on later frames), then an MLP, each of them pre-norm with layer scale. A still image is
    computed as one frame, to which attention over equal frames adds what attention over one does.
    Of options, only channels, rope_mode and dtype are used.
    """

    options: CellOptions
    num_heads: int = 4
    mlp_ratio: float = 4.0
    layer_scale_init: float = 1e-6
    over_time: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o, given = self.options, x
        if last_only:
            given = x[:, -1:]
            x = x if self.over_time else given
        table = self.param("pos_embed", nn.initializers.normal(0.02), (1, 1, *x.shape[2:]))
        x = x + table.astype(x.dtype)
        for over in ("space", "time") if self.over_time else ("space",):
            last = last_only and over == "time"
            attention = SelfAttention(self.num_heads, o.dtype, over, o.rope_mode, name=f"attn_{over}")
            x, y = core.ResidualNorm(name=f"norm_{over}")(x)
            y = attention(y, last_only=last)
            x = (x[:, -1:] if last else x) + y * self._scale(over, y).astype(y.dtype)
        x, y = core.ResidualNorm(name="norm_mlp")(x)
        x = x + MLP(self.mlp_ratio, o.dtype, name="mlp")(y, self._scale("mlp", y))
        return core.repeat_over_time(x - given, 1 if last_only else num_steps)

    def _scale(self, branch: str, y: jax.Array) -> jax.Array:
        return LayerScale(self.layer_scale_init, name=f"scale_{branch}")(y.shape[-1])
