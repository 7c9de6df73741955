"""Datasets: `load` gives a Source, cssm.data.pipeline turns it into batches. No jax in this package."""

from collections.abc import Callable
from dataclasses import replace

from cssm.config import Config
from cssm.data.folder import folder_outline, folder_source
from cssm.data.generated import generated_outline, generated_source
from cssm.data.images import digits_outline, digits_source
from cssm.data.npz import npz_outline, npz_source
from cssm.data.pipeline import First, Outline, Source
from cssm.data.prepared import prepared_outline, prepared_source
from cssm.data.published import published_outline, published_source

_FOLDERS = ("folder", "imagenet", "imagenette")
_GENERATED = ("pathfinder", "cabc", "pathtracker")
LOADERS = {"digits": digits_source, "npz": npz_source, "tfds:NAME": prepared_source}
LOADERS |= dict.fromkeys(_FOLDERS, folder_source) | dict.fromkeys(_GENERATED, published_source)
OUTLINES = {"digits": digits_outline, "npz": npz_outline, "tfds:NAME": prepared_outline}
OUTLINES |= dict.fromkeys(_FOLDERS, folder_outline) | dict.fromkeys(_GENERATED, published_outline)


def outline(config: Config) -> Outline:
    """What `load` would give for each split; no image is made, and none read but one for the shape of all.

    UserError as from `load`. With --dry_run nothing is written; otherwise compressed TFRecords are unpacked.
    """
    whole = (generated_outline if _is_generated(config) else OUTLINES[config.source])(config)
    limits = {split: _limit(config, split) for split in whole.examples}
    examples = {split: min(n, limits[split] or n) for split, n in whole.examples.items()}
    return replace(whole, examples=examples)


def load(config: Config, split: str, progress: Callable[[int, int], None] | None = None) -> Source:
    """The train, val or test split of config.dataset; splits share no example.

    `progress(done, total)` is called while examples are made or read, where that takes a while.
    """
    source = (generated_source if _is_generated(config) else LOADERS[config.source])(config, split, progress)
    limit = _limit(config, split)
    return source if limit is None or limit >= len(source) else First(source, limit)


def _is_generated(config: Config) -> bool:
    """Whether a data set of which there are published files is generated, since none are given."""
    return config.dataset in _GENERATED and config.data_dir is None


def _limit(config: Config, split: str) -> int | None:
    return config.max_train_examples if split == "train" else config.max_eval_examples
