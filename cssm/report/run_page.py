"""report.html: one run on one page, from its events and from what it answered last."""

import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from cssm import __version__
from cssm.report import page, plots
from cssm.report.examined import Examined, Sample
from cssm.report.terminal import device_lines, in_words, run_lines

# What is drawn, and what it says; the first two of training and evaluation.
CURVES = {
    "loss": "loss",
    "accuracy": "accuracy",
    "learning_rate": "learning rate",
    "grad_norm": "norm of the gradient, before clipping",
    "images_per_s": "throughput: images per second",
    "step_ms": "time of a step, milliseconds, waiting included",
    "data_wait_ms": "waiting for data, milliseconds a step",
}
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# A matrix of more classes is a picture, with the pairs that are confused most beside it.
MOST_CLASSES = 20
MOST_PAIRS = 20
SIDE = 96  # of a sample, in pixels


def run_page(name: str, events: Sequence[dict[str, Any]], ending: str, examined: Examined | None) -> str:
    """The page of the run `name`. events: as events.read_events gives them; ending: how it ended, in words."""
    facts: dict[str, Any] = next((event for event in reversed(events) if event["event"] == "config"), {})
    last = {(e["event"], e.get("split")): e for e in events}
    numbers = [
        (f"{split} accuracy", f"{float(e['accuracy']):.4f}") for (kind, split), e in last.items() if kind == "eval"
    ]
    if step := last.get(("step", None)):
        numbers += [("step", f"{step['step']:,} of {facts.get('total_steps', step['step']):,}")]
        numbers += [(key.replace("_per_s", " per s"), f"{step[key]:,.0f}") for key in ("images_per_s",) if key in step]
    parts = [page.element("p", ending, class_="faint"), page.tiles(numbers), _curves(events)]
    if examined is not None:
        parts += [_confusion(examined), _samples(examined)]
    summary = last.get(("summary", None), {})
    told = {key: value for key, value in summary.items() if key not in ("event", "schema") and value is not None}
    if told:
        lines = [in_words(key, value).partition(": ") for key, value in told.items()]
        parts.append(page.section("Summary", page.pairs({key: value for key, _, value in lines})))
    if facts:
        lines = [*run_lines(facts), *device_lines(facts["device_table"])]
        parts.append(page.section("Model, data, devices", *(page.element("p", line) for line in lines)))
    parts.append(page.section("Environment", page.pairs(environment())))
    settings = {key: "" if value is None else value for key, value in facts.get("config", {}).items()}
    parts.append(page.section("Configuration", page.folded(f"{len(settings)} settings", page.pairs(settings))))
    return page.document(name, *parts)


def environment() -> dict[str, str]:
    """Names and versions of what a run is computed with."""
    found = {"cssm": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # there, but not installed by a package
            found[name] = "unknown"
    return {**found, "command": " ".join(sys.argv)}


def _curves(events: Sequence[dict[str, Any]]) -> page.Markup:
    pictures = {}
    for metric, words in CURVES.items():
        curves = plots.curves_of(events, metric)
        if any(curves.values()):
            pictures[words] = plots.svg(plots.draw(metric, curves))
    if not pictures:
        return page.section("Curves", page.element("p", "no step was taken", class_="faint"))
    return page.section("Curves", page.charts(pictures))


def _confusion(examined: Examined) -> page.Markup:
    counts, names = examined.confusion, examined.classes
    total, right = int(counts.sum()), int(np.trace(counts))
    said = f"{examined.split} split at step {examined.step:,}: {right:,} of {total:,} right. "
    said += "Rows are labels, columns answers."
    title, words = "Confusion matrix", page.element("p", said, class_="faint")
    if len(names) <= MOST_CLASSES:
        return page.section(title, words, _matrix(counts, names))
    return page.section(
        title, words, _heat(counts), page.table([("label", "answer", "how often"), *_most_confused(examined)])
    )


def _matrix(counts: np.ndarray, names: Sequence[str]) -> page.Markup:
    """Every count, the darker the larger its share of its row."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows = [
        page.element(
            "tr", page.element("th", ""), *(page.element("th", name) for name in names), page.element("th", "right")
        )
    ]
    for i, name in enumerate(names):
        cells = (
            page.element(
                "td",
                f"{counts[i, j]:,}" if counts[i, j] else "",
                style=f"background: rgba(var(--heat), {shares[i, j] * 0.7:.3f})",
            )
            for j in range(len(names))
        )
        known = f"{shares[i, i]:.1%}" if counts[i].sum() else "-"
        rows.append(page.element("tr", page.element("th", name), *cells, page.element("td", known)))
    return page.element("div", page.element("table", *rows, class_="matrix"), class_="wide")


def _heat(counts: np.ndarray) -> page.Markup:
    image = heat_png(counts)
    return page.picture(image, "confusion matrix, dark where there are many", class_="matrix-picture")


def heat_png(counts: np.ndarray) -> bytes:
    """The matrix as a picture, a pixel a cell (at least 256 in all), white to blue by the share of the row."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    pixels = 255 - shares[..., None] ** 0.5 * (255 - np.array([33, 80, 140]))
    scale = -(-256 // len(counts))
    return page.png(np.kron(pixels, np.ones((scale, scale, 1))).astype(np.uint8))


def _most_confused(examined: Examined) -> list[tuple[Any, ...]]:
    wrong = examined.confusion - np.diag(np.diag(examined.confusion))
    order = np.argsort(wrong, axis=None, kind="stable")[::-1][:MOST_PAIRS]
    pairs = [np.unravel_index(flat, wrong.shape) for flat in order]
    return [(examined.classes[i], examined.classes[j], f"{wrong[i, j]:,}") for i, j in pairs if wrong[i, j]]


def _samples(examined: Examined) -> page.Markup:
    def figure(sample: Sample) -> page.Markup:
        label, answer = examined.classes[sample.label], examined.classes[sample.answer]
        hit = sample.label == sample.answer
        words = [page.element("span", answer, class_="good" if hit else "bad"), f" {sample.confidence:.0%}"]
        words += [] if hit else [page.Markup("<br>"), f"is {label}"]
        alt = f"labelled {label}, answered {answer}"
        return page.element(
            "figure", page.picture(page.png(sample.image, SIDE), alt), page.element("figcaption", *words)
        )

    def row(samples: Sequence[Sample]) -> page.Markup:
        return (
            page.element("div", *map(figure, samples), class_="samples")
            if samples
            else page.element("p", "none", class_="faint")
        )

    return page.section(
        f"Answers on the {examined.split} split",
        page.element("h3", "Wrong, the most confident first"),
        row(examined.wrong),
        page.element("h3", "Right, some from all over the split"),
        row(examined.right),
    )


def pictures(examined: Examined) -> dict[str, bytes]:
    """The same for TensorBoard and the like: PNG by name. Of the samples, wrong ones and right ones in a row each."""
    found = {f"{examined.split}/confusion": heat_png(examined.confusion)}
    for name, samples in (("wrong", examined.wrong), ("right", examined.right)):
        if samples:
            found[f"{examined.split}/{name}"] = page.png(np.concatenate([sample.image for sample in samples], axis=1))
    return found
