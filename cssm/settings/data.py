"""Settings of the data."""

import dataclasses
from functools import partial

from cssm import recipes
from cssm.knobs import TRAINING, knob

# What is read from files: image folders, which are cropped; what is read image by image; all.
FOLDERS = ("folder", "imagenet", "imagenette")
ONE_BY_ONE = (*FOLDERS, "pathfinder", "cabc", "pathtracker")
FILES = (*ONE_BY_ONE, "npz")
DATASETS = ("digits", "pathfinder", "cabc", "pathtracker", "npz", *FOLDERS)

_data = partial(knob, group="data", resume="fixed", verbs=TRAINING)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Which images, how many, and how they are prepared."""

    # fmt: off
    dataset: str = _data("digits", "the images", choices=DATASETS)
    data_dir: str | None = _data(None, "the file or folder that holds the images (docs/data.md)",
        applies={"dataset": FILES}, resume="kept", unset="none, pathfinder is then generated",
        aliases=("imagenet_dir", "pathtracker_dir", "tfrecord_dir"))
    pathfinder_difficulty: str = _data("easy", "easy, or the number of paddles of a contour",
        choices=tuple(recipes.PATHFINDER_SIZES), applies={"dataset": ("pathfinder",)})
    cabc_difficulty: str = _data("easy", "which of the three sets", choices=("easy", "medium", "hard"),
        applies={"dataset": ("cabc",)})
    image_size: int | None = _data(None, "side of the images", bounds="[1,)", unset="by data set, or that of the files")
    crop_scale: float = _data(0.08, "least share of an image's area that a random crop for training keeps, "
        "1 for the centre as in evaluation", bounds="(0,1]", applies={"dataset": FOLDERS}, resume="kept")
    flip: bool | None = _data(None, "mirror half of the images for training", applies={"dataset": (*FOLDERS, "npz")},
        resume="kept", unset="on for photographs, off for npz")
    mixup: float = _data(0.0, "mix each image with its neighbour in the batch, in shares of Beta(X, X); with cutmix "
        "each takes one of the two by a coin", bounds="[0,)", aliases=("mixup_alpha",), resume="kept")
    cutmix: float = _data(0.0, "replace a box by its neighbour's, of a share of Beta(X, X)", bounds="[0,)",
        aliases=("cutmix_alpha",), resume="kept")
    random_erasing: float = _data(0.0, "probability of erasing a rectangle", bounds="[0,1]", aliases=("reprob",),
        resume="kept")
    rand_augment: str | None = _data(None, "random operations on each image, such as m9-n2: magnitude 9 of 10, 2 of "
        "them", resume="kept", unset="none")
    cache_dir: str | None = _data(None, "where generated images are kept", resume="fresh",
        unset="$XDG_CACHE_HOME/cssm or ~/.cache/cssm")
    num_workers: int | None = _data(None, "workers that prepare data", bounds="[0,)", resume="fresh",
        unset="the number of cores, at most 8")
    prefetch: int = _data(2, "batches made ahead, 0 for none", bounds="[0,)", aliases=("prefetch_batches",),
        resume="fresh")
    max_bad_examples: int = _data(0, "examples of a split that may be unreadable, 0 to stop at the first",
        bounds="[0,)", applies={"dataset": ONE_BY_ONE}, resume="kept")
    max_train_examples: int | None = _data(None, "train on the first so many", bounds="[1,)", unset="all")
    max_eval_examples: int | None = _data(None, "evaluate on the first so many", bounds="[1,)", resume="kept",
        verbs=("train",), unset="all")
    # fmt: on
