"""Settings of the data."""

import dataclasses
from functools import partial

from cssm import recipes
from cssm.knobs import TRAINING, knob

_data = partial(knob, group="data", resume="fixed", verbs=TRAINING)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Which images, how many, and how they are prepared."""

    # fmt: off
    dataset: str = _data("digits", "the images", choices=("digits", "pathfinder"))
    pathfinder_difficulty: str = _data("easy", "easy, or the number of paddles of a contour",
        choices=tuple(recipes.PATHFINDER_SIZES), applies={"dataset": ("pathfinder",)})
    image_size: int | None = _data(None, "side of the images", bounds="[1,)", unset="by data set")
    cache_dir: str | None = _data(None, "where generated images are kept", resume="fresh",
        unset="$XDG_CACHE_HOME/cssm or ~/.cache/cssm")
    num_workers: int | None = _data(None, "workers that prepare data", bounds="[0,)", resume="fresh",
        unset="the number of cores, at most 8")
    prefetch: int = _data(2, "batches made ahead, 0 for none", bounds="[0,)", aliases=("prefetch_batches",),
        resume="fresh")
    max_train_examples: int | None = _data(None, "train on the first so many", bounds="[1,)", unset="all")
    max_eval_examples: int | None = _data(None, "evaluate on the first so many", bounds="[1,)", resume="kept",
        verbs=("train",), unset="all")
    # fmt: on
