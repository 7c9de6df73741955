"""Curves: training and evaluation in one labelled picture."""

import pytest
from matplotlib.figure import Figure

from cssm.report import plots

EVENTS = [
    {"event": "config"},
    *[{"event": "step", "step": step, "loss": 2 / step, "accuracy": 1 - 1 / step} for step in range(1, 31)],
    *[{"event": "eval", "split": "val", "step": step, "loss": 3 / step, "accuracy": 0.5} for step in (10, 20, 30)],
    {"event": "eval", "split": "test", "step": 30, "loss": 0.1, "accuracy": 0.9},
]


@pytest.fixture
def figures(monkeypatch):
    """The figures drawn, by file name."""
    drawn, save = {}, Figure.savefig

    def keep(figure, path, **options):
        drawn[path.name] = figure
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def curves(figure) -> dict[str, list[tuple[float, float]]]:
    (axes,) = figure.axes
    return {str(line.get_label()): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}


def test_both_curves_of_both_metrics_are_drawn(tmp_path, figures):
    paths = plots.save_curves(EVENTS, tmp_path / "plots", "my run")
    assert [path.name for path in paths] == ["loss.png", "accuracy.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        (axes,) = figures[path.name].axes
        assert axes.get_title() == f"my run: {path.stem}"
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", path.stem)
        assert len(axes.get_legend().get_texts()) == 3
    drawn = curves(figures["loss.png"])
    assert drawn["train"] == [(step, 2 / step) for step in range(1, 31)]
    assert drawn["val (last 0.1)"] == [(step, 3 / step) for step in (10, 20, 30)]
    assert drawn["test (0.1)"] == [(30, 0.1)]


def test_a_long_noisy_curve_is_smoothed(tmp_path, figures):
    noisy = [{"event": "step", "step": step, "loss": 1 + (-1) ** step} for step in range(1, 201)]
    plots.save_curves(noisy, tmp_path, "run")
    assert list(figures) == ["loss.png"]
    smooth = [value for _, value in curves(figures["loss.png"])["train (running mean)"]]
    assert smooth[0] == 0  # the mean of one value: no bias towards the start
    assert all(0.8 < value < 1.2 for value in smooth[50:])


@pytest.mark.parametrize("n", [3, 100])
def test_a_loss_that_is_not_finite_leaves_a_gap(tmp_path, figures, n):
    values = ["nan" if step % 3 == 2 else "inf" if step % 7 == 4 else 1.0 for step in range(1, n + 1)]
    events = [{"event": "step", "step": step, "loss": value} for step, value in enumerate(values, 1)]
    plots.save_curves(events, tmp_path, "run")
    (axes,) = figures["loss.png"].axes
    assert len(axes.get_lines()[0].get_xdata()) == n
    if n == 100:
        means = [value for _, value in curves(figures["loss.png"])["train (running mean)"]]
        assert means == pytest.approx([1.0] * n)


def test_without_points_nothing_is_drawn(tmp_path):
    assert plots.save_curves([{"event": "config"}], tmp_path / "plots", "run") == []
