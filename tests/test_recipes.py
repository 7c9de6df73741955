"""Every combination of architecture, preset and data set has a complete recipe of known settings."""

import itertools

import pytest

from cssm.config import ARCHS, KNOBS, Config, applicable
from cssm.recipes import PATHFINDER_SIZES, PRESETS, SIMPLE, recipe

DATASETS = KNOBS["dataset"].choices
# Settings of which None is a meaning of its own.
MAY_BE_NONE = {name for name, knob in KNOBS.items() if knob.unset != "by recipe"} | {"epochs", "max_steps"}


@pytest.mark.parametrize("arch, preset, dataset", [*itertools.product(ARCHS, PRESETS, DATASETS)])
def test_recipes_leave_nothing_open(arch, preset, dataset):
    if arch == "simple" and preset != "nano":
        return
    config = Config(arch=arch, preset=preset, dataset=dataset)
    assert {name for name, value in applicable(config).items() if value is None} <= MAY_BE_NONE
    assert (config.epochs is None) != (config.max_steps is None)
    assert config.image_size
    assert config.pos_embed
    assert Config(**applicable(config)) == config


def test_rows_hold_known_settings_with_values_of_their_type():
    rows = [*SIMPLE.values(), *(row for preset in PRESETS.values() for row in preset.values())]
    for name, value in itertools.chain.from_iterable(row.items() for row in rows):
        assert KNOBS[name].default is None, f"{name} has a default that would hide the recipe"
        assert type(KNOBS[name].coerce(value, name)) is type(value)


def test_every_difficulty_of_pathfinder_can_be_drawn_at_its_size():
    from cssm.data.pathfinder import DIFFICULTIES, spec

    assert set(PATHFINDER_SIZES) == set(DIFFICULTIES)
    for difficulty, size in PATHFINDER_SIZES.items():
        assert Config(dataset="pathfinder", pathfinder_difficulty=difficulty).image_size == size
        assert spec(difficulty, size).image_size == size


def test_what_is_given_is_not_in_the_recipe():
    assert "epochs" not in recipe(Config(max_steps=5))
    assert "batch_size" not in recipe(Config(global_batch_size=64))
