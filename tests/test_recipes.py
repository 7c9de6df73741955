"""Every combination of architecture, preset and data set has a complete recipe of known settings."""

import itertools

import pytest

from cssm.config import ARCHS, KNOBS, Config, applicable
from cssm.recipes import KIND, KINDS, PATHFINDER_SIZES, PRESETS, recipe, scaled_lr
from cssm.resume import resume_config, resume_record
from cssm.settings.data import FILES, GENERATED

DATASETS = KNOBS["dataset"].choices
# Whose images have a size which the files tell; Pathfinder and its like only where they are read and not generated.
OF_THE_FILES = ("npz", "pathfinder", "cabc", "pathtracker", "tfds:NAME")
# Settings of which None is a meaning of its own.
MAY_BE_NONE = {name for name, knob in KNOBS.items() if knob.unset != "by recipe"} | {"epochs", "max_steps"}


@pytest.mark.parametrize("arch, preset", [(arch, preset) for arch in ARCHS for preset in PRESETS[arch]])
@pytest.mark.parametrize("dataset", DATASETS)
def test_recipes_leave_nothing_open(arch, preset, dataset):
    config = Config(arch=arch, preset=preset, dataset=dataset, data_dir="somewhere" if dataset in FILES else None)
    open_ones = {name for name, value in applicable(config).items() if value is None}
    assert open_ones <= MAY_BE_NONE | ({"seq_len"} if dataset == "pathtracker" else set())
    assert (config.epochs is None) != (config.max_steps is None)
    assert (config.image_size is None) == (dataset in OF_THE_FILES)
    assert config.pos_embed
    assert Config(**applicable(config)) == config


def test_every_data_set_is_of_a_kind_that_every_preset_knows():
    assert set(KIND) == set(DATASETS) and set(KIND.values()) == set(KINDS)
    assert all(preset.keys() == set(KINDS) for sizes in PRESETS.values() for preset in sizes.values())
    sizes = {dataset: Config(dataset=dataset).image_size for dataset in GENERATED}
    assert sizes == {"pathfinder": 32, "cabc": 128, "pathtracker": 32}


def test_rows_hold_known_settings_with_values_of_their_type():
    rows = [row for sizes in PRESETS.values() for preset in sizes.values() for row in preset.values()]
    for name, value in itertools.chain.from_iterable(row.items() for row in rows):
        assert KNOBS[name].default is None, f"{name} has a default that would hide the recipe"
        assert type(KNOBS[name].coerce(value, name)) is type(value)


def test_every_difficulty_of_pathfinder_can_be_drawn_at_its_size():
    from cssm.data.pathfinder import DIFFICULTIES, spec

    assert set(PATHFINDER_SIZES) == set(DIFFICULTIES)
    for difficulty, size in PATHFINDER_SIZES.items():
        assert Config(dataset="pathfinder", pathfinder_difficulty=difficulty).image_size == size
        assert spec(difficulty, size).image_size == size


@pytest.mark.parametrize(
    "optimizer, lr, own",
    [
        ("adamw", 3e-3, (None, 0.9, 0.999)),
        ("sgd", 0.09, (0.9, None, None)),
        ("lion", 9e-4, (None, 0.9, 0.99)),
        ("lamb", 9e-3, (None, 0.9, 0.999)),
        ("muon", 3e-3, (0.95, 0.9, 0.999)),
    ],
)
def test_an_optimizer_has_a_rate_of_its_own_unless_one_is_given(optimizer, lr, own):
    config = Config(optimizer=optimizer)
    assert (config.lr, (config.momentum, config.beta1, config.beta2)) == (lr, own)
    assert Config(optimizer=optimizer, lr=0.5).lr == 0.5
    assert f"the learning rate {lr:.3g} is meant for" in scaled_lr(config, 64)[1]


def test_what_is_given_is_not_in_the_recipe():
    assert "epochs" not in recipe(Config(max_steps=5))
    assert "batch_size" not in recipe(Config(global_batch_size=64))


@pytest.mark.parametrize(
    "scale, base, effective, factor",
    [
        ("linear", None, 128, 4.0),  # the recipe's batch is 32
        ("sqrt", None, 128, 2.0),
        ("linear", 64, 128, 2.0),
        ("linear", None, 32, 1.0),
        ("linear", None, 16, 0.5),
        ("sqrt", 64, 16, 0.5),
        ("none", None, 128, 1.0),
        ("none", None, 8, 1.0),
    ],
)
def test_the_learning_rate_follows_the_effective_batch(scale, base, effective, factor):
    config = Config(lr=0.1, lr_scale=scale, base_batch_size=base)
    lr, note = scaled_lr(config, effective)
    assert lr == pytest.approx(0.1 * factor)
    assert (note is None) == (factor == 1)
    if note:
        assert f"--lr_scale {scale}" in note and f"{lr:.3g}" in note and str(effective) in note


@pytest.mark.parametrize("off", ["warmup_steps", "warmup_epochs"])
def test_scaling_up_without_warm_up_is_warned_of(off):
    config = Config(lr_scale="linear", **{off: 0})
    warning = f"leave --{off} 0 out"
    assert warning in scaled_lr(config, 64)[1]
    assert warning not in scaled_lr(config, 16)[1]
    assert "warm-up" not in scaled_lr(Config(lr_scale="linear"), 64)[1]
    assert "warm-up" not in scaled_lr(Config(lr_scale="linear", **{off: 3}), 64)[1]


def test_a_batch_larger_than_the_recipes_brings_a_hint_unless_the_rate_was_chosen():
    lr, hint = scaled_lr(Config(), 128)
    assert lr == Config().lr == 3e-3
    assert "meant for an effective batch of 32" in hint and "takes 128" in hint
    assert "--lr_scale linear makes it 0.012, --lr_scale sqrt 0.006" in hint
    assert scaled_lr(Config(), 32)[1] is None
    assert scaled_lr(Config(lr=1e-3), 128)[1] is None
    assert scaled_lr(Config(batch_size=128), 128)[1] == hint  # on one device too


@pytest.mark.parametrize("scale, factor", [("linear", 4), ("sqrt", 2)])
def test_a_resumed_run_keeps_its_rate_on_any_number_of_devices(scale, factor):
    config = Config(lr=0.1, lr_scale=scale)
    saved = resume_record(config, effective_batch=128, grad_accum=1)  # 4 devices
    resumed, changes = resume_config(saved, {})
    assert not changes
    assert resumed.global_batch_size == 128 and resumed.batch_size is None  # whatever the devices are now
    assert scaled_lr(resumed, 128) == scaled_lr(config, 128) == (pytest.approx(0.1 * factor), scaled_lr(config, 128)[1])
    # The rate typed anew is scaled by the same batches; the recipe has no say in them.
    again, changes = resume_config(saved, {"lr": 0.2})
    assert changes == ["lr: was 0.1, now 0.2"]
    assert scaled_lr(again, 128)[0] == pytest.approx(0.2 * factor)
