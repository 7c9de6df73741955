"""conv_ssm: a constant decay a channel, driven through a local convolution, as a control for global kernels.

docs/math.md. After the control of that name in the published CSSM code, in real arithmetic.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.depthwise import DepthwiseConv
from cssm.positions import rope


class ConvSSM(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C], less x, so that a residual sum is what is read.

    Of options, kernel_size is the side of the convolution; there are no frequencies and no gates from a context.
    """

    options: CellOptions

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        steps = num_steps or x.shape[1]
        rotated = x if o.rope_mode == "none" else rope(x, o.rope_mode, steps)
        conv = DepthwiseConv(o.kernel_size, o.dtype, name="spatial_conv")
        drive = nn.Dense(o.channels, dtype=o.dtype, name="B_proj")(rotated) * conv(rotated)
        decay = nn.sigmoid(self.param("A_logit", nn.initializers.constant(2.0), (o.channels,)))

        count = jnp.zeros((1, steps, 1, 1, 1), x.dtype)  # no gates, but their length says how many steps there are
        state = core.real_scan(core.decay_step, decay, count, drive, o.scan, last_only).astype(x.dtype)
        if last_only:
            x, rotated = x[:, -1:], rotated[:, -1:]
        y = state * nn.Dense(o.channels, dtype=o.dtype, name="C_proj")(rotated)
        return nn.Dense(o.channels, dtype=o.dtype, name="output_proj")(y) - x
