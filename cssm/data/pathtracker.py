"""PathTracker: does the dot that starts in the red square end in the blue one (label 1), or another (label 0)?

After Linsley, Malik, Kim, Govindarajan, Mingolla and Serre 2021 (arXiv:2105.13351), drawn anew from (seed, split,
index): dots that look alike wander over 32x32 pixels, pass through each other, and both squares stay visible.

How the classes are kept alike, as in scenes.py. Dot P starts in the red square. A ghost, which is not drawn, starts
with P's first `shared` steps and then goes its own way; dot Q ends with the ghost's last `shared` steps. The blue
square is where P ends (label 1) or where Q, and so the ghost, ends (label 0). P and ghost come from one distribution,
and a scene is kept only if it would also be kept with the two exchanged. So both squares, and the steps from the one
and to the other, have one joint distribution in both classes; and dots do not depend on the label. No dot hides a part
of a square, which would tell how often it comes by: each has a colour channel of its own. In the published clips the
distance between the squares alone finds up to 62% of the labels.
"""

from dataclasses import dataclass, fields

import numpy as np

from cssm.config import UserError
from cssm.data.draw import UNIT, along, apart, balanced, below, bits, fold, turns

VERSION = 1  # of the generator: raise it whenever a clip changes
SPLITS = ("train", "val", "test")
CHUNK = 64  # clips drawn at once: bounds memory, changes no clip
MOST_ATTEMPTS = 1 << 16
TRIES_Q = 4  # ways for Q before a scene is given up
TRIES_DOT = 16
SCENE, LABEL, ATTEMPT, HEADING, TURNS, GHOST, OTHER, EXCHANGED, PLACE, DOT, STEPS = range(11)  # streams of numbers
SIDE = 32  # px
BORDER = 1  # px around the dots that only the squares reach
DOT_PX = 2


@dataclass(frozen=True)
class PathtrackerSpec:
    """Everything that decides the clips. Lengths in 1/64 px, angles in degrees."""

    difficulty: str
    frames: int
    step: int  # from a frame to the next
    max_turn: int  # per step
    others: int  # dots besides P and Q
    shared: int  # steps at each square that are alike in both classes
    apart: int  # the ends of P and Q, their starts, and the squares
    clear: int  # other dots from the squares, in the frames in which P and Q are there
    version: int = VERSION


# Published: 64 frames and 0, 5, 14 or 25 dots besides P and Q.
DIFFICULTIES = {
    "easy": PathtrackerSpec("easy", 16, 72, 60, 0, 3, 6 * UNIT, 4 * UNIT),
    **{str(n): PathtrackerSpec(str(n), 64, 20, 50, n, 8, 4 * UNIT, 3 * UNIT) for n in (0, 5, 14, 25)},
}


def spec(difficulty: str, image_size: int) -> PathtrackerSpec:
    """The parameters of a difficulty: easy, or the number of other dots. UserError for any size but 32."""
    if image_size != SIDE:
        raise UserError(f"--image_size {image_size}: clips of PathTracker are {SIDE} pixels wide, leave it out")
    return DIFFICULTIES[difficulty]


@dataclass(frozen=True)
class Geometry:
    """Where everything is, to check labels against: (x, y) in px of the top left pixel of a dot."""

    dots: np.ndarray  # int32 [n, T, dots, 2]: P, Q, others
    red: np.ndarray  # int32 [n, 2]: of the dot in the square
    blue: np.ndarray  # int32 [n, 2]
    attempts: np.ndarray  # int64 [n]: proposals until the scene was found


def generate(
    spec: PathtrackerSpec, seed: int, split: str, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Geometry]:
    """The clips with some indices: uint8 [n, T, 32, 32, 3], labels int32 [n], and their Geometry.

    A clip depends on (spec, seed, split, its index) alone, to the bit, on every machine: not on the other indices.
    seed: 0 .. 2**64 - 1; split: train, val or test; indices: int64 [n], not negative.
    """
    starts = range(0, max(len(indices), 1), CHUNK)
    clips, labels, parts = zip(*(_chunk(spec, seed, split, indices[i : i + CHUNK]) for i in starts), strict=True)
    geometry = Geometry(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Geometry)))
    return np.concatenate(clips), np.concatenate(labels), geometry


def _chunk(
    spec: PathtrackerSpec, seed: int, split: str, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Geometry]:
    stream = fold(fold(np.array([spec.version], np.uint64), seed), SPLITS.index(split))
    paths, attempts = _scenes(spec, fold(fold(stream, SCENE), indices.astype(np.uint64)))
    labels = balanced(fold(stream, LABEL), indices)
    dots = (paths // UNIT).transpose(1, 3, 2, 0)  # [n, T, dots, xy]
    red, blue = dots[:, 0, 0], np.where(labels[:, None] == 1, dots[:, -1, 0], dots[:, -1, 1])
    return _render(dots, red, blue), labels, Geometry(dots, red, blue, attempts)


def _scenes(spec: PathtrackerSpec, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Paths int32 [2, n, dots, T] of P, Q and the others, and proposals that it took int64 [n]."""
    n = len(keys)
    paths, attempts = np.zeros((2, n, 2 + spec.others, spec.frames), np.int32), np.zeros(n, np.int64)
    active = np.arange(n)
    while active.size:
        before = attempts[active]
        if before.max() > MOST_ATTEMPTS:
            raise RuntimeError(f"no scene found in {MOST_ATTEMPTS} attempts: {spec}")
        # Several attempts at once for each clip; the earliest success counts, so this decides the speed only.
        at_once = max(1, min(64, 512 // active.size))
        numbers = (before[:, None] + np.arange(at_once)).ravel().astype(np.uint64)
        tried = fold(fold(np.repeat(keys[active], at_once), ATTEMPT), numbers)
        good, pair, ends = _propose(spec, tried)
        which, first = np.unique(good // at_once, return_index=True)
        good, pair, ends, winners = good[first], pair[:, first], ends[:, first], active[which]
        attempts[active] += at_once
        attempts[winners] += good % at_once + 1 - at_once
        found, others = _others(spec, fold(tried[good], DOT), ends)
        paths[:, winners[found], :2], paths[:, winners[found], 2:] = pair[:, found], others[:, found]
        active = np.delete(active, which[found])
    return paths, attempts


def _propose(spec: PathtrackerSpec, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which of the keys give a scene (ascending int64 [k]), its P and Q int32 [2, k, 2, T], and where squares may be:
    the start of both, P's end and the ghost's, int32 [2, k, 3].
    """
    first = below(bits(keys, HEADING, 1), 360)
    wander = turns(keys, TURNS, spec.frames - 2, spec.max_turn)
    own = turns(keys, GHOST, spec.frames - 1 - spec.shared, spec.max_turn)
    start = np.zeros((2, len(keys)), np.int32)
    p, headings = _walk(spec, start, first, wander)
    ghost, ghost_headings = _walk(spec, start, headings[:, : spec.shared], own)
    squares = np.stack([start, p[..., -1], ghost[..., -1]], 2)
    good = np.flatnonzero(
        _fit(p, ghost) & np.logical_and.reduce([apart(squares[..., i], squares[..., j], spec.apart) for i, j in _PAIRS])
    )
    chains, kept = [p[:, good], ghost[:, good]], good
    for stream, other, other_headings in ((OTHER, ghost, ghost_headings), (EXCHANGED, p, headings)):
        found, q = _ending(spec, fold(keys[kept], stream), other[:, kept, -1], other_headings[kept])
        chains, kept = [*(chain[:, found] for chain in chains), q], kept[found]
    inside = np.flatnonzero(_fit(*chains))
    chains, kept = [chain[:, inside] for chain in chains], kept[inside]
    low = np.minimum.reduce([chain.min(2) for chain in chains])  # of all four, or the place would tell P from the ghost
    high = np.maximum.reduce([chain.max(2) for chain in chains])
    shift = BORDER * UNIT - low + below(bits(keys[kept], PLACE, 2).T, _ROOM - (high - low) + 1)
    pair = np.stack([chains[0], chains[2]], 2) + shift[:, :, None, None]
    return kept, pair, squares[:, kept] + shift[:, :, None]


_PAIRS = ((0, 1), (0, 2), (1, 2))
_ROOM = (SIDE - 2 * BORDER - DOT_PX + 1) * UNIT - 1  # greatest coordinate of a dot, less the least


def _walk(
    spec: PathtrackerSpec, start: np.ndarray, first: np.ndarray, turned: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """From int32 [2, n] at headings [n, k], the last of them turned by [n, T - 1 - k]: places int32 [2, n, T] and
    headings [n, T - 1].
    """
    headings = np.concatenate([first, first[:, -1:] + np.cumsum(turned, 1, dtype=np.int32)], 1) % 360
    steps = np.cumsum(along(headings, spec.step), 2, dtype=np.int32)
    return np.concatenate([start[:, :, None], start[:, :, None] + steps], 2), headings


def _ending(
    spec: PathtrackerSpec, keys: np.ndarray, end: np.ndarray, headings: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Paths that end like others, at `end` after the last `shared` of their headings, and start apart from 0, where
    those did. Which exist, and they int32 [2, k, T]: the first of TRIES_Q each.
    """
    row = np.repeat(np.arange(len(keys)), TRIES_Q)
    tried = fold(keys[row], np.tile(np.arange(TRIES_Q, dtype=np.uint64), len(keys)))
    back = (headings[row, : -spec.shared - 1 : -1] + 180) % 360
    turned = turns(tried, STEPS, spec.frames - 1 - spec.shared, spec.max_turn)
    path = _walk(spec, end[:, row], back, turned)[0][..., ::-1]
    good = np.flatnonzero(apart(path[..., 0], np.zeros_like(path[..., 0]), spec.apart) & _fit(path))
    which, first = np.unique(row[good], return_index=True)
    return which, path[:, good[first]]


def _fit(*chains: np.ndarray) -> np.ndarray:
    """Whether there is a place for all of them: bool [n]."""
    high = np.maximum.reduce([chain.max(2) for chain in chains])
    low = np.minimum.reduce([chain.min(2) for chain in chains])
    return np.asarray((high - low <= _ROOM).all(0))


def _others(spec: PathtrackerSpec, keys: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The other dots, of which none is near the start in the first frame, or near P's end or the ghost's in the last.
    Which scenes have all of them, and they int32 [2, n, others, T].
    """
    n = len(keys)
    found = np.zeros((2, n, spec.others, spec.frames), np.int32)
    placed = np.ones(n, bool)
    for dot in range(spec.others):
        row = np.repeat(np.flatnonzero(placed), TRIES_DOT)
        tried = fold(fold(keys, dot)[row], np.tile(np.arange(TRIES_DOT, dtype=np.uint64), len(row) // TRIES_DOT))
        words = bits(tried, PLACE, 3)
        wander = turns(tried, TURNS, spec.frames - 2, spec.max_turn)
        path, _ = _walk(spec, np.zeros((2, len(row)), np.int32), below(words[:, 2:], 360), wander)
        path = path - path.min(2, keepdims=True) + BORDER * UNIT
        room = np.maximum(BORDER * UNIT + _ROOM - path.max(2) + 1, 1)
        path = path + below(words[:, :2].T, room)[:, :, None]
        good = np.flatnonzero(
            (path.max((0, 2)) <= BORDER * UNIT + _ROOM)
            & apart(path[..., 0], ends[:, row, 0], spec.clear)
            & apart(path[..., -1], ends[:, row, 1], spec.clear)
            & apart(path[..., -1], ends[:, row, 2], spec.clear)
        )
        which, first = np.unique(row[good], return_index=True)
        found[:, which, dot] = path[:, good[first]]
        placed &= np.isin(np.arange(n), which)
    return np.flatnonzero(placed), found


def _render(dots: np.ndarray, red: np.ndarray, blue: np.ndarray) -> np.ndarray:
    """uint8 [n, T, 32, 32, 3]: outlines of squares of 4x4 pixels in the red and the blue channel, dots of 2x2 in the
    green one, so that none hides another.
    """
    n, frames = dots.shape[:2]
    clips = np.zeros((n, frames, SIDE * SIDE, 3), np.uint8)
    first = dots[..., 1] * SIDE + dots[..., 0]
    for down, right in np.ndindex(DOT_PX, DOT_PX):
        clips[np.arange(n)[:, None, None], np.arange(frames)[:, None], first + down * SIDE + right, 1] = 255
    outline = [(y, x) for y in range(-1, 3) for x in range(-1, 3) if {y, x} & {-1, 2}]
    for channel, (x, y) in ((0, red.T), (2, blue.T)):
        for down, right in outline:
            clips[np.arange(n), :, (y + down) * SIDE + x + right, channel] = 255
    return clips.reshape(n, frames, SIDE, SIDE, 3)
