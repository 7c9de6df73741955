"""Datasets: `load` gives a Source, cssm.data.pipeline turns it into batches. No jax in this package."""

from collections.abc import Callable

from cssm.config import Config
from cssm.data.images import digits_source
from cssm.data.pathfinder import pathfinder_source
from cssm.data.pipeline import First, Source

LOADERS = {"digits": digits_source, "pathfinder": pathfinder_source}


def load(config: Config, split: str, progress: Callable[[int, int], None] | None = None) -> Source:
    """The train, val or test split of config.dataset; splits share no example.

    `progress(done, total)` is called while examples are made or read, where that takes a while.
    """
    source = LOADERS[config.dataset](config, split, progress)
    limit = config.max_train_examples if split == "train" else config.max_eval_examples
    return source if limit is None or limit >= len(source) else First(source, limit)
