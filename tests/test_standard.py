"""standard: a float64 recurrence, and the laws of every cell."""

import jax
import laws
import numpy as np
import oracle
import pytest
import recurrence

from cssm.cells.core import CellOptions
from cssm.cells.standard import Standard


def make(transition="kernel", **changes):
    defaults = {"channels": 4, "kernel_size": 3, "scan": "reference", "backend": "fft"}
    return Standard(CellOptions(**{**defaults, **changes}), transition)


def standard(x, p, origin="origin"):
    if "decay" in p:
        a, states = 0.1 + 0.89 * oracle.sigmoid(p["decay"]), [x[:, 0]]
        for t in range(1, x.shape[1]):
            states.append(a * states[-1] + x[:, t])
        return np.stack(states, 1)
    k = oracle.kernel_spectrum(p["kernel/kernel"], *x.shape[2:4], origin)
    (state,) = recurrence.scan([[k]], [oracle.to_frequency(x)])
    return oracle.to_space(state, x.shape[3])


@pytest.mark.parametrize(
    "transition,scan,backend,origin",
    [
        ("kernel", "reference", "fft", "origin"),
        ("kernel", "associative", "dft", "image_center"),
        ("scalar", "reference", "fft", "origin"),
        ("scalar", "associative", "fft", "origin"),
    ],
)
def test_values_and_gradients_are_those_of_the_float64_recurrence(transition, scan, backend, origin):
    cell = make(transition, scan=scan, backend=backend, kernel_origin=origin)
    recurrence.matches(cell, lambda x, p: standard(x, p, origin))


@pytest.mark.parametrize("transition", ["kernel", "scalar"])
def test_later_frames_never_change_earlier_outputs(transition, key):
    laws.causal(make(transition), key, recurrence.SHAPE)


@pytest.mark.parametrize("transition", ["kernel", "scalar"])
def test_a_still_image_is_the_clip_of_its_copies(transition, key):
    laws.still(make(transition), key, recurrence.SHAPE)


def test_rotary_codes_turn_the_input():
    recurrence.turns_its_input(make)


def test_every_parameter_learns(key):
    laws.learns(make(kernel_domain="spectral"), key, recurrence.SHAPE)


@pytest.mark.parametrize("transition", ["kernel", "scalar"])
def test_bf16_is_near(transition, key):
    laws.bf16_is_near(lambda **changes: make(transition, **changes), key, recurrence.SHAPE)


def test_shifting_the_input_shifts_the_output():
    recurrence.equivariant(make())


def test_one_step_returns_the_input(key):
    x = oracle.wave_input((2, 1, 5, 6, 4))
    cell = make()
    np.testing.assert_allclose(cell.apply(cell.init(key, x), x), x, atol=1e-5)


def test_the_scalar_decay_starts_at_nine_tenths(key):
    params = make("scalar").init(key, oracle.wave_input(recurrence.SHAPE))["params"]
    np.testing.assert_allclose(0.1 + 0.89 * jax.nn.sigmoid(params["decay"]), 0.9, rtol=1e-6)
