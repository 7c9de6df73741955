"""standard: h <- K h + u for every frequency, without gates or projections: what a kernel does by itself.

docs/math.md. After StandardCSSM and, with a scalar transition, LinearCSSM of the published CSSM code.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm import spectral
from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope
from cssm.scan import linear_scan

# decay = 0.1 + 0.89 sigmoid(logit) is 0.9 at the start.
DECAY_LOGIT = math.log(0.8 / 0.09)


class Standard(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C].

    transition: "kernel", or "scalar", one decay a channel: pixels do not mix, and the options of kernels and of the
    transform have no meaning. The same at every step, whatever the input: gate_type has no meaning either.
    """

    options: CellOptions
    transition: str = "kernel"

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        steps = num_steps or x.shape[1]
        height, width = x.shape[2:4]
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)
        clock = jnp.zeros((1, steps, 1, 1))  # nothing depends on it: it tells the scan how many steps there are
        if self.transition == "scalar":
            logit = self.param("decay", nn.initializers.constant(DECAY_LOGIT), (o.channels,))
            decay = 0.1 + 0.89 * nn.sigmoid(logit)
            y = core.real_scan(core.decay_step, decay, clock, x, o.scan, last_only)
            return y.astype(x.dtype)
        kernel = core.SpectralKernel(o, nn.initializers.normal(0.02), name="kernel")(height, width)
        u_hat = core.flatten(spectral.rfft2(x, o.backend))
        y_hat = linear_scan(core.kernel_step, (kernel,), (1, 1), clock, u_hat, o.scan, last_only)
        return spectral.irfft2(core.unflatten(y_hat, height), width, o.backend)
