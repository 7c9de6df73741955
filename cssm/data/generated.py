"""Pathfinder, cABC and PathTracker where no files are given: generated once, kept in the cache, mapped into memory."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cssm.config import Config
from cssm.data import cabc, pathfinder, pathtracker
from cssm.data.pipeline import Outline
from cssm.data.records import ArraySource, Made, cached_arrays

DATA_SEED = 2018  # of the images, not of the run: every --seed trains on the same ones and shares their cache
# Examples of each difficulty, unless --max_train_examples or --max_eval_examples ask for fewer.
_FEW, _SOME, _MANY = ({"train": 10 * n, "val": n, "test": n} for n in (1_000, 2_000, 5_000))
_MOST = {"train": 100_000, "val": 5_000, "test": 5_000}
EXAMPLES = {
    "pathfinder": {"easy": _SOME, "6": _MANY, **dict.fromkeys(("9", "14", "20", "25"), _MOST)},
    "cabc": {"easy": _SOME, "medium": _MANY, "hard": _MANY},
    "pathtracker": dict.fromkeys(pathtracker.DIFFICULTIES, _FEW),
}


@dataclass(frozen=True)
class Generated:
    """One data set. make(split, indices int64 [n]) -> uint8 [n, *image_shape], labels int32 [n]; it can be pickled.

    digest: 12 hex digits that change with anything that decides the examples, except their number.
    """

    dataset: str
    difficulty: str
    version: int
    digest: str
    image_shape: tuple[int, ...]
    examples: dict[str, int]
    make: Callable[[str, np.ndarray], Made]


def generated(config: Config) -> Generated:
    """The data set that a configuration asks for. UserError for an image_size at which it cannot be seen."""
    difficulty = getattr(config, f"{config.dataset}_difficulty")
    size = config.image_size
    assert size is not None, "the recipe has one"
    spec: Any
    if config.dataset == "pathtracker":
        spec = pathtracker.spec(difficulty, size)
        shape: tuple[int, ...] = (spec.frames, size, size, 3)
        module: Any = pathtracker
    else:
        module = {"pathfinder": pathfinder, "cabc": cabc}[config.dataset]
        spec = module.spec(difficulty, size)
        shape = (size, size, 1)
    return Generated(
        config.dataset,
        difficulty,
        spec.version,
        hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()[:12],
        shape,
        dict(EXAMPLES[config.dataset][difficulty]),
        partial(_made, module.generate, spec),
    )


def _made(generate: Callable[..., tuple[Any, ...]], spec: object, split: str, indices: np.ndarray) -> Made:
    images, labels, _ = generate(spec, DATA_SEED, split, indices)
    return images, labels


def generated_source(config: Config, split: str, progress: Callable[[int, int], None] | None = None) -> ArraySource:
    """One split, from the cache or generated into it: no more of it than config.max_train_examples or
    max_eval_examples ask for.
    """
    chosen, folder, workers = generated(config), config.cache_dir, config.num_workers
    assert folder is not None and workers is not None, "resolve() leaves none unset"
    limit = config.max_train_examples if split == "train" else config.max_eval_examples
    most = chosen.examples[split]
    n = most if limit is None else min(limit, most)
    images, labels = cached_arrays(
        Path(folder) / chosen.dataset / f"v{chosen.version}-{chosen.digest}" / f"{DATA_SEED}_{split}_{n}",
        partial(chosen.make, split),
        n,
        chosen.image_shape,
        num_workers=workers,
        progress=progress,
    )
    return ArraySource(images, labels, num_classes=2)


def generated_outline(config: Config) -> Outline:
    """What generated_source gives, without making an image."""
    chosen = generated(config)
    return Outline(2, chosen.image_shape, chosen.examples)
