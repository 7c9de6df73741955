"""vit: pre-norm residual blocks of a mixer and an MLP with layer scale; with attention as mixer it is the baseline.

After CSSMViT of the published CSSM code, with one head for all mixers: GELU, norm, logits of every pixel of the last
step, pooled.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm.cells.attention import MLP, LayerScale, SelfAttention
from cssm.cells.core import LayerNorm, ResidualNorm
from cssm.models import blocks


class Block(nn.Module):
    """x + scale(act(mixer(norm x))), then x + scale(mlp(norm x)); [B, T or 1, H, W, C] -> [B, T, H, W, C].

    last_only: only the last step is returned, and the MLP runs for it alone.
    """

    mixer: Callable[..., nn.Module]
    output_act: Callable
    mlp_ratio: float
    use_dwconv: bool
    layer_scale_init: float
    drop_path_rate: float
    num_steps: int
    last_only: bool
    train: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x, y = ResidualNorm(name="mixer_norm")(x)
        y = self.mixer(x.shape[-1], name="mixer")(y, num_steps=self.num_steps, last_only=self.last_only)
        y = self.output_act(y) * _scale(self, x, "mixer").astype(y.dtype)
        x = (x[:, -1:] if self.last_only else x) + _drop(self, y, "mixer")
        x, y = ResidualNorm(name="mlp_norm")(x)
        y = MLP(self.mlp_ratio, self.dtype, dwconv=self.use_dwconv, name="mlp")(y, _scale(self, x, "mlp"))
        return x + _drop(self, y, "mlp")


class TimeBlock(nn.Module):
    """x + scale(attention over the steps of each pixel (norm x)); x [B, T, H, W, C]."""

    num_heads: int
    layer_scale_init: float
    drop_path_rate: float
    train: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x, y = ResidualNorm(name="time_norm")(x)
        y = SelfAttention(self.num_heads, self.dtype, "time", name="time")(y)
        return x + _drop(self, y * _scale(self, x, "time").astype(y.dtype), "time")


def _scale(block: Block | TimeBlock, x: jax.Array, name: str) -> jax.Array:
    """Layer scale of a branch, in the block's compact call."""
    return LayerScale(block.layer_scale_init, name=f"{name}_scale")(x.shape[-1])


def _drop(block: Block | TimeBlock, y: jax.Array, name: str) -> jax.Array:
    return blocks.DropPath(block.drop_path_rate, block.train, name=f"{name}_drop")(y)


class ViT(nn.Module):
    """images [B, H, W, C] or [B, F, H, W, C], float -> logits [B, num_classes], float32.

    seq_len: as in simple.Simple. read_all: the logits of all steps are pooled; otherwise the last step alone is read,
    to which a recurrent mixer has carried the earlier ones. time_attn_every: attention over time, with `time_heads`
    heads, after every so many blocks; 0: none.
    """

    mixer: Callable[..., nn.Module]
    num_classes: int
    embed_dim: int
    depth: int
    seq_len: int | None
    stem_mode: str
    patch_size: int
    stem_stride: int
    pos_embed: str
    register_tokens: int
    norm: blocks.Norm
    output_act: Callable
    mlp_ratio: float
    use_dwconv: bool
    drop_path_rate: float
    layer_scale_init: float
    time_attn_every: int
    time_heads: int
    read_all: bool
    readout_act: Callable
    pool_type: str
    wrap_block: Callable | None
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x, steps = blocks.frames_shown(images, self.seq_len)
        x = blocks.as_steps(self._stem(x.astype(self.dtype), train), steps)
        x = blocks.AddPositions(self.pos_embed, steps, self.dtype, name="positions")(x)
        if self.register_tokens:
            x = blocks.RegisterTokens(self.register_tokens, steps, name="registers")(x)
            steps += self.register_tokens
        x = self._blocks(x, steps, train)
        if self.read_all:
            x = x[:, self.register_tokens :]
        x = LayerNorm(self.dtype, self.readout_act, name="head_norm")(x)
        return blocks.pool(blocks.classify(x, self.num_classes, self.dtype), self.pool_type)

    def _blocks(self, x: jax.Array, steps: int, train: bool) -> jax.Array:
        wrap = self.wrap_block or (lambda block: block)
        block, time_block = wrap(Block), wrap(TimeBlock) if self.time_attn_every else TimeBlock
        for i, *_, rate in blocks.places([self.depth], self.drop_path_rate):
            shared = {
                "layer_scale_init": self.layer_scale_init,
                "drop_path_rate": rate,
                "train": train,
                "dtype": self.dtype,
            }
            x = block(
                mixer=self.mixer,
                output_act=self.output_act,
                mlp_ratio=self.mlp_ratio,
                use_dwconv=self.use_dwconv,
                num_steps=steps,
                last_only=not self.read_all and i == self.depth - 1,
                name=f"block_{i}",
                **shared,
            )(x)
            if self.time_attn_every and (i + 1) % self.time_attn_every == 0:
                x = time_block(num_heads=self.time_heads, name=f"block_{i}_time", **shared)(x)
        return x

    def _stem(self, x: jax.Array, train: bool) -> jax.Array:
        if self.stem_mode == "patch":
            return blocks.PatchStem(self.embed_dim, self.patch_size, self.dtype, name="stem")(x, train)
        return blocks.StridedStem(self.embed_dim, self.stem_stride, self.norm, self.dtype, name="stem")(x, train)
