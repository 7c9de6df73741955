"""Scores against slow counts, and the interval against sampling with replacement."""

import numpy as np
import pytest

from cssm.inference.scores import BINS, RESAMPLES, Answers, bootstrap_interval, calibration, confusion, scores

rng = np.random.default_rng(0)


def answers(n, classes=7):
    label, predicted = rng.integers(0, classes, (2, n)).astype(np.int32)
    predicted = np.where(rng.random(n) < 0.6, label, predicted).astype(np.int32)
    confidence = rng.random(n).astype(np.float32)
    return Answers(label, predicted, confidence, rng.random(n).astype(np.float32), rng.integers(0, classes, n))


@pytest.mark.parametrize("n", [1, 2, 37, 500])
def test_scores_are_those_counted_one_by_one(n):
    a = answers(n)
    found = scores(a, 7, seed=3)
    table = np.zeros((7, 7), int)
    for true, guess in zip(a.label, a.predicted, strict=True):
        table[true, guess] += 1
    assert found["confusion"] == table.tolist() and found["count"] == n
    assert found["accuracy"] == sum(a.label == a.predicted) / n
    assert found["top5_accuracy"] == sum(rank < 5 for rank in a.rank) / n
    assert found["loss"] == pytest.approx(sum(map(float, a.loss)) / n, rel=1e-12)
    for c, row in enumerate(found["per_class"]):
        members = [g for t, g in zip(a.label, a.predicted, strict=True) if t == c]
        assert (row["count"], row["correct"]) == (len(members), members.count(c))
        assert row["accuracy"] == (members.count(c) / len(members) if members else None)


def test_calibration_is_the_weighted_gap_of_each_bin():
    a = answers(400)
    confidence = a.confidence.astype(np.float64)
    right = a.label == a.predicted
    found, gap = calibration(a.confidence, right), 0.0
    for i, row in enumerate(found["rows"]):
        inside = (confidence > i / BINS) & (confidence <= (i + 1) / BINS)
        assert row["count"] == inside.sum()
        if row["count"]:
            assert row["accuracy"] == pytest.approx(right[inside].mean())
            assert row["confidence"] == pytest.approx(confidence[inside].mean())
            gap += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert found["ece"] == pytest.approx(gap) and gap > 0.01


def test_calibration_at_the_ends_and_where_it_is_perfect():
    ends = calibration(np.array([0.0, 1.0, 1 / BINS], np.float64), np.array([False, True, False]))
    assert [row["count"] for row in ends["rows"]] == [2] + [0] * (BINS - 2) + [1]
    assert calibration(np.ones(5), np.ones(5, bool))["ece"] == 0
    assert calibration(np.ones(5), np.zeros(5, bool))["ece"] == 1


def test_the_interval_is_that_of_sampling_with_replacement():
    right = rng.random(200) < 0.8
    drawn = [right[rng.integers(0, 200, 200)].mean() for _ in range(4 * RESAMPLES)]
    assert bootstrap_interval(right, 0) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.012)
    assert bootstrap_interval(right, 0) == bootstrap_interval(right, 0) != bootstrap_interval(right, 1)
    assert bootstrap_interval(np.ones(9, bool), 0) == (1.0, 1.0)


def test_many_classes_do_not_overflow():
    labels = np.array([2999, 0], np.int32)
    assert confusion(labels, labels, 3000)[2999, 2999] == 1
