"""cABC, cluttered letters: do the two rings sit on one letter (label 1) or on two (label 0)?

After Kim, Linsley, Thakkar and Serre 2020 (arXiv:1906.01558), drawn anew from (seed, split, index), without fonts or
files to download: strokes of our own, warped, made of little squares of which one in five is missing.

How the classes are kept alike. Two letters are placed about their common centre of mass, without regard to the label.
Then two radii and an angle between them are drawn, and looked for at every turn about the centre: a scene is kept if,
in some sector of SECTOR turns and its opposite, both points lie on one letter at some turns and on two at others. The
label says from which of these turns one is drawn; the letters are turned back by it, and then everything by a random
angle. So what the rings alone show has one distribution in both classes, exactly, and so has what the letters alone
show; and how far the rings are from the centre of mass and, up to a sector, in which direction along the letters, has
one too. In the published images a ring's place tells: the middle between two rings on one letter is further from the
centre.
"""

from dataclasses import dataclass, fields

import numpy as np

from cssm.config import UserError
from cssm.data.draw import UNIT, Canvas, along, balanced, below, bits, fold, turn_table
from cssm.data.letters import PIECES, Style, pairs, rotated

VERSION = 1  # of the generator: raise it whenever an image changes
SPLITS = ("train", "val", "test")
CHUNK = 128  # images drawn at once: bounds memory, changes no image
MOST_ATTEMPTS = 1 << 14
# Streams of random numbers
SCENE, LABEL, ATTEMPT, LETTERS, MARKS, CHOICE, SQUARES = range(7)
# As published, a canvas is 70 squares of 5 px wide; lengths below are of such squares.
CELLS = 70
HEIGHT, STROKE, RADII = 29.0, 1.4, (11, 8)  # of a letter, of its strokes; of a ring and its hole in px of 350
NEAR = 5.0  # between the middles of pieces that count as overlapping
LEAST_NEAR, MOST_NEAR = 1, 6  # of the pieces of a letter: one letter has the least, none more than the most
TRIES, TURNS, SECTOR = 16, 180, 18  # pairs of radii, turns at which they are looked for, and how many make a sector
ON = UNIT  # a square: how far from the middle of a stroke still lies on it
SHOWN, LIT = 52429, 76  # a square is kept with 4/5 of 2**16, and where more than 0.3 of 255 is covered
SMALLEST, LARGEST = 64, 448  # px


@dataclass(frozen=True)
class CabcSpec:
    """Everything that decides the images. Lengths in squares of the texture unless they say px, angles in degrees."""

    difficulty: str
    image_size: int  # px
    shared: tuple[int, int]  # this and `own`: of letters.Style
    own: tuple[int, int, int]
    distance: tuple[float, float]  # of the letters from the middle
    separation: int  # least angle between them
    square: int  # px
    ring: tuple[int, int]  # radii of a ring and its hole, in 1/64 px
    letter_level: int = 255
    marker_level: int = 255
    version: int = VERSION

    @property
    def cells(self) -> int:
        """Squares across the image; what is left over is a margin."""
        return self.image_size // self.square

    def units(self, length: float) -> int:
        """A published length in 1/64 of a square."""
        return round(length * UNIT * self.cells / CELLS)


# Published as standard deviations of normal distributions; here the greatest values of ones that are as wide.
DIFFICULTIES = {
    #         shared     own           distance     separation
    "easy": ((50, 30), (2, 2, 2), (10.0, 12.0), 170),
    "medium": ((35, 21), (35, 21, 42), (8.0, 14.0), 110),
    "hard": ((2, 2), (50, 30, 60), (6.0, 16.0), 60),
}


def spec(difficulty: str, image_size: int) -> CabcSpec:
    """The parameters of a difficulty (easy, medium, hard) on image_size px. UserError for a size that is too small for
    rings to be seen, or too large.
    """
    if not SMALLEST <= image_size <= LARGEST:
        raise UserError(f"--image_size {image_size}: cABC takes {SMALLEST} to {LARGEST} pixels, type --image_size 128")
    square = max(1, round(image_size / CELLS))
    least = (3.0, 2.0)  # px that can be seen
    ring = [round(UNIT * max(r * image_size / 350, low)) for r, low in zip(RADII, least, strict=True)]
    return CabcSpec(difficulty, image_size, *DIFFICULTIES[difficulty], square=square, ring=(ring[0], ring[1]))


@dataclass(frozen=True)
class Geometry:
    """Where everything is, to check labels against: (x, y) in px from the centre of the top left pixel."""

    letters: np.ndarray  # int32 [n, 2]: which, from 0
    pieces: np.ndarray  # float64 [n, 2, PIECES, 2 (ends), 2]
    markers: np.ndarray  # float64 [n, 2, 2]: centres of the rings
    marker_letters: np.ndarray  # int32 [n, 2]: the letter, 0 or 1, under each
    attempts: np.ndarray  # int64 [n]: proposals until the scene was found


def generate(spec: CabcSpec, seed: int, split: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, Geometry]:
    """The images with some indices: uint8 [n, S, S, 1], labels int32 [n], and their Geometry.

    An image depends on (spec, seed, split, its index) alone, to the bit, on every machine: not on the other
    indices. seed: 0 .. 2**64 - 1; split: train, val or test; indices: int64 [n], not negative.
    """
    starts = range(0, max(len(indices), 1), CHUNK)
    images, labels, parts = zip(*(_chunk(spec, seed, split, indices[i : i + CHUNK]) for i in starts), strict=True)
    geometry = Geometry(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Geometry)))
    return np.concatenate(images), np.concatenate(labels), geometry


def _chunk(spec: CabcSpec, seed: int, split: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, Geometry]:
    stream = fold(fold(np.array([spec.version], np.uint64), seed), SPLITS.index(split))
    keys = fold(fold(stream, SCENE), indices.astype(np.uint64))
    labels = balanced(fold(stream, LABEL), indices)
    letters, pieces, radii, found, attempts = _scenes(spec, keys)
    words = bits(keys, CHOICE, 3)
    turn, owners = _chosen(found, labels, words)
    angle = below(words[:, 2], 360)
    pieces = rotated(pieces, (angle - turn) % 360)
    markers = np.stack([along((angle + radii[:, 2 * i + 1]) % 360, radii[:, 2 * i]) for i in range(2)], 2)
    images = _render(spec, keys, pieces, markers)
    to_px = spec.square / UNIT
    middle = (spec.image_size - 1) / 2
    geometry = Geometry(
        letters=letters,
        pieces=pieces.transpose(1, 2, 3, 4, 0) * to_px + middle,
        markers=markers.transpose(1, 2, 0) * to_px + middle,
        marker_letters=owners,
        attempts=attempts,
    )
    return images, labels, geometry


def _scenes(spec: CabcSpec, keys: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of each key: which letters int32 [n, 2]; their pieces about the centre int32 [2, n, 2, PIECES, 2 (ends)]; radius
    and angle of both markers int32 [n, 4]; what lies under them at each turn int8 [n, TURNS, 2], 0 for nothing or both
    letters, else 1 or 2; attempts int64 [n].
    """
    n = len(keys)
    letters, pieces = np.zeros((n, 2), np.int32), np.zeros((2, n, 2, PIECES, 2), np.int32)
    radii, found = np.zeros((n, 4), np.int32), np.zeros((n, TURNS, 2), np.int8)
    attempts, active = np.zeros(n, np.int64), np.arange(n)
    low, high = spec.distance
    style = Style(spec.units(HEIGHT), spec.shared, spec.own, (spec.units(low), spec.units(high)), spec.separation)
    while active.size:
        before = attempts[active]
        if before.max() > MOST_ATTEMPTS:
            raise RuntimeError(f"no scene found in {MOST_ATTEMPTS} attempts: {spec}")
        # Several attempts at once for each image; the earliest success counts, so this decides the speed only.
        at_once = max(1, min(32, 512 // active.size))
        numbers = (before[:, None] + np.arange(at_once)).ravel().astype(np.uint64)
        tried = fold(fold(np.repeat(keys[active], at_once), ATTEMPT), numbers)
        which, shapes = pairs(style, fold(tried, LETTERS))
        good = np.flatnonzero(_fit(spec, shapes))
        image, first = np.unique(good // at_once, return_index=True)
        good, winners = good[first], active[image]
        attempts[active] += at_once
        attempts[winners] += good % at_once + 1 - at_once
        marked, middle, chosen, under = _marks(spec, tried[good], shapes[:, good])
        done = winners[marked]
        letters[done], pieces[:, done] = which[good[marked]], shapes[:, good[marked]] - middle[:, :, None, None, None]
        radii[done], found[done] = chosen, under
        active = np.delete(active, image[marked])
    return letters, pieces, radii, found, attempts


def _fit(spec: CabcSpec, pieces: np.ndarray) -> np.ndarray:
    """Whether both letters stay inside, however the scene is turned, and overlap a little: bool [n]."""
    most = spec.cells * UNIT // 2 - 3 * UNIT
    inside = (pieces**2).sum(0).max((1, 2, 3)) <= most**2
    middles = pieces.sum(-1) // 2  # [2, n, 2, PIECES]
    gaps = middles[:, :, 0, :, None] - middles[:, :, 1, None, :]
    near = (gaps**2).sum(0) <= spec.units(NEAR) ** 2
    counts = np.stack([near.any(axis).sum(1) for axis in (1, 2)])
    return inside & (counts.max(0) >= LEAST_NEAR) & (counts.max(0) <= MOST_NEAR)


def _marks(spec: CabcSpec, keys: np.ndarray, pieces: np.ndarray) -> tuple[np.ndarray, ...]:
    """Which scenes have places for markers of both classes (ascending), where the centre of mass of their light is
    int32 [2, k], radii and angles about it [k, 4] and what is under them at each turn int8 [k, TURNS, 2]: of the first
    of TRIES.
    """
    n, half = len(keys), spec.cells * UNIT // 2 - 2 * UNIT
    on, middle = _letter_map(spec, pieces)
    words = bits(keys, MARKS, 3 * TRIES).reshape(n, TRIES, 3)
    one, two = (below(words[..., i], half + 1) for i in range(2))
    between = below(words[..., 2], 360)
    first, second = along(np.zeros_like(one), one), along(between, two)
    least = 2 * spec.ring[0] // spec.square + 2 * UNIT
    apart = ((first - second) ** 2).sum(0) >= least**2
    turned = np.arange(TURNS, dtype=np.int32) * (360 // TURNS)
    under = []
    for radius, start in ((one, np.zeros_like(between)), (two, between)):
        at = along((start[..., None] + turned) % 360, radius[..., None]) + middle[:, :, None, None]
        cell = (at + (spec.cells - 1) * UNIT // 2 + UNIT // 2) // UNIT
        under.append(on[np.arange(n)[:, None, None], cell[1], cell[0]])
    seen = np.stack(under, -1)  # [n, TRIES, TURNS, 2]
    near = (np.abs(middle).max(0) <= UNIT)[:, None]
    usable = near & apart & _mixed(*_fits(seen)).any(-1)
    good = np.flatnonzero(usable.any(1))
    chosen = usable[good].argmax(1)
    values = np.stack([one, np.zeros_like(one), two, between], -1)
    return good, middle[:, good], values[good, chosen], seen[good, chosen]


def _letter_map(spec: CabcSpec, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which letter alone lies at each square, int8 [n, cells, cells]: 1 or 2, 0 for neither or where the other is so
    near that a ring would touch it; and the centre of mass of the squares that may be lit, int32 [2, n].
    """
    n, reach = pieces.shape[1], spec.ring[0] // spec.square + spec.units(STROKE) // 2 + UNIT // 2
    canvas = _canvas(spec, pieces, reach)
    for piece in range(PIECES):
        # As far as it fades, what is drawn tells the distance.
        ends = _ends(spec, pieces, piece)
        canvas.segments(*ends, reach // 2, 255, fade=reach)
    nearness = canvas.images()[..., 0].reshape(n, 2, spec.cells, spec.cells)
    on = nearness >= (reach - ON) * 255 // reach
    clear = nearness == 0
    lit = (nearness >= (reach - _radius(spec) - UNIT // 5) * 255 // reach).any(1)
    place = np.arange(spec.cells) * UNIT - (spec.cells - 1) * UNIT // 2
    count = np.maximum(lit.sum((1, 2)), 1)
    middle = np.stack([(lit.sum(axis) * place).sum(1) // count for axis in (1, 2)]).astype(np.int32)
    return (on[:, 0] & clear[:, 1]) * np.int8(1) + (on[:, 1] & clear[:, 0]) * np.int8(2), middle


def _radius(spec: CabcSpec) -> int:
    """Half the thickness of a stroke, in units."""
    return max(spec.units(STROKE), UNIT + UNIT // 4) // 2


def _canvas(spec: CabcSpec, pieces: np.ndarray, reach: int) -> Canvas:
    """A canvas of squares for each letter of each image."""
    longest = int(np.abs(pieces[..., 1] - pieces[..., 0]).max(initial=0))
    return Canvas(2 * pieces.shape[1], spec.cells, -(-(reach + longest) // UNIT) + 1)


def _ends(spec: CabcSpec, pieces: np.ndarray, piece: int) -> tuple[np.ndarray, np.ndarray]:
    middle = (spec.cells - 1) * UNIT // 2
    ends = pieces[:, :, :, piece].reshape(2, -1, 2) + np.int32(middle)
    return ends[..., 0], ends[..., 1]


def _fits(found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At which turns the markers lie on two letters, and at which on one: int8 [..., TURNS, 2] -> bool [..., TURNS]."""
    both, same = (found > 0).all(-1), found[..., 0] == found[..., 1]
    return both & ~same, both & same


def _mixed(apart: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Which sectors have turns of both kinds: bool [..., TURNS] twice -> bool [..., sectors]."""
    return np.logical_and(np.any(_by_sector(apart), -1), np.any(_by_sector(same), -1))


def _by_sector(turned: np.ndarray) -> np.ndarray:
    """[..., TURNS] -> [..., sectors, 2 SECTOR]: each with the one opposite."""
    halves = turned.reshape(*turned.shape[:-1], 2, TURNS // 2 // SECTOR, SECTOR)
    return np.concatenate([halves[..., 0, :, :], halves[..., 1, :, :]], -1)


def _chosen(found: np.ndarray, labels: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One of the turns that fit each label, int32 [n] in degrees, in a sector that has some of both; and the letters
    under the markers there int32 [n, 2].
    """
    n, (apart, same) = np.arange(len(found)), _fits(found)
    sector = _one_of(_mixed(apart, same), words[:, 0])
    fits = np.where(labels[:, None] == 1, same, apart)
    place = _by_sector(np.arange(TURNS))[sector, _one_of(_by_sector(fits)[n, sector], words[:, 1])]
    return (place * (360 // TURNS)).astype(np.int32), found[n, place].astype(np.int32) - 1


def _one_of(allowed: np.ndarray, words: np.ndarray) -> np.ndarray:
    """A random True in each row of bool [n, k]: int64 [n]."""
    order = np.argsort(~allowed, 1, kind="stable")
    return order[np.arange(len(order)), below(words, allowed.sum(1))]


def _render(spec: CabcSpec, keys: np.ndarray, pieces: np.ndarray, markers: np.ndarray) -> np.ndarray:
    n, square, size, cells = len(keys), spec.square, spec.image_size, spec.cells
    radius = _radius(spec)
    canvas = _canvas(spec, pieces, radius + UNIT)
    for piece in range(PIECES):
        canvas.segments(*_ends(spec, pieces, piece), radius, 255)
    # A square for each cell that is covered, unless it is left out, shifted by up to 4/5 of its side
    drawing, row, column = np.nonzero(canvas.images()[..., 0] > LIT)
    key = fold(fold(keys[drawing // 2], SQUARES), ((drawing % 2 * cells + row) * cells + column).astype(np.uint64))
    kept = (key & np.uint64(0xFFFF)) < SHOWN
    drawing, row, column, key = drawing[kept], row[kept], column[kept], key[kept]
    farthest = max(1, round(4 * square / 5))
    table = turn_table(farthest + 1)
    shifts = [table[((key >> np.uint64(low)) & np.uint64(0xFFF)).astype(np.intp)] for low in (16, 28)]
    margin = (size - cells * square) // 2 + farthest
    side = size + 2 * farthest
    images = np.zeros((n, side, side), np.uint8)
    top, left = row * square + margin + shifts[0], column * square + margin + shifts[1]
    for down, right in np.ndindex(square, square):
        images[drawing // 2, top + down, left + right] = spec.letter_level
    inner = slice(farthest, farthest + size)
    rings = Canvas.over(images[:, inner, inner], -(-spec.ring[0] // UNIT))
    for marker in range(2):
        # markers count from the centre of the image, in units of a square
        at = markers[:, :, marker] * square + (size - 1) * UNIT // 2
        rings.rings(at, *spec.ring, spec.marker_level)
    return rings.images()
