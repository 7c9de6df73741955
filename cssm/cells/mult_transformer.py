"""mult_transformer: Q and K drive each other and V, each spreads by its own kernel; V is read, its log magnitude
standardised.

docs/math.md. After the multiplicative transformer of the published CSSM code, which despite its name is linear in its
input up to the read-out.
"""

import flax.linen as nn
import jax

from cssm import spectral
from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope
from cssm.scan import linear_scan
from cssm.spectral import Spectrum, add, multiply, scale

GATES = ("decay_q", "decay_k", "decay_v", "k_to_q", "q_to_k", "q_to_v", "k_to_v")


class MultTransformer(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C]; C even. spectral_clip: kernels are bounded; published without."""

    options: CellOptions
    spectral_clip: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        steps = num_steps or x.shape[1]
        height, width = x.shape[2:4]
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)
        gates, inputs, offset = core.gates_and_inputs(GATES, 3, x, steps, o)
        kernels = [
            core.SpectralKernel(o, core.xavier_normal_raw, self.spectral_clip, name=f"k_{s}")(height, width)
            for s in "qkv"
        ]
        v_only = lambda h, _: h[2:]
        v_hat = linear_scan(
            _step, tuple(kernels), (3, 3), gates, inputs, o.scan, last_only, o.stable_transition, v_only, offset=offset
        )
        (v,) = spectral.unpack(v_hat, axis=-3)
        normed = core.LogMagnitudeNorm(name="norm_v")(v, height * width)
        y_hat = core.unflatten(spectral.pack(normed, axis=-3).astype(x.dtype), height)
        y_hat, bias = core.SpectralDense(o.channels, o.dtype, name="output_proj")(y_hat)
        return spectral.irfft2(y_hat, width, o.backend) + bias


def _step(k_q: Spectrum, k_k: Spectrum, k_v: Spectrum):
    """One time step; the right-hand states are those of t - 1."""

    def step(h, g, u):
        q, k, v = h
        return (
            add(multiply(k_q, scale(g["decay_q"], q)), scale(g["k_to_q"], k), u[0]),
            add(scale(g["q_to_k"], q), multiply(k_k, scale(g["decay_k"], k)), u[1]),
            add(scale(g["q_to_v"], q), scale(g["k_to_v"], k), multiply(k_v, scale(g["decay_v"], v)), u[2]),
        )

    return step
