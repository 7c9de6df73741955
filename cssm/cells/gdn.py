"""gdn: gated delta rule: each head keeps a d x d matrix of associations per frequency, written and erased by keys.

After GatedDeltaNetCSSM of the published CSSM code and Gated DeltaNet (Yang et al. 2024), in plain complex arithmetic.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cssm import spectral
from cssm.cells import core
from cssm.cells.attention import SplitDense
from cssm.cells.core import CellOptions
from cssm.depthwise import CausalConv, DepthwiseConv
from cssm.positions import rope
from cssm.scan import linear_scan
from cssm.spectral import Packed, Spectrum, add, multiply, scale

# Under the square roots by which spectra are divided.
EPSILON = 1e-6


class GatedDeltaNet(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C]; delta_key_dim d divides C: C / d heads of d x d states.

    gate_type (of options): "dense", "factored" over frequencies, "channel" one gate a head, "scalar" one for all.
    short_conv_size: taps over time of the convolution of q, k and v, followed by SiLU; 0 leaves out both.
    output_norm: "rms", "layer" or "none". output_gate_act: "silu" or "sigmoid".
    use_input_gates: gate k and v in space. use_spectral_l2_norm: q and k have unit norm over all frequencies.
    qkv_conv_size: side of a depthwise convolution before the projection to q, k, v; 1 leaves it out. qkv_conv_full:
    that projection is itself a convolution of this side. spectral_clip: bound the magnitude of the kernels.
    cross_freq_conv_size: taps of a convolution of what is read along the Wf frequencies; 0 leaves it out.
    """

    options: CellOptions
    delta_key_dim: int = 2
    short_conv_size: int = 4
    output_norm: str = "rms"
    use_input_gates: bool = True
    output_gate_act: str = "silu"
    use_spectral_l2_norm: bool = True
    qkv_conv_size: int = 1
    qkv_conv_full: bool = False
    spectral_clip: bool = True
    cross_freq_conv_size: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o, d = self.options, self.delta_key_dim
        if o.channels % d:
            raise ValueError(f"delta_key_dim {d} does not divide the {o.channels} channels")
        steps = num_steps or x.shape[1]
        height, width = x.shape[2:4]
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)

        context = core.gate_context(x.mean(axis=(2, 3)), steps, o)
        q, k, v = self._queries_keys_values(x, context, steps)
        if last_only:
            q, x = q[:, -1:], x[:, -1:]
        q_hat, k_hat, v_hat = (self._to_heads(part) for part in (q, k, v))
        if self.use_spectral_l2_norm:
            q_hat, k_hat = _unit(q_hat, d, axis=3), _unit(k_hat, d, axis=3)
        k_hat = _unit(k_hat, d, axis=4)

        head_options = dataclasses.replace(o, channels=o.channels // d)
        kernel = core.SpectralKernel(head_options, core.xavier_normal_raw, self.spectral_clip, name="kernel")(
            height, width
        )
        gates = self._gates(context, height, width)
        gates["k"] = Packed(core.repeat_over_time(k_hat, steps), d)
        queries = Packed(core.repeat_over_time(q_hat, 1 if last_only else steps), d)
        # The rows of a head's matrix move alike, each by its component of v.
        y_hat = linear_scan(
            functools.partial(_step, stable=o.stable_transition),
            (kernel,),
            (d, 1),
            gates,
            v_hat,
            o.scan,
            last_only,
            read=_asked,
            read_gates=queries,
            copies=d,
        )
        y_hat = core.unflatten(y_hat, height).astype(x.dtype)
        if self.cross_freq_conv_size:
            y_hat = self._cross_frequencies(y_hat)
        y = spectral.irfft2(y_hat, width, o.backend)
        y = self._normalise(_by_head(y, d))
        act = nn.silu if self.output_gate_act == "silu" else nn.sigmoid
        y = y * act(nn.Dense(o.channels, dtype=o.dtype, name="gate_proj")(x))
        return nn.Dense(o.channels, dtype=o.dtype, name="output_proj")(y)

    def _queries_keys_values(self, x: jax.Array, context: jax.Array, steps: int) -> list[jax.Array]:
        """Three arrays [B, T or 1, H, W, C], in space, channels in the order of `_head_order`."""
        o, size = self.options, self.qkv_conv_size
        order = _head_order(o.channels, self.delta_key_dim)
        if self.qkv_conv_full:
            qkv = nn.Conv(3 * o.channels, (size, size), dtype=o.dtype, name="qkv_proj")(x)
            parts = [part[..., order] for part in jnp.split(qkv, 3, axis=-1)]
        else:
            x_in = DepthwiseConv(size, o.dtype, name="qkv_dw")(x) if size > 1 else x
            parts = SplitDense(3, o.channels, o.dtype, name="qkv_proj")(x_in, order)
        if self.short_conv_size:
            parts = CausalConv(self.short_conv_size, nn.silu, o.dtype, name="short_conv")(parts, steps, order)
            parts = [core.repeat_over_time(part, steps) for part in parts]
        q, k, v = parts
        if self.use_input_gates:
            gate_k, gate_v = self._input_gates(x, context, order)
            k, v = nn.sigmoid(gate_k) * k, nn.sigmoid(gate_v) * v
        return [q, k, v]

    def _input_gates(self, x: jax.Array, context: jax.Array, order: np.ndarray) -> list[jax.Array]:
        """Raw gates of k and v, [B, T or 1, H or 1, W or 1, C or 1]; channels in this order."""
        o, (height, width) = self.options, x.shape[2:4]
        if o.gate_type == "channel":
            return SplitDense(2, o.channels, o.dtype, name="input_gates")(x, order)
        if o.gate_type == "scalar":
            raw = nn.Dense(2, dtype=o.dtype, name="input_gates")(context)
            return jnp.split(raw[:, :, None, None, :], 2, axis=-1)
        names = ("k", "v")
        return list(core.spatial_gates(names, o.gate_type, context, height, width, o.dtype, "input_gates").values())

    def _gates(self, context: jax.Array, height: int, width: int) -> dict:
        """alpha in 0.1 .. 0.99 and beta in 0 .. 1: [B, T, F, 1], or [B, T, 1, C / d or 1]."""
        o = self.options
        if o.gate_type in ("channel", "scalar"):
            count = o.channels // self.delta_key_dim if o.gate_type == "channel" else 1
            raw = nn.Dense(2 * count, dtype=o.dtype, name="gates")(context)[:, :, None, :]
            alpha, beta = jnp.split(raw, 2, axis=-1)
        else:
            raw = core.FrequencyGates(("alpha", "beta"), o.gate_type, dtype=o.dtype, name="gates")(
                context, height, width
            )
            alpha, beta = raw["alpha"], raw["beta"]
        return {"alpha": 0.1 + 0.89 * nn.sigmoid(alpha), "beta": nn.sigmoid(beta)}

    def _to_heads(self, x: jax.Array) -> jax.Array:
        """[B, T, H, W, C], in the order of `_head_order` -> its spectrum, packed, [B, T, 2, F, C]."""
        return core.flatten(spectral.rfft2(x, self.options.backend))

    def _cross_frequencies(self, y_hat: jax.Array) -> jax.Array:
        """Convolve each plane of packed [B, T, 2, H, Wf, C] along Wf, one kernel for all rows and channels."""
        (y,) = spectral.unpack(y_hat)

        def conv(plane: jax.Array, name: str) -> jax.Array:
            along = nn.Conv(1, (self.cross_freq_conv_size,), dtype=self.options.dtype, name=name)
            return jnp.moveaxis(along(jnp.moveaxis(plane, -2, -1)[..., None])[..., 0], -1, -2)

        return spectral.pack(Spectrum(conv(y.re, "cross_freq_re"), conv(y.im, "cross_freq_im")))

    def _normalise(self, y: jax.Array) -> jax.Array:
        if self.output_norm == "none":
            return y
        if self.output_norm == "layer":
            return core.LayerNorm(self.options.dtype, name="output_norm")(y)
        return nn.RMSNorm(epsilon=EPSILON, dtype=self.options.dtype, name="output_norm")(y)


def _head_order(channels: int, d: int) -> np.ndarray:
    """Of the channels, d for each head: the first of all C / d heads, then the second of all, and so on."""
    return np.arange(channels).reshape(-1, d).T.reshape(-1)


def _by_head(y: jax.Array, d: int) -> jax.Array:
    """Channels that are in the order of `_head_order` in their own again."""
    return jnp.swapaxes(y.reshape(*y.shape[:-1], d, -1), -1, -2).reshape(y.shape)


def _conjugate(z: Spectrum) -> Spectrum:
    return Spectrum(z.re, -z.im)


def _unit(packed: jax.Array, d: int, axis: int) -> jax.Array:
    """Divide d packed spectra [B, T, 2, F, d m] by their norm, in float32 at least, over F (axis 3) or the d (4)."""
    z = packed.reshape(*packed.shape[:-1], d, -1)
    power = jnp.square(z.astype(jnp.promote_types(z.dtype, jnp.float32)))
    inverse = jax.lax.rsqrt(power.sum((2, axis), keepdims=True) + EPSILON)
    return (inverse.astype(z.dtype) * z).reshape(packed.shape)


def _asked(h: tuple[Spectrum, ...], q: tuple[Spectrum, ...]) -> tuple[Spectrum]:
    """What a row of a head's matrix answers to a query."""
    return (add(*(multiply(s, q_j) for s, q_j in zip(h, q, strict=True))),)


def _step(kernel: Spectrum, stable: bool):
    """One row s of every head's matrix, d states [B, F, C / d]: s <- alpha W (s - beta k (k^H s)) + beta v conj(k).

    stable: |alpha W| above 1 counts as 1. Erasing along k lengthens no s, so no step does then.
    """

    def step(s, g, u):
        decay = scale(g["alpha"], kernel)
        if stable:
            decay = scale(1.0 / jnp.maximum(spectral.magnitude(decay), 1.0), decay)
        keys = [scale(g["beta"], k) for k in g["k"]]
        stored = add(*(multiply(_conjugate(k), s_j) for k, s_j in zip(g["k"], s, strict=True)))
        return tuple(
            add(
                multiply(decay, add(s_i, scale(-1.0, multiply(k, stored)))),
                multiply(u[0], _conjugate(k)),
            )
            for k, s_i in zip(keys, s, strict=True)
        )

    return step
