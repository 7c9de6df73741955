"""Capital letters as strokes, drawn for this project; and pairs of them: stretched, sheared, turned, warped, placed."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np

from cssm.data.draw import COS, HALF, SIN, TRIG_BITS, along, below, bits, fold, turns

# In a box 100 high, y down. Strokes are separated by semicolons, their points by blanks.
_O = "38,0 18,8 4,28 0,50 4,72 18,92 38,100 58,92 72,72 76,50 72,28 58,8 38,0"
_P = "0,100 0,0 38,0 56,8 62,26 56,44 38,52 0,52"
_C = "68,20 56,6 38,0 18,8 4,28 0,50 4,72 18,92 38,100 56,94 68,80"
STROKES = {
    "A": "0,100 35,0 70,100; 13,63 57,63",
    "B": "0,0 0,100; 0,0 38,0 54,8 60,24 54,40 38,48 0,48; 38,48 58,56 65,74 58,92 38,100 0,100",
    "C": _C,
    "D": "0,0 0,100 34,100 54,90 66,70 70,50 66,30 54,10 34,0 0,0",
    "E": "56,0 0,0 0,100 56,100; 0,48 46,48",
    "F": "56,0 0,0 0,100; 0,48 46,48",
    "G": f"{_C} 68,56 42,56",
    "H": "0,0 0,100; 66,0 66,100; 0,48 66,48",
    "I": "10,0 38,0; 24,0 24,100; 10,100 38,100",
    "J": "46,0 46,76 40,92 24,100 8,92 0,78",
    "K": "0,0 0,100; 60,0 0,58; 22,37 64,100",
    "L": "0,0 0,100 54,100",
    "M": "0,100 0,0 40,70 80,0 80,100",
    "N": "0,100 0,0 66,100 66,0",
    "O": _O,
    "P": _P,
    "Q": f"{_O}; 48,74 78,106",
    "R": f"{_P}; 34,52 64,100",
    "S": "60,16 48,4 32,0 14,6 4,22 12,40 32,48 54,58 62,76 52,94 32,100 12,95 0,82",
    "T": "0,0 70,0; 35,0 35,100",
    "U": "0,0 0,64 8,88 34,100 60,88 68,64 68,0",
    "V": "0,0 35,100 70,0",
    "W": "0,0 22,100 45,20 68,100 90,0",
    "X": "0,0 64,100; 64,0 0,100",
    "Y": "0,0 34,50 68,0; 34,50 34,100",
    "Z": "0,0 64,0 0,100 64,100",
}
PIECES = 40  # straight pieces of each letter, so that all are arrays of one shape
SCALE = 64  # units to a hundredth of the height
WIDTHS = (82, 100)  # percent, of two fonts
BUMPS = 4  # that warp a letter
LETTER, SHAPE, WARP, PLACE = range(4)  # streams of random numbers
# 2**(k/100) for k from -128; no entry is so near a boundary that a machine's last bit would change it (tested)
POWERS = np.array([round(2 ** (TRIG_BITS + k / 100)) for k in range(-128, 129)], np.int64)


@dataclass(frozen=True)
class Style:
    """How a pair of letters is made. Lengths in any unit, whole numbers below 2**12; angles in degrees.

    shared: greatest scale (k of 2**(k/100)) and shear (percent) that both letters have in common; own: those of each,
    and its greatest rotation. distance: least and greatest, of a letter from the middle; separation: least angle
    between the two.
    """

    height: int
    shared: tuple[int, int]
    own: tuple[int, int, int]
    distance: tuple[int, int]
    separation: int


@cache
def alphabet() -> np.ndarray:
    """int32 [26, PIECES, 2 (ends), 2 (x, y)], each about its centre of mass, in 1 / (100 SCALE) of the height."""
    return np.stack([_pieces(strokes) for strokes in STROKES.values()])


def _pieces(strokes: str) -> np.ndarray:
    edges = []
    for stroke in strokes.split(";"):
        points = [tuple(SCALE * int(number) for number in point.split(",")) for point in stroke.split()]
        edges += pairwise(points)
    squared = [(a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 for a, b in edges]
    parts = [1] * len(edges)
    while sum(parts) < PIECES:  # cut the edge whose pieces are longest
        longest = max(range(len(edges)), key=lambda i: Fraction(squared[i], parts[i] ** 2))
        parts[longest] += 1
    ends = [
        [[a[axis] + (b[axis] - a[axis]) * (i + end) // n for axis in range(2)] for end in range(2)]
        for (a, b), n in zip(edges, parts, strict=True)
        for i in range(n)
    ]
    pieces = np.array(ends, np.int32)
    return pieces - pieces.sum((0, 1), dtype=np.int32) // (2 * PIECES)


def pairs(style: Style, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two letters a key: which int32 [n, 2], and their pieces int32 [2, n, 2, PIECES, 2], about the centre."""
    words = bits(keys, LETTER, 3)
    which = below(words[:, :2], len(alphabet()))
    width = np.array(WIDTHS, np.int32)[below(words[:, 2], len(WIDTHS))]
    # 32 bits hold these products: the alphabet's numbers are below 2**13, a size below 2**12
    x, y = (alphabet()[which, ..., axis] for axis in range(2))
    size = style.height
    x, y = x * size // (100 * SCALE), y * size // (100 * SCALE)
    x = x * width[:, None, None, None] // 100
    both = _transform(fold(keys, SHAPE), *style.shared, 0)
    x, y = _warped(fold(keys, WARP), x, y, size)
    for letter in range(2):
        scale_x, scale_y, shear_x, shear_y, turn = _transform(fold(keys, SHAPE + 100 + letter), *style.own)
        factors = (scale_x * both[0] >> TRIG_BITS, scale_y * both[1] >> TRIG_BITS)
        wide, high = (
            values[:, letter].astype(np.int64) * factor[:, None, None] >> TRIG_BITS
            for values, factor in zip((x, y), factors, strict=True)
        )
        sheared = [
            wide + (shear_x + both[2])[:, None, None] * high // 100,
            high + (shear_y + both[3])[:, None, None] * wide // 100,
        ]
        x[:, letter], y[:, letter] = rotated(np.stack(sheared).astype(np.int32), turn % 360)
    pieces = np.stack([x, y]) + _places(style, keys)[..., None, None]
    return which, pieces - _centre_of_mass(pieces)[:, :, None, None, None]


def _centre_of_mass(pieces: np.ndarray) -> np.ndarray:
    """Of all pieces of both letters, int32 [2, n]."""
    across = (pieces[..., 1] - pieces[..., 0]).astype(np.float64)
    length = np.sqrt((across**2).sum(0)).astype(np.int64)  # exact: see draw.py
    total = (length * (pieces.sum(-1, dtype=np.int64) // 2)).sum((2, 3))
    return (total // length.sum((1, 2))).astype(np.int32)


def _transform(keys: np.ndarray, scale: int, shear: int, rotation: int) -> tuple[np.ndarray, ...]:
    """Of each key: scales of x and y times 2**TRIG_BITS, which grow or shrink together, shears in percent, degrees."""
    sizes = np.abs(turns(keys, 0, 2, scale + 1))
    grows = below(bits(keys, 1, 1), 2)
    leans = np.abs(turns(keys, 2, 2, shear + 1)) * (2 * below(bits(keys, 3, 1), 2) - 1)
    x, y = (POWERS.take(np.where(grows[:, 0] == 1, sizes[:, i], -sizes[:, i]) + 128) for i in range(2))
    return x, y, leans[:, 0], leans[:, 1], turns(keys, 4, 1, rotation + 1)[:, 0] if rotation else np.zeros_like(grows)


def _warped(keys: np.ndarray, x: np.ndarray, y: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Points moved by smooth bumps, others for each letter: int32 [n, 2, ...] twice -> the same."""
    x, y = x.astype(np.int64), y.astype(np.int64)
    out_x, out_y = x.copy(), y.copy()
    reach = 6 * size // 10
    for bump in range(BUMPS):
        words = below(bits(keys, bump, 8), size + 1).reshape(-1, 2, 4) - size // 2
        at_x, at_y, by_x, by_y = (words[..., i, None, None].astype(np.int64) for i in range(4))
        inside = np.maximum(reach**2 - (x - at_x) ** 2 - (y - at_y) ** 2, 0) * 1024 // reach**2
        strength = inside * inside  # to 2**20; the whole is a fifth of the shift that was drawn
        out_x += (by_x * strength // 5) >> 20
        out_y += (by_y * strength // 5) >> 20
    return out_x.astype(np.int32), out_y.astype(np.int32)


def _places(style: Style, keys: np.ndarray) -> np.ndarray:
    """Where the letters stand: int32 [2, n, 2 (letters)]."""
    words = bits(keys, PLACE, 4)
    low, high = style.distance
    radius = low + below(words[:, :2], high - low + 1)
    first = below(words[:, 2], 360)
    apart = style.separation + below(words[:, 3], 360 - 2 * style.separation + 1)
    return along(np.stack([first, (first + apart) % 360], 1), radius)


def rotated(points: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Points int32 [2, n, ...] turned by degrees int32 [n]: int32."""
    shape = (-1, *[1] * (points.ndim - 2))
    cos, sin = (table.take(angle).astype(np.int64).reshape(shape) for table in (COS, SIN))
    x, y = points
    return np.stack([(x * cos - y * sin + HALF) >> TRIG_BITS, (x * sin + y * cos + HALF) >> TRIG_BITS]).astype(np.int32)
