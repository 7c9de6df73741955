"""Pathfinder: do the two discs sit at the ends of one contour (label 1) or of two (label 0)?

After Linsley et al. 2018 (arXiv:1805.08315), drawn anew from (seed, split, index), without files to download.
Unlike in the published images, marker distance, place and the line ends at the markers have one distribution
in both classes (scenes.py says how); there, a rule on marker distance alone finds up to 86% of the labels.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from cssm.config import UserError
from cssm.data.draw import UNIT, Canvas, along, balanced, fold
from cssm.data.scenes import Scenes, Shape, grow

VERSION = 1  # of the generator: raise it whenever an image changes
SPLITS = ("train", "val", "test")  # hashed into every image: no two splits have an image in common
CHUNK = 1024  # images drawn at once: bounds memory, changes no image
SCENE, LABEL = 0, 1  # streams of random numbers


@dataclass(frozen=True)
class PathfinderSpec:
    """Everything that decides the images. Lengths in px, each a multiple of 1/64; angles in degrees."""

    difficulty: str
    image_size: int
    paddles: int  # in each of the two contours
    length: float  # of a paddle's centre line; its ends are round and reach thickness / 2 further
    gap: float  # between the centre lines of neighbouring paddles
    thickness: float
    max_turn: int  # from a paddle to the next
    clearance: float  # between the centre lines of different contours
    marker_radius: float
    shared: int  # paddles at each marker that are alike in both classes
    distractors: int
    distractor_paddles: int
    contour_level: int = 180  # grey levels
    marker_level: int = 255
    version: int = VERSION


# The sizes at which each difficulty was designed, its usual one first; spec() scales to others. At 300 px the
# published lengths, turns and counts.
SPECS = (
    #              difficulty size paddles length gap thick turn clear radius shared distractors of
    PathfinderSpec("easy", 32, 5, 3.5, 0.0, 1.5, 75, 4.5, 1.5, 1, 1, 4),
    PathfinderSpec("6", 64, 6, 4.0, 3.5, 1.5, 60, 7.0, 2.5, 2, 4, 2),
    PathfinderSpec("6", 32, 6, 2.0, 2.0, 1.0, 75, 5.0, 1.5, 2, 2, 2),
    PathfinderSpec("6", 300, 6, 3.0, 8.0, 2.0, 50, 12.0, 5.0, 2, 15, 2),
    PathfinderSpec("9", 64, 9, 2.5, 3.0, 1.5, 50, 6.0, 2.5, 2, 5, 3),
    PathfinderSpec("9", 300, 9, 3.0, 8.0, 2.0, 50, 12.0, 5.0, 2, 15, 3),
    PathfinderSpec("14", 128, 14, 3.5, 4.0, 1.5, 50, 8.0, 3.0, 2, 8, 4),
    PathfinderSpec("14", 64, 14, 2.0, 2.0, 1.0, 60, 4.5, 2.0, 2, 5, 4),
    PathfinderSpec("14", 300, 14, 3.0, 8.0, 2.0, 50, 12.0, 5.0, 2, 15, 4),
    PathfinderSpec("20", 128, 20, 2.5, 3.5, 1.5, 50, 7.0, 3.0, 2, 8, 6),
    PathfinderSpec("20", 300, 20, 3.0, 8.0, 2.0, 50, 12.0, 5.0, 2, 15, 6),
    PathfinderSpec("25", 128, 25, 2.0, 3.0, 1.5, 50, 6.0, 3.0, 2, 8, 8),
    PathfinderSpec("25", 300, 25, 3.0, 7.0, 2.0, 50, 11.0, 5.0, 2, 15, 8),
)
DIFFICULTIES = tuple(dict.fromkeys(row.difficulty for row in SPECS))
# px that can be seen
LEAST = {"length": 2.0, "gap": 2.0, "thickness": 1.0, "clearance": 4.5, "marker_radius": 1.5}
LARGEST_SIZE = 448  # squared distances stay below 2**31


def spec(difficulty: str, image_size: int) -> PathfinderSpec:
    """The parameters of a difficulty (easy, or the paddles of a contour: 6, 9, 14, 20, 25) on image_size px.

    A size without a row in SPECS scales every length of the nearest row that stays visible there, rounded
    to 1/4 px: the same scenes, finer or coarser. Raises UserError for a size at which it cannot be seen.
    """
    rows = [row for row in SPECS if row.difficulty == difficulty]
    if not rows:
        raise UserError(f"--pathfinder_difficulty {difficulty}: there is {', '.join(DIFFICULTIES)}")
    found = _scaled(rows, image_size)
    if found is None:
        smallest = next(size for size in range(1, LARGEST_SIZE) if _scaled(rows, size))
        raise UserError(
            f"--image_size {image_size}: Pathfinder {difficulty} takes {smallest} to {LARGEST_SIZE} "
            f"pixels, type --image_size {rows[0].image_size}"
        )
    return found


def _scaled(rows: list[PathfinderSpec], size: int) -> PathfinderSpec | None:
    """The nearest row that is visible at this size, if any: no length under LEAST (a gap of 0 stays 0)."""
    for row in sorted(rows, key=lambda row: max(row.image_size / max(size, 1), size / row.image_size)):
        scaled = row
        if size != row.image_size:
            quarters = {name: round(4 * getattr(row, name) * size / row.image_size) for name in LEAST}
            scaled = replace(row, image_size=size, **{name: n / 4 for name, n in quarters.items()})
        seen = all(getattr(scaled, name) >= least for name, least in LEAST.items() if getattr(row, name))
        if seen and size <= LARGEST_SIZE:
            return scaled
    return None


@dataclass(frozen=True)
class Geometry:
    """Where everything is, to check labels against: (x, y) in px from the centre of the top left pixel."""

    contours: np.ndarray  # float64 [n, 2, paddles + 1, 2]: joints of both contours
    distractors: np.ndarray  # float64 [n, distractors, distractor_paddles + 1, 2]
    markers: np.ndarray  # float64 [n, 2, 2]: centres of the discs
    marker_contours: np.ndarray  # int32 [n, 2]: the contour that each disc is an end of
    attempts: np.ndarray  # int64 [n]: proposals until the scene was found


def generate(
    spec: PathfinderSpec, seed: int, split: str, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Geometry]:
    """The images with some indices: uint8 [n, S, S, 1], labels int32 [n], and their Geometry.

    An image depends on (spec, seed, split, its index) alone, to the bit, on every machine: not on the other
    indices. seed: 0 .. 2**64 - 1; split: train, val or test; indices: int64 [n], not negative.
    """
    starts = range(0, max(len(indices), 1), CHUNK)
    images, labels, parts = zip(*(_chunk(spec, seed, split, indices[i : i + CHUNK]) for i in starts), strict=True)
    geometry = Geometry(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Geometry)))
    return np.concatenate(images), np.concatenate(labels), geometry


def _chunk(spec: PathfinderSpec, seed: int, split: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, Geometry]:
    stream = fold(fold(np.array([spec.version], np.uint64), seed), SPLITS.index(split))
    scenes = grow(_shape(spec), fold(fold(stream, SCENE), indices.astype(np.uint64)))
    labels = balanced(fold(stream, LABEL), indices)
    half_gap = round(spec.gap * UNIT) // 2
    points, headings = scenes.points, scenes.headings
    root = points[:, :, 0, 0] + along(headings[:, 0, 0], half_gap)
    same = points[:, :, 0, -1] - along(headings[:, 0, -1], half_gap)
    other = points[:, :, 1, 0] + along(headings[:, 1, 0], half_gap)
    markers = np.stack([root, np.where(labels == 1, same, other)], 2)
    geometry = Geometry(
        contours=points[..., ::2].transpose(1, 2, 3, 0) / UNIT,
        distractors=scenes.distractor_points[..., ::2].transpose(1, 2, 3, 0) / UNIT,
        markers=markers.transpose(1, 2, 0) / UNIT,
        marker_contours=np.stack([np.zeros_like(labels), 1 - labels], 1),
        attempts=scenes.attempts,
    )
    return _render(spec, scenes, markers), labels, geometry


def _shape(spec: PathfinderSpec) -> Shape:
    def units(px: float) -> int:
        return round(px * UNIT)

    return Shape(
        size=spec.image_size,
        paddles=spec.paddles,
        pitch=units(spec.length + spec.gap),
        max_turn=spec.max_turn,
        clearance=units(spec.clearance),
        tip_clearance=units(max(spec.clearance, 2 * spec.marker_radius + 2)),
        border=units(spec.marker_radius + 1.5),
        shared=spec.shared,
        distractors=spec.distractors,
        distractor_paddles=spec.distractor_paddles,
    )


def _render(spec: PathfinderSpec, scenes: Scenes, markers: np.ndarray) -> np.ndarray:
    length, width, radius = (round(x * UNIT) for x in (spec.length, spec.thickness, spec.marker_radius))
    reach = -(-max(length + width, 2 * radius) // (2 * UNIT))
    canvas = Canvas(markers.shape[1], spec.image_size, reach)
    for points, headings in (
        (scenes.points, scenes.headings),
        (scenes.distractor_points, scenes.distractor_headings),
    ):
        for contour, paddle in np.ndindex(headings.shape[1:]):
            centre, heading = points[:, :, contour, 2 * paddle + 1], headings[:, contour, paddle]
            canvas.bars(centre, heading, length, width // 2, spec.contour_level)
    for marker in range(2):
        canvas.discs(markers[:, :, marker], radius, spec.marker_level)
    return canvas.images()
