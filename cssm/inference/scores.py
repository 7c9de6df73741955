"""What the answers of a model are worth: counts, calibration, an interval. Plain numpy in float64, example by example,
so that numbers do not depend on batches or devices.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

# Of the reliability diagram: equal intervals of confidence, as Guo et al. 2017, "On Calibration of Modern Neural
# Networks", take 15.
BINS = 15
RESAMPLES, LEVEL = 2000, 0.95


@dataclass(frozen=True)
class Answers:
    """Of N examples: labels and predicted classes int [N], the confidence in the prediction [N], losses [N], and how
    many classes were likelier than the right one, int [N].
    """

    label: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    loss: np.ndarray
    rank: np.ndarray


def scores(answers: Answers, num_classes: int, seed: int) -> dict[str, Any]:
    """All of it as JSON values. count, loss, accuracy, top5_accuracy (of more than 5 classes); accuracy_interval and
    what it is; per_class; confusion [true][predicted]; calibration. Of no example, means are None.
    """
    right = answers.predicted == answers.label
    table = confusion(answers.label, answers.predicted, num_classes)
    found: dict[str, Any] = {
        "count": len(right),
        "loss": _mean(answers.loss),
        "accuracy": _mean(right),
    }
    if num_classes > 5:
        found["top5_accuracy"] = _mean(answers.rank < 5)
    low, high = bootstrap_interval(right, seed)
    found["accuracy_interval"] = {"low": low, "high": high, "level": LEVEL, "resamples": RESAMPLES, "seed": seed}
    found["calibration"] = calibration(answers.confidence, right)
    counts, hits = table.sum(axis=1), np.diag(table)
    found["per_class"] = [
        {"count": int(n), "correct": int(hit), "accuracy": hit / n if n else None}
        for n, hit in zip(counts.tolist(), hits.tolist(), strict=True)
    ]
    found["confusion"] = table.tolist()
    return found


def confusion(labels: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """int64 [classes, classes]: how many examples of the class of the row were taken for that of the column."""
    pairs = labels.astype(np.int64) * num_classes + predicted
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def calibration(confidence: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """Expected calibration error: sum over bins of (share of the examples) x |accuracy - mean confidence|.

    BINS equal intervals (low, high] of the confidence, the first with its low end; rows: what each holds.
    """
    confidence = confidence.astype(np.float64)
    place = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    count = np.bincount(place, minlength=BINS)
    sums = (np.bincount(place, weights=values, minlength=BINS) for values in (confidence, right.astype(np.float64)))
    mean_confidence, accuracy = (total / np.maximum(count, 1) for total in sums)
    ece = float(np.sum(count * np.abs(accuracy - mean_confidence)) / len(right)) if len(right) else None
    rows = [
        {
            "low": i / BINS,
            "high": (i + 1) / BINS,
            "count": int(count[i]),
            "confidence": float(mean_confidence[i]) if count[i] else None,
            "accuracy": float(accuracy[i]) if count[i] else None,
        }
        for i in range(BINS)
    ]
    return {"ece": ece, "bins": BINS, "rows": rows}


def bootstrap_interval(right: np.ndarray, seed: int) -> tuple[float | None, float | None]:
    """The middle LEVEL of the accuracies of RESAMPLES samples of N examples, drawn with replacement (Efron 1979).

    The number of right answers in such a sample is binomial, with the observed accuracy: it is drawn as that.
    """
    if not len(right):
        return None, None
    drawn = np.random.default_rng(seed).binomial(len(right), right.mean(), RESAMPLES) / len(right)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None
