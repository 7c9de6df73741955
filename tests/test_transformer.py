"""transformer: a float64 recurrence with its matrices formed for every ablation, and the laws of every cell."""

import laws
import oracle
import pytest
import recurrence

from cssm.cells.core import CellOptions
from cssm.cells.transformer import Transformer

COMMON = {"channels": 4, "kernel_size": 3, "scan": "reference", "backend": "fft"}


def make(ablations=(), **changes):
    return Transformer(CellOptions(**{**COMMON, **changes}), **dict(ablations))


def transformer(x, p, readout_state="qka", asymmetric_qk=False, feedback=True, k_state=True, **others):
    height, width = x.shape[2:4]
    k = oracle.kernel_spectrum(p["kernel/kernel"], height, width, "origin")
    if not others.get("spectral_clip", True):
        k = k / (0.999 - abs(k))
    names = ["decay_q", "decay_k", "decay_a"]
    names += ["w_k_to_q", "w_q_to_k"] if asymmetric_qk else ["w_qk"]
    names += ["alpha", "gamma", "B_q", "B_k", "B_a", "C"]
    names = [n for n in names if not (not feedback and n == "alpha")]
    names = [n for n in names if not (not k_state and n in ("decay_k", "w_qk", "B_k"))]
    g = recurrence.gates(x, p, names)
    to_q, to_k = g.get("w_k_to_q", g.get("w_qk", 0)), g.get("w_q_to_k", g.get("w_qk", 0))
    matrix = [
        [g["decay_q"], to_q * k, g.get("alpha", 0) * k],
        [to_k * k, g.get("decay_k", 0), 0],
        [g["gamma"], g["gamma"], g["decay_a"]],
    ]
    present = "qka" if k_state else "qa"
    u = recurrence.inputs(x, p, len(present))
    if not k_state:
        u.insert(1, 0 * u[0])
    states = recurrence.scan(matrix, [g.get(f"B_{s}", 0) * part for s, part in zip("qka", u, strict=True)])
    read = [(name, states["qka".index(name)]) for name in readout_state]
    if others.get("use_layernorm"):
        read = [(name, recurrence.standardise(s, p, f"norm_{name}")) for name, s in read]
    maps = [oracle.to_space(g["C"] * s, width) for _, s in read]
    return recurrence.project(maps, p) if len(maps) > 1 else maps[0]


@pytest.mark.parametrize(
    "ablations,gate_type,scan,backend",
    [
        ({}, "factored", "reference", "fft"),
        pytest.param(
            {"asymmetric_qk": True, "readout_state": "k"}, "dense", "associative", "dft", marks=pytest.mark.slow
        ),
        ({"feedback": False, "spectral_clip": False, "readout_state": "ka"}, "factored", "reference", "fft"),
        ({"k_state": False, "readout_state": "q"}, "factored", "reference", "fft"),
        ({"use_layernorm": True, "readout_state": "qa"}, "factored", "reference", "fft"),
    ],
)
def test_values_and_gradients_are_those_of_the_float64_recurrence(ablations, gate_type, scan, backend):
    cell = make(ablations, gate_type=gate_type, scan=scan, backend=backend)
    recurrence.matches(cell, lambda x, p: transformer(x, p, **ablations))


def test_later_frames_never_change_earlier_outputs(key):
    laws.causal(make({"use_layernorm": True}), key, recurrence.SHAPE)


def test_a_still_image_is_the_clip_of_its_copies(key):
    laws.still(make(), key, recurrence.SHAPE)


def test_rotary_codes_turn_the_input():
    recurrence.turns_its_input(make)


def test_every_parameter_learns(key):
    laws.learns(make({"readout_state": "q"}, kernel_domain="spectral"), key, recurrence.SHAPE)


@pytest.mark.parametrize("norm", [False, True])
def test_bf16_is_near(norm, key):
    laws.bf16_is_near(lambda **changes: make({"use_layernorm": norm}, **changes), key, recurrence.SHAPE)


def test_shifting_the_input_shifts_the_output():
    recurrence.equivariant(make({"use_layernorm": True}))


@pytest.mark.parametrize(
    "ablations,sentence",
    [
        ({"k_state": False, "asymmetric_qk": True}, "asymmetric_qk has nothing to act on"),
        ({"k_state": False, "feedback": False}, "without feedback there is no kernel"),
        ({"k_state": False, "readout_state": "qka"}, "'qka' is not made of the states q, a"),
        ({"readout_state": "x"}, "'x' is not made of the states q, k, a"),
        ({"feedback": False, "readout_state": "qk"}, "nothing of A reaches"),
    ],
)
def test_what_would_leave_dead_parameters_is_refused(ablations, sentence, key):
    with pytest.raises(ValueError, match=sentence):
        make(ablations).init(key, oracle.wave_input(recurrence.SHAPE))
