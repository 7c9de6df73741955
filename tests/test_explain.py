"""Saliency is the slope of the highest logit; states are what each cell gives at every step."""

import jax
import numpy as np
import pytest
from trained import make_run

from cssm import load_trained
from cssm.inference.explain import explained, with_states

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), np.uint8)
MODELS = {
    "simple": {"depth": 2, "seq_len": 4},
    "vit": {"arch": "vit", "depth": 2, "stem_stride": 2, "seq_len": 3, "cssm": "gdn", "delta_key_dim": 2},
    "shvit": {"arch": "shvit", "cssm": "gated", "dims": "4,8", "depths": "1,1", "embed_dim": None, "depth": None},
    "baseline": {"arch": "baseline", "num_heads": 2, "seq_len": None, "kernel_size": None, "stem_stride": 2},
}
CELLS = {"simple": {"cell_0": 4, "cell_1": 4}, "vit": {"block_0/mixer": 3, "block_1/mixer": 3}, "baseline": {}}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("vit", "shvit", "baseline")]


@pytest.fixture(scope="module", params=["simple", *SLOW])
def case(request, tmp_path_factory):
    trained = load_trained(make_run(tmp_path_factory.mktemp("explain") / "run", **MODELS[request.param]))
    logits, why = jax.jit(explained(trained))(trained.variables, IMAGES)
    return request.param, trained, np.asarray(logits), jax.tree.map(np.asarray, why)


def test_watching_changes_no_answer(case):
    _, trained, logits, _ = case
    np.testing.assert_allclose(logits, trained.logits(IMAGES), atol=1e-4)


def test_every_cell_tells_every_step(case):
    name, _, _, why = case
    steps = {cell: states.shape[1] for cell, states in why["states"].items()}
    assert steps == CELLS[name] if name in CELLS else steps and set(steps.values()) == {2}
    for states in why["states"].values():
        assert states.shape[0] == 3 and np.isfinite(states).all() and (np.ptp(states, axis=1) > 0).any()


def test_saliency_is_the_slope_of_the_highest_logit(case):
    """Along the pixel that matters most, by differences."""
    name, trained, logits, why = case
    assert why["saliency"].shape == (3, 8, 8)
    model = jax.jit(lambda x: with_states(trained, trained.variables, x)[0])
    for n in range(3):
        i, j = np.unravel_index(why["saliency"][n].argmax(), (8, 8))
        step = np.zeros((3, 8, 8, 1), np.float32)
        step[n, i, j] = 0.1
        ends = [float(model(IMAGES + sign * step)[n, logits[n].argmax()]) for sign in (1, -1)]
        assert abs(ends[0] - ends[1]) / 0.2 == pytest.approx(why["saliency"][n, i, j], rel=0.05), name


def test_the_last_state_is_what_the_cell_hands_on(case):
    """Of the recurrence: the root mean square over channels of what `capture_intermediates` sees of the last step."""
    name, trained, _, why = case
    if name == "baseline":
        assert why["states"] == {}
        return
    pixels = np.asarray(IMAGES, np.float32) / 127.5 - 1
    seen = jax.jit(lambda v, x: trained.model.apply(v, x, capture_intermediates=True)[1])(trained.variables, pixels)
    for cell, states in why["states"].items():
        place = seen["intermediates"]
        for key in cell.split("/"):
            place = place[key]
        handed = np.sqrt(np.mean(np.square(np.asarray(place["__call__"][0])), axis=-1))
        np.testing.assert_allclose(states[:, -1], handed[:, -1], rtol=1e-3, atol=1e-5)
