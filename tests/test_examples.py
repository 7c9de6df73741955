"""Examples that cannot be read: never silently, never differently, never more than allowed."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest

from cssm.config import UserError
from cssm.data.examples import BadExamples, FileSource, reason
from cssm.data.pipeline import eval_batches, train_batches

N = 23
BAD = {4: FileNotFoundError(2, "No such file"), 5: ValueError("not\n an image"), 22: EOFError()}


def source(bad=(), most=0):
    def read(index, epoch):
        if index in bad:
            raise BAD[index]
        return np.full((2, 2, 1), index, np.uint8), index

    return FileSource(N, read, lambda i: f"file {i}", num_classes=N, image_shape=(2, 2, 1), most_bad=most)


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


def test_images_and_labels_belong_together():
    images, found = source().gather(np.array([3, 1, 22]))
    assert images.shape == (3, 2, 2, 1) and images.dtype == np.uint8 and found.dtype == np.int32
    np.testing.assert_array_equal(images[:, 0, 0, 0], found)
    assert found.tolist() == [3, 1, 22]
    images, found = source().gather(np.array([], int))
    assert images.shape == (0, 2, 2, 1) and found.shape == (0,)


def test_the_first_that_cannot_be_read_ends_the_run_unless_some_may():
    for epoch in (0, None):
        with pytest.raises(UserError, match=r"file 4 cannot be read \(No such file\): repair .* --max_bad_examples 1"):
            source(BAD).gather(np.arange(N), epoch)
    with pytest.raises(UserError, match=r"3 examples cannot be read, among them file 22 \(EOFError\)"):
        source(BAD, 2).gather(np.arange(N))


def test_each_is_named_and_counted_once(capsys):
    some = source(BAD, 3)
    for epoch in (0, 1, None):
        some.gather(np.arange(N), epoch)
    warnings = capsys.readouterr().err.splitlines()
    assert some.bad == ("file 4", "file 5", "file 22")
    assert len(warnings) == 3
    assert warnings[1] == "warning: file 5 cannot be read and is left out, number 2 of at most 3: not an image"


def test_in_training_the_next_one_that_can_be_read_takes_the_place():
    _, found = source(BAD, 3).gather(np.array([4, 5, 6, 22, 0]), 0)
    assert found.tolist() == [6, 6, 6, 0, 0]


def test_in_evaluation_it_is_left_out():
    _, found = source(BAD, 3).gather(np.arange(N))
    assert found.tolist() == [i for i in range(N) if i not in BAD]
    for workers in (0, 1, 3):  # which share a batch, and leave gaps in its array
        batches = list(eval_batches(source(BAD, 3), 4, workers=workers))
        assert [*chain(*labels(batches))] == found.tolist()
        for batch in batches:
            np.testing.assert_array_equal(batch["image"][:, 1, 1, 0], batch["label"])


@pytest.mark.parametrize("processes", [2, 4])
def test_what_takes_the_place_depends_on_nothing_else(processes):
    whole = labels(train_batches(source(BAD, 3), 8, 1, 1, 6, workers=0))
    for workers in (1, 3):
        parts = [
            labels(train_batches(source(BAD, 3), 8, 1, 1, 6, workers=workers, process_index=p, process_count=processes))
            for p in range(processes)
        ]
        assert [[*chain(*rows)] for rows in zip(*parts, strict=True)] == whole


@pytest.mark.parametrize(
    "wrong", [(np.zeros((2, 3, 1), np.uint8), 0), (np.zeros((2, 2, 1), np.uint8), N)], ids=["shape", "label"]
)
def test_a_wrong_shape_or_label_counts_as_unreadable(wrong):
    odd = FileSource(1, lambda i, e: wrong, str, num_classes=N, image_shape=(2, 2, 1), most_bad=0)
    with pytest.raises(UserError, match=r"shape is 2x3x1, not 2x2x1|label is 23, and labels go from 0 to 22"):
        odd.gather(np.array([0]))


def test_where_none_can_be_read_the_run_ends():
    none = FileSource(1, lambda i, e: 1 / 0, str, num_classes=2, image_shape=(1,), most_bad=9)
    with pytest.raises(UserError, match="none of the 1 training examples"):
        none.gather(np.array([0]), 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [StopIteration, KeyError, RuntimeError, GeneratorExit])
def test_whatever_is_raised_no_epoch_ends_early(workers, error):
    def read(index, epoch):
        if index == 7:
            raise error
        return np.zeros((2, 2, 1), np.uint8), 0

    broken = FileSource(N, read, str, num_classes=2, image_shape=(2, 2, 1), most_bad=0)
    seen = 0
    with pytest.raises((UserError, RuntimeError, GeneratorExit)):
        for batch in eval_batches(broken, 5, workers=workers):
            seen += len(batch["label"])
    assert seen == 5


def test_threads_count_each_once(capsys):
    bad = BadExamples(50)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: bad.add(str(i % 50), "why"), range(1000)))
    assert len(bad.names) == len(capsys.readouterr().err.splitlines()) == 50


def test_reasons_are_one_line():
    assert reason(OSError(13, "Permission denied", "a.png")) == "Permission denied"
    assert reason(OSError("broken\ndata")) == "broken data"
    assert reason(ValueError()) == "ValueError"
