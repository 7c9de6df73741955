"""Generated data sets: made once, as many as asked, and the same for every --seed of a run."""

import pickle

import numpy as np
import pytest

from cssm import data
from cssm.config import KNOBS, resolve
from cssm.data import cabc, pathfinder, pathtracker
from cssm.data.generated import DATA_SEED, EXAMPLES, generated, generated_source
from cssm.settings.data import GENERATED

MODULES = {"pathfinder": pathfinder, "cabc": cabc, "pathtracker": pathtracker}
SHAPES = {"pathfinder": (32, 32, 1), "cabc": (64, 64, 1), "pathtracker": (16, 32, 32, 3)}


def typed(dataset: str, **settings):
    size = {"image_size": 64} if dataset == "cabc" else {}
    return {"dataset": dataset, "num_workers": 0, **size, **settings}


@pytest.mark.parametrize("dataset", GENERATED)
def test_a_source_makes_no_more_than_asked_and_ignores_the_seed_of_the_run(tmp_path, dataset):
    settings = typed(dataset, cache_dir=str(tmp_path), max_train_examples=12)
    source = generated_source(resolve({**settings, "seed": 1}, {}), "train")
    assert (len(source), source.num_classes, source.image_shape) == (12, 2, SHAPES[dataset])
    seen: list[tuple[int, int]] = []
    again = generated_source(resolve({**settings, "seed": 2}, {}), "train", lambda *done: seen.append(done))
    assert seen == []
    module, spec = MODULES[dataset], MODULES[dataset].spec("easy", SHAPES[dataset][-2])
    expected, labels, _ = module.generate(spec, DATA_SEED, "train", np.arange(12))
    images, found = again.gather(np.arange(12))
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(found, labels)


@pytest.mark.parametrize("dataset", GENERATED)
def test_progress_is_told_and_outlines_agree(tmp_path, dataset):
    config = resolve(typed(dataset, cache_dir=str(tmp_path), max_eval_examples=7, max_train_examples=8), {})
    seen: list[tuple[int, int]] = []
    source = data.load(config, "val", lambda *done: seen.append(done))
    outline = data.outline(config)
    assert seen == [(7, 7)] and outline.examples == {"train": 8, "val": 7, "test": 7}
    assert (outline.image_shape, outline.num_classes) == (source.image_shape, source.num_classes)


@pytest.mark.parametrize("dataset", GENERATED)
def test_every_difficulty_has_a_number_of_examples_and_a_digest_of_its_own(dataset):
    name = f"{dataset}_difficulty"
    assert tuple(EXAMPLES[dataset]) == KNOBS[name].choices
    found = [generated(resolve({"dataset": dataset, name: level}, {})) for level in KNOBS[name].choices]
    assert len({one.digest for one in found}) == len(found)
    assert all(set(one.examples) == set(MODULES[dataset].SPLITS) for one in found)


def test_a_maker_can_be_sent_to_a_worker():
    made = pickle.loads(pickle.dumps(generated(resolve({"dataset": "pathtracker"}, {})))).make("val", np.arange(2))
    assert made[0].shape == (2, 16, 32, 32, 3)


def test_the_size_of_the_images_is_part_of_the_digest():
    sizes = [generated(resolve({"dataset": "cabc", "image_size": size}, {})).digest for size in (64, 128)]
    assert len({*sizes}) == 2
