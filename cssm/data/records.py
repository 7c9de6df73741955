"""Arrays made once by worker processes, kept on disk, memory-mapped ever after."""

import errno
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from cssm.config import UserError
from cssm.lock import lock_file

CHUNK, CHUNK_BYTES = 1000, 1 << 26  # what a worker makes at a time: so many examples, or fewer large ones
AHEAD = 2
P, T = TypeVar("P"), TypeVar("T")
Made = tuple[np.ndarray, np.ndarray]
Maker = Callable[[np.ndarray], Made]


class ArraySource:
    """A Source of examples in memory or memory-mapped: images uint8 [n, *image_shape], labels int32 [n].

    rows: int64 [m], which of them make up the split, in order; None: all.
    """

    decodes = False
    bad = ()

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, num_classes: int, rows: np.ndarray | None = None
    ) -> None:
        self._images, self._labels, self._rows, self.num_classes = images, labels, rows, num_classes
        self.image_shape: tuple[int, ...] = images.shape[1:]

    def __len__(self) -> int:
        return len(self._labels if self._rows is None else self._rows)

    def gather(
        self, indices: np.ndarray, epoch: int | None = None, out: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n] -> copies: images uint8 [n, *image_shape], labels int32 [n]; alike in every epoch."""
        chosen = indices if self._rows is None else self._rows[indices]
        images = self._images[chosen] if out is None else np.take(self._images, chosen, 0, out)
        return images, self._labels[chosen]


def cached_arrays(
    folder: Path,
    make: Maker,
    n: int,
    image_shape: tuple[int, ...],
    *,
    num_workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Examples 0 .. n-1 of `make`: uint8 [n, *image_shape], read-only, memory-mapped, and labels int32 [n].

    `folder` names everything that decides them. If it holds them, intact by their SHA-256, nothing is made.
    Otherwise `make(indices)` (picklable) runs in num_workers new processes (0: in this one), `progress(done,
    total)` is called as chunks arrive, and the files are written elsewhere and moved into place whole. Of
    processes that need them at once, one makes them and the others wait for it; where the file system has no
    locks each makes them, and the slower uses what the faster left. Raises UserError, exit code 6, where the
    disk is full or not writable.
    """
    found = _load(folder, n, image_shape)
    if found is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _only_one(folder):
                if (found := _load(folder, n, image_shape)) is not None:
                    return found
                if folder.exists():
                    print(f"{folder} is damaged; its images are made again", file=sys.stderr, flush=True)
                _make(folder, make, n, image_shape, num_workers, progress)
        except OSError as error:
            if (why := no_room(error)) is None:
                raise
            raise UserError(
                f"cannot keep generated images in {folder.parent}: {why}; type --cache_dir FOLDER",
                exit_code=6,
            ) from error
        found = _load(folder, n, image_shape)
    if found is None:
        raise UserError(f"{folder} does not read back as written: type --cache_dir FOLDER", exit_code=6)
    return found


def no_room(error: OSError) -> str | None:
    """Why nothing can be written, in words; None for another kind of failure."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    return "it is not writable" if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else None


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Let one process at a time through. Where there are no locks all pass, after a sentence on stderr."""

    def waiting(owner: str) -> None:
        print(f"waiting for {owner}, which generates {folder}", file=sys.stderr, flush=True)

    with lock_file(folder.with_name(f"{folder.name}.lock"), waiting) as locked:
        if not locked:
            print(
                f"{folder.parent} cannot be locked: of processes that need the same images each generates them",
                file=sys.stderr,
                flush=True,
            )
        yield


def _make(
    folder: Path,
    make: Maker,
    n: int,
    image_shape: tuple[int, ...],
    num_workers: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".building", dir=folder.parent))
    try:
        labels = np.zeros(n, np.int32)
        chunks = chunks_of(n, image_shape)
        with npy_file(building / "images.npy", np.uint8, (n, *image_shape)) as file:
            for chunk, (images, labels[chunk]) in zip(chunks, in_workers(make, chunks, num_workers), strict=True):
                file.write(np.ascontiguousarray(images).data)
                if progress is not None:
                    progress(int(chunk[-1]) + 1, n)
        np.save(building / "labels.npy", labels)
        digests = {name: _sha256(building / name) for name in ("images.npy", "labels.npy")}
        (building / "index.json").write_text(json.dumps(digests))
        _move(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def npy_file(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> BinaryIO:
    """A .npy file open for its content; no memory map, since that ends in SIGBUS where the disk is full, and not
    written by numpy, whose error does not say that it is.
    """
    file = path.open("wb")
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file


def chunks_of(n: int, image_shape: tuple[int, ...]) -> list[np.ndarray]:
    """The indices 0 .. n-1 in the parts in which workers make examples."""
    size = max(1, min(CHUNK, CHUNK_BYTES // math.prod(image_shape)))
    return [np.arange(start, min(start + size, n)) for start in range(0, n, size)]


def in_workers(make: Callable[[P], T], parts: Sequence[P], num_workers: int) -> Iterator[T]:
    """make(part) of each, in order, made by num_workers new processes (0: by this one); `make` can be pickled. They are
    no more than AHEAD parts a process ahead of who asks for them.

    UserError where one of them is ended from outside.
    """
    if not num_workers:
        yield from map(make, parts)
        return
    # Started afresh: a fork of a process whose libraries run threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_workers, len(parts)), context, _depend_on_parent) as pool:
        waiting = deque[Future[T]]()
        try:
            for part in parts:
                waiting.append(pool.submit(make, part))
                if len(waiting) > AHEAD * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                f"one of {num_workers} worker processes was ended from outside, perhaps for want of memory: "
                "type --num_workers 0 to make the images in this process"
            ) from error
        finally:
            # Not future by future: Python 3.11.2 waits for ever for a pool some of whose futures were cancelled.
            pool.shutdown(cancel_futures=True)


def _depend_on_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and end with it, however it ends, instead of waiting for its orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), name="parent watch", daemon=True).start()


def _move(building: Path, folder: Path) -> None:
    """Put a finished folder in its place, unless another process has put an intact one there meanwhile."""
    try:
        building.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _intact(folder):
            folder.rename(building.with_suffix(".corrupt"))
            shutil.rmtree(building.with_suffix(".corrupt"), ignore_errors=True)
            building.rename(folder)


def _load(folder: Path, n: int, image_shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """What a folder holds, or None where there is no folder or not what was written."""
    if not _intact(folder):
        return None
    images = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
    labels = np.load(folder / "labels.npy", allow_pickle=False)
    return (images, labels) if images.shape == (n, *image_shape) and labels.shape == (n,) else None


def _intact(folder: Path) -> bool:
    try:
        expected = json.loads((folder / "index.json").read_text())
        return all(_sha256(folder / name) == expected[name] for name in ("images.npy", "labels.npy"))
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
