"""cABC: the same images everywhere, right labels, and no cue to the class in rings or letters alone."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
from cues import blocks, excess
from scipy.stats import ks_2samp
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from cssm.config import UserError
from cssm.data import cabc
from cssm.data.cabc import CabcSpec, generate, spec
from cssm.data.draw import UNIT

HASHES = {  # of 16 images and their labels
    ("easy", 128, "train", 0): "d7fab36a9b2e7916daf84209",
    ("medium", 64, "val", 2018): "92bdfdde15e6d2346015522c",
    ("hard", 350, "test", 18446744073709551615): "bd4f319f40b12f37037bb434",
}


@pytest.mark.parametrize("difficulty, size, split, seed", HASHES)
def test_images_are_the_same_to_the_bit_on_every_machine(difficulty, size, split, seed):
    images, labels, _ = generate(spec(difficulty, size), seed, split, np.arange(16))
    assert images.shape == (16, size, size, 1) and images.dtype == np.uint8
    digest = hashlib.sha256(images.tobytes() + labels.astype("<i4").tobytes()).hexdigest()
    assert digest[:24] == HASHES[difficulty, size, split, seed]


def test_an_image_depends_on_its_index_alone(monkeypatch):
    chosen = spec("hard", 64)
    indices = np.array([7, 3, 1234567, 7])
    whole, labels, geometry = generate(chosen, 1, "val", indices)
    monkeypatch.setattr(cabc, "CHUNK", 2)
    for i, index in enumerate(indices):
        image, label, alone = generate(chosen, 1, "val", np.array([index]))
        np.testing.assert_array_equal(image[0], whole[i])
        np.testing.assert_array_equal(alone.markers[0], geometry.markers[i])
        assert (label[0], alone.attempts[0]) == (labels[i], geometry.attempts[i])
    np.testing.assert_array_equal(generate(chosen, 1, "val", indices)[0], whole)
    assert len(generate(chosen, 1, "val", np.zeros(0, np.int64))[0]) == 0


def test_no_image_occurs_twice_in_splits_or_seeds():
    chosen = spec("easy", 64)
    sets = [generate(chosen, seed, split, np.arange(12))[0] for split in cabc.SPLITS for seed in (0, 1)]
    assert len({image.tobytes() for images in sets for image in images}) == 6 * 12


@pytest.fixture(scope="module", params=["easy", "medium", "hard"])
def drawn(request):
    chosen = spec(request.param, 128)
    return chosen, *generate(chosen, 3, "test", np.arange(100))


def test_the_geometry_proves_the_labels(drawn):
    chosen, images, labels, geometry = drawn
    assert labels.sum() == 50
    a, b = (geometry.pieces[..., end, :][:, None] for end in range(2))  # [n, 1, letter, piece, xy]
    at = geometry.markers[:, :, None, None]
    share = np.clip(((at - a) * (b - a)).sum(-1) / ((b - a) ** 2).sum(-1).clip(1e-9), 0, 1)
    gaps = np.linalg.norm(at - a - share[..., None] * (b - a), axis=-1).min(-1)  # [n, marker, letter]
    owner = gaps.argmin(-1)
    np.testing.assert_array_equal(owner, geometry.marker_letters)
    np.testing.assert_array_equal(owner[:, 0] == owner[:, 1], labels == 1)
    ring = chosen.ring[0] / UNIT
    # The map of letters has squares for pixels, so that a ring may be off by one and a half.
    assert gaps.min(-1).max() < ring - chosen.square * 0.25 and gaps.max(-1).min() > ring
    assert np.linalg.norm(geometry.markers[:, 0] - geometry.markers[:, 1], axis=-1).min() > 2 * ring
    assert geometry.pieces.min() > 0 and geometry.pieces.max() < 127
    for image, markers in zip(images[..., 0], np.rint(geometry.markers).astype(int), strict=True):
        assert all(image[y - 1 : y + 2, x - 1 : x + 2].max() == 0 for x, y in markers), "a ring has a hole"


def test_letters_overlap_a_little(drawn):
    _, _, _, geometry = drawn
    middles = geometry.pieces.mean(3)
    gaps = np.linalg.norm(middles[:, 0, :, None] - middles[:, 1, None], axis=-1)
    near = gaps.min(2) < cabc.NEAR * 128 / 70
    assert near.any(1).mean() > 0.95 and near.mean() < 0.15


def test_texture_is_of_squares_of_which_one_in_five_is_missing(monkeypatch):
    monkeypatch.setattr(cabc.Canvas, "rings", lambda *_: None)
    chosen = spec("easy", 350)
    images, _, _ = generate(chosen, 0, "train", np.arange(16))
    assert set(np.unique(images)) == {0, 255}
    monkeypatch.setattr(cabc, "SHOWN", 1 << 16)
    whole, _, _ = generate(chosen, 0, "train", np.arange(16))
    assert 0.75 < (images > 0).sum() / (whole > 0).sum() < 0.88  # squares overlap
    assert (whole >= images).all()


def scalars(images: np.ndarray, geometry: cabc.Geometry) -> dict[str, np.ndarray]:
    """What could give the class away without a letter being followed."""
    size, markers = images.shape[1], geometry.markers
    across, middle = markers[:, 1] - markers[:, 0], markers.mean(1) - (size - 1) / 2
    rows, columns = np.mgrid[:size, :size]
    light = images[..., 0].astype(float)
    centre = np.stack([(light * grid).sum((1, 2)) for grid in (columns, rows)], 1) / light.sum((1, 2))[:, None]
    return {
        "distance": np.hypot(*across.T),
        "middle x": middle[:, 0],
        "middle y": middle[:, 1],
        "middle radius": np.hypot(*middle.T),
        "angle": np.arctan2(across[:, 1], across[:, 0]) % np.pi,
        "sum": images.sum((1, 2, 3), dtype=np.float64),
        "centre x": centre[:, 0],
        "centre y": centre[:, 1],
        "attempts": geometry.attempts.astype(np.float64),
        "equal letters": (geometry.letters[:, 0] == geometry.letters[:, 1]).astype(float),
        "first letter": geometry.letters[:, 0].astype(float),
    }


def check_no_cue(chosen: CabcSpec, n: int) -> None:
    images, labels, geometry = generate(chosen, 11, "train", np.arange(n))
    found = scalars(images, geometry)
    for name, values in found.items():
        assert ks_2samp(values[labels == 1], values[labels == 0], method="asymp").pvalue > 1e-3, name
    table = np.stack(list(found.values()), 1)
    sides = (8, 16, 32)
    rings = generate(replace(chosen, letter_level=0), 11, "train", np.arange(n // 4))[0]
    unmarked = generate(replace(chosen, marker_level=0), 11, "train", np.arange(n // 4))[0]
    telling = {
        **{f"{side}x{side}": excess(blocks(images, side), labels) for side in sides},
        "scalars": excess(table, labels),
        "products": excess(PolynomialFeatures(2).fit_transform(StandardScaler().fit_transform(table)), labels),
        "rings only": excess(blocks(rings, sides[-1]), labels[: n // 4]),
        "letters only": excess(blocks(unmarked, sides[-1]), labels[: n // 4]),
    }
    assert {name: round(value, 2) for name, value in telling.items() if abs(value) > 3} == {}


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", ["easy", "hard"])
def test_no_trivial_cue_at_full_size(difficulty):
    check_no_cue(spec(difficulty, 128), 2_500)


def test_rings_alone_do_not_depend_on_the_label(monkeypatch):
    """The same scenes with all labels turned round: rings alone, and letters up to a rotation, stay what they are."""
    chosen = spec("medium", 64)
    _, labels, geometry = generate(chosen, 0, "train", np.arange(60))
    balanced = cabc.balanced
    monkeypatch.setattr(cabc, "balanced", lambda *args: 1 - balanced(*args))
    _, turned, other = generate(chosen, 0, "train", np.arange(60))
    np.testing.assert_array_equal(turned, 1 - labels)
    np.testing.assert_array_equal(other.markers, geometry.markers)
    np.testing.assert_array_equal(other.attempts, geometry.attempts)
    radii = [np.linalg.norm(g.pieces - 31.5, axis=-1) for g in (geometry, other)]
    np.testing.assert_allclose(*radii, atol=0.05)


def test_every_size_is_drawn():
    for size in (64, 100, 224, 448):
        chosen = spec("hard", size)
        assert generate(chosen, 0, "train", np.arange(2))[0].any((1, 2, 3)).all()
        assert 46 <= chosen.cells <= 105
        assert math.isclose(chosen.ring[0] / UNIT, max(11 * size / 350, 3), abs_tol=0.01)


@pytest.mark.parametrize("size", [63, 449])
def test_a_size_that_cannot_show_it_names_those_that_can(size):
    with pytest.raises(UserError, match="64 to 448"):
        spec("easy", size)
