"""opponent: a float64 recurrence with its matrices formed, and the laws of every cell."""

import jax
import laws
import numpy as np
import oracle
import pytest
import recurrence

from cssm.cells.core import CellOptions
from cssm.cells.opponent import GATES, Opponent

SQUASH = {
    "sigmoid": oracle.sigmoid,
    "softplus_clamped": lambda raw: np.minimum(np.logaddexp(0, raw), 2),
    "tanh_scaled": lambda raw: (np.tanh(raw) + 1) / 2,
}


def make(readout="xy", activation="sigmoid", rank=0, **changes):
    defaults = {"channels": 4, "kernel_size": 3, "scan": "reference", "backend": "fft"}
    return Opponent(CellOptions(**{**defaults, **changes}), readout, activation, rank)


def gelu(v):
    return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))


def opponent(x, p, readout="xy", activation="sigmoid", factored=True):
    batch, steps, height, width, channels = x.shape
    columns, context = width // 2 + 1, recurrence.context(x)
    if "gates_hidden/kernel" in p:
        context = gelu(oracle.dense(context, p, "gates_hidden"))
    raw = oracle.dense(context, p, "gates").reshape(batch, steps, 6, -1)
    g = {}
    for i, name in enumerate(GATES):
        if factored:
            row, column, channel = np.split(raw[:, :, i], (height, height + columns), axis=-1)
            full = channel[..., None, None] + row[..., None, :, None] + column[..., None, None, :]
        else:
            full = np.moveaxis(raw[:, :, i].reshape(batch, steps, height, columns, channels), -1, 2)
        g[name] = (oracle.sigmoid if name in "BC" else SQUASH[activation])(full)
    decay = 0.1 + 0.89 * oracle.sigmoid(p["decay"])[:, None, None]
    k_exc, k_inh = (oracle.kernel_spectrum(p[f"{name}/kernel"], height, width, "origin") for name in ("k_exc", "k_inh"))
    matrix = [[decay * g["alpha"], -g["mu"] * k_inh], [g["gamma"] * k_exc, decay * g["delta"]]]
    u = oracle.to_frequency(x)
    states = recurrence.scan(matrix, [g["B"] * u, 0 * u])
    maps = [oracle.to_space(g["C"] * states["xy".index(name)], width) for name in readout]
    return recurrence.project(maps, p) if len(maps) > 1 else maps[0]


@pytest.mark.parametrize(
    "readout,activation,rank,gate_type,scan,backend",
    [
        ("xy", "sigmoid", 0, "factored", "reference", "fft"),
        pytest.param("y", "tanh_scaled", 0, "dense", "associative", "dft", marks=pytest.mark.slow),
        ("x", "softplus_clamped", 3, "dense", "reference", "fft"),
    ],
)
def test_values_and_gradients_are_those_of_the_float64_recurrence(readout, activation, rank, gate_type, scan, backend):
    cell = make(readout, activation, rank, gate_type=gate_type, scan=scan, backend=backend)
    recurrence.matches(cell, lambda x, p: opponent(x, p, readout, activation, gate_type == "factored"))


def test_later_frames_never_change_earlier_outputs(key):
    laws.causal(make(), key, recurrence.SHAPE)


def test_a_still_image_is_the_clip_of_its_copies(key):
    laws.still(make(), key, recurrence.SHAPE)


def test_rotary_codes_turn_the_input():
    recurrence.turns_its_input(make)


def test_every_parameter_learns(key):
    laws.learns(make("y", kernel_domain="spectral"), key, recurrence.SHAPE)


def test_bf16_is_near(key):
    laws.bf16_is_near(make, key, recurrence.SHAPE)


def test_shifting_the_input_shifts_the_output():
    recurrence.equivariant(make())


def test_decay_starts_at_nine_tenths(key):
    params = make().init(key, oracle.wave_input(recurrence.SHAPE))["params"]
    np.testing.assert_allclose(0.1 + 0.89 * jax.nn.sigmoid(params["decay"]), 0.9, rtol=1e-6)


def test_a_gate_rank_with_factored_gates_is_refused(key):
    with pytest.raises(ValueError, match="gate_rank 3 applies to dense gates"):
        make(rank=3).init(key, oracle.wave_input(recurrence.SHAPE))
