"""Letters: 26 of them, whole and centred; pairs that depend on their own key and keep to their style."""

import math

import numpy as np

from cssm.data import letters
from cssm.data.draw import TRIG_BITS, fold
from cssm.data.letters import PIECES, SCALE, STROKES, Style, alphabet, pairs, rotated

STYLE = Style(height=1800, shared=(2, 2), own=(50, 30, 60), distance=(600, 900), separation=60)
KEYS = fold(np.zeros(1, np.uint64), np.arange(300, dtype=np.uint64))


def test_an_alphabet_of_connected_pieces_about_their_centre():
    assert "".join(STROKES) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    found = alphabet()
    assert found.shape == (26, PIECES, 2, 2)
    assert np.abs(found.mean((1, 2))).max() <= 1
    heights = np.ptp(found[..., 1], (1, 2)) / SCALE
    assert heights.min() >= 99 and heights.max() <= 107
    for name, strokes, pieces in zip(STROKES, STROKES.values(), found, strict=True):
        joints = (pieces[1:, 0] == pieces[:-1, 1]).all(1).sum()
        assert joints == PIECES - 1 - strokes.count(";"), name
        lengths = np.hypot(*np.moveaxis(pieces[:, 1] - pieces[:, 0], 1, 0)) / SCALE
        assert lengths.min() > 0 and lengths.max() < 20


def test_no_power_depends_on_the_last_bit_of_the_machines():
    exact = np.array([2 ** (TRIG_BITS + k / 100) for k in range(-128, 129)])
    assert np.abs(exact % 1 - 0.5).min() > 1e-6


def test_a_pair_depends_on_its_own_key_alone():
    which, pieces = pairs(STYLE, KEYS)
    some, alone = pairs(STYLE, KEYS[[7, 200]])
    np.testing.assert_array_equal(some, which[[7, 200]])
    np.testing.assert_array_equal(alone, pieces[:, [7, 200]])


def test_pairs_stand_about_their_common_centre_of_mass_at_their_distance():
    which, pieces = pairs(STYLE, KEYS)
    assert pieces.shape == (2, 300, 2, PIECES, 2) and set(which.ravel()) == set(range(26))
    ends = pieces.astype(float)
    length = np.hypot(*(ends[..., 1] - ends[..., 0]))
    centre = (ends.mean(-1) * length).sum((2, 3)) / length.sum((1, 2))
    assert np.abs(centre).max() < 20
    of_each = ends.mean((3, 4))
    apart = np.hypot(*(of_each[:, :, 0] - of_each[:, :, 1]))
    # at 60 degrees, the letters' warp aside, no nearer than the least distance
    assert np.percentile(apart, 5) > STYLE.distance[0] * 0.8 and apart.max() < 2 * STYLE.distance[1] + 900


def test_both_letters_share_what_is_shared_and_differ_in_what_is_their_own():
    def spread(style: Style) -> float:
        """How differently two equal letters come out, at one place and without warp."""
        which, pieces = pairs(style, KEYS)
        same = which[:, 0] == which[:, 1]
        shapes = pieces[:, same] - pieces[:, same].mean((3, 4), keepdims=True)
        return float(np.abs(shapes[:, :, 0] - shapes[:, :, 1]).mean())

    calm = Style(1800, (50, 30), (2, 2, 2), (600, 900), 60)
    assert spread(calm) < 0.5 * spread(STYLE)


def test_a_rotation_by_degrees_keeps_lengths():
    points = np.array([[300, -40], [20, 500]], np.int32)
    turned = rotated(points, np.array([90, 210], np.int32))
    np.testing.assert_array_equal(turned[:, 0], [-20, 300])
    assert np.abs(np.hypot(*turned) - np.hypot(*points)).max() < 1.5
    c, s = math.cos(math.radians(210)), math.sin(math.radians(210))
    np.testing.assert_allclose(turned[:, 1], [-40 * c - 500 * s, -40 * s + 500 * c], atol=1)


def test_letters_are_warped(monkeypatch):
    _, warped = pairs(STYLE, KEYS[:50])
    monkeypatch.setattr(letters, "BUMPS", 0)
    _, plain = pairs(STYLE, KEYS[:50])
    moved = np.abs(warped - plain)
    assert 0.01 * STYLE.height < moved.mean() < 0.1 * STYLE.height
