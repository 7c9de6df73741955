"""hgru_bi: excitatory X, inhibitory Y and their bilinear memory Z, coupled in the frequency domain.

docs/math.md, section 1. After HGRUBilinearCSSM of the published CSSM code; the 3 x 3 matrices it builds in log space
are never formed here, gates are factored by default, and kernels are centred at the origin by default.
"""

import flax.linen as nn
import jax

from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope
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
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)
        gates, inputs, offset = core.gates_and_inputs(DECAYS + COUPLINGS + READS, 3, x, steps, o)
        k_exc = core.SpectralKernel(o, core.xavier_normal_raw, name="k_exc")(*x.shape[2:4])
        k_inh = core.SpectralKernel(o, core.xavier_normal_raw, name="k_inh")(*x.shape[2:4])
        c = gates.pop("C")
        read = core.gated_states(*("xyz".index(name) for name in self.readout_state))
        y_hat = linear_scan(
            _step, (k_exc, k_inh), (3, 3), gates, inputs, o.scan, last_only, o.stable_transition, read, c, offset
        )
        return core.read_out(y_hat, len(self.readout_state), x.shape, o)


def _step(k_exc: Spectrum, k_inh: Spectrum):
    """One time step, docs/math.md equation (4); the right-hand states are those of t - 1."""

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
