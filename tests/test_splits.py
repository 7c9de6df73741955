"""Parts of train held back: disjoint, of every class, the same whatever is added."""

import numpy as np
import pytest

from cssm.data.splits import SHARE, hold_back, order_keys, shares


def names(n: int) -> list[str]:
    return [f"class/{i}.png" for i in range(n)]


@pytest.mark.parametrize("held", [{"val": 0.1, "test": 0.1}, {"test": 0.05}, {}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 60, 1000])
def test_splits_share_nothing_and_hold_everything(n, held):
    labels = np.arange(n) % 3
    parts = hold_back(labels, order_keys(names(n)), held)
    assert parts.keys() == {"train", *held}
    assert sorted(np.concatenate(list(parts.values()))) == list(range(n))
    for label in np.unique(labels):
        members = (labels == label).sum()
        counts = {split: (labels[part] == label).sum() for split, part in parts.items()}
        assert counts["train"] >= 1
        for split, share in held.items():
            assert counts[split] >= 1 or members < 1 + len(held)
            assert abs(counts[split] - share * members) <= 1


def test_an_example_keeps_its_split_when_others_come():
    few, many = names(500), names(1000)
    before = hold_back(np.zeros(500, int), order_keys(few), {"val": 0.1, "test": 0.1})
    after = hold_back(np.zeros(1000, int), order_keys(many), {"val": 0.1, "test": 0.1})
    moved = sum(len(np.setdiff1d(before[split], after[split])) for split in before)
    assert moved < 50  # a random division anew would move some 170
    kept = [i for i in after["train"] if i < 500 and i in before["train"]]
    assert kept == [i for i in before["train"] if i in after["train"]]


def test_keys_are_written_down():
    assert [int(key) >> 48 for key in order_keys(["a", "b", "c"])] == PINNED


PINNED = [55213, 29513, 29515]


def test_what_is_missing_comes_from_train_and_never_more_than_the_other_split_holds():
    held, notes = shares({"train": 1000})
    assert held == {"val": SHARE, "test": SHARE}
    assert len(notes) == 1 and "only train" in notes[0] and "0.1 of it for val and 0.1 of it for test" in notes[0]
    held, notes = shares({"train": 1000, "val": 20})
    assert held == {"test": 0.02} and "only train and val" in notes[0] and "0.02 of it for test" in notes[0]
    assert shares({"train": 100, "test": 90})[0] == {"val": SHARE}
    assert shares({"train": 100, "val": 5, "test": 5}) == ({}, ())
