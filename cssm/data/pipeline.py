"""Host batches of numpy. The contents of global step k depend on (seed, k, effective batch) alone.

Never on how many devices, processes or threads there are, nor on where a run was interrupted.
Steps count from 1.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from cssm.config import UserError

Batch = dict[str, np.ndarray]
Gathered = tuple[np.ndarray, np.ndarray]  # images, labels


class Source(Protocol):
    """A dataset split on the host: examples by index, in any order, from several threads at once.

    image_shape: (H, W, C), or of clips (T, H, W, C). decodes: whether an example takes so much work that threads
    should share a batch.
    """

    num_classes: int
    image_shape: tuple[int, ...]
    decodes: bool

    @property
    def bad(self) -> Sequence[str]:
        """Names of the examples met so far that cannot be read."""
        ...

    def __len__(self) -> int: ...

    def gather(self, indices: np.ndarray, epoch: int | None = None, out: np.ndarray | None = None) -> Gathered:
        """int64 [n] -> images uint8 [n, *image_shape], labels int32 [n].

        epoch, from 0: of training, which random crops follow; an example that cannot be read is replaced. None: the
        images as they are, without those, so that they may be fewer. out: where the images are put, of the same shape
        (what is returned is its beginning); None: in a new array.
        """
        ...


@dataclass(frozen=True)
class Outline:
    """What a data set holds, known without making or decoding an image.

    examples: how many, by split. image_shape: as of Source. classes: their names in the order of the labels, if they
    have any. notes: what a person should be told, one sentence each.
    """

    num_classes: int
    image_shape: tuple[int, ...]
    examples: dict[str, int]
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class First:
    """The first n examples of a source, which is read no further than asked."""

    def __init__(self, source: Source, n: int):
        self.source, self.n = source, n
        self.num_classes, self.image_shape, self.decodes = source.num_classes, source.image_shape, source.decodes

    @property
    def bad(self) -> Sequence[str]:
        return self.source.bad

    def __len__(self) -> int:
        return self.n

    def gather(self, indices: np.ndarray, epoch: int | None = None, out: np.ndarray | None = None) -> Gathered:
        return self.source.gather(indices, epoch, out)


class Some(First):
    """n examples of a source, drawn from all over it by the seed."""

    def __init__(self, source: Source, n: int, seed: int):
        super().__init__(source, n)
        self.rows = shuffled(len(source), seed)[:n]

    def gather(self, indices: np.ndarray, epoch: int | None = None, out: np.ndarray | None = None) -> Gathered:
        return self.source.gather(self.rows[indices], epoch, out)


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
) -> Generator[Batch]:
    """The batches of steps first_step..last_step, both included, in order.

    Each is {image: uint8 [b, *image_shape], label: int32 [b]}: this process's b = batch / process_count rows of
    the global batch. `workers` threads gather up to `prefetch` batches ahead, none where either is 0. Close
    the iterator (or exhaust it) to end the threads. UserError if an epoch has no whole batch.
    """
    rows = _rows_of(batch, process_index, process_count)
    n = len(source)
    per_epoch = steps_per_epoch(n, batch)

    def making(step: int) -> _Making:
        return _Making(source, step_indices(n, batch, seed, step)[rows], (step - 1) // per_epoch, workers)

    return _ahead(making, range(first_step, last_step + 1), workers, prefetch)


def eval_batches(
    source: Source,
    batch: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 1,
    prefetch: int = 2,
) -> Generator[Batch]:
    """Every example once, in order: {image: uint8 [b, *image_shape], label: int32 [b]}.

    b and threads are as in `train_batches`, except that b is smaller, even 0, where the examples run out or cannot be
    read: every process sees as many batches. `parallel.devices.pad_and_mask` gives them all one shape.
    """
    rows = _rows_of(batch, process_index, process_count)
    n = len(source)

    def making(start: int) -> _Making:
        indices = np.arange(start, start + batch)[rows]
        return _Making(source, indices[indices < n], None, workers)

    return _ahead(making, range(0, n, batch), workers, prefetch)


def _rows_of(batch: int, process_index: int, process_count: int) -> slice:
    size, rest = divmod(batch, process_count)
    if rest:
        nearest = " or ".join(str(n) for n in (batch - rest, batch - rest + process_count) if n)
        raise UserError(
            f"a global batch of {batch} does not divide by {process_count} processes: "
            f"type --global_batch_size {nearest}"
        )
    return slice(process_index * size, (process_index + 1) * size)


class _Making:
    """A batch in as many pieces as there are threads to decode its examples, each of which fills a part of one array.

    pieces: to be called, in any order, from any thread.
    """

    def __init__(self, source: Source, indices: np.ndarray, epoch: int | None, workers: int) -> None:
        count = max(1, min(workers, len(indices))) if source.decodes else 1
        self._images = np.empty((len(indices), *source.image_shape), np.uint8) if count > 1 else None
        parts = np.array_split(indices, count)
        places = [None] * count if self._images is None else np.array_split(self._images, count)
        self.pieces: list[Callable[[], Gathered]] = [
            partial(source.gather, part, epoch, place) for part, place in zip(parts, places, strict=True)
        ]

    def joined(self, found: list[Gathered]) -> Batch:
        """The batch, of what the pieces returned, in their order. It is smaller where examples could not be read."""
        images, labels = found[0]
        if self._images is not None:
            labels = np.concatenate([labels for _, labels in found])
            whole = len(labels) == len(self._images)
            images = self._images if whole else np.concatenate([images for images, _ in found])
        return {"image": images, "label": labels}


def _ahead(making: Callable[[int], _Making], keys: Iterable[int], workers: int, depth: int) -> Generator[Batch]:
    """The batch of every key, in order, at most `depth` of them ahead in `workers` threads."""
    if not workers or not depth:
        # No map, which would take a StopIteration raised by a source for the end of the batches.
        for key in keys:
            batch = making(key)
            yield batch.joined([piece() for piece in batch.pieces])
        return
    waiting: deque[tuple[_Making, list[Future[Gathered]]]] = deque()

    def next_one() -> Batch:
        batch, futures = waiting.popleft()
        return batch.joined([future.result() for future in futures])

    pool = ThreadPoolExecutor(workers, thread_name_prefix="cssm-data")
    try:
        for key in keys:
            batch = making(key)
            waiting.append((batch, [pool.submit(piece) for piece in batch.pieces]))
            if len(waiting) > depth:
                yield next_one()
        while waiting:
            yield next_one()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
