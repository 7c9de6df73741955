"""shvit: stages of convolutions, then of cells or of single-head attention, with batch norm between them.

docs/math.md, section 5. After CSSMSHViT and SHViT of the published CSSM code, and SHViT (Yun and Ro 2024).
"""

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm.activations import gelu
from cssm.cells.attention import MLP, SelfAttention
from cssm.cells.core import LayerNorm, ResidualNorm
from cssm.depthwise import DepthwiseConv
from cssm.models import blocks
from cssm.stages import Stage


class PatchEmbedding(nn.Module):
    """Two 3x3 convolutions, each followed by a norm, with GELU in between; stride 1, 2 or 4 in all."""

    features: int
    stride: int
    norm: blocks.Norm
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = _conv_norm(x, self.features // 2, 2 if self.stride > 1 else 1, self.norm, train, 0)
        return _conv_norm(gelu(x), self.features, 2 if self.stride > 2 else 1, self.norm, train, 1)


class ConvBlock(nn.Module):
    """x + drop(dense(gelu(conv(norm x)))), then x + drop(mlp(norm x)); the convolution is depthwise, 7x7."""

    mlp_ratio: float
    drop_path_rate: float
    train: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        x, y = ResidualNorm(name="conv_norm")(x)
        y = DepthwiseConv(7, self.dtype, name="conv")(y)
        y = nn.Dense(channels, dtype=self.dtype, name="proj")(gelu(y))
        return _with_mlp(self, x + _drop(self, y, "conv"), dwconv=False)


class CellBlock(nn.Module):
    """x + drop(act(cell(z + conv z))), z = norm x, then x + drop(mlp(norm x)); MLP with a depthwise convolution.

    [B, T or 1, H, W, C] -> [B, T, H, W, C], or [B, 1, H, W, C] if last_only. The first norm is over T, H, W and C; the
    convolution is depthwise, 3x3, and tells positions.
    """

    mixer: Callable[..., nn.Module]
    output_act: Callable
    mlp_ratio: float
    drop_path_rate: float
    num_steps: int
    last_only: bool
    train: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        z = blocks.Norm("global_layer", self.dtype)(self.train, "mixer_norm")(x)
        z = z + DepthwiseConv(3, self.dtype, name="pos_conv")(z)
        y = self.mixer(channels, name="mixer")(z, num_steps=self.num_steps, last_only=self.last_only)
        x = x[:, -1:] if self.last_only else x
        return _with_mlp(self, x + _drop(self, self.output_act(y), "mixer"), dwconv=True)


class AttentionBlock(nn.Module):
    """x + drop(attention(norm x)), then x + drop(mlp(norm x)); one head over the pixels of each frame."""

    mlp_ratio: float
    drop_path_rate: float
    train: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x, y = ResidualNorm(name="mixer_norm")(x)
        y = SelfAttention(1, self.dtype, pos_conv=True, name="mixer")(y)
        return _with_mlp(self, x + _drop(self, y, "mixer"), dwconv=True)


def _with_mlp(block: ConvBlock | CellBlock | AttentionBlock, x: jax.Array, dwconv: bool) -> jax.Array:
    """The second half of a block, in its compact call."""
    x, y = ResidualNorm(name="mlp_norm")(x)
    return x + _drop(block, MLP(block.mlp_ratio, block.dtype, dwconv=dwconv, name="mlp")(y), "mlp")


def _drop(block: ConvBlock | CellBlock | AttentionBlock, y: jax.Array, name: str) -> jax.Array:
    return blocks.DropPath(block.drop_path_rate, block.train, name=f"{name}_drop")(y)


def _conv_norm(x: jax.Array, features: int, stride: int, norm: blocks.Norm, train: bool, index: int) -> jax.Array:
    """3x3 convolution and norm, in a compact call; an offset before the norm would have no effect."""
    conv = nn.Conv(features, (3, 3), (stride, stride), use_bias=False, dtype=norm.dtype, name=f"conv_{index}")
    return norm(train, f"norm_{index}")(conv(x))


class Downsample(nn.Module):
    """3x3 convolution of stride 2, then a norm."""

    features: int
    norm: blocks.Norm

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return _conv_norm(x, self.features, 2, self.norm, train, 0)


class SHViT(nn.Module):
    """images [B, H, W, C] or [B, F, H, W, C], float -> logits [B, num_classes], float32.

    mixer: of the stages whose blocks mix (Stage.mixes); None: attention, which takes frames alike, so that all are
    pooled. A still image is one frame between blocks: each cell shows it seq_len times and hands on its last step. Of a
    clip each hands on all steps, and the last one is read.
    """

    mixer: Callable[..., nn.Module] | None
    num_classes: int
    stages: Sequence[Stage]
    seq_len: int | None
    stem_stride: int
    pos_embed: str
    norm: blocks.Norm
    output_act: Callable
    mlp_ratio: float
    drop_path_rate: float
    pool_type: str
    wrap_block: Callable | None
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x, steps = blocks.frames_shown(images, self.seq_len)
        stem = PatchEmbedding(self.stages[0].width, self.stem_stride, self.norm, self.dtype, name="stem")
        x = blocks.AddPositions(self.pos_embed, steps, self.dtype, name="positions")(stem(x.astype(self.dtype), train))
        wrap = functools.cache(self.wrap_block or (lambda block: block))
        for place in blocks.places([stage.depth for stage in self.stages], self.drop_path_rate):
            stage = self.stages[place.stage]
            if place.halves:
                x = Downsample(stage.width, self.norm, name=f"downsample_{place.stage}")(x, train)
            shared = {
                "mlp_ratio": self.mlp_ratio,
                "drop_path_rate": place.drop_path_rate,
                "train": train,
                "dtype": self.dtype,
                "name": f"block_{place.number}",
            }
            if not stage.mixes:
                x = wrap(ConvBlock)(**shared)(x)
            elif self.mixer is None:
                x = wrap(AttentionBlock)(**shared)(x)
            else:
                x = blocks.as_steps(x, steps)
                cell = {"mixer": self.mixer, "output_act": self.output_act, "num_steps": steps}
                x = wrap(CellBlock)(last_only=x.shape[1] == 1 or place.last, **cell, **shared)(x)
        x = LayerNorm(self.dtype, name="head_norm")(x)
        return blocks.classify(blocks.pool(x, self.pool_type), self.num_classes, self.dtype)
