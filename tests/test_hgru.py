"""hgru: a float64 recurrence with its matrices formed, and the laws of every cell."""

import laws
import oracle
import pytest
import recurrence

from cssm.cells.core import CellOptions
from cssm.cells.hgru import GATES, HGRU


def make(readout="xy", **changes):
    defaults = {"channels": 4, "kernel_size": 3, "scan": "reference", "backend": "fft"}
    return HGRU(CellOptions(**{**defaults, **changes}), readout)


def hgru(x, p, readout="xy", origin="origin"):
    height, width = x.shape[2:4]
    g, u = recurrence.gates(x, p, GATES), recurrence.inputs(x, p, 2)
    k_exc, k_inh = (oracle.kernel_spectrum(p[f"{name}/kernel"], height, width, origin) for name in ("k_exc", "k_inh"))
    matrix = [[g["decay_x"], -g["mu_inhib"] * k_inh], [g["mu_excit"] * k_exc, g["decay_y"]]]
    states = recurrence.scan(matrix, [g["B"] * u[0], g["D"] * u[1]])
    maps = [oracle.to_space(g["C"] * states["xy".index(name)], width) for name in readout]
    return recurrence.project(maps, p) if len(maps) > 1 else maps[0]


@pytest.mark.parametrize(
    "readout,gate_type,scan,backend,origin",
    [
        ("xy", "factored", "reference", "fft", "origin"),
        pytest.param("xy", "dense", "associative", "dft", "image_center", marks=pytest.mark.slow),
        pytest.param("y", "factored", "associative", "fft", "origin", marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_those_of_the_float64_recurrence(readout, gate_type, scan, backend, origin):
    cell = make(readout, gate_type=gate_type, scan=scan, backend=backend, kernel_origin=origin)
    recurrence.matches(cell, lambda x, p: hgru(x, p, readout, origin))


def test_later_frames_never_change_earlier_outputs(key):
    laws.causal(make(), key, recurrence.SHAPE)


def test_a_still_image_is_the_clip_of_its_copies(key):
    laws.still(make(), key, recurrence.SHAPE)


def test_rotary_codes_turn_the_input():
    recurrence.turns_its_input(make)


def test_every_parameter_learns(key):
    laws.learns(make("x", kernel_domain="spectral"), key, recurrence.SHAPE)


def test_bf16_is_near(key):
    laws.bf16_is_near(make, key, recurrence.SHAPE)


def test_shifting_the_input_shifts_the_output():
    recurrence.equivariant(make())
