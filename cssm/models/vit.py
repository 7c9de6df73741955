"""vit: pre-norm residual blocks of a mixer and an MLP with layer scale; with attention as mixer it is the baseline.

After CSSMViT of the published CSSM code, with one head for all mixers: GELU, norm, logits of every pixel of the last
step, pooled.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cssm.cells.attention import MLP, LayerScale
from cssm.cells.core import layer_norm
from cssm.models import blocks


class Block(nn.Module):
    """x + scale(mixer(norm x)), then x + scale(mlp(norm x)); [B, T or 1, H, W, C] -> [B, T, H, W, C].

    last_only: only the last step is returned, and the MLP runs for it alone.
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
        def branch(y: jax.Array, name: str) -> jax.Array:
            y = LayerScale(self.layer_scale_init, name=f"{name}_scale")(y)
            return blocks.DropPath(self.drop_path_rate, self.train, name=f"{name}_drop")(y)

        y = layer_norm(self.dtype, "mixer_norm")(x)
        y = self.mixer(name="mixer")(y, num_steps=self.num_steps, last_only=self.last_only)
        x = (x[:, -1:] if self.last_only else x) + branch(y, "mixer")
        y = layer_norm(self.dtype, "mlp_norm")(x)
        return x + branch(MLP(self.mlp_ratio, self.dtype, name="mlp")(y), "mlp")


class ViT(nn.Module):
    """images [B, H, W, C] or [B, T, H, W, C], float -> logits [B, num_classes], float32.

    recurrent: the mixer carries earlier steps into the last one, which alone is read; else all frames are pooled.
    """

    mixer: Callable[..., nn.Module]
    num_classes: int
    embed_dim: int
    depth: int
    seq_len: int
    stem_mode: str
    patch_size: int
    stem_stride: int
    pos_embed: str
    norm: blocks.Norm
    pool_type: str
    mlp_ratio: float
    drop_path_rate: float
    layer_scale_init: float
    recurrent: bool
    wrap_block: Callable | None
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = images[:, None] if images.ndim == 4 else images
        steps = self.seq_len if images.ndim == 4 else images.shape[1]
        x = self._stem(x.astype(self.dtype), train)
        x = blocks.AddPositions(self.pos_embed, self.seq_len, self.dtype, name="positions")(x)
        block = self.wrap_block(Block) if self.wrap_block else Block
        # Stochastic depth rises linearly over depth (Huang et al. 2016).
        rates = np.linspace(0.0, self.drop_path_rate, self.depth)
        for i in range(self.depth):
            x = block(
                mixer=self.mixer,
                mlp_ratio=self.mlp_ratio,
                layer_scale_init=self.layer_scale_init,
                drop_path_rate=float(rates[i]),
                num_steps=steps,
                last_only=self.recurrent and i == self.depth - 1,
                train=train,
                dtype=self.dtype,
                name=f"block_{i}",
            )(x)
        x = layer_norm(self.dtype, "head_norm")(nn.gelu(x))
        logits = nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x).astype(
            jnp.promote_types(self.dtype, jnp.float32)
        )
        return blocks.pool(logits, self.pool_type)

    def _stem(self, x: jax.Array, train: bool) -> jax.Array:
        if self.stem_mode == "patch":
            return blocks.PatchStem(self.embed_dim, self.patch_size, self.dtype, name="stem")(x, train)
        return blocks.StridedStem(self.embed_dim, self.stem_stride, self.norm, self.dtype, name="stem")(x, train)
