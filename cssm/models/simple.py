"""simple: stem, `depth` residual cells without norm between input and sum, read-out of the last step.

After SimpleCSSM of the published CSSM code; a still image passes the stem once and is unrolled inside the cells.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm.cells.attention import MLP
from cssm.cells.core import LayerNorm
from cssm.models import blocks


class Simple(nn.Module):
    """images [B, H, W, C] or [B, F, H, W, C], float -> logits [B, num_classes], float32.

    seq_len: steps T that an image, or the F frames of a clip, take (blocks.sample_frames); None: one for each frame.
    read_all: the T steps are pooled; otherwise the last alone is read.
    """

    mixer: Callable[..., nn.Module]
    num_classes: int
    embed_dim: int
    depth: int
    seq_len: int | None
    stem_mode: str
    stem_layers: int
    pos_embed: str
    register_tokens: int
    norm: blocks.Norm
    act: Callable
    inter_mlp_ratio: float
    read_all: bool
    pool_type: str
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x, steps = blocks.frames_shown(images, self.seq_len)
        x = blocks.as_steps(self._stem(x.astype(self.dtype), train), steps)
        x = blocks.AddPositions(self.pos_embed, steps, self.dtype, name="positions")(x)
        if self.register_tokens:
            x = blocks.RegisterTokens(self.register_tokens, steps, name="registers")(x)
            steps += self.register_tokens
        for i in range(self.depth):
            end = i == self.depth - 1
            last_only = end and not self.read_all
            y = self.mixer(self.embed_dim, name=f"cell_{i}")(x, num_steps=steps, last_only=last_only)
            x = (x[:, -1:] if last_only else x) + y
            if not end:
                x = self.norm.activated(train, f"body_norm_{i}", after=self.act)(x)
                if self.inter_mlp_ratio:
                    x = x + MLP(self.inter_mlp_ratio, self.dtype, self.act, name=f"mlp_{i}")(x)
        if self.read_all:
            x = x[:, self.register_tokens :]
        x = self.norm.activated(train, "readout_norm", after=self.act)(x)
        x = blocks.pool(x, self.pool_type)
        x = LayerNorm(self.dtype, name="norm_post")(x)
        return blocks.classify(x, self.num_classes, self.dtype)

    def _stem(self, x: jax.Array, train: bool) -> jax.Array:
        if self.stem_mode == "pathtracker":
            return blocks.PointwiseStem(self.embed_dim, self.norm, self.act, self.dtype, name="stem")(x, train)
        stem = blocks.ConvPoolStem(self.embed_dim, self.stem_layers, self.norm, self.act, self.dtype, name="stem")
        return stem(x, train)
