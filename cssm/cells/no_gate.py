"""no_gate: the spectral kernel alone, h_t = K h_{t-1} + x_t, as a control for the gates.

docs/math.md. After the control of that name in the published CSSM code.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm import spectral
from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope
from cssm.scan import linear_scan


class NoGate(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C]: the projected state less x, so that a residual sum is the state."""

    options: CellOptions

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        steps = num_steps or x.shape[1]
        height, width = x.shape[2:4]
        rotated = x if o.rope_mode == "none" else rope(x, o.rope_mode, steps)
        kernel = core.SpectralKernel(o, nn.initializers.normal(0.02), name="kernel")(height, width)

        count = jnp.zeros((1, steps, 1, 1), x.dtype)  # no gates, but their length says how many steps there are
        x_hat = core.flatten(spectral.rfft2(rotated, o.backend))
        h_hat = linear_scan(core.kernel_step, (kernel,), (1, 1), count, x_hat, o.scan, last_only)
        h_hat = core.unflatten(h_hat, height)
        y = nn.Dense(o.channels, dtype=o.dtype, name="output_proj")(spectral.irfft2(h_hat, width, o.backend))
        return y - (x[:, -1:] if last_only else x)
