"""Train, val and test where a data set has not all three: a part of train is held back, always the same one.

The part does not depend on --seed. It is chosen by a hash of each example's own name, within each class, so that an
example keeps its place among the others when more are added. The test split never chooses anything: what is given as
val chooses the best checkpoint, and test is only ever evaluated at the end.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

SPLITS = ("train", "val", "test")
SHARE = 0.1
SPLIT_SEED = b"cssm-split-1"


def order_keys(names: Sequence[str]) -> np.ndarray:
    """A hash of each name: uint64 [n]."""
    digests = (
        hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8, key=SPLIT_SEED).digest() for name in names
    )
    return np.frombuffer(b"".join(digests), "<u8")


def shares(counts: Mapping[str, int]) -> tuple[dict[str, float], tuple[str, ...]]:
    """How much of train is held back for each split that is not there, and the sentences that say so.

    counts: examples by split that is there, with train among them. As much as SHARE, but no more than the other split
    holds.
    """
    missing = [split for split in SPLITS if split not in counts]
    most = min([SHARE, *(counts[split] / counts["train"] for split in counts if split != "train")])
    held = dict.fromkeys(missing, most)
    if not missing:
        return held, ()
    parts = " and ".join(f"{most:.2g} of it for {split}" for split in missing)
    has = " and ".join(split for split in SPLITS if split in counts)
    return held, (f"the data set has only {has}: parts of train are held back, {parts}, the same in every run",)


def hold_back(labels: np.ndarray, keys: np.ndarray, held: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Which examples of train stay in it and which go elsewhere: int64 arrays by split, each in the order of the keys.

    labels, keys: [n]. Of a class of at least three, each split gets one or more; train keeps one or more of each class.
    """
    order = np.argsort(keys, kind="stable")
    place = np.zeros(len(labels), np.int64)  # 0: stays
    for label in np.unique(labels):
        members = order[labels[order] == label]
        start = 0
        for number, share in enumerate(held.values(), 1):
            take = min(max(round(share * len(members)), 1), len(members) - start - 1)
            place[members[start : start + take]] = number
            start += take
    return {split: order[place[order] == number] for number, split in enumerate(("train", *held))}
