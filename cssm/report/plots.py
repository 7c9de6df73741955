"""Curves of one run as PNG files, drawn from its events."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

SMOOTH_ABOVE = 40  # with more points than this the training curve is drawn faint, under its running mean
COLOURS = {"train": "#4477aa", "val": "#cc3311", "test": "#117733"}


def save_curves(events: list[dict[str, Any]], directory: Path, title: str) -> list[Path]:
    """Draw loss.png and accuracy.png, training and evaluation together; returns those that had a point."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for metric in ("loss", "accuracy"):
        curves = {"train": _points(events, metric, "step", None)}
        curves |= {split: _points(events, metric, "eval", split) for split in ("val", "test")}
        if any(curves.values()):
            paths.append(directory / f"{metric}.png")
            _figure(metric, curves, title).savefig(paths[-1])
    return paths


def _points(events: list[dict[str, Any]], metric: str, kind: str, split: str | None) -> list[tuple[int, float]]:
    return [
        (event["step"], float(event[metric]))
        for event in events
        if event["event"] == kind and event.get("split") == split and event.get(metric) is not None
    ]


def _figure(metric: str, curves: dict[str, list[tuple[int, float]]], title: str) -> Figure:
    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        if not points:
            continue
        steps, values = [step for step, _ in points], [value for _, value in points]
        colour = COLOURS[name]
        if name == "train" and len(points) > SMOOTH_ABOVE:
            axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
            axes.plot(steps, _running_mean(values), color=colour, linewidth=2, label="train (running mean)")
        elif name == "train":
            axes.plot(steps, values, color=colour, linewidth=2, marker=".", label="train")
        elif len(points) == 1:
            axes.plot(
                steps,
                values,
                color=colour,
                linestyle="",
                marker="*",
                markersize=12,
                label=_final(name, values),
            )
        else:
            axes.plot(steps, values, color=colour, linewidth=2, marker="o", markersize=4, label=_final(name, values))
    axes.set(title=f"{title}: {metric}", xlabel="step", ylabel=metric)
    if metric == "accuracy":
        axes.set_ylim(0, 1.02)
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _final(name: str, values: list[float]) -> str:
    return f"{name} ({'last ' if len(values) > 1 else ''}{values[-1]:.4g})"


def _running_mean(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential, corrected for its start; a non-finite value is left out of the mean."""
    means, total, mass = [], 0.0, 0.0
    for value in values:
        if abs(value) < float("inf"):
            total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        means.append(total / mass if mass else float("nan"))
    return means
