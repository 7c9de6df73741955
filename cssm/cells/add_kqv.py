"""add_kqv: a chain Q -> K -> V: Q and K spread by one kernel, each state adds into those after it.

docs/math.md. After AdditiveCSSM of the published CSSM code: its transition matrix is triangular.
"""

import functools

import flax.linen as nn
import jax

from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope
from cssm.scan import linear_scan
from cssm.spectral import Spectrum, add, multiply, scale

CHAINS = ("qkv", "qk", "qv", "q")


class AddKQV(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C]; C even.

    chain: "qkv" (add_kqv), "qv" (add_kqv_2), "q" (add_kqv_1) or "qk"; its last state is read and projected.
    """

    options: CellOptions
    chain: str = "qkv"

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        if self.chain not in CHAINS:
            raise ValueError(f"chain {self.chain!r} is not one of {', '.join(CHAINS)}")
        steps = num_steps or x.shape[1]
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)
        between = tuple({"k": "w", "v": "g"}[s] for s in self.chain[1:])
        names = (*(f"decay_{s}" for s in self.chain), *between, *(f"B_{s}" for s in self.chain), "C")
        count = len(self.chain)
        gates, inputs, offset = core.gates_and_inputs(names, count, x, steps, o)
        kernel = core.SpectralKernel(o, core.xavier_normal_raw, name="kernel")(*x.shape[2:4])
        c = gates.pop("C")
        step = functools.partial(_step, chain=self.chain)
        read = core.gated_states(count - 1)
        y_hat = linear_scan(
            step, (kernel,), (count, count), gates, inputs, o.scan, last_only, o.stable_transition, read, c, offset
        )
        y = core.read_out(y_hat, 1, x.shape, o)
        return nn.Dense(o.channels, dtype=o.dtype, name="output_proj")(y)


def _step(kernel: Spectrum, chain: str):
    """One time step; the right-hand states are those of t - 1."""

    def step(h, g, u):
        h, u = dict(zip(chain, h, strict=True)), dict(zip(chain, u, strict=True))
        kept = {s: scale(g[f"decay_{s}"], h[s]) for s in chain}
        kept["q"] = multiply(kernel, kept["q"])
        if "k" in h:
            kept["k"] = multiply(kernel, add(kept["k"], scale(g["w"], h["q"])))
        if "v" in h:
            kept["v"] = add(kept["v"], scale(g["g"], add(*(h[s] for s in chain[:-1]))))
        return tuple(add(kept[s], scale(g[f"B_{s}"], u[s])) for s in chain)

    return step
