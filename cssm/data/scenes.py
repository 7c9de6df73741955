"""Scenes of Pathfinder: two contours whose tips say nothing about which tip belongs to which contour.

How the classes are kept alike. Contour A grows from a root. A ghost starts with the same `shared` paddles and then goes its
own way; contour B ends with the last `shared` paddles of the ghost and otherwise goes its own way. A positive image marks
root and tip of A, a negative one the root of A and the tip of B, which is the tip of the ghost. A and the ghost are drawn from
one distribution, and a scene is kept only if it would also be kept with the two exchanged (a second B, ending like A and
clear of the ghost, must exist). So the two marked tips, with the `shared` paddles at each, have one and the same joint
distribution in both classes: distance, midpoint, directions and all. Nothing here knows the label.
"""

from dataclasses import dataclass

import numpy as np

from cssm.data.draw import UNIT, apart, below, bits, chain, clear, fold, self_clear, turns

TRIES_B = 4  # ways to complete contour B before a scene is given up
TRIES_DISTRACTOR = 16
ROUNDS_DISTRACTOR = 8
MOST_ATTEMPTS = 1 << 16
ROOT, TURNS_A, TURNS_GHOST, TURNS_B, SHIFT, PLACE, ATTEMPT, EXCHANGED, DISTRACTOR = range(9)


@dataclass(frozen=True)
class Shape:
    """What `grow` needs to know; lengths in units of 1/64 px, angles in degrees."""

    size: int
    paddles: int
    pitch: int
    max_turn: int
    clearance: int  # between points of different contours
    tip_clearance: int  # between tips
    border: int  # between any joint and the edge of the image
    shared: int
    distractors: int
    distractor_paddles: int


@dataclass(frozen=True)
class Scenes:
    """Chains as points every half pitch (even ones are joints), int32 [2, M, ...], and headings, int32 [M, ...]."""

    points: (
        np.ndarray
    )  # [2, M, 2, 2 paddles + 1]: contour A from its root; contour B from the tip that may be marked
    headings: np.ndarray  # [M, 2, paddles]
    distractor_points: np.ndarray  # [2, M, distractors, 2 distractor_paddles + 1]
    distractor_headings: np.ndarray  # [M, distractors, distractor_paddles]
    attempts: np.ndarray  # [M]: proposals it took


def grow(shape: Shape, keys: np.ndarray) -> Scenes:
    """One scene a key: uint64 [M] -> Scenes. A scene depends on its own key alone."""
    M, n, D, m = len(keys), shape.paddles, shape.distractors, shape.distractor_paddles
    points = np.zeros((2, M, 2, 2 * n + 1), np.int32)
    headings = np.zeros((M, 2, n), np.int32)
    d_points = np.zeros((2, M, D, 2 * m + 1), np.int32)
    d_headings = np.zeros((M, D, m), np.int32)
    attempts = np.zeros(M, np.int64)
    active = np.arange(M)
    while active.size:
        if attempts[active].max() > MOST_ATTEMPTS:
            raise RuntimeError(f"no scene found in {MOST_ATTEMPTS} attempts: {shape}")
        at_once = max(1, min(64, 2048 // active.size))  # decides the speed only: the earliest success counts
        numbers = attempts[active][:, None] + np.arange(at_once)
        tried = fold(fold(np.repeat(keys[active], at_once), ATTEMPT), numbers.ravel().astype(np.uint64))
        good, p, h = _propose(shape, tried)
        image, first = np.unique(good // at_once, return_index=True)
        found = np.zeros(active.size, bool)
        found[image] = True
        attempts[active[~found]] += at_once
        winners = active[image]
        attempts[winners] += good[first] % at_once + 1
        p, h = p[:, first], h[first]
        placed, dp, dh = _distract(shape, tried[good[first]], p.reshape(2, len(first), 4 * n + 2))
        points[:, winners], headings[winners] = p, h
        d_points[:, winners], d_headings[winners] = dp, dh
        found[image] = placed
        active = active[~found]
    return Scenes(points, headings, d_points, d_headings, attempts)


def _propose(shape: Shape, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which of the keys give a scene (ascending int64 [S]), its points [2, S, 2, 2n + 1] and headings [S, 2, n]."""
    n, shared = shape.paddles, shape.shared
    root = below(bits(keys, ROOT, 1), 360)
    turns_a = turns(keys, TURNS_A, n - 1, shape.max_turn)
    turns_ghost = turns_a.copy()
    turns_ghost[:, shared - 1 :] = turns(keys, TURNS_GHOST, n - shared, shape.max_turn)
    h_a, h_ghost = (_headings(root, t) for t in (turns_a, turns_ghost))
    origin = np.zeros((2, len(keys)), np.int32)
    a, ghost = (chain(origin, h, shape.pitch) for h in (h_a, h_ghost))
    good = np.flatnonzero(
        _fits(shape, a, ghost) & _tips_apart(shape, a, ghost) & _loose(shape, a) & _loose(shape, ghost)
    )
    a, ghost, h_a, h_ghost, keys = a[:, good], ghost[:, good], h_a[good], h_ghost[good], keys[good]

    kept, b, h_b = _complete(shape, fold(keys, TURNS_B), a, ghost, h_ghost)
    good, a, ghost, h_a, h_ghost, keys = (
        good[kept],
        a[:, kept],
        ghost[:, kept],
        h_a[kept],
        h_ghost[kept],
        keys[kept],
    )
    kept, other, _ = _complete(shape, fold(keys, EXCHANGED), ghost, a, h_a)
    good, a, ghost, b, h_a, h_b, keys = (
        good[kept],
        a[:, kept],
        ghost[:, kept],
        b[:, kept],
        h_a[kept],
        h_b[kept],
        keys[kept],
    )

    low, high = _extent(a, ghost, b, other)
    room = shape.size * UNIT - UNIT - 2 * shape.border - (high - low)
    kept = np.flatnonzero((room >= 0).all(0))
    where = below(bits(keys[kept], SHIFT, 2).T, room[:, kept] + 1)
    shift = where + shape.border - UNIT // 2 - low[:, kept]
    p = np.stack([a[:, kept], b[:, kept]], 2) + shift[:, :, None, None]
    return good[kept], p, np.stack([h_a[kept], h_b[kept]], 1)


def _complete(
    shape: Shape, keys: np.ndarray, a: np.ndarray, ghost: np.ndarray, h_ghost: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Contour B, from the tip of the ghost back along its last paddles and on, clear of a: kept [S], points, headings."""
    shared, n = shape.shared, shape.paddles
    kept = np.flatnonzero(clear(a, ghost[:, :, -2 * shared - 1 :], shape.clearance))
    a, h_ghost, tip = a[:, kept], h_ghost[kept], ghost[:, kept, -1]
    repeat = np.repeat(np.arange(len(kept)), TRIES_B)
    tried = fold(keys[kept[repeat]], np.tile(np.arange(TRIES_B, dtype=np.uint64), len(kept)))
    back = (h_ghost[:, : -shared - 1 : -1] + 180) % 360
    on = _headings(back[repeat, -1:], turns(tried, TURNS_B, n - shared, shape.max_turn))[:, 1:]
    h_b = np.concatenate([back[repeat], on], 1)
    b = chain(tip[:, repeat], h_b, shape.pitch)
    a = a[:, repeat]
    good = np.flatnonzero(_fits(shape, a, b) & _tips_apart(shape, a, b) & _loose(shape, b))
    good = good[clear(a[:, good], b[:, good], shape.clearance)]
    which, first = np.unique(repeat[good], return_index=True)
    return kept[which], b[:, good[first]], h_b[good[first]]


def _distract(shape: Shape, keys: np.ndarray, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distractors clear of `taken` [2, M, p] and of each other: whether all were placed [M], points, headings."""
    M, m = len(keys), shape.distractor_paddles
    points = np.zeros((2, M, shape.distractors, 2 * m + 1), np.int32)
    headings = np.zeros((M, shape.distractors, m), np.int32)
    placed = np.ones(M, bool)
    for d in range(shape.distractors):
        open_ = np.flatnonzero(placed)
        for round_ in range(ROUNDS_DISTRACTOR):
            stream = fold(fold(keys[open_], DISTRACTOR), d * ROUNDS_DISTRACTOR + round_)
            found, p, h = _one_distractor(shape, stream, taken[:, open_])
            points[:, open_[found], d], headings[open_[found], d] = p, h
            open_ = np.delete(open_, found)
            if not open_.size:
                break
        placed[open_] = False
        taken = np.concatenate([taken, points[:, :, d]], 2)
    return placed, points, headings


def _one_distractor(
    shape: Shape, keys: np.ndarray, taken: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first of some random chains that is inside and clear: which images got one [S], points, headings."""
    low, high = shape.border - UNIT // 2, shape.size * UNIT - UNIT // 2 - shape.border
    image = np.repeat(np.arange(len(keys)), TRIES_DISTRACTOR)
    tried = fold(keys[image], np.tile(np.arange(TRIES_DISTRACTOR, dtype=np.uint64), len(keys)))
    words = bits(tried, PLACE, 3)
    start = low + below(words[:, :2].T, high - low + 1)
    h = _headings(
        below(words[:, 2:], 360), turns(tried, TURNS_A, shape.distractor_paddles - 1, shape.max_turn)
    )
    p = chain(start, h, shape.pitch)
    good = np.flatnonzero(((p >= low) & (p <= high)).all((0, 2)) & _loose(shape, p))
    good = good[clear(p[:, good], taken[:, image[good]], shape.clearance)]
    which, first = np.unique(image[good], return_index=True)
    return which, p[:, good[first]], h[good[first]]


def _headings(first: np.ndarray, turned: np.ndarray) -> np.ndarray:
    """int32 [M, 1] and the turns after it [M, k] -> headings 0 .. 359, int32 [M, k + 1]."""
    return np.cumsum(np.concatenate([first, turned], 1), 1, dtype=np.int32) % 360


def _extent(*chains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = chains[0].min(2), chains[0].max(2)
    for p in chains[1:]:
        low, high = np.minimum(low, p.min(2)), np.maximum(high, p.max(2))
    return low, high


def _fits(shape: Shape, *chains: np.ndarray) -> np.ndarray:
    low, high = _extent(*chains)
    return (high - low <= shape.size * UNIT - UNIT - 2 * shape.border).all(0)


def _tips_apart(shape: Shape, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether the tips of two contours keep their distance; the roots of a contour and its ghost coincide."""
    good = apart(a[:, :, 0], a[:, :, -1], shape.tip_clearance) & apart(
        b[:, :, 0], b[:, :, -1], shape.tip_clearance
    )
    good &= apart(a[:, :, -1], b[:, :, -1], shape.tip_clearance)
    return good & apart(a[:, :, 0], b[:, :, -1], shape.tip_clearance)


def _loose(shape: Shape, p: np.ndarray) -> np.ndarray:
    """Whether a chain keeps away from itself, but for points within 1.6 clearances along it."""
    return self_clear(p, shape.clearance, -(-shape.clearance * 16 // (5 * shape.pitch)))
