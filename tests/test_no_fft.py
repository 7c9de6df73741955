"""no_fft: a float64 loop over time, no exchange between pixels but by gates, causality, and its shortcuts."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest

from cssm.cells.core import CellOptions
from cssm.cells.no_fft import NoFFT


def make(gates="factored", temporal=4, spatial=3, **changes):
    return NoFFT(CellOptions(**{"channels": 8, "gate_type": gates, "scan": "reference", **changes}), temporal, spatial)


def shapes(gates, temporal, spatial, channels=8, height=8, width=10):
    count = {"dense": height * width, "factored": height + width}[gates]
    leaves = {"A_logit": (channels,), "output_norm/scale": (channels,)}
    leaves |= oracle.dense_shapes(f"gates/{'dense' if gates == 'dense' else 'factors'}", channels, 3 * count)
    leaves |= oracle.dense_shapes("in_proj", channels, 2 * channels) | oracle.dense_shapes(
        "out_proj", channels, channels
    )
    for name, size, shape in (("temporal", temporal, (temporal,)), ("spatial", spatial, (spatial, spatial))):
        if size:
            leaves |= {f"short_conv_{name}/kernel": (*shape, 1, channels), f"short_conv_{name}/bias": (channels,)}
    return leaves


def no_fft(x, p, gates, temporal, spatial):
    batch, steps, height, width, _ = x.shape
    m, z = np.split(oracle.dense(x, p, "in_proj"), 2, axis=-1)
    if spatial:
        k, r = p["short_conv_spatial/kernel"], spatial // 2
        pad = np.pad(m, ((0, 0), (0, 0), (r, r), (r, r), (0, 0)))
        m = p["short_conv_spatial/bias"] + sum(
            k[a, b, 0] * pad[:, :, a : a + height, b : b + width] for a in range(spatial) for b in range(spatial)
        )
    if temporal:
        k, conv = p["short_conv_temporal/kernel"], np.zeros_like(m)
        for t in range(steps):
            for i in range(max(0, temporal - 1 - t), temporal):
                conv[:, t] += k[i, 0] * m[:, t - (temporal - 1) + i]
        m = conv + p["short_conv_temporal/bias"]
    m = m * oracle.sigmoid(m)
    name = "gates/dense" if gates == "dense" else "gates/factors"
    raw = oracle.dense(m.mean(axis=(2, 3)), p, name).reshape(batch, steps, 3, -1)
    if gates == "dense":
        raw = raw.reshape(batch, steps, 3, height, width, 1)
    else:
        raw = (raw[..., :height, None] + raw[..., None, height:])[..., None]
    delta, b, c = np.logaddexp(0, raw[:, :, 0]), raw[:, :, 1], raw[:, :, 2]
    state, y = 0, []
    for t in range(steps):
        state = oracle.sigmoid(p["A_logit"]) ** delta[:, t] * state + delta[:, t] * b[:, t] * m[:, t]
        read = c[:, t] * state
        y.append(read / np.sqrt((read**2).mean(-1, keepdims=True) + 1e-6) * p["output_norm/scale"])
    return oracle.dense(np.stack(y, 1) * z * oracle.sigmoid(z), p, "out_proj") - x


@pytest.mark.parametrize(
    "gates,temporal,spatial,scan",
    [("factored", 4, 3, "associative"), ("dense", 2, 0, "reference"), ("dense", 0, 3, "auto")],
)
def test_values_are_those_of_the_float64_loop(gates, temporal, spatial, scan):
    p, x = oracle.wave_parameters(shapes(gates, temporal, spatial)), oracle.wave_input().astype(float)
    with jax.enable_x64(True):
        y = laws.run(make(gates, temporal, spatial, scan=scan), laws.nest(p), jnp.asarray(x))
        np.testing.assert_allclose(y, no_fft(x, p, gates, temporal, spatial), atol=1e-9)


def test_gradients_are_slopes_of_the_loop_and_agree_between_scans():
    p = oracle.wave_parameters(shapes("factored", 4, 3, height=4, width=6))
    x = oracle.wave_input((1, 3, 4, 6, 8)).astype(float)
    with jax.enable_x64(True):
        loss = lambda params: jnp.sum(jnp.sin(make().apply({"params": params}, jnp.asarray(x))))
        laws.gradient_is_the_slope(loss, lambda p: np.sin(no_fft(x, p, "factored", 4, 3)).sum(), p, laws.nest)
        laws.agree(make, [{}, {"scan": "associative"}], laws.nest(p), jnp.asarray(x))


def test_the_imaginary_planes_are_never_computed(key):
    """The compiled scan carries one real state: nothing of the complex recurrence is left."""
    x = jnp.zeros((1, 4, 6, 7, 8))
    params = jax.eval_shape(make().init, key, x)
    text = jax.jit(make().apply).lower(params, x).as_text()
    loop = text[text.index("stablehlo.while") :].split(")", 1)[0]
    assert loop.count("%iterArg") <= 3 + 4, loop  # counter, state, result, and the stacked inputs


def test_later_frames_never_change_earlier_outputs(key):
    laws.causal(make(), key)


@pytest.mark.parametrize("temporal,rope_mode", [(4, "none"), (0, "none"), (0, "mrope")])
def test_a_still_image_is_the_clip_of_its_copies(temporal, rope_mode, key):
    laws.still(make(temporal=temporal, rope_mode=rope_mode), key)


def test_every_parameter_learns(key):
    laws.learns(make("dense"), key)


def test_bf16_is_near_float32(key):
    laws.bf16_is_near(make, key)
