"""Scenes of Pathfinder: two contours whose tips say nothing about which tip belongs to which contour.

How the classes are kept alike. Contour A grows from a root. A ghost starts with the same `shared` paddles and
then goes its own way; contour B ends with the last `shared` paddles of the ghost and otherwise goes its own
way. A positive image marks root and tip of A; a negative one the root of A and the tip of B, which is the tip
of the ghost. A and the ghost come from one distribution, and a scene is kept only if it would also be kept
with the two exchanged (a second B, ending like A and clear of the ghost, must exist, and room for the
distractors). So the two marked tips, with the `shared` paddles at each, have one joint distribution in both
classes: distance, midpoint, directions and all. Nothing here knows the label.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from cssm.data.draw import UNIT, apart, below, bits, chain, clear, fold, self_clear, turns

TRIES_B = 4  # ways to complete contour B before a scene is given up
TRIES_DISTRACTOR = 16
ROUNDS_DISTRACTOR = 8
MOST_ATTEMPTS = 1 << 16
ROOT, TURNS, GHOST, COMPLETE, EXCHANGED, SHIFT, PLACE, ATTEMPT, DISTRACTOR = range(9)  # streams of numbers


@dataclass(frozen=True)
class Shape:
    """What `grow` needs to know; lengths in units of 1/64 px, angles in degrees."""

    size: int  # px
    paddles: int
    pitch: int
    max_turn: int
    clearance: int  # between points of different contours
    tip_clearance: int  # between tips
    border: int  # between any joint and the edge of the image
    shared: int
    distractors: int
    distractor_paddles: int

    @property
    def low(self) -> int:
        """The least coordinate of a joint."""
        return self.border - UNIT // 2

    @property
    def room(self) -> int:
        """The greatest coordinate of a joint, less the least."""
        return self.size * UNIT - 2 * self.border


@dataclass(frozen=True)
class Chains:
    """M chains of n steps, or M groups of them. Even points are joints, odd ones middles of steps."""

    points: np.ndarray  # int32 [2, M, ..., 2n + 1]
    headings: np.ndarray  # int32 [M, ..., n]

    @classmethod
    def grown(cls, start: np.ndarray, first: np.ndarray, turned: np.ndarray, pitch: int) -> Self:
        """From points int32 [2, M] at headings int32 [M, k], the last of them turned by int32 [M, n - k]."""
        on = first[:, -1:] + np.cumsum(turned, 1, dtype=np.int32)
        headings = np.concatenate([first, on], 1) % 360
        return cls(chain(start, headings, pitch), headings)

    @classmethod
    def stacked(cls, chains: "list[Chains]") -> Self:
        """Each M chains -> M groups."""
        return cls(np.stack([c.points for c in chains], 2), np.stack([c.headings for c in chains], 1))

    def __getitem__(self, chosen: np.ndarray) -> "Chains":
        return Chains(self.points[:, chosen], self.headings[chosen])


@dataclass(frozen=True)
class Scenes:
    """Points as in Chains."""

    points: np.ndarray  # int32 [2, M, 2, 2n + 1]: contour A from its root; B from the tip that may be marked
    headings: np.ndarray  # int32 [M, 2, n]
    distractor_points: np.ndarray  # int32 [2, M, distractors, 2 distractor_paddles + 1]
    distractor_headings: np.ndarray  # int32 [M, distractors, distractor_paddles]
    attempts: np.ndarray  # int64 [M]: proposals it took

    @classmethod
    def empty(cls, shape: Shape, M: int) -> Self:
        """To be filled."""
        n, D, m = shape.paddles, shape.distractors, shape.distractor_paddles
        sizes = ((2, M, 2, 2 * n + 1), (M, 2, n), (2, M, D, 2 * m + 1), (M, D, m))
        return cls(*(np.zeros(size, np.int32) for size in sizes), attempts=np.zeros(M, np.int64))


def grow(shape: Shape, keys: np.ndarray) -> Scenes:
    """One scene a key: uint64 [M] -> Scenes. A scene depends on its own key alone."""
    scenes = Scenes.empty(shape, len(keys))
    active = np.arange(len(keys))
    while active.size:
        tried_before = scenes.attempts[active]
        if tried_before.max() > MOST_ATTEMPTS:
            raise RuntimeError(f"no scene found in {MOST_ATTEMPTS} attempts: {shape}")
        # Several attempts at once for each image; the earliest success counts, so this decides the speed only
        at_once = max(1, min(64, 2048 // active.size))
        numbers = (tried_before[:, None] + np.arange(at_once)).ravel().astype(np.uint64)
        tried = fold(fold(np.repeat(keys[active], at_once), ATTEMPT), numbers)
        good, pair, twins = _propose(shape, tried)
        image, first = np.unique(good // at_once, return_index=True)
        good, pair, twins, winners = good[first], pair[first], twins[first], active[image]
        scenes.attempts[active] += at_once
        scenes.attempts[winners] += good % at_once + 1 - at_once
        placed, around = _distract(shape, fold(tried[good], DISTRACTOR), pair)
        # Distractors must find room beside the twins as well, or a crowded scene would favour one of the two.
        placed &= _distract(shape, fold(tried[good], EXCHANGED), twins)[0]
        scenes.points[:, winners], scenes.headings[winners] = pair.points, pair.headings
        scenes.distractor_points[:, winners] = around.points
        scenes.distractor_headings[winners] = around.headings
        active = np.delete(active, image[placed])
    return scenes


def _propose(shape: Shape, keys: np.ndarray) -> tuple[np.ndarray, Chains, Chains]:
    """Which of the keys give a scene (ascending int64 [S]), its contours A and B, and their twins:

    the ghost and the B that goes with it, had the two been exchanged.
    """
    root = below(bits(keys, ROOT, 1), 360)
    origin = np.zeros((2, len(keys)), np.int32)
    turns_a = turns(keys, TURNS, shape.paddles - 1, shape.max_turn)
    own = turns(keys, GHOST, shape.paddles - shape.shared, shape.max_turn)
    a = Chains.grown(origin, root, turns_a, shape.pitch)
    ghost = Chains.grown(origin, a.headings[:, : shape.shared], own, shape.pitch)
    good = np.flatnonzero(_fit(shape, a, ghost) & _tips_apart(shape, a, ghost) & _loose(shape, a))
    good = good[_loose(shape, ghost[good])]
    a, ghost = a[good], ghost[good]

    kept, b = _complete(shape, fold(keys[good], COMPLETE), a, ghost)
    good, a, ghost = good[kept], a[kept], ghost[kept]
    kept, exchanged = _complete(shape, fold(keys[good], EXCHANGED), ghost, a)
    good, a, ghost, b = good[kept], a[kept], ghost[kept], b[kept]

    chains = (a, b, ghost, exchanged)
    kept = np.flatnonzero(_fit(shape, *chains))
    good, chains = good[kept], [c[kept] for c in chains]
    low, high = _extent(*chains)  # of all four, or the place would tell A and B from their twins
    shift = shape.low - low + below(bits(keys[good], SHIFT, 2).T, shape.room - (high - low) + 1)
    a, b, ghost, exchanged = (Chains(c.points + shift[:, :, None], c.headings) for c in chains)
    return good, Chains.stacked([a, b]), Chains.stacked([ghost, exchanged])


def _complete(shape: Shape, keys: np.ndarray, a: Chains, ghost: Chains) -> tuple[np.ndarray, Chains]:
    """Contour B: from the tip of the ghost along its last paddles, on, clear of a. Which exist, and they."""
    shared = shape.shared
    kept = np.flatnonzero(clear(a.points, ghost.points[:, :, -2 * shared - 1 :], shape.clearance))
    a, ghost = a[kept], ghost[kept]
    row = np.repeat(np.arange(len(kept)), TRIES_B)
    tried = fold(keys[kept][row], np.tile(np.arange(TRIES_B, dtype=np.uint64), len(kept)))
    back = (ghost.headings[row, : -shared - 1 : -1] + 180) % 360
    turned = turns(tried, TURNS, shape.paddles - shared, shape.max_turn)
    b = Chains.grown(ghost.points[:, row, -1], back, turned, shape.pitch)
    good = np.flatnonzero(_fit(shape, a[row], b) & _tips_apart(shape, a[row], b) & _loose(shape, b))
    good = good[clear(a.points[:, row[good]], b.points[:, good], shape.clearance)]
    which, first = np.unique(row[good], return_index=True)
    return kept[which], b[good[first]]


def _distract(shape: Shape, keys: np.ndarray, pair: Chains) -> tuple[np.ndarray, Chains]:
    """Distractors clear of a pair of contours and of each other: whether all found room [M], and they."""
    M, D, m = len(keys), shape.distractors, shape.distractor_paddles
    taken = pair.points.reshape(2, M, 4 * shape.paddles + 2)
    points, headings = np.zeros((2, M, D, 2 * m + 1), np.int32), np.zeros((M, D, m), np.int32)
    placed = np.ones(M, bool)
    for d in range(D):
        lacking = np.flatnonzero(placed)
        for attempt in range(d * ROUNDS_DISTRACTOR, (d + 1) * ROUNDS_DISTRACTOR):
            found, chains = _one_distractor(shape, fold(keys[lacking], attempt), taken[:, lacking])
            points[:, lacking[found], d], headings[lacking[found], d] = chains.points, chains.headings
            lacking = np.delete(lacking, found)
            if not lacking.size:
                break
        placed[lacking] = False
        taken = np.concatenate([taken, points[:, :, d]], 2)
    return placed, Chains(points, headings)


def _one_distractor(shape: Shape, keys: np.ndarray, taken: np.ndarray) -> tuple[np.ndarray, Chains]:
    """The first of some random chains that is inside and clear of `taken`. Which exist, and they."""
    row = np.repeat(np.arange(len(keys)), TRIES_DISTRACTOR)
    tried = fold(keys[row], np.tile(np.arange(TRIES_DISTRACTOR, dtype=np.uint64), len(keys)))
    words = bits(tried, PLACE, 3)
    start = shape.low + below(words[:, :2].T, shape.room + 1)
    turned = turns(tried, TURNS, shape.distractor_paddles - 1, shape.max_turn)
    chains = Chains.grown(start, below(words[:, 2:], 360), turned, shape.pitch)
    inside = (chains.points >= shape.low) & (chains.points <= shape.low + shape.room)
    good = np.flatnonzero(inside.all((0, 2)) & _loose(shape, chains))
    good = good[clear(chains.points[:, good], taken[:, row[good]], shape.clearance)]
    which, first = np.unique(row[good], return_index=True)
    return which, chains[good[first]]


def _extent(*chains: Chains) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest coordinates of several chains together, int32 [2, M] each."""
    lows, highs = [c.points.min(2) for c in chains], [c.points.max(2) for c in chains]
    return np.minimum.reduce(lows), np.maximum.reduce(highs)


def _fit(shape: Shape, *chains: Chains) -> np.ndarray:
    low, high = _extent(*chains)
    return np.asarray((high - low <= shape.room).all(0))


def _tips_apart(shape: Shape, a: Chains, b: Chains) -> np.ndarray:
    """Whether tips keep their distance; a contour and its ghost have one root, a ghost and its B one tip."""
    a_0, a_1, b_0, b_1 = a.points[:, :, 0], a.points[:, :, -1], b.points[:, :, 0], b.points[:, :, -1]
    pairs = ((a_0, a_1), (b_0, b_1), (a_1, b_1), (a_0, b_1))
    return np.logical_and.reduce([apart(p, q, shape.tip_clearance) for p, q in pairs])


def _loose(shape: Shape, chains: Chains) -> np.ndarray:
    """Whether a chain keeps clear of itself, but for points within 1.6 clearances along it."""
    return self_clear(chains.points, shape.clearance, -(-16 * shape.clearance // (5 * shape.pitch)))
