"""Batches: a step's contents depend on (seed, step, batch) alone, and every example counts exactly once."""

import itertools
import threading
from itertools import islice

import numpy as np
import pytest

from cssm.config import UserError, resolve
from cssm.data import load
from cssm.data.pipeline import First, Some, eval_batches, shuffled, step_indices, steps_per_epoch, train_batches

SIZES = [(1, 1), (7, 7), (20, 3), (64, 16), (100, 33)]


class Numbered:
    """Example i is a one-pixel image of brightness i % 256 with label i."""

    num_classes = 10
    image_shape = (1, 1, 1)
    decodes = False
    bad = ()

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def gather(self, indices, epoch=None, out=None):
        assert np.all((indices >= 0) & (indices < self.n))
        images = np.empty((len(indices), 1, 1, 1), np.uint8) if out is None else out
        images[:, 0, 0, 0] = indices % 256
        return images, indices.astype(np.int32)


def labels(batches) -> list[list[int]]:
    return [batch["label"].tolist() for batch in batches]


@pytest.mark.parametrize("n, batch", SIZES)
def test_an_epoch_holds_every_example_at_most_once(n, batch):
    steps = steps_per_epoch(n, batch)
    for epoch in range(3):
        first = epoch * steps + 1
        seen = np.concatenate([step_indices(n, batch, 0, step) for step in range(first, first + steps)])
        assert len(seen) == len(set(seen.tolist())) == n // batch * batch
        assert set(seen.tolist()) <= set(range(n))


def test_each_epoch_leaves_out_other_examples():
    n, batch = 10, 4
    left_out = []
    for epoch in range(20):
        seen = {int(i) for step in (1, 2) for i in step_indices(n, batch, 0, 2 * epoch + step)}
        left_out.append(frozenset(range(n)) - seen)
    assert frozenset.union(*left_out) == frozenset(range(n))


def test_seeds_and_epochs_differ_and_the_order_never_changes():
    orders = [tuple(step_indices(50, 50, seed, step)) for seed in range(5) for step in range(1, 6)]
    assert len(set(orders)) == len(orders)
    assert all(sorted(order) == list(range(50)) for order in orders)
    # Written down, so that no library or machine may change what a seed means.
    assert shuffled(10, 0, 0).tolist() == PINNED


PINNED = [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]


def test_any_step_can_be_the_first():
    source, batch = Numbered(53), 8
    whole = labels(train_batches(source, batch, 3, 1, 20))
    for first in (2, 6, 7, 13, 20):
        assert labels(train_batches(source, batch, 3, first, 20)) == whole[first - 1 :]
    assert whole == [step_indices(53, batch, 3, step).tolist() for step in range(1, 21)]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_threads_change_nothing(workers, prefetch):
    source = Numbered(41)
    ahead = {"workers": workers, "prefetch": prefetch}
    plain = {"workers": 0, "prefetch": 0}
    assert labels(train_batches(source, 4, 1, 1, 25, **ahead)) == labels(train_batches(source, 4, 1, 1, 25, **plain))
    assert labels(eval_batches(source, 4, **ahead)) == labels(eval_batches(source, 4, **plain))


@pytest.mark.parametrize("processes", [2, 3, 6])
def test_the_slices_of_all_processes_make_the_batch(processes):
    source, batch = Numbered(67), 12

    def split(batches):
        return [batches(source, process_index=p, process_count=processes) for p in range(processes)]

    def train(source, **process):
        return train_batches(source, batch, 5, 1, 9, **process)

    def evaluate(source, **process):
        return eval_batches(source, batch, **process)

    for batches in (train, evaluate):
        for whole, *parts in zip(batches(source), *split(batches), strict=True):
            most = batch // processes
            assert all(len(part["label"]) <= most for part in parts)
            assert len(whole["label"]) < batch or all(len(part["label"]) == most for part in parts)
            for name, values in whole.items():
                np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)


def test_batches_have_the_promised_types():
    for batch in (next(train_batches(Numbered(9), 4, 0, 1, 1)), next(eval_batches(Numbered(4), 4))):
        assert (batch["image"].shape, batch["image"].dtype) == ((4, 1, 1, 1), np.uint8)
        assert (batch["label"].shape, batch["label"].dtype) == ((4,), np.int32)
        np.testing.assert_array_equal(batch["image"].ravel(), batch["label"])


def test_evaluation_covers_each_example_exactly_once():
    for n in range(25):
        for size in (1, 2, 3, 7, 16, 30):
            batches = labels(eval_batches(Numbered(n), size, workers=0))
            assert [label for batch in batches for label in batch] == list(range(n))
            assert all(len(batch) == size for batch in batches[:-1])
            assert len(batches) == -(-n // size)


@pytest.mark.parametrize("start", [lambda: steps_per_epoch(5, 8), lambda: train_batches(Numbered(5), 8, 0, 1, 2)])
def test_an_epoch_without_a_step_is_refused_at_once(start):
    with pytest.raises(UserError, match=r"5 examples.* takes 8 .*at most 5"):
        start()


def test_a_batch_that_processes_cannot_share_is_refused_at_once():
    with pytest.raises(UserError, match="10 does not divide by 4 processes: type --global_batch_size 8 or 12"):
        train_batches(Numbered(40), 10, 0, 1, 2, process_count=4)
    with pytest.raises(UserError, match=r"global_batch_size 4$"):
        eval_batches(Numbered(40), 2, process_count=4)


def loading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cssm-data")]


def test_batches_are_made_ahead_and_closing_ends_the_threads():
    second = threading.Event()

    class Watched(Numbered):
        calls = 0

        def gather(self, indices, epoch=None, out=None):
            self.calls += 1
            if self.calls == 2:
                second.set()
            return super().gather(indices)

    source = Watched(100)
    batches = train_batches(source, 4, 0, 1, 1000, workers=1, prefetch=3)
    next(batches)
    assert second.wait(30), "the second batch is made only when it is asked for"
    assert loading_threads()
    batches.close()
    assert not loading_threads()
    assert source.calls <= 1 + 3
    list(islice(eval_batches(source, 4), 2))
    list(eval_batches(source, 4))
    assert not loading_threads()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_a_slow_source_is_at_work_while_a_batch_is_used(workers, prefetch):
    """While the consumer holds a batch, the next ones are gathered, as many as are asked for and no more.

    There is no clock here: the consumer waits for them, and without prefetch it would wait for ever.
    """
    source, gathered = Numbered(40), threading.Condition()
    done, plain = [], source.gather

    def gather(indices, epoch=None, out=None):
        with gathered:
            done.append(indices.tolist())
            gathered.notify_all()
        return plain(indices)

    source.gather = gather
    batches = train_batches(source, 4, 0, 1, 10, workers=workers, prefetch=prefetch)
    for held in range(1, 11):
        assert next(batches)["label"].tolist() == step_indices(40, 4, 0, held).tolist()
        ahead = min(held + prefetch, 10)
        with gathered:
            assert gathered.wait_for(lambda ahead=ahead: len(done) >= ahead, timeout=30), (
                f"nothing is made ahead of step {held}"
            )
            assert len(done) == ahead
    batches.close()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_epoch_is_exact_for_all_sizes_also_after_an_interruption(processes):
    """Of every size of a data set up to 50, 1 to 4 devices and batches of 1 to 5 for each of them."""
    draw = np.random.default_rng(processes)
    for n, devices, size in itertools.product(range(1, 51), range(1, 5), range(1, 6)):
        batch, seed = devices * size, int(draw.integers(100))
        if batch % processes or n < batch:
            continue
        source, steps = Numbered(n), n // batch
        epoch = int(draw.integers(3))
        first, last = epoch * steps + 1, (epoch + 1) * steps
        stopped = int(draw.integers(first - 1, last + 1))  # the last step before the interruption
        seen: list[list[int]] = [[] for _ in range(first, last + 1)]
        for process in range(processes):
            for start, end in ((first, stopped), (stopped + 1, last)):
                part = {"process_index": process, "process_count": processes, "workers": 0}
                for step, own in enumerate(labels(train_batches(source, batch, seed, start, end, **part)), start):
                    assert len(own) == batch // processes
                    seen[step - first] += own
        flat = [example for step in seen for example in step]
        assert all(len(step) == batch for step in seen) and len(set(flat)) == len(flat) == steps * batch
        assert flat == shuffled(n, seed, epoch)[: steps * batch].tolist()


def test_an_error_while_loading_reaches_the_reader():
    class Broken(Numbered):
        def gather(self, indices, epoch=None, out=None):
            if 7 in indices:
                raise OSError("unreadable")
            return super().gather(indices)

    batches = eval_batches(Broken(20), 5)
    next(batches)
    with pytest.raises(OSError, match="unreadable"):
        next(batches)
    assert not loading_threads()


def test_limits_keep_the_first_examples():
    config = resolve({"max_train_examples": 30, "max_eval_examples": 20}, {})
    everything = resolve({}, {})
    for split, n in (("train", 30), ("val", 20), ("test", 20)):
        few, all_ = load(config, split), load(everything, split)
        assert (len(few), few.image_shape, few.num_classes) == (n, all_.image_shape, all_.num_classes)
        for one, other in zip(few.gather(np.arange(n)), all_.gather(np.arange(n)), strict=True):
            np.testing.assert_array_equal(one, other)
    assert len(load(resolve({"max_train_examples": 10**6}, {}), "train")) == len(load(everything, "train"))
    assert labels(eval_batches(First(Numbered(9), 5), 4)) == [[0, 1, 2, 3], [4]]


@pytest.mark.parametrize("decodes, pieces", [(False, [8]), (True, [2, 3, 3])])
def test_threads_share_a_batch_only_where_it_is_work(decodes, pieces):
    sizes, given = [], []

    class Watched(Numbered):
        def gather(self, indices, epoch=None, out=None):
            sizes.append(len(indices))
            given.append(out)
            return super().gather(indices, epoch, out)

    source = Watched(8)
    source.decodes = decodes
    (batch,) = train_batches(source, 8, 1, 1, 1, workers=3)
    assert batch["label"].tolist() == step_indices(8, 8, 1, 1).tolist()
    np.testing.assert_array_equal(batch["image"][:, 0, 0, 0], batch["label"])
    assert sorted(sizes) == pieces
    # Each thread fills its part of one array, and nobody joins them.
    filled = [out for out in given if out is not None]
    assert len(filled) == (len(pieces) if decodes else 0)
    assert all(np.may_share_memory(out, batch["image"]) for out in filled)


def test_sources_are_told_the_epoch_in_training_only():
    epochs = []

    class Watched(Numbered):
        def gather(self, indices, epoch=None, out=None):
            epochs.append(epoch)
            return super().gather(indices)

    list(train_batches(Watched(10), 4, 1, 2, 5, workers=0))
    list(eval_batches(First(Watched(10), 4), 4, workers=0))
    assert epochs == [0, 1, 1, 2, None]


def test_some_examples_are_drawn_from_all_over_and_are_always_the_same_ones():
    some, again = Some(Numbered(100), 10, seed=1), Some(Numbered(100), 10, seed=1)
    _, labels = some.gather(np.arange(10))
    assert len(some) == len(set(labels.tolist())) == 10 and labels.max() > 50
    np.testing.assert_array_equal(again.gather(np.arange(10))[1], labels)
    np.testing.assert_array_equal(some.gather(np.array([7, 3]))[1], labels[[7, 3]])
    assert set(labels.tolist()) != set(Some(Numbered(100), 10, seed=2).gather(np.arange(10))[1].tolist())
