"""no_fft: gated without its transform: a selective recurrence at every pixel, as a control for the spectral kernel.

docs/math.md. After the control of that name in the published CSSM code, in real arithmetic.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm.activations import softplus
from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope


class NoFFT(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C], less x, so that a residual sum is the projected state.

    Of options, gates are over pixels; nothing of the kernel or the backend is used.
    short_conv_spatial_size, short_conv_size: as in gated, side and taps of the convolutions before the recurrence.
    """

    options: CellOptions
    short_conv_size: int = 4
    short_conv_spatial_size: int = 3

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        steps = num_steps or x.shape[1]
        height, width = x.shape[2:4]
        rotated = x if o.rope_mode == "none" else rope(x, o.rope_mode, steps)

        m, z = jnp.split(nn.Dense(2 * o.channels, dtype=o.dtype, name="in_proj")(rotated), 2, axis=-1)
        m = nn.silu(core.short_convs(m, o, self.short_conv_spatial_size, self.short_conv_size, steps))
        context = core.repeat_over_time(m.mean(axis=(2, 3)), steps)
        raw = core.spatial_gates(("delta", "B", "C"), o.gate_type, context, height, width, o.dtype, "gates")
        delta = softplus(raw["delta"])
        log_decay = nn.log_sigmoid(self.param("A_logit", nn.initializers.constant(2.0), (o.channels,)))

        gates = {"delta": delta, "write": delta * raw["B"]}
        state = core.real_scan(_step, log_decay, gates, m, o.scan, last_only)
        read = raw["C"]
        if last_only:
            read, z, x = read[:, -1:], z[:, -1:], x[:, -1:]
        y = nn.RMSNorm(epsilon=1e-6, dtype=o.dtype, name="output_norm")((read * state).astype(x.dtype)) * nn.silu(z)
        return nn.Dense(o.channels, dtype=o.dtype, name="out_proj")(y) - x


def _step(log_decay: jax.Array):
    """One time step at every pixel."""

    def step(h, g, u):
        return jnp.exp(g["delta"] * log_decay) * h + g["write"] * u

    return step
