"""mult_transformer: a float64 recurrence with its matrices formed, its norm, and the laws of every cell."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest
import recurrence

from cssm.cells import core
from cssm.cells.core import CellOptions
from cssm.cells.mult_transformer import GATES, MultTransformer
from cssm.spectral import Spectrum


def make(spectral_clip=True, **changes):
    defaults = {"channels": 4, "kernel_size": 3, "scan": "reference", "backend": "fft"}
    return MultTransformer(CellOptions(**{**defaults, **changes}), spectral_clip)


def mult_transformer(x, p, spectral_clip=True):
    height, width = x.shape[2:4]
    kernels = [oracle.kernel_spectrum(p[f"k_{s}/kernel"], height, width, "origin") for s in "qkv"]
    if not spectral_clip:
        kernels = [k / (0.999 - abs(k)) for k in kernels]
    g = recurrence.gates(x, p, GATES)
    matrix = [
        [g["decay_q"] * kernels[0], g["k_to_q"], 0],
        [g["q_to_k"], g["decay_k"] * kernels[1], 0],
        [g["q_to_v"], g["k_to_v"], g["decay_v"] * kernels[2]],
    ]
    _, _, v = recurrence.scan(matrix, recurrence.inputs(x, p, 3))
    return oracle.dense(oracle.to_space(recurrence.standardise(v, p, "norm_v"), width), p, "output_proj")


@pytest.mark.parametrize(
    "spectral_clip,gate_type,scan,backend",
    [
        (False, "factored", "reference", "fft"),
        pytest.param(True, "dense", "associative", "dft", marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_those_of_the_float64_recurrence(spectral_clip, gate_type, scan, backend):
    cell = make(spectral_clip, gate_type=gate_type, scan=scan, backend=backend)
    recurrence.matches(cell, lambda x, p: mult_transformer(x, p, spectral_clip))


def test_later_frames_never_change_earlier_outputs(key):
    laws.causal(make(), key, recurrence.SHAPE)


def test_a_still_image_is_the_clip_of_its_copies(key):
    laws.still(make(), key, recurrence.SHAPE)


def test_rotary_codes_turn_the_input():
    recurrence.turns_its_input(make)


def test_every_parameter_learns(key):
    laws.learns(make(kernel_domain="spectral"), key, recurrence.SHAPE)


def test_bf16_is_near(key):
    laws.bf16_is_near(make, key, recurrence.SHAPE)


def test_shifting_the_input_shifts_the_output():
    """Also with a scale other than one: the norm turns no phase."""
    recurrence.equivariant(make())


def norm(z, scale=1.0):
    params = {"scale": jnp.full(3, scale), "bias": jnp.zeros(3)}
    return core.LogMagnitudeNorm().apply({"params": params}, Spectrum(*z), 16)


def test_the_norm_is_blind_to_loudness_and_keeps_phases():
    z = np.random.default_rng(0).normal(size=(2, 1, 1, 12, 3)).astype(np.float32)
    want = norm(z, 0.7)
    got = norm(1e25 * z, 0.7)  # whose square is not a number of float32
    np.testing.assert_allclose(got, want, rtol=1e-3)
    np.testing.assert_allclose(np.arctan2(*want), np.arctan2(*z), rtol=1e-5)
    log = np.log(np.hypot(*want) / 4)
    np.testing.assert_allclose(log.mean(axis=2), 0.0, atol=1e-5)
    np.testing.assert_allclose(log.std(axis=2), 0.7, rtol=1e-4)


def test_the_norm_leaves_silence_silent_and_its_gradient_finite():
    silent = jnp.zeros((2, 1, 1, 12, 3))
    np.testing.assert_array_equal(norm(silent), silent)
    one_missing = jnp.ones((2, 1, 1, 12, 3)).at[:, :, :, 4].set(0.0)
    for z in (silent, one_missing):
        assert np.isfinite(jax.grad(lambda z: jnp.sum(norm(z).re ** 2))(z)).all()
