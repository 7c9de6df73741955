"""Stages of trunks."""

import pytest

from cssm.config import Config
from cssm.stages import Stage, numbers, stages


@pytest.mark.parametrize(
    "text, found",
    [("64,128", [64, 128]), (" 8 , 16", [8, 16]), ("3", [3]), ("", None), ("1,,2", None), ("1,-2", None), ("a", None)],
)
def test_numbers_are_read_from_text(text, found):
    assert numbers(text) == found


def test_a_trunk_without_stages_is_one():
    assert stages(Config(arch="vit", embed_dim=8, depth=3, image_size=21, stem_stride=2)) == [Stage(8, 3, 11)]
    assert stages(Config(image_size=20, stem_layers=2, embed_dim=6, depth=1)) == [Stage(6, 1, 5)]


def test_each_stage_halves_the_map_and_the_last_two_of_shvit_mix():
    settings = {"dims": "4,6,8,10", "depths": "1,2,1,3", "image_size": 50, "stem_stride": 2}
    widths, depths, sides = (4, 6, 8, 10), (1, 2, 1, 3), (25, 13, 7, 4)
    rows = list(zip(widths, depths, sides, strict=True))
    assert stages(Config(arch="convnext", **settings)) == [Stage(*row) for row in rows]
    assert stages(Config(arch="shvit", **settings)) == [Stage(*row, mixes=i >= 2) for i, row in enumerate(rows)]
    few = stages(Config(arch="shvit", dims="4,6", depths="1,1", image_size=8, stem_stride=1))
    assert [stage.mixes for stage in few] == [True, True]
