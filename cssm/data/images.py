"""Still images that need no download: scikit-learn's handwritten digits."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from cssm.config import Config, UserError
from cssm.data.pipeline import Outline, shuffled
from cssm.data.records import ArraySource

DIGITS_SIZE = 8
LARGEST_SIZE = 512
SPLITS = {"train": (0.0, 0.70), "val": (0.70, 0.85), "test": (0.85, 1.0)}
NUM_IMAGES = {"train": 1258, "val": 270, "test": 269}  # what SPLITS makes of the 1,797
SPLIT_SEED = 20220928  # of the split, not of the run: --seed never moves an example from one split to another


def digits_source(config: Config, split: str, progress: Callable[[int, int], None] | None = None) -> ArraySource:
    """1,797 real handwritten digits (UCI, 8x8 pixels, 10 classes), grey, resized to config.image_size.

    Split 70/15/15 within each class, the same for every --seed; within a split the order is shuffled once, so
    that its first n examples are a fair sample. Nothing here takes long enough to call `progress`.
    """
    size = _side(config)
    images, labels = _digits()
    chosen = _split_indices(labels, split)
    return ArraySource(_enlarge(images[chosen], size)[..., None], labels[chosen], num_classes=10)


def digits_outline(config: Config) -> Outline:
    """What digits_source gives, without reading it."""
    size = _side(config)
    return Outline(10, (size, size, 1), dict(NUM_IMAGES))


def _side(config: Config) -> int:
    size = config.image_size
    assert size is not None  # the recipe fills it in
    if not DIGITS_SIZE <= size <= LARGEST_SIZE:
        raise UserError(
            f"--image_size {size}: digits are {DIGITS_SIZE}x{DIGITS_SIZE} pixels and are only ever enlarged: "
            f"type --image_size 16, or another size from {DIGITS_SIZE} to {LARGEST_SIZE}"
        )
    return size


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """float64 [1797, 8, 8] from 0 to 255, int32 [1797]: scikit-learn's file, read without its 2 s import."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError("--dataset digits reads images that scikit-learn ships: type pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.exists():
        raise UserError(f"this scikit-learn has no {path.name}: type pip install 'scikit-learn>=1.7'")
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1].reshape(-1, DIGITS_SIZE, DIGITS_SIZE) * (255 / 16), table[:, -1].astype(np.int32)


def _split_indices(labels: np.ndarray, split: str) -> np.ndarray:
    """Where the examples of one split are: int64, stratified by class, shuffled."""
    low, high = SPLITS[split]
    parts = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[shuffled(len(members), SPLIT_SEED, int(label))]
        parts.append(members[round(low * len(members)) : round(high * len(members))])
    chosen = np.concatenate(parts)
    return chosen[shuffled(len(chosen), SPLIT_SEED)]


def _enlarge(images: np.ndarray, size: int) -> np.ndarray:
    """Bilinear, pixel centres aligned, edges clamped: float64 [n, h, h] -> uint8 [n, size, size].

    Element by element rather than as a matrix product, whose rounding would differ from machine to machine.
    """
    for axis in (1, 2):
        old = images.shape[axis]
        at = np.clip((np.arange(size) + 0.5) * (old / size) - 0.5, 0, old - 1)
        below = np.minimum(at.astype(np.int64), old - 2)
        weight = (at - below).reshape((-1, 1) if axis == 1 else (-1,))
        images = images.take(below, axis) * (1 - weight) + images.take(below + 1, axis) * weight
    return np.rint(images).astype(np.uint8)
