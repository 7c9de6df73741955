"""Several runs on one page: what each cost and reached, and their curves over each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from cssm.report import page, plots

TITLE = "Runs compared"
# (what is drawn, whether of training (None) or of a split, what it says)
CURVES = (
    ("loss", None, "loss in training"),
    ("loss", "val", "loss on the val split"),
    ("accuracy", None, "accuracy in training"),
    ("accuracy", "val", "accuracy on the val split"),
    ("learning_rate", None, "learning rate"),
    ("grad_norm", None, "norm of the gradient, before clipping"),
    ("images_per_s", None, "throughput: images per second"),
    ("data_wait_ms", None, "waiting for data, milliseconds a step"),
)


def comparison_page(
    rows: Sequence[Sequence[str]], runs: Mapping[str, Sequence[dict[str, Any]]], notes: Sequence[str]
) -> str:
    """rows: of the table, the first its head. runs: the events of each run, by the name that it has in the table."""
    pictures = {}
    for metric, split, words in CURVES:
        curves = {name: plots.curves_of(events, metric)[split or "train"] for name, events in runs.items()}
        if any(curves.values()):
            pictures[words] = plots.svg(plots.draw(metric, curves))
    said = [page.element("p", note, class_="faint") for note in notes]
    return page.document(TITLE, page.table(rows), *said, page.section("Curves", page.charts(pictures)))
