"""The range test of learning rates: finds what is known to be there, suggests what works, and trains nothing."""

import json

import numpy as np
import pytest
from test_training import start

from cssm.config import Config, UserError
from cssm.find_lr import HIGHEST, LOWEST, STEPS, smoothed, suggestion

RATES = np.geomspace(LOWEST, HIGHEST, STEPS)


def test_the_mean_of_a_constant_is_that_constant_from_the_first_step_on():
    np.testing.assert_allclose(smoothed([3.0] * 5), 3.0)
    assert smoothed([1.0, 2.0]) == pytest.approx([1.0, (0.8 * 0.2 * 1 + 0.2 * 2) / (1 - 0.8**2)])


def test_the_suggestion_is_where_a_known_curve_falls_fastest():
    """A fall of logistic form in log rate around 1e-3, a rise from 1e-1 on; the running mean lags by a few steps."""
    losses = 2.3 - 2 / (1 + (1e-3 / RATES) ** 2) + (RATES / 0.3) ** 2
    best, lowest = suggestion(RATES, losses)
    assert 1e-3 <= best <= 1e-3 * (RATES[1] / RATES[0]) ** 6
    assert best < lowest < 0.3


@pytest.mark.parametrize("seed", range(20))
def test_the_noise_of_small_batches_at_rates_that_change_nothing_suggests_none_of_those(seed):
    noise = 0.2 * np.random.default_rng(seed).standard_normal(STEPS)
    best, _ = suggestion(RATES, 1.4 - 1.2 / (1 + 1e-3 / RATES) + (RATES / 0.3) ** 2 + noise)
    assert 1e-4 < best < 1e-1


@pytest.mark.parametrize("losses", [np.full(STEPS, 2.3), np.linspace(1, 9, STEPS), np.array([2.0, 3.0]), np.array([])])
def test_a_loss_that_never_falls_suggests_nothing(losses):
    with pytest.raises(UserError, match="does not fall at any rate"):
        suggestion(RATES[: len(losses)], list(losses))


def test_what_is_found_is_drawn_and_kept_and_nothing_is_trained(tmp_path, capsys):
    found = start(tmp_path, "test", find_lr=True, quiet=True)
    assert sorted(path.name for path in (tmp_path / "test").iterdir()) == ["find_lr.json", "find_lr.png"]
    kept = json.loads((tmp_path / "test" / "find_lr.json").read_text())
    assert kept["lr"] == found["lr"] and 1e-5 < found["lr"] < found["lowest_at"] <= HIGHEST
    assert len(kept["rates"]) == len(kept["losses"]) <= STEPS
    assert kept["rates"] == pytest.approx(RATES[: len(kept["rates"])])
    assert f"suggestion: --lr {found['lr']:g}" in capsys.readouterr().out
    assert (tmp_path / "test" / "find_lr.png").read_bytes().startswith(b"\x89PNG")
    # A rule that multiplies --lr is taken out of the suggestion again.
    scaled = start(tmp_path, "scaled", find_lr=True, lr_scale="linear", base_batch_size=2)
    assert scaled["lr"] == pytest.approx(found["lr"] / 4, rel=0.05)


@pytest.mark.parametrize("other", [{"resume": "auto"}, {"dry_run": True}])
def test_it_is_for_a_run_that_begins(other):
    with pytest.raises(UserError, match="leave one of the two out"):
        Config(find_lr=True, **other)
