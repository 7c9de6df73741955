"""Explanations are drawn: pixels in their places, colours from the lowest value to the highest."""

import numpy as np
import pytest
from PIL import Image

from cssm.inference.pictures import GAP, LINE, TILE, coloured, save_saliency, save_states, tile

rng = np.random.default_rng(0)
TOP = 2 * GAP + 2 * LINE  # where the first row of tiles begins


def at(picture, column, row=0):
    """The middle of a tile."""
    return picture.getpixel((GAP + column * (TILE + GAP) + TILE // 2, TOP + row * (TILE + GAP) + TILE // 2))


def test_a_saliency_map_is_drawn_beside_its_image(tmp_path):
    image = np.full((8, 8, 3), (200, 0, 0), np.uint8)
    saliency = np.zeros((8, 8))
    saliency[4, 4] = 1.0
    save_saliency(tmp_path / "x.png", image, saliency, "cat: 0.9")
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.size == (3 * (TILE + GAP) + GAP, TOP + TILE + GAP)
        assert at(picture, 0) == (200, 0, 0)
        assert sum(at(picture, 1)) > 600, "the brightest of its colours"
        assert picture.getpixel((GAP + TILE + GAP + 3, TOP + 3)) == tuple(coloured(np.zeros((1, 2)), "inferno")[0, 0])


def test_a_clip_has_a_row_for_each_of_a_few_frames(tmp_path):
    save_saliency(tmp_path / "x.png", np.zeros((20, 8, 8, 1), np.uint8), rng.random((20, 8, 8)), "1")
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.height == TOP + 8 * (TILE + GAP)


def test_states_are_frames_over_time_in_one_scale(tmp_path):
    states = {"cell_0": np.stack([np.full((4, 4), v) for v in (0.0, 0.5, 1.0)]), "cell_1": rng.random((3, 4, 4))}
    save_states(tmp_path / "x.gif", np.full((8, 8, 1), 77, np.uint8), states, "class \u4e2d with a long name " * 9)
    with Image.open(tmp_path / "x.gif") as gif:
        assert gif.n_frames == 3
        seen = []
        for t in range(3):
            gif.seek(t)
            seen.append(at(gif.convert("RGB"), 1))
    wanted = coloured(np.array([[[0.0, 0.5, 1.0]]]), "viridis")[0, 0]
    assert np.abs(np.array(seen, int) - wanted).max() <= 8, "a GIF has 256 colours"


def test_many_cells_wrap_into_rows(tmp_path):
    states = {f"block_{i}/mixer": rng.random((2, 4, 4)) for i in range(12)}
    save_states(tmp_path / "x.gif", rng.integers(0, 256, (300, 300, 3), np.uint8), states, "x")
    with Image.open(tmp_path / "x.gif") as gif:
        assert gif.size == (5 * (TILE + GAP) + GAP, 2 * GAP + LINE + 3 * (LINE + TILE + GAP))


@pytest.mark.parametrize("values", [np.zeros((2, 3, 3)), np.full((1, 2, 2), np.nan), np.array([[np.inf, 1.0]])])
def test_values_without_a_range_are_drawn_too(values):
    assert coloured(values, "viridis").shape == (*values.shape, 3)


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 3), (5, 5, 2), (400, 400, 3)])
def test_tiles_have_one_size(shape):
    made = tile(rng.integers(0, 256, shape, np.uint8))
    assert made.size == (TILE, TILE) and made.mode == "RGB"
