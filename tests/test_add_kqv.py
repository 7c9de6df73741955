"""add_kqv: a float64 recurrence with its matrices formed for every chain, and the laws of every cell."""

import laws
import numpy as np
import oracle
import pytest
import recurrence

from cssm.cells.add_kqv import AddKQV
from cssm.cells.core import CellOptions


def make(chain="qkv", **changes):
    defaults = {"channels": 4, "kernel_size": 3, "scan": "reference", "backend": "fft"}
    return AddKQV(CellOptions(**{**defaults, **changes}), chain)


def add_kqv(x, p, chain):
    height, width = x.shape[2:4]
    k = oracle.kernel_spectrum(p["kernel/kernel"], height, width, "origin")
    between = {"q": "", "qk": "w", "qv": "g", "qkv": "wg"}[chain]
    g = recurrence.gates(x, p, [*(f"decay_{s}" for s in chain), *between, *(f"B_{s}" for s in chain), "C"])
    rows = {
        "q": {"q": g["decay_q"] * k},
        "k": {"q": g.get("w", 0) * k, "k": g.get("decay_k", 0) * k},
        "v": {"q": g.get("g", 0), "k": g.get("g", 0), "v": g.get("decay_v", 0)},
    }
    u = recurrence.inputs(x, p, len(chain))
    states = recurrence.scan(
        [[rows[to].get(origin, 0) for origin in chain] for to in chain],
        [g[f"B_{s}"] * part for s, part in zip(chain, u, strict=True)],
    )
    return oracle.dense(oracle.to_space(g["C"] * states[-1], width), p, "output_proj")


@pytest.mark.parametrize(
    "chain,gate_type,scan,backend",
    [
        ("qkv", "factored", "reference", "fft"),
        pytest.param("qv", "dense", "associative", "dft", marks=pytest.mark.slow),
        ("qk", "factored", "reference", "fft"),
        pytest.param("q", "factored", "associative", "fft", marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_those_of_the_float64_recurrence(chain, gate_type, scan, backend):
    cell = make(chain, gate_type=gate_type, scan=scan, backend=backend)
    recurrence.matches(cell, lambda x, p: add_kqv(x, p, chain))


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
    recurrence.equivariant(make())


def test_what_q_receives_reaches_v_at_the_next_step(key):
    """In a chain of three, V gets Q directly and through K: two kernels do nothing before the third step."""
    x = np.float32(oracle.wave_input((2, 3, 5, 6, 4)))
    params = laws.init(make(), key, x)
    without = {**params, "kernel": {"kernel": 0 * params["kernel"]["kernel"]}}
    want, got = laws.run(make(), params, x), laws.run(make(), without, x)
    np.testing.assert_array_equal(got[:, :2], want[:, :2])
    assert np.abs(got[:, 2] - want[:, 2]).max() > 1e-4


def test_an_unknown_chain_is_refused(key):
    with pytest.raises(ValueError, match="'kv' is not one of qkv, qk, qv, q"):
        make("kv").init(key, oracle.wave_input(recurrence.SHAPE))
