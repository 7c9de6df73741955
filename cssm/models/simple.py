"""simple: stem, `depth` residual cells without norm between input and sum, read-out of the last step.

After SimpleCSSM of the published CSSM code; a still image passes the stem once and is unrolled inside the cells.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm.cells.core import layer_norm
from cssm.models import blocks


class Simple(nn.Module):
    """images [B, H, W, C] or [B, T, H, W, C], float -> logits [B, num_classes], float32."""

    mixer: Callable[..., nn.Module]
    num_classes: int
    embed_dim: int
    depth: int
    seq_len: int
    stem_mode: str
    stem_layers: int
    pos_embed: str
    norm: blocks.Norm
    pool_type: str
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = images[:, None] if images.ndim == 4 else images
        steps = self.seq_len if images.ndim == 4 else images.shape[1]
        x = self._stem(x.astype(self.dtype), train)
        x = blocks.AddPositions(self.pos_embed, self.seq_len, self.dtype, name="positions")(x)
        for i in range(self.depth):
            last = i == self.depth - 1
            y = self.mixer(name=f"cell_{i}")(x, num_steps=steps, last_only=last)
            x = (x[:, -1:] if last else x) + y
            if not last:
                x = nn.softplus(self.norm(train, f"body_norm_{i}")(x))
        x = nn.softplus(self.norm(train, "readout_norm")(x))
        x = blocks.pool(x, self.pool_type)
        x = layer_norm(self.dtype, "norm_post")(x)
        return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x).astype(
            jnp.promote_types(self.dtype, jnp.float32)
        )

    def _stem(self, x: jax.Array, train: bool) -> jax.Array:
        if self.stem_mode == "pathtracker":
            return blocks.PointwiseStem(self.embed_dim, self.norm, self.dtype, name="stem")(x, train)
        return blocks.ConvPoolStem(self.embed_dim, self.stem_layers, self.norm, self.dtype, name="stem")(x, train)
