"""gated: one state a channel with a spectral kernel and Mamba-like input-dependent step size.

docs/math.md, section 2. After GatedCSSM of the published CSSM code (its depthwise path), in plain complex arithmetic.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm import spectral
from cssm.activations import softplus
from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope
from cssm.scan import linear_scan
from cssm.spectral import Spectrum, add, multiply, scale


class Gated(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C].

    short_conv_spatial_size, short_conv_size: side of the depthwise convolution over space, taps of the causal one over
    time, both before the transform; 0 leaves one out.
    """

    options: CellOptions
    short_conv_size: int = 4
    short_conv_spatial_size: int = 3

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        steps = num_steps or x.shape[1]
        height, width = x.shape[2:4]
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)

        m, z = jnp.split(nn.Dense(2 * o.channels, dtype=o.dtype, name="in_proj")(x), 2, axis=-1)
        m = nn.silu(core.short_convs(m, o, self.short_conv_spatial_size, self.short_conv_size, steps))
        context = core.repeat_over_time(m.mean(axis=(2, 3)), steps)
        raw = core.FrequencyGates(("delta", "B", "C"), o.gate_type, jnp.multiply, o.dtype, name="gates")(
            context, height, width
        )
        delta = softplus(raw["delta"])
        gates = {"decay": jnp.exp(-delta), "write": (delta + 1e-8) * raw["B"]}
        kernel = core.SpectralKernel(o, nn.initializers.normal(0.02), name="kernel")(height, width)

        m_hat = core.flatten(spectral.rfft2(m, o.backend))
        read = core.gated_states(0)
        y_hat = linear_scan(_step, (kernel,), (1, 1), gates, m_hat, o.scan, last_only, read=read, read_gates=raw["C"])
        if last_only:
            z = z[:, -1:]
        y = spectral.irfft2(core.unflatten(y_hat, height), width, o.backend) * nn.silu(z)
        return nn.Dense(o.channels, dtype=o.dtype, name="out_proj")(y)


def _step(kernel: Spectrum):
    """One time step."""

    def step(h, g, u):
        return (add(multiply(kernel, scale(g["decay"], h[0])), scale(g["write"], u[0])),)

    return step
