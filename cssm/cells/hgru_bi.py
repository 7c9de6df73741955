"""hgru_bi: excitatory X, inhibitory Y and their bilinear memory Z, coupled in the frequency domain.

docs/math.md, section 1. After HGRUBilinearCSSM of the published CSSM code; the 3 x 3 matrices it builds in log space
are never formed here, gates are factored by default, and kernels are centred at the origin by default.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm import spectral
from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope, time_code
from cssm.scan import linear_scan
from cssm.spectral import Spectrum, add, multiply, scale

DECAYS = ("decay_x", "decay_y", "decay_z")
COUPLINGS = ("mu_inhib", "mu_excit", "alpha_inhib", "alpha_excit", "gamma", "delta")
READS = ("B", "D", "E", "C")


class HGRUBilinear(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C]; C even. readout_state: which of X, Y, Z are read, e.g. "xyz", "y".

    A single read-out state is returned as it is; several are concatenated and projected to C.
    """

    options: CellOptions
    readout_state: str = "xyz"

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        steps = num_steps or x.shape[1]
        height, width = x.shape[2:4]
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)

        context = x.mean(axis=(2, 3))
        context = core.repeat_over_time(context, steps) + time_code(steps, o.channels, x.dtype)
        gates = self._gates(context, height, width)
        k_exc = core.SpectralKernel(o, core.xavier_normal_raw, name="k_exc")(height, width)
        k_inh = core.SpectralKernel(o, core.xavier_normal_raw, name="k_inh")(height, width)

        # Projecting after the transform moves C channels through it instead of 3 C.
        u_hat = core.SpectralDense(3 * o.channels, o.dtype, name="input_proj")(spectral.rfft2(x, o.backend), width)
        u_hat = core.flatten(u_hat)
        inputs = tuple(Spectrum(*planes) for planes in zip(*(jnp.split(p, 3, axis=-1) for p in u_hat), strict=True))

        step = _step(k_exc, k_inh)
        states = linear_scan(step, 3, gates, inputs, o.scan, last_only)
        read_gate = gates["C"][:, -1:] if last_only else gates["C"]
        chosen = ["xyz".index(name) for name in self.readout_state]
        read = tuple(core.unflatten(scale(read_gate, states[i]), height) for i in chosen)
        read = jax.tree.map(lambda p: p.astype(x.dtype), read)
        y_hat = read[0]
        if len(chosen) > 1:
            y_hat = core.StateReadout(o.channels, o.dtype, name="output_proj")(read, width)
        return spectral.irfft2(y_hat, width, o.backend)

    def _gates(self, context: jax.Array, height: int, width: int) -> dict[str, jax.Array]:
        o = self.options
        names = DECAYS + COUPLINGS + READS
        raw = core.FrequencyGates(names, o.gate_type, dtype=o.dtype, name="gates")(context, height, width)
        squashed = {name: nn.sigmoid(value) for name, value in raw.items()}
        return squashed | {name: 0.1 + 0.89 * squashed[name] for name in DECAYS}


def _step(k_exc: Spectrum, k_inh: Spectrum):
    """One time step, docs/math.md equation (3); the right-hand states are those of t - 1."""

    def step(h, g, u):
        x, y, z = h
        inhibition = multiply(k_inh, add(scale(g["mu_inhib"], y), scale(g["alpha_inhib"], z)))
        excitation = multiply(k_exc, add(scale(g["mu_excit"], x), scale(g["alpha_excit"], z)))
        return (
            add(scale(g["decay_x"], x), scale(-1.0, inhibition), scale(g["B"], u[0])),
            add(excitation, scale(g["decay_y"], y), scale(g["D"], u[1])),
            add(scale(g["gamma"], x), scale(g["delta"], y), scale(g["decay_z"], z), scale(g["E"], u[2])),
        )

    return step
