"""One row of `bench --input data`: how fast the host makes the batches of training, without a model or a device.

Meant for a process of its own, which loads no jax. Beside it PyTorch's DataLoader with torchvision, as they are usually
put together, may be timed on the same files; torch is loaded in the process that measures it, and nowhere else.
"""

import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cssm import data
from cssm.config import Config
from cssm.data.folder import listing
from cssm.data.pipeline import step_indices, train_batches
from cssm.watchdog import ROWS_KEPT, Watchdog

Row = dict[str, Any]
BURN_IN = 5
NEEDED = ("torch", "torchvision")  # by the peer


def measure(config: Config) -> Row:
    """{num_workers, batch_size, images_per_s} of config.steps batches, taken as fast as they come; the configuration
    has one num_workers and a global_batch_size.
    """
    batch, workers = config.global_batch_size or 1, config.num_workers or 0
    source = data.load(config, "train")
    # As many are ahead when the clock stops as when it starts.
    last = BURN_IN + config.steps + config.prefetch
    with closing(
        train_batches(source, batch, config.seed, 1, last, workers=workers, prefetch=config.prefetch)
    ) as batches:
        return timed(config, batches)


def measure_peer(config: Config) -> Row:
    """The same examples in the same batches, by torch's DataLoader; as cssm.input_rate.measure."""
    torch, workers = importlib.import_module("torch"), config.num_workers or 0
    files, labels = _training_files(config)
    ahead = workers * config.prefetch
    steps = range(1, BURN_IN + config.steps + ahead + 1)
    batches = [step_indices(len(files), config.global_batch_size or 1, config.seed, step).tolist() for step in steps]
    loader = torch.utils.data.DataLoader(
        Photos(files, labels, _transform(config)),
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=config.prefetch if workers else None,
    )
    return timed(config, iter(loader))


def timed(config: Config, batches: Iterator[Any]) -> Row:
    """The rate of config.steps batches after BURN_IN others."""
    with Watchdog(config.stall_timeout, lambda: "a batch", ROWS_KEPT) as watchdog:
        times = []
        for _ in range(BURN_IN + config.steps):
            next(batches)
            watchdog.beat()
            times.append(time.perf_counter())
    seconds = times[-1] - times[BURN_IN - 1]
    batch = config.global_batch_size or 1
    return {"num_workers": config.num_workers, "batch_size": batch, "images_per_s": config.steps * batch / seconds}


class Photos:
    """A data set as torch's loaders want one: (transformed image, label) by index; images as torchvision opens them."""

    def __init__(self, files: Sequence[Path], labels: np.ndarray, transform: Any) -> None:
        self.files, self.labels, self.transform = files, labels, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.files[index]) as image:
            return self.transform(image.convert("RGB")), int(self.labels[index])


def _training_files(config: Config) -> tuple[list[Path], np.ndarray]:
    root = Path(str(config.data_dir)).absolute()
    found = listing(root)
    files = found.files["train"][: config.max_train_examples]
    return [root / name for name in files], found.labels["train"]


def _transform(config: Config) -> Any:
    """torchvision's, with the crops and mirrors of cssm.data.folder; to uint8, which is what crosses the bus here."""
    vision, size = importlib.import_module("torchvision.transforms"), config.image_size
    crop = [vision.RandomResizedCrop(size, scale=(config.crop_scale, 1.0))]
    if config.crop_scale == 1:
        crop = [vision.Resize(size), vision.CenterCrop(size)]
    mirror = [vision.RandomHorizontalFlip()] if config.flip else []
    return vision.Compose([*crop, *mirror, vision.PILToTensor()])
