"""Curves: of one run as PNG files, drawn from its events; and any as SVG that a page takes in."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

SMOOTH_ABOVE = 40  # with more points than this the training curve is drawn faint, under its running mean
COLOURS = {"train": "#4477aa", "val": "#cc3311", "test": "#117733"}
# Of other curves, in turn; they tell themselves apart on white, on black, and to those who see fewer colours.
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999")
SHARES = ("accuracy",)  # from 0 to 1

Points = list[tuple[float, float]]


def save_curves(events: list[dict[str, Any]], directory: Path, title: str) -> list[Path]:
    """Draw loss.png and accuracy.png, training and evaluation together; returns those that had a point."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for metric in ("loss", "accuracy"):
        curves = curves_of(events, metric)
        if any(curves.values()):
            paths.append(directory / f"{metric}.png")
            draw(metric, curves, f"{title}: {metric}").savefig(paths[-1])
    return paths


def curves_of(events: Sequence[dict[str, Any]], metric: str) -> dict[str, Points]:
    """The points (step, value) of a metric in training and on each split; empty where there is none."""
    splits = {split: _points(events, metric, "eval", split) for split in ("val", "test")}
    return {"train": _points(events, metric, "step", None), **splits}


def draw_range(rates: Sequence[float], losses: Sequence[float], means: Sequence[float], suggested: float) -> Figure:
    """The losses of a learning-rate range test over the rates, and their running mean, with the suggestion."""
    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(rates, losses, color=COLOURS["train"], alpha=0.3, linewidth=1)
    axes.plot(rates, means, color=COLOURS["train"], linewidth=2, label="loss (running mean)")
    axes.axvline(suggested, color=COLOURS["val"], linestyle="--", label=f"suggestion {suggested:g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss", ylim=(0.9 * min(means), 1.2 * means[0]))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def svg(figure: Figure) -> str:
    """The figure as an SVG element for a page: its black is the page's colour of text, its ground is the page's, and it
    refers to nothing outside. A page may set --train, --val and --test to colours of its own.
    """
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cssm"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text)  # the page says how wide it is
    text = re.sub(r' id="[\w.]+_\d+"', "", text)  # several figures on a page would share them
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name}, {colour})")
    return text.replace("#000000", "currentColor").strip()


def _points(events: Sequence[dict[str, Any]], metric: str, kind: str, split: str | None) -> Points:
    return [
        (event["step"], float(event[metric]))
        for event in events
        if event["event"] == kind and event.get("split") == split and event.get(metric) is not None
    ]


def draw(metric: str, curves: Mapping[str, Points], title: str = "") -> Figure:
    """All curves that have points in one picture, by step; a single point is a star. Without a title, for a page."""
    figure = Figure(figsize=(7.5, 4.5) if title else (6, 3.6), dpi=120, layout="constrained" if title else None)
    axes = figure.add_subplot()
    if not title:  # a page has many, and a layout that is worked out takes as long as all else
        figure.subplots_adjust(left=0.14, right=0.98, bottom=0.14, top=0.97)
    for number, (name, points) in enumerate(curves.items()):
        if not points:
            continue
        steps, values = [step for step, _ in points], [value for _, value in points]
        name = f" {name}" if name.startswith("_") else name  # matplotlib would leave it out of the legend
        colour = COLOURS.get(name, PALETTE[number % len(PALETTE)])
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
    axes.set(title=title, xlabel="step", ylabel=metric.replace("_", " "))
    if metric in SHARES:
        axes.set_ylim(0, 1.02)
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    legend = axes.legend(framealpha=0)
    for text in (axes.title, *legend.get_texts()):
        text.set_parse_math(False)  # a dollar in a name is one
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
