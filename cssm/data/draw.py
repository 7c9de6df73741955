"""Integer building blocks of procedural images: a counter-based hash, chains of bars, distances, rendering.

Everything is integer arithmetic, so that a result is the same to the bit on every machine. Lengths and
positions are in units of 1/64 px, headings in whole degrees; pixel (row, column) is centred on (64 column,
64 row).
"""

import math
from functools import cache
from typing import Self

import numpy as np

UNIT = 64  # steps to a pixel
TRIG_BITS = 14
# math.cos may differ in its last bit between machines, no entry is so near a boundary as to change (tested)
COS = np.array([round(2**TRIG_BITS * math.cos(math.radians(d))) for d in range(360)], np.int32)
SIN = np.roll(COS, 90)
HALF = 1 << (TRIG_BITS - 1)
TURN_BITS = 12

_GOLDEN, _64_BITS = 0x9E3779B97F4A7C15, 2**64 - 1
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): uint64 -> uint64, a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def fold(keys: np.ndarray, word: int | np.ndarray) -> np.ndarray:
    """Keys of the sub-streams called `word`: uint64 [...], and an int below 2**64 or an array of them."""
    words = np.atleast_1d(np.asarray(word, np.uint64))  # arrays wrap silently where scalars warn
    return mix(keys ^ mix((words + np.uint64(1)) * np.uint64(_GOLDEN)))


def folded(key: int, *words: int) -> int:
    """One key folded with some words, one after another, in integers of Python: faster than arrays of one element."""
    for word in words:
        key = _mixed(key ^ _mixed((word + 1) * _GOLDEN))
    return key


def _mixed(x: int) -> int:
    x &= _64_BITS
    x = (x ^ (x >> 30)) * _MIX_1 & _64_BITS
    x = (x ^ (x >> 27)) * _MIX_2 & _64_BITS
    return x ^ (x >> 31)


def bits(keys: np.ndarray, stream: int, count: int) -> np.ndarray:
    """`count` independent words a key: uint64 [M] -> uint64 [M, count]."""
    return fold(fold(keys, stream)[:, None], np.arange(count, dtype=np.uint64))


def below(words: np.ndarray, limit: int | np.ndarray) -> np.ndarray:
    """uint64 words -> int32 uniform in 0 .. limit-1, limit below 2**31."""
    return (((words >> np.uint64(32)) * np.asarray(limit, np.uint64)) >> np.uint64(32)).astype(np.int32)


@cache
def turn_table(max_turn: int) -> np.ndarray:
    """int32 [4096]: the inverse of the distribution of a turn d in whole degrees, cos(90 d / max_turn)**2."""
    weights = [round(2**20 * math.cos(math.pi / 2 * d / max_turn) ** 2) for d in range(-max_turn, max_turn + 1)]
    levels = (2 * np.arange(2**TURN_BITS) + 1) * sum(weights)
    return (np.searchsorted(np.cumsum(weights) * 2 ** (TURN_BITS + 1), levels) - max_turn).astype(np.int32)


def turns(keys: np.ndarray, stream: int, count: int, max_turn: int) -> np.ndarray:
    """Random turns: uint64 [M] -> int32 [M, count] degrees."""
    words = bits(keys, stream, -(-count // 5))  # five draws of 12 bits from a word
    shifts = np.arange(5, dtype=np.uint64) * np.uint64(TURN_BITS)
    draws = (words[:, :, None] >> shifts) & np.uint64(2**TURN_BITS - 1)
    return turn_table(max_turn)[draws.reshape(len(keys), 5 * words.shape[1])[:, :count].astype(np.intp)]


def balanced(stream: np.ndarray, indices: np.ndarray, block: int = 100) -> np.ndarray:
    """Labels int32 [n] of the examples with some indices, int64 [n]: of every `block` consecutive ones a hashed half
    is 1.
    """
    blocks, place = np.unique(indices // block, return_inverse=True)
    hashes = fold(fold(stream, blocks.astype(np.uint64))[:, None], np.arange(block, dtype=np.uint64))
    rank = hashes.argsort(1, kind="stable").argsort(1, kind="stable")
    return (rank[place, indices % block] < block // 2).astype(np.int32)


def along(heading: np.ndarray, length: int | np.ndarray) -> np.ndarray:
    """The vector of `length` units at `heading` degrees (0 .. 359): int32 [...] -> int32 [2, ...] (x, y)."""
    return np.stack([(length * table.take(heading) + HALF) >> TRIG_BITS for table in (COS, SIN)])


def chain(start: np.ndarray, headings: np.ndarray, pitch: int) -> np.ndarray:
    """Points every half pitch along a chain of straight steps.

    start int32 [2, M], headings int32 [M, n] (0 .. 359) -> int32 [2, M, 2n + 1]; even points are joints, odd
    ones middles.
    """
    steps = along(headings, pitch // 2)
    steps = np.repeat(steps, 2, axis=2)
    return np.concatenate([start[:, :, None], start[:, :, None] + np.cumsum(steps, axis=2, dtype=np.int32)], axis=2)


def clear(a: np.ndarray, b: np.ndarray, distance: int) -> np.ndarray:
    """Whether all points of a keep `distance` from all of b: int32 [2, M, p], int32 [2, M, q] -> bool [M]."""
    nearest = np.full(a.shape[1:], np.iinfo(np.int32).max, np.int32)
    for j in range(b.shape[2]):
        np.minimum(nearest, _squared(a[0] - b[0, :, j, None], a[1] - b[1, :, j, None]), out=nearest)
    return np.asarray((nearest >= distance**2).all(1))


def self_clear(a: np.ndarray, distance: int, skip: int) -> np.ndarray:
    """Whether points more than `skip` apart along a chain keep `distance`: int32 [2, M, p] -> bool [M]."""
    good = np.ones(a.shape[1], bool)
    for lag in range(skip + 1, a.shape[2]):
        good &= (_squared(*(a[:, :, lag:] - a[:, :, :-lag])) >= distance**2).all(1)
    return good


def apart(a: np.ndarray, b: np.ndarray, distance: int) -> np.ndarray:
    """Whether two points keep `distance`: int32 [2, M] twice -> bool [M]."""
    return np.asarray(_squared(*(a - b)) >= distance**2)


def _squared(dx: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return dx * dx + dy * dy  # below 2**31 up to 500 px


class Canvas:
    """uint8 images [M, size, size] drawn on by maximum; shapes are anti-aliased and may cross the edge."""

    def __init__(self, count: int, size: int, reach: int) -> None:
        """`reach`: the radius in px of the largest shape."""
        self._size, self._margin = size, reach + 2
        self._side = size + 2 * self._margin
        self._pixels = np.zeros(count * self._side**2, np.uint8)
        self._first = np.arange(count, dtype=np.int32) * self._side**2

    @classmethod
    def over(cls, images: np.ndarray, reach: int) -> Self:
        """One that starts as a copy of uint8 images [M, size, size]."""
        canvas = cls(len(images), images.shape[1], reach)
        canvas._inner()[:] = images
        return canvas

    def bars(self, centre: np.ndarray, heading: np.ndarray, length: int, radius: int, level: int) -> None:
        """One bar an image, all within `radius` of a segment: centre int32 [2, M], heading int32 [M]."""
        dx, dy, at = self._patch(centre, length // 2 + radius)
        cos, sin = (table.take(heading)[:, None, None] for table in (COS, SIN))
        # rounded to nearest: were it down, a bar would reach a little further at its head than at its tail
        u = (dx * cos + dy * sin + HALF) >> TRIG_BITS
        v = (dy * cos - dx * sin + HALF) >> TRIG_BITS
        self._draw(at, np.maximum(np.abs(u) - length // 2, 0), v, radius, level)

    def discs(self, centre: np.ndarray, radius: int, level: int) -> None:
        """One disc an image: centre int32 [2, M]."""
        dx, dy, at = self._patch(centre, radius)
        self._draw(at, dx, dy, radius, level)

    def segments(self, a: np.ndarray, b: np.ndarray, radius: int, level: int, fade: int = UNIT) -> None:
        """One segment an image, all within `radius` of it: ends int32 [2, M]; `fade`: over how many units its edge
        does, half of them inside.
        """
        across, middle = b - a, (a + b) // 2
        half = int(np.abs(across).max(initial=0)) * 3 // 4 + 1  # no less than half the length
        dx, dy, at = self._patch(middle, half + radius + fade // 2)
        dx, dy = dx + (middle - a)[0][:, None, None], dy + (middle - a)[1][:, None, None]
        ux, uy = (across[i][:, None, None] for i in range(2))
        squared = np.maximum(_squared(ux, uy), 1)
        share = np.clip(dx * ux + dy * uy, 0, squared)  # of the way to b, times the squared length
        self._draw(at, dx - ux * share // squared, dy - uy * share // squared, radius, level, fade)

    def rings(self, centre: np.ndarray, radius: int, hole: int, level: int) -> None:
        """One ring an image, over what is there, with nothing in its hole: centre int32 [2, M]."""
        dx, dy, at = self._patch(centre, radius)
        outer, inner = (_covered(dx, dy, reach, UNIT) for reach in (radius, hole))
        self._pixels[at] = ((UNIT - outer) * self._pixels[at] + (outer - inner) * level) // UNIT

    def images(self) -> np.ndarray:
        """uint8 [M, size, size, 1], contiguous."""
        return np.ascontiguousarray(self._inner())[..., None]

    def _inner(self) -> np.ndarray:
        inner = slice(self._margin, self._margin + self._size)
        return self._pixels.reshape(-1, self._side, self._side)[:, inner, inner]

    def _patch(self, centre: np.ndarray, radius: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Offsets x [M, 1, p] and y [M, p, 1] of the pixels around `centre`, and where they are [M, p, p]."""
        reach = -(-radius // UNIT) + 1
        offsets = np.arange(-reach, reach + 1, dtype=np.int32)
        pixel = (centre + UNIT // 2) // UNIT
        x, y = pixel[0][:, None] + offsets, pixel[1][:, None] + offsets
        rows = self._first[:, None] + (y + self._margin) * self._side
        at = rows[:, :, None] + (x + self._margin)[:, None, :]
        dx = x * UNIT - centre[0][:, None]
        dy = y * UNIT - centre[1][:, None]
        return dx[:, None, :], dy[:, :, None], at

    def _draw(self, at: np.ndarray, dx: np.ndarray, dy: np.ndarray, radius: int, level: int, fade: int = UNIT) -> None:
        values = _covered(dx, dy, radius, fade) * level // fade
        self._pixels[at] = np.maximum(self._pixels[at], values.astype(np.uint8))


def _covered(dx: np.ndarray, dy: np.ndarray, radius: int, fade: int) -> np.ndarray:
    """How far inside `radius` an offset is: from 0 outside to `fade`."""
    # IEEE 754 prescribes every bit of a square root, so that this float is exact
    distance = np.sqrt(_squared(dx, dy).astype(np.float64)).astype(np.int32)
    return np.clip(fade // 2 + radius - distance, 0, fade)
