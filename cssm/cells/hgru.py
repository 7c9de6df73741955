"""hgru: excitatory X and inhibitory Y, coupled in the frequency domain: hgru_bi without its memory Z.

docs/math.md. After HGRUStyleCSSM of the published CSSM code.
"""

import flax.linen as nn
import jax

from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope
from cssm.scan import linear_scan
from cssm.spectral import Spectrum, add, multiply, scale

GATES = ("decay_x", "decay_y", "mu_inhib", "mu_excit", "B", "D", "C")


class HGRU(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C]; C even. readout_state: which of X and Y are read: "xy", "x" or "y".

    A single read-out state is returned as it is; two are concatenated and projected to C.
    """

    options: CellOptions
    readout_state: str = "xy"

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        steps = num_steps or x.shape[1]
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)
        gates, inputs, offset = core.gates_and_inputs(GATES, 2, x, steps, o)
        k_exc = core.SpectralKernel(o, core.xavier_normal_raw, name="k_exc")(*x.shape[2:4])
        k_inh = core.SpectralKernel(o, core.xavier_normal_raw, name="k_inh")(*x.shape[2:4])
        c = gates.pop("C")
        read = core.gated_states(*("xy".index(name) for name in self.readout_state))
        y_hat = linear_scan(
            _step, (k_exc, k_inh), (2, 2), gates, inputs, o.scan, last_only, o.stable_transition, read, c, offset
        )
        return core.read_out(y_hat, len(self.readout_state), x.shape, o)


def _step(k_exc: Spectrum, k_inh: Spectrum):
    """One time step; the right-hand states are those of t - 1."""

    def step(h, g, u):
        x, y = h
        return (
            add(scale(g["decay_x"], x), scale(-g["mu_inhib"], multiply(k_inh, y)), scale(g["B"], u[0])),
            add(scale(g["mu_excit"], multiply(k_exc, x)), scale(g["decay_y"], y), scale(g["D"], u[1])),
        )

    return step
