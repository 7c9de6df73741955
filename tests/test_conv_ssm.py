"""conv_ssm: a float64 loop over time, equivariance away from the border, causality, and its shortcuts."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest

from cssm.cells.conv_ssm import ConvSSM
from cssm.cells.core import CellOptions

SHAPES = {"A_logit": (8,), "spatial_conv/kernel": (3, 3, 1, 8), "spatial_conv/bias": (8,)}
for NAME in ("B_proj", "C_proj", "output_proj"):
    SHAPES |= oracle.dense_shapes(NAME, 8, 8)


def make(**changes):
    return ConvSSM(CellOptions(**{"channels": 8, "kernel_size": 3, "scan": "reference", **changes}))


def conv_ssm(x, p):
    height, width = x.shape[2:4]
    pad, k = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0))), p["spatial_conv/kernel"]
    taps = [k[a, b, 0] * pad[:, :, a : a + height, b : b + width] for a in range(3) for b in range(3)]
    drive = oracle.dense(x, p, "B_proj") * (sum(taps) + p["spatial_conv/bias"])
    state, y = 0, []
    for t in range(x.shape[1]):
        state = oracle.sigmoid(p["A_logit"]) * state + drive[:, t]
        y.append(oracle.dense(state * oracle.dense(x[:, t], p, "C_proj"), p, "output_proj") - x[:, t])
    return np.stack(y, 1)


@pytest.mark.parametrize("scan", ["reference", "associative"])
def test_values_are_those_of_the_float64_loop(scan):
    p, x = oracle.wave_parameters(SHAPES), oracle.wave_input().astype(float)
    with jax.enable_x64(True):
        y = laws.run(make(scan=scan), laws.nest(p), jnp.asarray(x))
        np.testing.assert_allclose(y, conv_ssm(x, p), atol=1e-10)


def test_gradients_are_slopes_of_the_loop_and_agree_between_scans():
    p, x = oracle.wave_parameters(SHAPES), oracle.wave_input((1, 3, 4, 6, 8)).astype(float)
    with jax.enable_x64(True):
        loss = lambda params: jnp.sum(jnp.sin(make().apply({"params": params}, jnp.asarray(x))))
        laws.gradient_is_the_slope(loss, lambda p: np.sin(conv_ssm(x, p)).sum(), p, laws.nest)
        laws.agree(make, [{}, {"scan": "associative"}], laws.nest(p), jnp.asarray(x))


def test_a_shifted_input_gives_the_shifted_output_away_from_the_border(key):
    x = jnp.asarray(oracle.wave_input())
    params = laws.init(make(), key, x)
    y, shifted = (laws.run(make(), params, z) for z in (x, jnp.roll(x, 2, 3)))
    np.testing.assert_allclose(shifted[:, :, :, 3:-1], np.roll(y, 2, 3)[:, :, :, 3:-1], atol=1e-5)


def test_later_frames_never_change_earlier_outputs(key):
    laws.causal(make(), key)


@pytest.mark.parametrize("rope_mode", ["none", "mrope"])
def test_a_still_image_is_the_clip_of_its_copies(rope_mode, key):
    laws.still(make(rope_mode=rope_mode), key)


def test_every_parameter_learns(key):
    laws.learns(make(), key)


def test_bf16_is_near_float32(key):
    laws.bf16_is_near(make, key)
