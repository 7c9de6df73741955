"""convnext: stages of residual blocks whose cell takes the place of a convolution (pure), or follows one (hybrid).

docs/math.md, section 5. After ModelFactory of the published CSSM code and ConvNeXt (Liu et al. 2022).
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm.cells.attention import MLP, LayerScale
from cssm.cells.core import LayerNorm, ResidualNorm
from cssm.depthwise import DepthwiseConv
from cssm.models import blocks
from cssm.stages import Stage


class PureBlock(nn.Module):
    """x + drop(scale(mlp(cell(norm x)))); [B, T or 1, H, W, C] -> [B, T, H, W, C], or [B, 1, H, W, C] if last_only."""

    mixer: Callable[..., nn.Module]
    mlp_ratio: float
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
        scale = LayerScale(self.layer_scale_init, name="mlp_scale")(x.shape[-1])
        y = MLP(self.mlp_ratio, self.dtype, name="mlp")(y, scale)
        return (x[:, -1:] if self.last_only else x) + blocks.DropPath(self.drop_path_rate, self.train, name="drop")(y)


class HybridBlock(nn.Module):
    """x + drop(scale(mlp(norm(conv x)))), then x + drop(norm(cell(norm x))); shapes as of PureBlock.

    The convolution is depthwise, 7x7: it sees frames as they come, a still image once.
    """

    mixer: Callable[..., nn.Module]
    mlp_ratio: float
    layer_scale_init: float
    drop_path_rate: float
    num_steps: int
    last_only: bool
    train: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        y = LayerNorm(self.dtype, name="mlp_norm")(DepthwiseConv(7, self.dtype, name="conv")(x))
        scale = LayerScale(self.layer_scale_init, name="mlp_scale")(x.shape[-1])
        y = MLP(self.mlp_ratio, self.dtype, name="mlp")(y, scale)
        x = x + blocks.DropPath(self.drop_path_rate, self.train, name="mlp_drop")(y)
        x, y = ResidualNorm(name="mixer_norm")(x)
        y = self.mixer(channels, name="mixer")(y, num_steps=self.num_steps, last_only=self.last_only)
        y = LayerNorm(self.dtype, name="mixed_norm")(y)
        return (x[:, -1:] if self.last_only else x) + blocks.DropPath(self.drop_path_rate, self.train, name="drop")(y)


class ConvNeXt(nn.Module):
    """images [B, H, W, C] or [B, F, H, W, C], float -> logits [B, num_classes], float32.

    seq_len, read_all: as in simple.Simple; every step passes every block, as in the source. hybrid: which block.
    """

    mixer: Callable[..., nn.Module]
    num_classes: int
    stages: Sequence[Stage]
    hybrid: bool
    seq_len: int | None
    stem_stride: int
    pos_embed: str
    register_tokens: int
    norm: blocks.Norm
    mlp_ratio: float
    layer_scale_init: float
    drop_path_rate: float
    read_all: bool
    pool_type: str
    wrap_block: Callable | None
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x, steps = blocks.frames_shown(images, self.seq_len)
        x = self._patches(x.astype(self.dtype), self.stages[0].width, self.stem_stride, "stem")
        x = blocks.as_steps(self.norm(train, "stem_norm")(x), steps)
        x = blocks.AddPositions(self.pos_embed, steps, self.dtype, name="positions")(x)
        if self.register_tokens:
            x = blocks.RegisterTokens(self.register_tokens, steps, name="registers")(x)
            steps += self.register_tokens
        wrap = self.wrap_block or (lambda block: block)
        block = wrap(HybridBlock if self.hybrid else PureBlock)
        for place in blocks.places([stage.depth for stage in self.stages], self.drop_path_rate):
            width = self.stages[place.stage].width
            if place.halves:
                x = self.norm(train, f"downsample_norm_{place.stage}")(x)
                x = self._patches(x, width, 2, f"downsample_{place.stage}")
            x = block(
                mixer=self.mixer,
                mlp_ratio=self.mlp_ratio,
                layer_scale_init=self.layer_scale_init,
                drop_path_rate=place.drop_path_rate,
                num_steps=steps,
                last_only=place.last and not self.read_all,
                train=train,
                dtype=self.dtype,
                name=f"block_{place.number}",
            )(x)
        if self.read_all:
            x = x[:, self.register_tokens :]
        x = LayerNorm(self.dtype, name="head_norm")(blocks.pool(x, self.pool_type))
        return blocks.classify(x, self.num_classes, self.dtype)

    def _patches(self, x: jax.Array, width: int, side: int, name: str) -> jax.Array:
        """A linear map of each patch; one that reaches over the border sees zeros there."""
        return nn.Conv(width, (side, side), (side, side), dtype=self.dtype, name=name)(x)
