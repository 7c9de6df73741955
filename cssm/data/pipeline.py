"""Host batches of numpy. The contents of global step k depend on (seed, k, effective batch) alone.

Never on how many devices, processes or threads there are, nor on where a run was interrupted.
Steps count from 1.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from cssm.config import UserError

Batch = dict[str, np.ndarray]


class Source(Protocol):
    """A dataset split held on the host: examples by index, in any order."""

    num_classes: int
    image_shape: tuple[int, int, int]

    def __len__(self) -> int: ...

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n] -> images uint8 [n, H, W, C], labels int32 [n]."""
        ...


@dataclass(frozen=True)
class Outline:
    """What a data set holds, known without making or reading an image. examples: how many, by split."""

    num_classes: int
    image_shape: tuple[int, int, int]
    examples: dict[str, int]


class First:
    """The first n examples of a source, which is read no further than asked."""

    def __init__(self, source: Source, n: int):
        self.source, self.n = source, n
        self.num_classes, self.image_shape = source.num_classes, source.image_shape

    def __len__(self) -> int:
        return self.n

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.source.gather(indices)


def steps_per_epoch(n: int, batch: int) -> int:
    """Whole batches in one epoch of n examples; the remainder is dropped, another one in every epoch.

    Raises UserError where that is none.
    """
    if n < batch:
        raise UserError(
            f"the training set has {n} examples and one step takes {batch} (batch size x devices x "
            f"accumulation), so an epoch has no step: type a smaller --global_batch_size, at most {n}"
        )
    return n // batch


@lru_cache(maxsize=2)
def shuffled(n: int, *seed: int) -> np.ndarray:
    """A read-only permutation of range(n), int64, the same on every machine and with every numpy.

    It sorts the raw words of the Philox generator: numpy promises those never to change, unlike
    Generator.permutation.
    """
    order = np.argsort(np.random.Philox(np.random.SeedSequence(seed)).random_raw(n), kind="stable")
    order.flags.writeable = False
    return order


def step_indices(n: int, batch: int, seed: int, step: int) -> np.ndarray:
    """Which examples make up global step `step` (from 1): int64 [batch], distinct within an epoch."""
    epoch, position = divmod(step - 1, steps_per_epoch(n, batch))
    return shuffled(n, seed, epoch)[position * batch : (position + 1) * batch]


def train_batches(
    source: Source,
    batch: int,
    seed: int,
    first_step: int,
    last_step: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 1,
    prefetch: int = 2,
) -> Iterator[Batch]:
    """The batches of steps first_step..last_step, both included, in order.

    Each is {image: uint8 [b, H, W, C], label: int32 [b]}: this process's b = batch / process_count rows of
    the global batch. `workers` threads gather up to `prefetch` batches ahead, none where either is 0. Close
    the iterator (or exhaust it) to end the threads. UserError if an epoch has no whole batch.
    """
    rows = _rows_of(batch, process_index, process_count)
    n = len(source)
    steps_per_epoch(n, batch)

    def load(step: int) -> Batch:
        images, labels = source.gather(step_indices(n, batch, seed, step)[rows])
        return {"image": images, "label": labels}

    return _ahead(load, range(first_step, last_step + 1), workers, prefetch)


def eval_batches(
    source: Source,
    batch: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 1,
    prefetch: int = 2,
) -> Iterator[Batch]:
    """Every example once, in order: {image: uint8 [b, H, W, C], label: int32 [b]}.

    b and threads are as in `train_batches`, except that b is smaller, even 0, where the examples run out: every
    process sees as many batches. `parallel.devices.pad_and_mask` gives them all one shape.
    """
    rows = _rows_of(batch, process_index, process_count)
    n = len(source)

    def load(start: int) -> Batch:
        indices = np.arange(start, start + batch)[rows]
        images, labels = source.gather(indices[indices < n])
        return {"image": images, "label": labels}

    return _ahead(load, range(0, n, batch), workers, prefetch)


def _rows_of(batch: int, process_index: int, process_count: int) -> slice:
    size, rest = divmod(batch, process_count)
    if rest:
        nearest = " or ".join(str(n) for n in (batch - rest, batch - rest + process_count) if n)
        raise UserError(
            f"a global batch of {batch} does not divide by {process_count} processes: "
            f"type --global_batch_size {nearest}"
        )
    return slice(process_index * size, (process_index + 1) * size)


def _ahead(load: Callable[[int], Batch], keys: Iterable[int], workers: int, depth: int) -> Iterator[Batch]:
    """load(key) for every key, in order, at most `depth` of them ahead in `workers` threads."""
    if not workers or not depth:
        yield from map(load, keys)
        return
    waiting: deque[Future[Batch]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="cssm-data")
    try:
        for key in keys:
            waiting.append(pool.submit(load, key))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
