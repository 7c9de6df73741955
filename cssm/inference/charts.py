"""The confusion matrix and the reliability diagram of an evaluation as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

MOST_NUMBERED = 20  # classes up to which each cell tells its number
MOST_NAMED = 60  # and up to which the classes are named
LONGEST = 18  # letters of a name
INK, ACCENT = "#4477aa", "#cc3311"


def save_confusion(path: Path, table: Sequence[Sequence[int]], classes: Sequence[str], title: str) -> None:
    """Rows are true classes, columns predicted ones; colour is the share of the row, numbers are counts."""
    counts = np.asarray(table)
    n = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(max(4.5, 0.42 * n + 2.5), 16)
    figure = Figure(figsize=(side + 1, side), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    if n <= MOST_NUMBERED:
        for i, j in np.argwhere(counts):
            colour = "white" if shares[i, j] > 0.6 else "black"
            axes.text(j, i, f"{counts[i, j]:,}", ha="center", va="center", color=colour, fontsize=8)
    if n <= MOST_NAMED:
        names = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in classes]
        rotation = 90 if max(map(len, names)) > 2 else 0
        axes.set_xticks(range(n), names, fontsize=8, parse_math=False, rotation=rotation)
        axes.set_yticks(range(n), names, fontsize=8, parse_math=False)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title(title, fontsize=10, parse_math=False)
    figure.savefig(path)


def save_reliability(path: Path, calibration: Mapping[str, Any], title: str) -> None:
    """Accuracy over confidence, bin by bin, and below how many examples each bin holds."""
    rows = calibration["rows"]
    figure = Figure(figsize=(5.5, 6), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=[3, 1])
    full = [row for row in rows if row["count"]]
    left, width = [row["low"] for row in full], 1 / calibration["bins"]
    style = {"align": "edge", "width": width, "edgecolor": "white"}
    upper.bar(left, [row["accuracy"] for row in full], color=INK, label="accuracy", **style)
    upper.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1, label="calibrated")
    points = [row["confidence"] for row in full], [row["accuracy"] for row in full]
    upper.plot(*points, color=ACCENT, marker="o", markersize=4, linewidth=1, label="at the mean confidence")
    ece = "" if calibration["ece"] is None else f"\nECE {calibration['ece']:.4f}"
    upper.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    upper.set_title(f"{title}{ece}", fontsize=10, parse_math=False)
    upper.legend(loc="upper left", fontsize=8)
    lower.bar([row["low"] for row in rows], [row["count"] for row in rows], color=INK, **style)
    lower.set(xlabel="confidence", ylabel="examples")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path)
