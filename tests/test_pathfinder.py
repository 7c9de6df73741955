"""Pathfinder: the same images everywhere, right labels, and no cue to the class but the contours."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
from cues import blocks, excess
from scipy import ndimage
from scipy.stats import ks_2samp
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from cssm.config import UserError
from cssm.data import pathfinder
from cssm.data.pathfinder import SPECS, PathfinderSpec, generate, spec

HASHES = {  # of 64 images and their labels
    ("easy", 32, "train", 0): "d769c53652a60f09c9c4f02f",
    ("easy", 32, "val", 2018): "768ca692b101464b89a4a357",
    ("6", 64, "train", 0): "2b031369df4269afb131b878",
    ("9", 64, "test", 7): "43e5d575ff61d4809797d6e7",
    ("14", 128, "train", 0): "26b194eae9830e645e4c2792",
    ("25", 128, "val", 0): "cc1c1eeb1c2e23b7ac7dfe4f",
    ("14", 64, "test", 18446744073709551615): "8df7c67bb37c3247c8276473",
    ("14", 300, "train", 0): "f7b6d1f4979b35afa12958a2",
}


def _images(chosen: PathfinderSpec, split: str = "train", seed: int = 5, n: int = 64) -> np.ndarray:
    return generate(chosen, seed, split, np.arange(n))[0]


@pytest.mark.parametrize("difficulty, size, split, seed", HASHES)
def test_images_are_the_same_to_the_bit_on_every_machine(difficulty, size, split, seed):
    images, labels, _ = generate(spec(difficulty, size), seed, split, np.arange(64))
    assert images.shape == (64, size, size, 1)
    assert images.dtype == np.uint8
    digest = hashlib.sha256(images.tobytes() + labels.astype("<i4").tobytes()).hexdigest()
    assert digest[:24] == HASHES[difficulty, size, split, seed]


def test_an_image_depends_on_its_index_alone(monkeypatch):
    chosen = spec("easy", 32)
    indices = np.array([7, 3, 1234567, 8, 7])
    whole, labels, geometry = generate(chosen, 1, "val", indices)
    monkeypatch.setattr(pathfinder, "CHUNK", 2)
    for i, index in enumerate(indices):
        image, label, alone = generate(chosen, 1, "val", np.array([index]))
        np.testing.assert_array_equal(image[0], whole[i])
        np.testing.assert_array_equal(alone.markers[0], geometry.markers[i])
        assert (label[0], alone.attempts[0]) == (labels[i], geometry.attempts[i])
    np.testing.assert_array_equal(generate(chosen, 1, "val", indices)[0], whole)
    assert len(generate(chosen, 1, "val", np.zeros(0, np.int64))[0]) == 0


def test_no_image_occurs_twice_in_splits_or_seeds():
    chosen = spec("easy", 32)
    sets = [_images(chosen, split, seed, 500) for split in ("train", "val", "test") for seed in (0, 1)]
    assert len({image.tobytes() for images in sets for image in images}) == 6 * 500


def test_every_hundred_images_hold_fifty_of_each_class():
    _, labels, _ = generate(spec("easy", 32), 0, "train", np.arange(300, 900))
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(labels.reshape(6, 100).sum(1), 50)
    assert abs(np.corrcoef(labels[1:], labels[:-1])[0, 1]) < 0.15


@pytest.mark.parametrize("difficulty, size", [("easy", 32), ("9", 64), ("14", 128)])
def test_the_geometry_proves_the_labels(difficulty, size):
    chosen = spec(difficulty, size)
    _, labels, geometry = generate(chosen, 3, "test", np.arange(60))
    ends = geometry.contours[:, :, [0, -1]]
    gaps = np.linalg.norm(geometry.markers[:, :, None, None] - ends[:, None], axis=-1)  # marker, contour, end
    owner = gaps.min(3).argmin(2)
    assert gaps.min((2, 3)).max() < chosen.gap / 2 + 0.1
    np.testing.assert_array_equal(owner, geometry.marker_contours)
    np.testing.assert_array_equal(owner[:, 0] == owner[:, 1], labels == 1)
    distances = np.linalg.norm(geometry.markers[:, 0] - geometry.markers[:, 1], axis=-1)
    assert distances.min() > 2 * chosen.marker_radius + 1
    for i in range(60):
        lines = [*geometry.contours[i], *geometry.distractors[i]]
        assert len(lines) == 2 + chosen.distractors
        dense = [_dense(line) for line in lines]
        assert min(p.min() for p in dense) > chosen.marker_radius + 0.5
        assert max(p.max() for p in dense) < size - 1.5 - chosen.marker_radius
        for j, p in enumerate(dense):
            for q in dense[:j]:
                nearest = np.linalg.norm(p[:, None] - q, axis=-1).min()
                # checked every half pitch, so that lines between the points may come a little nearer
                pitch = chosen.length + chosen.gap
                assert nearest >= math.sqrt(chosen.clearance**2 - pitch**2 / 8) - 0.3


def _dense(line: np.ndarray) -> np.ndarray:
    t = np.linspace(0, 1, 9)[:, None, None]
    return (line[:-1] * (1 - t) + line[1:] * t).reshape(-1, 2)


@pytest.mark.parametrize("difficulty, size", [("easy", 32), ("6", 64), ("9", 64), ("14", 128)])
def test_filling_from_one_marker_reaches_the_other_in_positives_only(difficulty, size):
    chosen = spec(difficulty, size)
    images, labels, geometry = generate(chosen, 3, "test", np.arange(400))
    bridge = max(0, math.ceil((chosen.gap - chosen.thickness) / 2))  # px, from both sides of a gap
    reached = []
    for image, markers in zip(images[..., 0], np.rint(geometry.markers).astype(int), strict=True):
        near = ndimage.distance_transform_edt(image <= chosen.contour_level // 4) <= bridge
        region, _ = ndimage.label(near, np.ones((3, 3)))
        reached.append(region[markers[0][1], markers[0][0]] == region[markers[1][1], markers[1][0]])
    assert np.mean(reached, where=labels == 1) > 0.95
    assert np.mean(reached, where=labels == 0) <= 0.01


def _scalars(images: np.ndarray, geometry: pathfinder.Geometry) -> dict[str, np.ndarray]:
    """What could give the class away without any contour being followed."""
    size, markers = images.shape[1], geometry.markers
    across, middle = markers[:, 1] - markers[:, 0], markers.mean(1) - (size - 1) / 2
    return {
        "distance": np.hypot(*across.T),
        "middle x": middle[:, 0],
        "middle y": middle[:, 1],
        "middle radius": np.hypot(*middle.T),
        "border": np.minimum(markers, size - 1 - markers).min((1, 2)),
        "angle": np.arctan2(across[:, 1], across[:, 0]) % np.pi,
        "sum": images.sum((1, 2, 3), dtype=np.float64),
        "squares": np.square(images, dtype=np.float64).sum((1, 2, 3)),
        "lit": np.count_nonzero(images, (1, 2, 3)).astype(np.float64),
        "attempts": geometry.attempts.astype(np.float64),
    }


def _surroundings(images: np.ndarray, markers: np.ndarray, chosen: PathfinderSpec) -> np.ndarray:
    """What is round both markers, as far as contours are alike in both classes: within `shared` paddles."""
    pitch = chosen.length + chosen.gap
    radius = int(pitch if chosen.shared == 1 else 2 * pitch * math.cos(math.radians(chosen.max_turn / 2)))
    rows, columns = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    inside = rows**2 + columns**2 <= radius**2
    padded = np.pad(images[..., 0], ((0, 0), (radius, radius), (radius, radius)))
    at = np.rint(markers).astype(int)[..., None] + radius  # [n, 2, xy, 1]
    discs = padded[np.arange(len(images))[:, None, None], at[:, :, 1] + rows[inside], at[:, :, 0] + columns[inside]]
    return discs.reshape(len(images), -1).astype(np.float64)


def _check_no_cue(chosen: PathfinderSpec, n: int) -> None:
    images, labels, geometry = generate(chosen, 11, "train", np.arange(n))
    scalars = _scalars(images, geometry)
    for name, values in scalars.items():
        assert ks_2samp(values[labels == 1], values[labels == 0]).pvalue > 1e-3, name
    table = np.stack(list(scalars.values()), 1)
    bright = np.where(images > chosen.contour_level, images, 0)
    unmarked = generate(replace(chosen, marker_level=0), 11, "train", np.arange(n // 4))[0]
    near = _surroundings(images, geometry.markers, chosen)
    products = PolynomialFeatures(2).fit_transform(StandardScaler().fit_transform(table))
    network = MLPClassifier((64,), early_stopping=True, alpha=1e-2, random_state=0)
    found = {
        "totals": excess(table[:, 6:9], labels),
        "8x8": excess(blocks(images, 8), labels),
        "16x16": excess(blocks(images, 16), labels),
        "32x32": excess(blocks(images, 32), labels),
        "scalars and products": excess(products, labels),
        "markers only": excess(blocks(bright, 32), labels),
        "contours only": excess(blocks(unmarked, 32), labels),
        "marker surroundings": excess(near, labels),
        "network on marker surroundings": excess(near, labels, network),
    }
    assert {name: round(value, 2) for name, value in found.items() if abs(value) > 3} == {}


def test_no_trivial_cue_tells_the_classes_apart():
    _check_no_cue(spec("easy", 32), 3000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "difficulty, size, n",
    [("easy", 32, 20_000), ("6", 64, 20_000), ("9", 64, 10_000), ("14", 128, 5_000)],
)
def test_no_trivial_cue_at_full_size(difficulty, size, n):
    _check_no_cue(spec(difficulty, size), n)


def test_other_sizes_scale_the_nearest_row():
    assert spec("14", 256) == replace(
        spec("14", 300),
        image_size=256,
        length=2.5,
        gap=6.75,
        thickness=1.75,
        clearance=10.25,
        marker_radius=4.25,
    )
    for row in SPECS:
        assert spec(row.difficulty, row.image_size) == row
        for size in (row.image_size * 5 // 4, 448):
            assert _images(spec(row.difficulty, size), n=2).any((1, 2, 3)).all()


@pytest.mark.parametrize("difficulty, size, names", [("14", 32, "--image_size 128"), ("easy", 449, "448")])
def test_a_size_that_cannot_show_it_names_those_that_can(difficulty, size, names):
    with pytest.raises(UserError, match=names):
        spec(difficulty, size)
