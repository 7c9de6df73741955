"""opponent: excitation X, driven by the input, and inhibition Y, driven by X; every channel has its own gates.

docs/math.md. After GatedOpponentCSSM of the published CSSM code.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm import spectral
from cssm.activations import gelu, softplus
from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope
from cssm.scan import linear_scan
from cssm.spectral import Spectrum, add, multiply, scale

COUPLINGS = ("alpha", "delta", "mu", "gamma")
GATES = (*COUPLINGS, "B", "C")
ACTIVATIONS = {
    "sigmoid": nn.sigmoid,
    "softplus_clamped": lambda raw: jnp.minimum(softplus(raw), 2.0),
    "tanh_scaled": lambda raw: 0.5 * (jnp.tanh(raw) + 1.0),
}
# decay = 0.1 + 0.89 sigmoid(logit) is 0.9 at the start.
DECAY_LOGIT = math.log(0.8 / 0.09)


class Opponent(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C]; C even. readout_state: which of X and Y are read: "xy", "x" or "y".

    gate_type (of options): "dense" one gate for every channel and frequency, "factored" the sum of one for the row, one
    for the column and one for the channel. gate_rank: width of a hidden layer of the dense gates; 0 leaves it out.
    gate_activation: of the couplings: "sigmoid", "softplus_clamped" or "tanh_scaled".
    """

    options: CellOptions
    readout_state: str = "xy"
    gate_activation: str = "sigmoid"
    gate_rank: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        if self.gate_rank and o.gate_type != "dense":
            raise ValueError(f"gate_rank {self.gate_rank} applies to dense gates, and these are {o.gate_type}")
        steps = num_steps or x.shape[1]
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)
        gates = self._gates(x, steps)
        logit = self.param("decay", nn.initializers.constant(DECAY_LOGIT), (o.channels,))
        decay = (0.1 + 0.89 * nn.sigmoid(logit)).astype(x.dtype)
        gates |= {name: decay * gates[name] for name in ("alpha", "delta")}
        c = gates.pop("C")
        k_exc = core.SpectralKernel(o, nn.initializers.normal(0.02), name="k_exc")(*x.shape[2:4])
        k_inh = core.SpectralKernel(o, nn.initializers.normal(0.02), name="k_inh")(*x.shape[2:4])
        u_hat = core.flatten(spectral.rfft2(x, o.backend))
        read = core.gated_states(*("xy".index(name) for name in self.readout_state))
        y_hat = linear_scan(
            _step, (k_exc, k_inh), (2, 1), gates, u_hat, o.scan, last_only, o.stable_transition, read, c
        )
        return core.read_out(y_hat, len(self.readout_state), x.shape, o)

    def _gates(self, x: jax.Array, steps: int) -> dict[str, jax.Array]:
        """Squashed gates [B, T, F, C]."""
        o, (height, width, channels) = self.options, x.shape[2:]
        context = core.gate_context(x.mean(axis=(2, 3)), steps, o)
        columns, n = width // 2 + 1, len(GATES)
        if o.gate_type == "dense":
            if self.gate_rank:
                context = gelu(nn.Dense(self.gate_rank, dtype=o.dtype, name="gates_hidden")(context))
            raw = nn.Dense(n * height * columns * channels, dtype=o.dtype, name="gates")(context)
        else:
            raw = nn.Dense(n * (height + columns + channels), dtype=o.dtype, name="gates")(context)
            raw = raw.reshape(*raw.shape[:2], n, -1)
            row, column, channel = jnp.split(raw, (height, height + columns), axis=-1)
            raw = row[..., :, None, None] + column[..., None, :, None] + channel[..., None, None, :]
        raw = raw.reshape(*raw.shape[:2], n, height * columns, channels)
        couple = ACTIVATIONS[self.gate_activation]
        parts = zip(GATES, jnp.split(raw, n, axis=2), strict=True)  # split: see core.FrequencyGates
        return {name: (couple if name in COUPLINGS else nn.sigmoid)(part[:, :, 0]) for name, part in parts}


def _step(k_exc: Spectrum, k_inh: Spectrum):
    """One time step; the right-hand states are those of t - 1, alpha and delta already hold the decay."""

    def step(h, g, u):
        x, y = h
        return (
            add(scale(g["alpha"], x), multiply(k_inh, scale(-g["mu"], y)), scale(g["B"], u[0])),
            add(multiply(k_exc, scale(g["gamma"], x)), scale(g["delta"], y)),
        )

    return step
