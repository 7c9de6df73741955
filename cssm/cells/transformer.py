"""transformer (kqv): queries Q and keys K excite each other through one kernel, A gathers both and feeds back into Q.

docs/math.md. After TransformerCSSM of the published CSSM code. Linear in its input, but for the gates.
"""

import functools

import flax.linen as nn
import jax

from cssm import spectral
from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.positions import rope
from cssm.scan import linear_scan
from cssm.spectral import Spectrum, add, multiply, scale


class Transformer(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C]; C even.

    readout_state: which states are read, such as "qka" or "a"; None: all that there are. One is returned as it is,
    several are concatenated and projected to C.
    asymmetric_qk: Q to K and K to Q have a gate each. feedback: A reaches Q. k_state: K has a state; otherwise there
    are Q and A alone.
    use_layernorm: the log magnitude of what is read is standardised over frequencies (core.LogMagnitudeNorm).
    spectral_clip: the kernel's magnitude is bounded.
    """

    options: CellOptions
    readout_state: str | None = None
    asymmetric_qk: bool = False
    feedback: bool = True
    k_state: bool = True
    use_layernorm: bool = False
    spectral_clip: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o, present = self.options, "qka" if self.k_state else "qa"
        chosen = present if self.readout_state is None else self.readout_state
        self._check(present, chosen)
        steps = num_steps or x.shape[1]
        height, width = x.shape[2:4]
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)
        gates, inputs, offset = core.gates_and_inputs(self._gate_names(present), len(present), x, steps, o)
        if "w_qk" in gates:
            gates["w_q_to_k"] = gates["w_k_to_q"] = gates.pop("w_qk")
        kernel = core.SpectralKernel(o, core.xavier_normal_raw, self.spectral_clip, name="kernel")(height, width)
        step = functools.partial(_step, present=present)
        c, counts = gates.pop("C"), (len(present), len(present))
        numbers = [present.index(name) for name in chosen]
        scan = functools.partial(
            linear_scan, step, (kernel,), counts, gates, inputs, o.scan, last_only, o.stable_transition, offset=offset
        )
        if self.use_layernorm:
            states = spectral.unpack(scan(lambda h, _: tuple(h[i] for i in numbers)), len(chosen), axis=-3)
            norms = [core.LogMagnitudeNorm(name=f"norm_{name}") for name in chosen]
            c = c[:, -states[0].re.shape[1] :]
            normed = [spectral.scale(c, norm(z, height * width)) for norm, z in zip(norms, states, strict=True)]
            y_hat = spectral.pack(*normed, axis=-3).astype(x.dtype)
        else:
            y_hat = scan(core.gated_states(*numbers), c)
        return core.read_out(y_hat, len(chosen), x.shape, o)

    def _gate_names(self, present: str) -> tuple[str, ...]:
        between = () if not self.k_state else ("w_k_to_q", "w_q_to_k") if self.asymmetric_qk else ("w_qk",)
        feedback = ("alpha",) if self.feedback else ()
        return (*(f"decay_{s}" for s in present), *between, *feedback, "gamma", *(f"B_{s}" for s in present), "C")

    def _check(self, present: str, chosen: str) -> None:
        """Refuse what would leave a parameter without any effect."""
        if not self.k_state and (self.asymmetric_qk or not self.feedback):
            other = (
                "asymmetric_qk has nothing to act on" if self.asymmetric_qk else "without feedback there is no kernel"
            )
            raise ValueError(f"without k_state, {other}")
        if not chosen or set(chosen) - set(present):
            raise ValueError(f"readout_state {chosen!r} is not made of the states {', '.join(present)}")
        if not self.feedback and "a" not in chosen:
            raise ValueError(f"without feedback, nothing of A reaches the readout_state {chosen!r}; read a as well")


def _step(kernel: Spectrum, present: str):
    """One time step; the right-hand states are those of t - 1. Gates that are left out count as zero."""

    def step(h, g, u):
        u = {s: scale(g[f"B_{s}"], part) for s, part in zip(present, u, strict=True)}
        h = dict(zip(present, h, strict=True))
        kept = {s: add(scale(g[f"decay_{s}"], h[s]), u[s]) for s in present}
        to_q = [scale(g["alpha"], h["a"])] if "alpha" in g else []
        to_a = h["q"]
        if "k" in h:
            to_q.append(scale(g["w_k_to_q"], h["k"]))
            to_a = add(h["q"], h["k"])
            kept["k"] = add(kept["k"], multiply(kernel, scale(g["w_q_to_k"], h["q"])))
        kept["q"] = add(kept["q"], multiply(kernel, add(*to_q)))
        kept["a"] = add(kept["a"], scale(g["gamma"], to_a))
        return tuple(kept[s] for s in present)

    return step
