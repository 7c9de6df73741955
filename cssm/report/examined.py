"""What an evaluation answered, in a form to be shown."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """An example and its answer. image: uint8 [H, W, C], of a clip its middle frame; confidence: of the answer."""

    image: np.ndarray
    label: int
    answer: int
    confidence: float


@dataclass(frozen=True)
class Examined:
    """What the evaluation of a split at a step answered. confusion: int64 [label, answer], every example counted once;
    classes: their names; samples: a few of the right and the wrong ones.
    """

    split: str
    step: int
    confusion: np.ndarray
    classes: tuple[str, ...]
    right: tuple[Sample, ...]
    wrong: tuple[Sample, ...]
