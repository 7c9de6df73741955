"""Datasets: `load` gives a Source, cssm.data.pipeline turns it into batches. No jax in this package."""

from collections.abc import Callable
from dataclasses import replace

from cssm.config import Config
from cssm.data.folder import folder_outline, folder_source
from cssm.data.images import digits_outline, digits_source
from cssm.data.npz import npz_outline, npz_source
from cssm.data.pathfinder import pathfinder_outline, pathfinder_source
from cssm.data.pipeline import First, Outline, Source
from cssm.data.published import published_outline, published_source

_FOLDERS = ("folder", "imagenet", "imagenette")
_PUBLISHED = ("cabc", "pathtracker")
LOADERS = {"digits": digits_source, "pathfinder": pathfinder_source, "npz": npz_source}
LOADERS |= dict.fromkeys(_FOLDERS, folder_source) | dict.fromkeys(_PUBLISHED, published_source)
OUTLINES = {"digits": digits_outline, "pathfinder": pathfinder_outline, "npz": npz_outline}
OUTLINES |= dict.fromkeys(_FOLDERS, folder_outline) | dict.fromkeys(_PUBLISHED, published_outline)


def outline(config: Config) -> Outline:
    """What `load` would give for each split; no image is made, and none read but one for the shape of all.

    UserError as from `load`. With --dry_run nothing is written; otherwise compressed TFRecords are unpacked.
    """
    whole = (published_outline if _is_published(config) else OUTLINES[config.dataset])(config)
    limits = {split: _limit(config, split) for split in whole.examples}
    examples = {split: min(n, limits[split] or n) for split, n in whole.examples.items()}
    return replace(whole, examples=examples)


def load(config: Config, split: str, progress: Callable[[int, int], None] | None = None) -> Source:
    """The train, val or test split of config.dataset; splits share no example.

    `progress(done, total)` is called while examples are made or read, where that takes a while.
    """
    source = (published_source if _is_published(config) else LOADERS[config.dataset])(config, split, progress)
    limit = _limit(config, split)
    return source if limit is None or limit >= len(source) else First(source, limit)


def _is_published(config: Config) -> bool:
    """Whether Pathfinder is read, rather than generated."""
    return config.dataset == "pathfinder" and config.data_dir is not None


def _limit(config: Config, split: str) -> int | None:
    return config.max_train_examples if split == "train" else config.max_eval_examples
