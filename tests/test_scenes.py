"""Scenes: what every one of them keeps to, and the exchange that keeps the classes alike."""

import dataclasses

import numpy as np
import pytest

from cssm.data import scenes
from cssm.data.draw import UNIT, fold
from cssm.data.scenes import Shape, grow

SHAPE = Shape(
    size=64,
    paddles=6,
    pitch=480,
    max_turn=60,
    clearance=448,
    tip_clearance=448,
    border=256,
    shared=2,
    distractors=4,
    distractor_paddles=2,
)
KEYS = fold(np.zeros(1, np.uint64), np.arange(40, dtype=np.uint64))


@pytest.fixture(scope="module")
def grown():
    return grow(SHAPE, KEYS)


def nearest(p, q):
    """Least distance between two sets of points [2, p] and [2, q]."""
    return np.linalg.norm(p[:, :, None] - q[:, None].astype(float), axis=0).min()


def test_a_scene_depends_on_its_own_key_alone(grown):
    chosen = [17, 3, 3]
    some = grow(SHAPE, KEYS[chosen])
    for field in ("points", "distractor_points"):
        np.testing.assert_array_equal(getattr(some, field), getattr(grown, field)[:, chosen])
    for field in ("headings", "distractor_headings", "attempts"):
        np.testing.assert_array_equal(getattr(some, field), getattr(grown, field)[chosen])


def test_lines_are_inside_and_clear_of_each_other(grown):
    assert grown.points.shape == (2, 40, 2, 13)
    assert grown.distractor_points.shape == (2, 40, 4, 5)
    everything = np.concatenate([grown.points.reshape(2, -1), grown.distractor_points.reshape(2, -1)], 1)
    edge = SHAPE.size * UNIT - UNIT // 2
    assert everything.min() >= SHAPE.border - UNIT // 2
    assert everything.max() <= edge - SHAPE.border
    for i in range(40):
        lines = [*np.moveaxis(grown.points[:, i], 1, 0), *np.moveaxis(grown.distractor_points[:, i], 1, 0)]
        for j, line in enumerate(lines):
            assert all(nearest(line, other) >= SHAPE.clearance for other in lines[:j])
        a, b = lines[:2]
        for tips in ((a[:, 0], a[:, -1]), (b[:, 0], b[:, -1]), (a[:, -1], b[:, 0]), (a[:, 0], b[:, 0])):
            assert np.linalg.norm(tips[0] - tips[1]) >= SHAPE.tip_clearance


def test_turns_stay_within_the_greatest(grown):
    turned = np.diff(grown.headings, axis=-1)
    assert np.abs((turned + 180) % 360 - 180).max() < SHAPE.max_turn


def test_a_scene_and_its_exchange_share_both_marked_ends():
    """The tip of B, which a negative image marks, belongs to the twin of A: root, tip and the paddles at both."""
    good, pair, twins = scenes._propose(SHAPE, fold(np.zeros(1, np.uint64), np.arange(3000, dtype=np.uint64)))
    assert len(good) > 50
    a, b, ghost, exchanged = (chains.points[:, :, i] for chains in (pair, twins) for i in (0, 1))
    points = 2 * SHAPE.shared + 1
    np.testing.assert_array_equal(a[:, :, :points], ghost[:, :, :points])
    assert (a[:, :, -1] != ghost[:, :, -1]).any(0).all()
    for tail, other in ((b, ghost), (exchanged, a)):
        np.testing.assert_array_equal(tail[:, :, 0], other[:, :, -1])
        # Walked backwards the middles are rounded the other way.
        assert np.abs(tail[:, :, :points] - other[:, :, : -points - 1 : -1]).max() <= points
    for chains in (pair, twins):
        first, second = np.moveaxis(chains.points, 2, 0)
        assert all(nearest(first[:, i], second[:, i]) >= SHAPE.clearance for i in range(len(good)))


def test_contours_that_find_no_room_are_an_error_that_ends(monkeypatch):
    monkeypatch.setattr(scenes, "MOST_ATTEMPTS", 64)
    with pytest.raises(RuntimeError, match="no scene found in 64 attempts"):
        grow(dataclasses.replace(SHAPE, size=24), KEYS[:1])
