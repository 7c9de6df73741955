"""gdn: published fingerprints, a float64 recurrence with its matrices formed, causality, and its shortcuts."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest

from cssm.cells.core import CellOptions
from cssm.cells.gdn import GatedDeltaNet

SHAPE = (2, 4, 8, 10, 8)
FINGERPRINTS = [  # gates, d, qkv convolution, sum, sum of squares, y[0, 3, 2, 5, :3]
    ("factored", 2, 1, 53.628754, 952.830241, [0.013355, 0.021057, 0.735654]),
    ("factored", 4, 5, 120.459064, 1369.883611, [0.044226, 0.892253, 0.657370]),
    ("channel", 2, 1, 24.350621, 1274.283964, [0.616777, 0.205182, -0.155009]),
    ("dense", 2, 1, 32.251667, 1330.629414, [0.393805, 0.471402, -0.079048]),
]


def make(gates="factored", d=2, qkv=1, ablations=(), **changes):
    defaults = {"channels": 8, "kernel_size": 3, "gate_type": gates, "scan": "reference", "backend": "fft"}
    return GatedDeltaNet(CellOptions(**{**defaults, **changes}), d, qkv_conv_size=qkv, **dict(ablations))


def shapes(gates, d, qkv, channels=8, height=8, width=10, cross=0):
    """Published leaves (cross_freq_* are this package's names), all ablations at their defaults."""
    heads, columns = channels // d, width // 2 + 1
    leaves = {"kernel": (heads, 3, 3), "rms_scale": (channels,)}
    for name, size in (("qkv_proj", 3 * channels), ("gate_proj", channels), ("output_proj", channels)):
        leaves |= oracle.dense_shapes(name, channels, size)
    if qkv > 1:
        leaves |= {"qkv_dw/kernel": (qkv, qkv, 1, channels), "qkv_dw/bias": (channels,)}
    for name in "qkv":
        leaves |= {f"short_conv_{name}/kernel": (4, 1, channels), f"short_conv_{name}/bias": (channels,)}
    for name, cols in (("alpha", columns), ("beta", columns), ("B_k", width), ("B_v", width)):
        if gates == "factored":
            leaves |= oracle.dense_shapes(f"{name}_h", channels, height) | oracle.dense_shapes(
                f"{name}_w", channels, cols
            )
        else:
            per_channel = heads if name in ("alpha", "beta") else channels
            count = {"dense": height * cols, "channel": per_channel, "scalar": 1}[gates]
            leaves |= oracle.dense_shapes(name, channels, count)
    for part in ("re", "im") if cross else ():
        leaves |= {f"cross_freq_{part}/kernel": (cross, 1, 1), f"cross_freq_{part}/bias": (1,)}
    return leaves


def tree(p, dtype=jnp.float32):
    """Published leaves -> this package's parameters: gates and short convolutions fused."""
    modules = {path.partition("/")[0] for path in p}

    def fuse(names):
        return {leaf: np.concatenate([p[f"{n}/{leaf}"] for n in names], -1) for leaf in ("kernel", "bias")}

    out = {name: fuse([name]) for name in modules if name.endswith("proj") or name == "qkv_dw" or "cross" in name}
    out |= {"kernel": {"kernel": p["kernel"]}, "output_norm": {"scale": p["rms_scale"]}}
    out["short_conv"] = fuse([f"short_conv_{name}" for name in "qkv"])
    for target, names in (("gates", ("alpha", "beta")), ("input_gates", ("B_k", "B_v"))):
        if "alpha_h" in modules:
            out[target] = {"factors": fuse([f"{n}_{part}" for n in names for part in "hw"])}
        else:
            dense = fuse(names)
            out[target] = {"dense": dense} if p["alpha/bias"].size == 48 else dense
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), out)


def gdn(x, p, gates, d, cross=0, origin="origin"):
    """The cell in float64: M and S as matrices, one loop over time."""
    x = np.asarray(x, np.float64)
    batch, steps, height, width, channels = x.shape
    ctx = x.mean(axis=(2, 3)) + oracle.time_code(steps, channels)

    def gate(name, lead):
        if gates == "factored":
            raw = oracle.dense(ctx, p, f"{name}_h")[..., :, None] + oracle.dense(ctx, p, f"{name}_w")[..., None, :]
            raw = raw[..., None] if lead == "space" else raw[:, :, None]
        elif gates == "dense":
            raw = oracle.dense(ctx, p, name).reshape(batch, steps, height, -1)
            raw = raw[..., None] if lead == "space" else raw[:, :, None]
        elif gates == "channel" and lead == "space":
            raw = oracle.dense(x, p, name)
        else:
            raw = oracle.dense(ctx, p, name)[:, :, None, None]
            raw = raw if lead == "space" else np.moveaxis(raw, -1, 2)
        return oracle.sigmoid(raw)

    inner = x
    if "qkv_dw/kernel" in p:
        kernel, size = p["qkv_dw/kernel"], p["qkv_dw/kernel"].shape[0]
        pad = np.pad(x, ((0, 0), (0, 0), (size // 2, size // 2), (size // 2, size // 2), (0, 0)))
        inner = p["qkv_dw/bias"] + sum(
            kernel[a, b, 0] * pad[:, :, a : a + height, b : b + width] for a in range(size) for b in range(size)
        )
    spectra = {}
    for name, part in zip("qkv", np.split(oracle.dense(inner, p, "qkv_proj"), 3, axis=-1), strict=True):
        conv = np.zeros_like(part) + p[f"short_conv_{name}/bias"]
        for t in range(steps):
            for i in range(4):
                if t - 3 + i >= 0:
                    conv[:, t] += p[f"short_conv_{name}/kernel"][i, 0] * part[:, t - 3 + i]
        conv = conv * oracle.sigmoid(conv) * (gate(f"B_{name}", "space") if name != "q" else 1)
        spectra[name] = oracle.to_frequency(conv).reshape(batch, steps, channels // d, d, height, -1)
    for name in "qk":
        power = (np.abs(spectra[name]) ** 2).sum(axis=(-1, -2), keepdims=True)
        spectra[name] = spectra[name] / np.sqrt(power + 1e-6)
    q, k, v = (np.moveaxis(spectra[name], 3, -1) for name in "qkv")  # [B, T, heads, H, Wf, d]
    k = k / np.sqrt((np.abs(k) ** 2).sum(-1, keepdims=True) + 1e-6)
    w = oracle.kernel_spectrum(p["kernel"], height, width, origin)
    alpha, beta = 0.1 + 0.89 * gate("alpha", "frequency"), gate("beta", "frequency")
    state, read = np.zeros((*k[:, 0].shape, d), complex), []
    for t in range(steps):
        erase = np.eye(d) - beta[:, t, ..., None, None] * k[:, t, ..., :, None] * k[:, t, ..., None, :].conj()
        matrix = (alpha[:, t] * w)[..., None, None] * erase
        write = beta[:, t, ..., None, None] * v[:, t, ..., :, None] * k[:, t, ..., None, :].conj()
        state = state @ np.swapaxes(matrix, -1, -2) + write  # rows of the state are multiplied by the matrix
        read.append((state @ q[:, t, ..., None])[..., 0])
    y_hat = np.moveaxis(np.stack(read, 1), -1, 3).reshape(batch, steps, channels, height, -1)
    if cross:
        pad = np.pad(y_hat, ((0, 0),) * 4 + ((cross // 2, cross // 2),))
        slices = [pad[..., i : i + y_hat.shape[-1]] for i in range(cross)]
        re, im = ([p[f"cross_freq_{n}/kernel"][i, 0, 0] for i in range(cross)] for n in ("re", "im"))
        y_hat = sum(a * s.real + 1j * b * s.imag for a, b, s in zip(re, im, slices, strict=True))
        y_hat = y_hat + p["cross_freq_re/bias"] + 1j * p["cross_freq_im/bias"]
    y = oracle.to_space(y_hat, width)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * p["rms_scale"]
    z = oracle.dense(x, p, "gate_proj")
    return oracle.dense(y * z * oracle.sigmoid(z), p, "output_proj")


@pytest.mark.parametrize("gates,d,qkv,total,squares,values", FINGERPRINTS)
def test_published_fingerprints(gates, d, qkv, total, squares, values):
    params = tree(oracle.wave_parameters(shapes(gates, d, qkv)))
    cell = make(gates, d, qkv, kernel_origin="image_center")
    y = laws.run(cell, params, oracle.wave_input()).astype(np.float64)
    np.testing.assert_allclose(y.sum(), total, rtol=1e-5)
    np.testing.assert_allclose((y**2).sum(), squares, rtol=1e-5)
    np.testing.assert_allclose(y[0, 3, 2, 5, :3], values, rtol=1e-5, atol=5e-7)


@pytest.mark.parametrize(
    "gates,d,qkv,cross,scan,backend",
    [
        ("factored", 1, 1, 0, "reference", "dft"),
        ("factored", 2, 5, 3, "associative", "fft"),
        ("dense", 4, 1, 0, "reference", "fft"),
        ("channel", 8, 3, 0, "reference", "fft"),
        ("scalar", 2, 1, 0, "associative", "dft"),
    ],
)
def test_values_are_those_of_the_float64_matrices(gates, d, qkv, cross, scan, backend):
    p, x = oracle.wave_parameters(shapes(gates, d, qkv, cross=cross)), oracle.wave_input()
    with jax.enable_x64(True):
        cell = make(gates, d, qkv, {"cross_freq_conv_size": cross}, scan=scan, backend=backend)
        y = laws.run(cell, tree(p, jnp.float64), jnp.asarray(x, jnp.float64))
        np.testing.assert_allclose(y, gdn(x, p, gates, d, cross), atol=1e-9)


@pytest.mark.slow
def test_gradients_are_slopes_of_the_matrices_and_agree_between_scans_and_backends():
    p = oracle.wave_parameters(shapes("factored", 2, 3, channels=4, height=4, width=6))
    make_small = lambda **changes: make(d=2, qkv=3, channels=4, **changes)
    with jax.enable_x64(True):
        x = jnp.asarray(oracle.wave_input((1, 3, 4, 6, 4)), jnp.float64)
        laws.gradient_is_the_slope(
            lambda params: jnp.sum(jnp.sin(make_small().apply({"params": params}, x))),
            lambda p: np.sin(gdn(x, p, "factored", 2)).sum(),
            p,
            lambda p: tree(p, jnp.float64),
        )
        variants = [{}, {"scan": "associative", "backend": "dft"}]
        laws.agree(make_small, variants, tree(p, jnp.float64), x)


def test_later_frames_never_change_earlier_outputs(key):
    laws.causal(make(), key)


STILL_INSIDE = {"short_conv_size": 0, "use_input_gates": False, "use_spectral_l2_norm": False, "output_norm": "none"}


@pytest.mark.parametrize(
    "gates,rope_mode,ablations",
    [
        ("channel", "mrope", {"output_norm": "layer", "short_conv_size": 2}),
        ("dense", "none", STILL_INSIDE),
        ("scalar", "none", {"short_conv_size": 2, "use_input_gates": False}),
    ],
)
def test_a_still_image_is_the_clip_of_its_copies(gates, rope_mode, ablations, key):
    laws.still(make(gates, 2, 3, ablations, channels=4, rope_mode=rope_mode), key, (1, 3, 4, 6, 4))


def test_every_parameter_learns(key):
    laws.learns(make("scalar", 2, 3, {"cross_freq_conv_size": 3}, channels=4), key, (1, 3, 4, 6, 4))


def test_the_ablations_change_the_result(key):
    x = jnp.asarray(oracle.wave_input((1, 3, 4, 6, 8)))
    params = laws.init(make(), key, x)
    want = laws.run(make(), params, x)
    for ablation in ({"output_gate_act": "sigmoid"}, {"use_spectral_l2_norm": False}):
        assert np.abs(laws.run(make(ablations=ablation), params, x) - want).max() > 1e-4, ablation


def test_bf16_is_near_float32_and_a_spectral_kernel_is_one_a_head(key):
    laws.bf16_is_near(lambda **changes: make(**changes), key)
    params = jax.eval_shape(make(kernel_domain="spectral").init, key, jnp.zeros(SHAPE))["params"]
    spectrum = params["kernel"]["spectrum"]
    assert spectrum.dtype == jnp.complex64 and spectrum.shape == (4, 8, 6)


def test_a_key_dimension_must_divide_the_channels(key):
    with pytest.raises(ValueError, match="delta_key_dim 3 does not divide the 8 channels"):
        make(d=3).init(key, jnp.zeros(SHAPE))


def test_a_full_convolution_can_be_the_separable_one(key):
    x = jnp.asarray(oracle.wave_input((1, 2, 4, 6, 4)))
    params = laws.init(make(qkv=3, channels=4), key, x)
    dw, dense = params["qkv_dw"], params["qkv_proj"]
    full = {"kernel": dw["kernel"][:, :, 0, :, None] * dense["kernel"], "bias": dw["bias"] @ dense["kernel"]}
    full["bias"] += dense["bias"]
    one = {name: leaf for name, leaf in params.items() if name != "qkv_dw"} | {"qkv_proj": full}
    want = laws.run(make(qkv=3, channels=4), params, x)
    got = laws.run(make(qkv=3, channels=4, ablations=(("qkv_conv_full", True),)), one, x)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_kernels_are_bounded_unless_told_otherwise(key):
    x = jnp.asarray(oracle.wave_input((1, 2, 4, 6, 4)))
    params = laws.init(make(channels=4), key, x)
    params["kernel"]["kernel"] *= 100.0
    bounded, free = (make(channels=4, ablations=(("spectral_clip", clip),)) for clip in (True, False))
    assert np.abs(laws.run(free, params, x)[:, 1] - laws.run(bounded, params, x)[:, 1]).max() > 1e-2
