"""The published data sets as TFRecords: equal to what was written, or refused with what is wrong."""

import numpy as np
import pytest
from on_disk import (
    LABELS,
    STILLS,
    N,
    check,
    config,
    encoded,
    everything,
    flat_records,
    framed,
    normalised,
    put,
    rng,
    rows,
    still_records,
)

from cssm import data
from cssm.config import UserError


@pytest.mark.parametrize(
    "form", [normalised, lambda pixels: np.repeat(pixels, 3, -1), lambda p: p], ids=["float32", "uint8", "grey"]
)
@pytest.mark.parametrize(
    "dataset, below", [("pathfinder", "difficulty_14"), ("pathfinder", ""), ("cabc", "easy"), ("cabc", "")]
)
def test_records_of_stills(tmp_path, dataset, below, form):
    parts = still_records(tmp_path / below, form=form)
    settings = config(dataset, tmp_path, **({"pathfinder_difficulty": "14"} if dataset == "pathfinder" else {}))
    for split, (images, labels) in everything(settings).items():  # in their order
        np.testing.assert_array_equal(images, STILLS[parts[split]])
        np.testing.assert_array_equal(labels, LABELS[parts[split]])


def test_records_without_val_hold_a_part_of_train_back(tmp_path):
    parts = still_records(tmp_path / "medium", ("train", "test"))
    settings = config("cabc", tmp_path, cabc_difficulty="medium")
    found = everything(settings)
    check(found, STILLS)
    assert rows(*found["test"]) == rows(STILLS[parts["test"]], LABELS[parts["test"]])
    assert "only train and test" in data.outline(settings).notes[0]


def test_an_outline_for_a_dry_run_unpacks_nothing(tmp_path):
    flat_records(tmp_path / "clips", "{split}-{shard}")
    outline = data.outline(config("pathtracker", tmp_path / "clips", dry_run=True))
    assert (sum(outline.examples.values()), outline.image_shape) == (N, (5, 8, 8, 3))
    assert not (tmp_path / "clips-cache").exists()


@pytest.mark.parametrize(
    "features, sentence",
    [
        ({"label": [2]}, "its label is 2, and labels go from 0 to 1"),
        ({"label": [0, 1]}, "no whole number label"),
        ({"label": [b"x"]}, "no whole number label"),
        ({"image": [b"abc"]}, r"its 3 bytes are neither uint8 nor float32 of shape \[12, 12, 3\]"),
        ({"image": [normalised(STILLS[0]).tobytes()[:-4]]}, "neither uint8 nor float32"),
        ({"image": [(normalised(STILLS[0]) + np.float32(0.01)).tobytes()]}, "no 8-bit pixels"),
        ({"image": [rng.integers(0, 256, (12, 12, 3), np.uint8).tobytes()]}, "it has colours"),
        ({"height": [6], "width": [24]}, "24x6 pixels, not square"),
        ({"height": [-1]}, "neither uint8"),
        (
            {"height": [6], "width": [6], "image": [normalised(STILLS[0][:6, :6]).tobytes()]},
            "its shape is 6x6x1, not 12x12x1",
        ),
        ({"picture": [b""], "image": []}, "no feature image of bytes, but channels"),
    ],
)
def test_records_of_another_form_say_which(tmp_path, features, sentence):
    still_records(tmp_path)
    good = {"image": [normalised(STILLS[0]).tobytes()], "label": [0], "height": [12], "width": [12], "channels": [3]}
    put(tmp_path / "train/shard_00009.tfrecord", framed(encoded(**{**good, **features})))
    with pytest.raises(UserError, match=f"record 0 of .*shard_00009.tfrecord cannot be read .*{sentence}"):
        source = data.load(config("pathfinder", tmp_path), "train")
        source.gather(np.arange(len(source)))
