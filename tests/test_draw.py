"""Integers that draw: streams of numbers, chains, distances and shapes, the same to the bit everywhere."""

import math

import numpy as np
import pytest

from cssm.data import draw
from cssm.data.draw import UNIT, Canvas
from cssm.data.pathfinder import SPECS

KEYS = draw.fold(np.zeros(1, np.uint64), np.arange(3000, dtype=np.uint64))


def test_no_table_depends_on_the_last_bit_of_the_machines_cosine():
    exact = [2**draw.TRIG_BITS * math.cos(math.radians(d)) for d in range(360)]
    exact += [
        2**20 * math.cos(math.pi / 2 * d / turn) ** 2 for turn in {row.max_turn for row in SPECS} for d in range(turn)
    ]
    fraction = np.abs(np.array(exact)) % 1
    assert np.abs(fraction - 0.5).min() > 1e-6


def test_the_hash_is_splitmix64s():
    """Its first two numbers from the seed 0."""
    golden = 0x9E3779B97F4A7C15
    state = np.array([golden, 2 * golden % 2**64], np.uint64)
    assert [hex(value) for value in draw.mix(state)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_streams_of_a_key_have_no_number_in_common():
    numbers = np.concatenate([draw.bits(KEYS, stream, 3) for stream in (0, 1)])
    assert len(np.unique(numbers)) == numbers.size
    assert draw.fold(draw.fold(KEYS, 1), 2)[0] != draw.fold(draw.fold(KEYS, 2), 1)[0]
    np.testing.assert_array_equal(draw.bits(KEYS, 7, 2), draw.bits(KEYS, 7, 3)[:, :2])


@pytest.mark.parametrize("limit", [1, 7, 360, 2**31 - 1])
def test_below_is_uniform_and_reaches_both_ends(limit):
    words = np.concatenate([KEYS, np.array([0, 2**64 - 1], np.uint64)])
    drawn = draw.below(words, limit)
    assert (drawn.min(), drawn.max()) == (0, limit - 1)
    assert abs(drawn.mean() - (limit - 1) / 2) < 4 * limit / math.sqrt(12 * len(words))


@pytest.mark.parametrize("max_turn", [50, 75])
def test_turns_follow_a_squared_cosine(max_turn):
    drawn = draw.turns(KEYS, 0, 7, max_turn)
    assert drawn.shape == (len(KEYS), 7)
    degrees = np.arange(-max_turn, max_turn + 1)
    share = np.cos(np.pi / 2 * degrees / max_turn) ** 2
    share /= share.sum()
    assert abs(drawn).max() < max_turn, "a turn of the greatest angle has the share 0"
    assert abs(drawn.mean()) < 4 * drawn.std() / math.sqrt(drawn.size)
    assert drawn.std() == pytest.approx(math.sqrt((share * degrees**2).sum()), rel=0.02)


def test_a_chain_advances_half_a_pitch_at_a_time():
    headings = draw.below(draw.bits(KEYS[:50], 0, 4), 360)
    start = np.stack([np.arange(50), -np.arange(50)]).astype(np.int32)
    points = draw.chain(start, headings, 200)
    assert points.shape == (2, 50, 9)
    np.testing.assert_array_equal(points[:, :, 0], start)
    steps = np.diff(points, axis=2)
    np.testing.assert_array_equal(steps[:, :, ::2], steps[:, :, 1::2])
    angles = np.degrees(np.arctan2(steps[1, :, ::2], steps[0, :, ::2])) % 360
    off = np.abs((angles - headings + 180) % 360 - 180)
    assert off.max() < 1
    assert np.abs(np.hypot(*steps) - 100).max() < 1


def test_distances_are_those_of_a_plain_search():
    random = np.random.default_rng(0)
    a, b = random.integers(-300, 300, (2, 200, 4)), random.integers(-300, 300, (2, 200, 3))
    a, b = a.astype(np.int32), b.astype(np.int32)
    between = np.linalg.norm(a[:, :, :, None] - b[:, :, None].astype(float), axis=0)
    np.testing.assert_array_equal(draw.clear(a, b, 90), between.min((1, 2)) >= 90)
    np.testing.assert_array_equal(draw.apart(a[:, :, 0], b[:, :, 0], 250), between[:, 0, 0] >= 250)
    within = np.linalg.norm(a[:, :, :, None] - a[:, :, None].astype(float), axis=0)
    far = np.abs(np.subtract.outer(np.arange(4), np.arange(4))) > 1
    np.testing.assert_array_equal(draw.self_clear(a, 90, 1), np.where(far, within, np.inf).min((1, 2)) >= 90)
    assert 20 < draw.clear(a, b, 90).sum() < 180


def centres(*points):
    return np.array(points, np.int32).T * UNIT


class TestCanvas:
    """Shapes on images of 20 px."""

    def drawn(self, centre, radius=3, level=200):
        canvas = Canvas(len(centre.T), 20, radius)
        canvas.discs(centre, radius * UNIT, level)
        return canvas

    def test_a_disc_has_the_area_of_a_circle(self):
        image = self.drawn(centres((9, 11))).images()[0, ..., 0]
        assert (image[11, 9], image[11, 12], image[11, 14], image[5, 9]) == (200, 100, 0, 0)
        assert image.sum() / 200 == pytest.approx(math.pi * 9, rel=0.02)
        np.testing.assert_array_equal(image[9:14, 6:13], image[9:14, 6:13][::-1, ::-1])

    @pytest.mark.parametrize("heading", [0, 37, 90, 233])
    def test_a_bar_has_its_area_and_the_same_ends(self, heading):
        canvas = Canvas(1, 20, 8)
        canvas.bars(centres((10, 10)), np.array([heading], np.int32), 8 * UNIT, UNIT, 200)
        image = canvas.images()[0, ..., 0].astype(int)
        assert image.sum() / 200 == pytest.approx(8 * 2 + math.pi, rel=0.03)
        around = image[1:20, 1:20]
        np.testing.assert_array_equal(around, around[::-1, ::-1])

    def test_what_crosses_the_edge_is_cut_off_and_stays_in_its_image(self):
        images = self.drawn(centres((10, 10), (0, 0), (10, 10))).images()[..., 0]
        np.testing.assert_array_equal(images[0], images[2])
        np.testing.assert_array_equal(images[1][:6, :6], images[0][10:16, 10:16])
        assert images[1].sum() == images[1][:6, :6].sum()

    def test_shapes_that_overlap_keep_the_brighter_level(self):
        canvas = self.drawn(centres((10, 10)), level=200)
        before = canvas.images()
        canvas.discs(centres((10, 10)), 3 * UNIT, 100)
        np.testing.assert_array_equal(canvas.images(), before)
