"""Settings of the data."""

import dataclasses
from functools import partial

from cssm import recipes
from cssm.knobs import INFERRING, TRAINING, knob

# What is generated unless files are given. What is read from files: image folders, which are cropped; what may be; what
# is read image by image; all.
GENERATED = ("pathfinder", "cabc", "pathtracker")
FOLDERS = ("folder", "imagenet", "imagenette")
CROPPED = (*FOLDERS, "tfds:NAME")
ONE_BY_ONE = (*CROPPED, *GENERATED)
FILES = (*ONE_BY_ONE, "npz")
DATASETS = ("digits", *GENERATED, "npz", *CROPPED)

_data = partial(knob, group="data", resume="fixed", verbs=TRAINING)
_made = partial(_data, verbs=(*TRAINING, "prepare"))
# Which images: eval may be told of others than a model was trained on.
_chosen = partial(_data, verbs=(*TRAINING, "prepare", "eval"))


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Which images, how many, and how they are prepared."""

    # fmt: off
    dataset: str = _chosen("digits", "the images; prepare takes it without --dataset", choices=DATASETS)
    data_dir: str | None = _chosen(None, "file or folder that holds the images, or that prepare makes of others than "
        "folders (docs/data.md)",
        applies={"dataset": FILES}, resume="kept", unset="none, pathfinder, cabc, pathtracker are then generated",
        aliases=("imagenet_dir", "pathtracker_dir", "tfrecord_dir"))
    pathfinder_difficulty: str = _chosen("easy", "easy, or the number of paddles of a contour",
        choices=tuple(recipes.PATHFINDER_SIZES), applies={"dataset": ("pathfinder",)})
    cabc_difficulty: str = _chosen("easy", "which of the three sets", choices=("easy", "medium", "hard"),
        applies={"dataset": ("cabc",)})
    pathtracker_difficulty: str = _chosen("easy", "of generated clips: easy, or the number of dots besides the two "
        "that matter", choices=("easy", "0", "5", "14", "25"), applies={"dataset": ("pathtracker",)})
    image_size: int | None = _made(None, "side of the images", bounds="[1,)", unset="by data set, or that of the files")
    crop_scale: float | None = _data(None, "least share of an image's area that a random crop for training keeps, "
        "1 for the centre as in evaluation", bounds="(0,1]", applies={"dataset": CROPPED}, resume="kept",
        unset="0.08, or 1 where all images of a tfds data set have one size")
    flip: bool | None = _data(None, "mirror half of the images for training", applies={"dataset": (*CROPPED, "npz")},
        resume="kept", unset="yes, but no for npz and where all images of a tfds data set have one size")
    mixup: float = _data(0.0, "mix each image with its neighbour in the batch, in shares of Beta(X, X); with cutmix "
        "each takes one of the two by a coin", bounds="[0,)", aliases=("mixup_alpha",), resume="kept")
    cutmix: float = _data(0.0, "replace a box by its neighbour's, of a share of Beta(X, X)", bounds="[0,)",
        aliases=("cutmix_alpha",), resume="kept")
    random_erasing: float = _data(0.0, "probability of erasing a rectangle", bounds="[0,1]", aliases=("reprob",),
        resume="kept")
    rand_augment: str | None = _data(None, "random operations on each image, such as m9-n2: magnitude 9 of 10, 2 of "
        "them", resume="kept", unset="none")
    cache_dir: str | None = _data(None, "where generated images and compiled programs are kept", resume="fresh",
        verbs=(*TRAINING, *INFERRING),
        unset="$XDG_CACHE_HOME/cssm or ~/.cache/cssm")
    num_workers: int | None = _made(None, "workers that prepare data", bounds="[0,)", resume="fresh",
        verbs=(*TRAINING, "prepare", *INFERRING),
        unset="the number of cores, at most 8")
    prefetch: int = _data(2, "batches made ahead, 0 for none", bounds="[0,)", aliases=("prefetch_batches",),
        resume="fresh", verbs=(*TRAINING, *INFERRING))
    max_bad_examples: int = _data(0, "examples of a split that may be unreadable, 0 to stop at the first",
        bounds="[0,)", applies={"dataset": ONE_BY_ONE}, resume="kept", verbs=(*TRAINING, "prepare", "eval"))
    max_train_examples: int | None = _chosen(None, "train on the first so many", bounds="[1,)", unset="all")
    max_eval_examples: int | None = _data(None, "evaluate on the first so many", bounds="[1,)", resume="kept",
        verbs=("train", "prepare", "eval"), unset="all")
    # fmt: on
