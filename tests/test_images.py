"""Digits: the real images, in splits that never change and share nothing."""

import hashlib

import numpy as np
import pytest
from PIL import Image

from cssm.config import UserError, resolve
from cssm.data import images
from cssm.data.images import digits_source

SPLITS = ("train", "val", "test")


def everything(split: str, size: int = 8, **typed) -> tuple[np.ndarray, np.ndarray]:
    source = digits_source(resolve({"image_size": size, **typed}, {}), split)
    assert source.image_shape == (size, size, 1)
    assert source.num_classes == 10
    return source.gather(np.arange(len(source)))


def test_splits_are_disjoint_and_hold_all_of_scikit_learns_digits():
    from sklearn.datasets import load_digits

    original = load_digits()
    expected = {
        (np.rint(image * 255 / 16).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(original.images, original.target, strict=True)
    }
    found = [(image.tobytes(), int(label)) for split in SPLITS for image, label in zip(*everything(split), strict=True)]
    assert len({image for image, _ in found}) == len(found) == 1797  # no image is there twice, in any two splits
    assert set(found) == expected


def test_splits_are_stratified():
    counts = {split: np.bincount(everything(split)[1], minlength=10) for split in SPLITS}
    total = sum(counts.values())
    for split, share in zip(SPLITS, (0.70, 0.15, 0.15), strict=True):
        assert np.abs(counts[split] - share * total).max() <= 1


def test_the_first_examples_are_a_fair_sample():
    labels = everything("train")[1][:200]
    assert np.bincount(labels, minlength=10).min() >= 10


def test_splits_never_change():
    digests = {}
    for split in SPLITS:
        pixels, labels = everything(split, 16)
        assert pixels.dtype == np.uint8
        assert labels.dtype == np.int32
        digests[split] = hashlib.sha256(pixels.tobytes() + labels.astype("<i4").tobytes()).hexdigest()[:16]
        for one, other in zip(everything(split, 16, seed=7), (pixels, labels), strict=True):
            np.testing.assert_array_equal(one, other)
    assert digests == PINNED


PINNED = {"train": "6a6064f5857576fe", "val": "9ce015c2c37a40c7", "test": "2f2ce439fe7ec8bf"}


@pytest.mark.parametrize("size", [8, 9, 16, 31, 64])
def test_enlarging_is_bilinear(size):
    rng = np.random.default_rng(0)
    small = rng.uniform(0, 255, (20, 8, 8))
    ours = images._enlarge(small, size)
    theirs = [Image.fromarray(one.astype(np.float32)).resize((size, size), Image.Resampling.BILINEAR) for one in small]
    assert np.abs(np.stack([np.asarray(one) for one in theirs]) - ours).max() <= 0.51  # ours is rounded
    assert (images._enlarge(np.full((1, 8, 8), 200.0), size) == 200).all()


@pytest.mark.parametrize("size", [1, 7, 513])
def test_a_size_that_digits_do_not_have_is_refused(size):
    config = resolve({"image_size": 16}, {})
    object.__setattr__(config, "image_size", size)
    with pytest.raises(UserError, match=f"--image_size {size}: .*type --image_size 16, .*8 to 512"):
        digits_source(config, "train")


def test_without_scikit_learn_the_package_is_named(monkeypatch):
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        everything("train")
