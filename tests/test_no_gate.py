"""no_gate: a float64 loop, exact translation equivariance, causality, and its shortcuts."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest

from cssm.cells.core import CellOptions
from cssm.cells.no_gate import NoGate

SHAPES = {"kernel/kernel": (8, 3, 3)} | oracle.dense_shapes("output_proj", 8, 8)


def make(**changes):
    defaults = {"channels": 8, "kernel_size": 3, "scan": "reference", "backend": "fft"}
    return NoGate(CellOptions(**{**defaults, **changes}))


def no_gate(x, p, origin="origin"):
    k_hat = oracle.kernel_spectrum(p["kernel/kernel"], *x.shape[2:4], origin)
    x_hat, h = oracle.to_frequency(x), 0
    states = [h := k_hat * h + x_hat[:, t] for t in range(x.shape[1])]
    return oracle.dense(oracle.to_space(np.stack(states, 1), x.shape[3]), p, "output_proj") - x


@pytest.mark.parametrize(
    "scan,backend,origin", [("reference", "dft", "origin"), ("associative", "fft", "image_center")]
)
def test_values_are_those_of_the_float64_loop(scan, backend, origin):
    p, x = oracle.wave_parameters(SHAPES), oracle.wave_input().astype(float)
    with jax.enable_x64(True):
        y = laws.run(make(scan=scan, backend=backend, kernel_origin=origin), laws.nest(p), jnp.asarray(x))
        np.testing.assert_allclose(y, no_gate(x, p, origin), atol=1e-10)


def test_gradients_are_slopes_of_the_loop_and_agree_between_scans_and_backends():
    p, x = oracle.wave_parameters(SHAPES), oracle.wave_input((1, 3, 4, 6, 8)).astype(float)
    with jax.enable_x64(True):
        loss = lambda params: jnp.sum(jnp.sin(make().apply({"params": params}, jnp.asarray(x))))
        laws.gradient_is_the_slope(loss, lambda p: np.sin(no_gate(x, p)).sum(), p, laws.nest)
        laws.agree(make, [{}, {"scan": "associative", "backend": "dft"}], laws.nest(p), jnp.asarray(x))


def test_a_shifted_input_gives_the_shifted_output(key):
    x = jnp.asarray(oracle.wave_input())
    params = laws.init(make(), key, x)
    y, shifted = (laws.run(make(), params, z) for z in (x, jnp.roll(x, (3, 4), (2, 3))))
    np.testing.assert_allclose(shifted, np.roll(y, (3, 4), (2, 3)), atol=1e-5)


def test_later_frames_never_change_earlier_outputs(key):
    laws.causal(make(), key)


@pytest.mark.parametrize("rope_mode", ["none", "mrope"])
def test_a_still_image_is_the_clip_of_its_copies(rope_mode, key):
    laws.still(make(rope_mode=rope_mode), key)


@pytest.mark.parametrize("kernel_domain", ["spatial", "spectral"])
def test_every_parameter_learns(kernel_domain, key):
    laws.learns(make(kernel_domain=kernel_domain), key)


def test_bf16_is_near_float32(key):
    laws.bf16_is_near(make, key)
