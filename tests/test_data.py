"""Which source a configuration means, and how much of it."""

import numpy as np
import pytest
from on_disk import config, still_records

from cssm import data
from cssm.config import Config
from cssm.data.examples import FileSource
from cssm.data.records import ArraySource
from cssm.settings.data import DATASETS


def test_every_data_set_can_be_loaded():
    assert set(data.LOADERS) == set(data.OUTLINES) == set(DATASETS)


def test_pathfinder_is_generated_unless_files_are_given(tmp_path):
    limits = {"max_train_examples": 5, "max_eval_examples": 3}
    generated = Config(dataset="pathfinder", cache_dir=str(tmp_path / "cache"), num_workers=0, **limits)
    assert isinstance(data.load(generated, "train"), ArraySource)
    assert data.outline(generated).image_shape == (32, 32, 1)
    still_records(tmp_path / "set")
    read = config("pathfinder", tmp_path / "set", **limits)
    assert isinstance(data.load(read, "train"), FileSource)
    assert data.outline(read).image_shape == (12, 12, 1)


@pytest.mark.parametrize("dataset", ["pathfinder", "npz"])
def test_limits_hold_for_files_and_the_examples_are_the_first(tmp_path, dataset):
    still_records(tmp_path / "set")
    images = np.arange(400, dtype=np.uint8).reshape(100, 2, 2)
    np.savez(tmp_path / "set/train.npz", images=images, labels=np.arange(100) % 2)
    few = config(dataset, tmp_path / "set", max_train_examples=5, max_eval_examples=3)
    for split, n in (("train", 5), ("val", 3), ("test", 3)):
        some, every = (data.load(each, split) for each in (few, config(dataset, tmp_path / "set")))
        assert len(some) == data.outline(few).examples[split] == n < len(every)
        for one, other in zip(some.gather(np.arange(n)), every.gather(np.arange(n)), strict=True):
            np.testing.assert_array_equal(one, other)
