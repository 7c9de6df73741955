"""What cells share: spectral kernels, gates over frequency, projections that act on spectra."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes

from cssm import spectral
from cssm.activations import gelu
from cssm.depthwise import CausalConv, DepthwiseConv
from cssm.fused_rows import beside_rows, by_rows, pooled_rows
from cssm.positions import time_code
from cssm.rows import activated_norm_rows, activated_rows, layer_norm_rows
from cssm.scan import Method, linear_scan, repeat_over_time
from cssm.spectral import Backend, Spectrum


@dataclass(frozen=True)
class CellOptions:
    """Everything a cell may be told apart from its own ablations. dtype: of activations; parameters stay float32."""

    channels: int
    kernel_size: int = 11
    kernel_domain: str = "spatial"
    kernel_origin: str = "origin"
    gate_type: str = "factored"
    rope_mode: str = "none"
    gate_time_code: bool = True
    pre_output_act: str = "none"
    scan: Method = "auto"
    stable_transition: bool = False
    backend: Backend = "auto"
    dtype: jnp.dtype | None = None


class SpectralKernel(nn.Module):
    """One depthwise kernel a channel, as a spectrum [H * Wf, C]; |K| < 0.999 if bounded.

    domain "spatial": a parameter [C, k, k], transformed at every call; "spectral": the spectrum itself is the
    parameter, complex64 [C, H, Wf] (global filters as in GFNet, Rao et al. 2021), started from the spectrum of a
    spatial kernel so that both domains begin alike.
    """

    options: CellOptions
    kernel_init: Callable
    bounded: bool = True

    @nn.compact
    def __call__(self, height: int, width: int) -> Spectrum:
        o = self.options
        shape = (o.channels, o.kernel_size, o.kernel_size)
        if o.kernel_domain == "spatial":
            kernel = self.param("kernel", self.kernel_init, shape)
            k_hat = spectral.kernel_spectrum(kernel, height, width, o.kernel_origin)
        else:

            def init_spectrum(key):
                re, im = spectral.kernel_spectrum(self.kernel_init(key, shape), height, width, "origin")
                return jnp.moveaxis(jax.lax.complex(re, im), -1, 0)

            k = jnp.moveaxis(self.param("spectrum", init_spectrum), 0, -1)
            k_hat = Spectrum(k.real, k.imag)
        if self.bounded:
            k_hat = spectral.bound_magnitude(k_hat)
        return jax.tree.map(lambda p: p.reshape(height * (width // 2 + 1), o.channels), k_hat)


class FrequencyGates(nn.Module):
    """Raw (unsquashed) gates from a context [B, T, C]: a dict name -> [B, T, H * Wf, 1], shared by all channels.

    "dense": one value a frequency, Dense(C -> H Wf) for each name, fused into one product.
    "factored": Dense(C -> H) and Dense(C -> Wf), combined by `combine` (sum or product) over rows and columns.
    Both fit one map size only.
    """

    names: tuple[str, ...]
    gate_type: str
    combine: Callable = jnp.add
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, context: jax.Array, height: int, width: int) -> dict[str, jax.Array]:
        columns, n = width // 2 + 1, len(self.names)
        lead = context.shape[:-1]
        if self.gate_type == "dense":
            raw = nn.Dense(n * height * columns, dtype=self.dtype, name="dense")(context)
            raw = raw.reshape(*lead, n, height * columns)
        else:
            both = nn.Dense(n * (height + columns), dtype=self.dtype, name="factors")(context)
            both = both.reshape(*lead, n, height + columns)
            rows, cols = both[..., :height], both[..., height:]
            raw = self.combine(rows[..., :, None], cols[..., None, :]).reshape(*lead, n, height * columns)
        # A split's gradient is one concatenation; that of n slices is a sum of n arrays of the whole size.
        parts = jnp.split(raw, n, axis=-2)
        return {name: part[..., 0, :, None] for name, part in zip(self.names, parts, strict=True)}


class SpectralDense(nn.Module):
    """Dense over channels, of maps or of their packed spectra [..., H, Wf, n C]: (the product with the kernel, the
    bias [features]).

    Channel mixing commutes with the transform over (H, W), so that the product of spectra is the spectrum of the
    product. The bias is constant in space: it belongs to the maps once they are there, or H W times to the real plane
    at frequency (0, 0). states: n, where there are several side by side; the kernel is then [n, C, features].
    """

    features: int
    dtype: jnp.dtype | None = None
    states: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        n = self.states or 1
        shape = (x.shape[-1] // n, self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape if self.states is None else (n, *shape))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        return x @ kernel.reshape(-1, self.features), bias


class LogMagnitudeNorm(nn.Module):
    """Standardise the log magnitude of a spectrum [B, T, F, C] over its frequencies and keep its phases.

    L = log |z|, z -> z / |z| sqrt(H W) exp(scale (L - mean L) / std L + bias), scale and bias [C]; float32 at least.
    sqrt(H W) is the magnitude that white noise of unit variance has. Where |z| stands here, it never falls below FLOOR:
    a frequency without content stays without, and gradients stay finite.
    """

    FLOOR = 1e-3

    @nn.compact
    def __call__(self, z: Spectrum, num_pixels: int) -> Spectrum:
        gain = self.param("scale", nn.initializers.ones, z.re.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, z.re.shape[-1:])
        z = jax.tree.map(lambda p: p.astype(jnp.promote_types(p.dtype, jnp.float32)), z)
        # log sqrt(re^2 + im^2 + FLOOR^2), whose squares cannot overflow; its derivative by `unit` is zero.
        unit = jax.lax.stop_gradient(jnp.maximum(jnp.maximum(jnp.abs(z.re), jnp.abs(z.im)), self.FLOOR))
        power = jnp.square(z.re / unit) + jnp.square(z.im / unit) + jnp.square(self.FLOOR / unit)
        log = jnp.log(unit) + 0.5 * jnp.log(power)
        centred = log - log.mean(axis=-2, keepdims=True)
        spread = jax.lax.rsqrt(jnp.square(centred).mean(axis=-2, keepdims=True) + 1e-6)
        return spectral.scale(math.sqrt(num_pixels) * jnp.exp(gain * centred * spread + bias - log), z)


def gate_context(mean: jax.Array, num_steps: int, options: CellOptions) -> jax.Array:
    """What gates are made of, [B, T, C]: the mean over space [B, T or 1, C] and, if gate_time_code, the time code."""
    context = repeat_over_time(mean, num_steps)
    return context + time_code(num_steps, mean.shape[-1], mean.dtype) if options.gate_time_code else context


def gates_and_inputs(
    names: tuple[str, ...], count: int, x: jax.Array, steps: int, options: CellOptions
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """(gates [B, T, F, 1], `count` spectra of inputs, packed, [B, T, 2, F, count C], the offset that linear_scan is to
    add to them); in a compact call, parameters "gates" and "input_proj".

    Gates come from the mean of x [B, T or 1, H, W, C]. Those whose names begin with decay lie in 0.1 .. 0.99, others in
    0 .. 1. Inputs are x, projected to `count` times C channels after the transform, which moves C of them.
    """
    height, width = x.shape[2:4]
    x_hat = spectral.rfft2(x, options.backend)
    if spectral.choose_backend(options.backend, height, width, jax.default_backend()) == "dft":
        x_hat, mean = spectral.with_mean(x_hat, height * width)
    else:  # on a CPU a step is slower with the mean of the spectrum
        mean = x.mean(axis=(2, 3))
    gates = FrequencyGates(names, options.gate_type, dtype=options.dtype, name="gates")
    squashed = jax.tree.map(nn.sigmoid, gates(gate_context(mean, steps, options), height, width))
    gates = {name: 0.1 + 0.89 * g if name.startswith("decay") else g for name, g in squashed.items()}
    u_hat, bias = SpectralDense(count * options.channels, options.dtype, name="input_proj")(x_hat)
    return gates, flatten(u_hat), bias * (height * width)


def gated_states(*numbers: int) -> Callable[[tuple[Spectrum, ...], jax.Array], tuple[Spectrum, ...]]:
    """What linear_scan is to read: these states, times the gate."""
    return lambda h, gate: tuple(spectral.scale(gate, h[i]) for i in numbers)


def read_out(y_hat: jax.Array, count: int, shape: tuple[int, ...], options: CellOptions) -> jax.Array:
    """Return `count` gated states, packed [B, T, 2, F, count C], to space: [B, T, H, W, C]; shape: of such maps.

    Each passes pre_output_act in space; one state is then returned as it is, several are concatenated and projected to
    C. In a compact call, parameters "output_proj".
    """
    height, width = shape[2:4]
    y = unflatten(y_hat, height)
    project = SpectralDense(options.channels, options.dtype, count, name="output_proj") if count > 1 else None
    act = {"none": None, "gelu": gelu, "silu": nn.silu}[options.pre_output_act]
    bias = None
    if project and not act:  # the projection may come first: fewer maps to transform
        y, bias = project(y)
    y = spectral.irfft2(y, width, options.backend)
    if act:
        y = act(y)
        if project:
            y, bias = project(y)
    return y if bias is None else y + bias


def short_convs(x: jax.Array, options: CellOptions, spatial_size: int, taps: int, num_steps: int) -> jax.Array:
    """Depthwise convolution over space, then the causal one over time; 0 leaves one out. In a compact call.

    Of a still image [B, 1, H, W, C] the steps that differ: see CausalConv.
    """
    if spatial_size:
        x = DepthwiseConv(spatial_size, options.dtype, name="short_conv_spatial")(x)
    if taps:
        (x,) = CausalConv(taps, dtype=options.dtype, name="short_conv_temporal")([x], num_steps)
    return x


def spatial_gates(
    names: tuple[str, ...], gate_type: str, context: jax.Array, height: int, width: int, dtype, name: str
) -> dict[str, jax.Array]:
    """Raw gates over pixels, made as those over frequencies are: a dict name -> [B, T, H, W, 1]. In a compact call."""
    # FrequencyGates gives width' // 2 + 1 columns to a map of width'.
    gates = FrequencyGates(names, gate_type, dtype=dtype, name=name)(context, height, 2 * (width - 1))
    return {key: gate.reshape(*gate.shape[:2], height, width, 1) for key, gate in gates.items()}


def kernel_step(kernel: Spectrum):
    """h <- K h + u, without gates."""

    def step(h, g, u):
        return (spectral.add(spectral.multiply(kernel, h[0]), u[0]),)

    return step


def decay_step(decay: jax.Array):
    """h <- decay h + u in real numbers, without gates."""

    def step(h, g, u):
        return decay * h + u

    return step


def real_scan(
    make_step: Callable,
    constant: jax.Array,
    gates: Any,
    inputs: jax.Array,
    method: Method = "auto",
    last_only: bool = False,
) -> jax.Array:
    """linear_scan with one real state at every pixel: make_step(constant) is (h, gates_t, inputs_t) -> h on arrays.

    constant [C]; gates: pytree of [B or 1, T, H or 1, W or 1, 1]; inputs [B, T or 1, H, W, C]. Returns
    [B, T or 1, H, W, C].
    """
    batch, steps, height, width, channels = inputs.shape
    gates = jax.tree.map(lambda g: g.reshape(*g.shape[:2], -1, 1), gates)
    packed = inputs.reshape(batch, steps, 1, height * width, channels)

    def planes(constant):
        step = make_step(constant)
        return lambda h, g, u: (Spectrum(step(h[0].re, g, u[0].re), h[0].im),)

    states = linear_scan(planes, (constant,), (1, 1), gates, packed, method, last_only)
    return states.reshape(batch, -1, height, width, channels)


def identity(x: jax.Array) -> jax.Array:
    """x, for where no activation is."""
    return x


class LayerNorm(nn.Module):
    """after(norm over channels of before(x + offset)), epsilon 1e-6, and its maximum over 2 x 2 pixels if pooled.

    On a GPU one kernel forward and one backward (cssm.fused_rows). The variance is taken about the mean: as
    E[x^2] - E[x]^2, Flax's default, it loses four digits after a softplus.
    """

    dtype: jnp.dtype | None = None
    before: Callable = identity
    after: Callable = identity
    pooled: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *offset: jax.Array) -> jax.Array:
        """x [..., H, W, C] where it is pooled, else [..., C]; offset [C], or none."""
        parameters = _scale_and_bias(self, x)
        x, *_ = dtypes.promote_dtype(x, *parameters, dtype=self.dtype)
        rows = functools.partial(activated_norm_rows, epsilon=1e-6, before=self.before, after=self.after)
        return (pooled_rows if self.pooled else by_rows)(rows, x, (*parameters, *offset), whole=True)


class ResidualNorm(nn.Module):
    """(x, LayerNorm of x), both in the dtype of x: the norm that begins a branch, and what the branch is added to.

    On a GPU the kernel of the norm's backward pass adds up both gradients (cssm.fused_rows).
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = functools.partial(layer_norm_rows, epsilon=1e-6)
        return beside_rows(rows, x, _scale_and_bias(self, x), whole=True)


def _scale_and_bias(module: nn.Module, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    scale = module.param("scale", nn.initializers.ones, x.shape[-1:])
    return scale, module.param("bias", nn.initializers.zeros, x.shape[-1:])


class ActivatedDense(nn.Module):
    """act(Dense(x)); on a GPU bias and activation are one kernel forward and one backward (cssm.fused_rows)."""

    features: int
    act: Callable[[jax.Array], jax.Array]
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        x, kernel, _ = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        return by_rows(functools.partial(activated_rows, act=self.act), x @ kernel, (bias,), whole=False)


def flatten(x_hat: jax.Array) -> jax.Array:
    """Packed spectra [B, T, 2, H, Wf, C] -> [B, T, 2, F, C]."""
    return x_hat.reshape(*x_hat.shape[:3], -1, x_hat.shape[-1])


def unflatten(x_hat: jax.Array, height: int) -> jax.Array:
    """Packed spectra [B, T, 2, F, C] -> [B, T, 2, H, Wf, C]."""
    return x_hat.reshape(*x_hat.shape[:3], height, -1, x_hat.shape[-1])


def xavier_normal_raw(key: jax.Array, shape: tuple[int, int, int], dtype=jnp.float32) -> jax.Array:
    """Truncated normal of std 1 / sqrt(C k): xavier_normal on the raw shape (C, k, k), fan_in = fan_out = C k."""
    std = 1.0 / math.sqrt(shape[0] * shape[1])
    # 0.8796 is the standard deviation of a unit normal cut at +-2.
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * (std / 0.87962566103423978)
