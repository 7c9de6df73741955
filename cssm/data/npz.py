"""Images or clips with labels in .npz files of numpy."""

import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from cssm.config import Config, UserError
from cssm.data.decode import squared
from cssm.data.examples import reason
from cssm.data.pipeline import Outline
from cssm.data.records import ArraySource
from cssm.data.splits import SPLITS, hold_back, order_keys, shares

KINDS = {"images": (3, 4), "clips": (5,)}  # and how many dims they have
FLOATS = (np.dtype("float32"), np.dtype("float64"))
MOST_CLASSES = 2**24
BLOCK = 1024  # examples converted at once
Progress = Callable[[int, int], None] | None
NOT_NPZ = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
FORM = "images [N, H, W] or [N, H, W, C], or clips [N, T, H, W, C], and labels [N]"


@dataclass(frozen=True)
class NpzFile:
    """What is known of a file before its images are read. shape: (N, *image_shape), as they lie in it."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    labels: np.ndarray
    classes: tuple[str, ...]

    def image_shape(self, size: int | None) -> tuple[int, ...]:
        """Of the images as they are used: of that size, if one is given."""
        sides = (size, size) if size else self.shape[-3:-1]
        return (*self.shape[1:-3], *sides, self.shape[-1])


@dataclass(eq=False)
class _Pixels:
    """Held as long as a source uses it."""

    values: np.ndarray = field(repr=False)


_pixels: "WeakValueDictionary[tuple[Path, int, int, tuple[int, ...]], _Pixels]" = WeakValueDictionary()


class NpzSource(ArraySource):
    """Some rows of a file's images, which are read once for all splits that are taken from it.

    size: of the images, if not that which they have.
    """

    def __init__(self, file: NpzFile, num_classes: int, rows: np.ndarray, size: int | None, progress: Progress) -> None:
        self._held = _read_pixels(file, size, progress)
        super().__init__(self._held.values, file.labels, num_classes, rows)


def npz_source(config: Config, split: str, progress: Progress = None) -> NpzSource:
    """See the module; config.data_dir is one file, or a folder of train.npz and, if there are, val.npz and test.npz."""
    files, rows, _ = _divided(config)
    file = files.get(split, files["train"])
    return NpzSource(file, _num_classes(files["train"]), rows[split], config.image_size, progress)


def npz_outline(config: Config) -> Outline:
    """What npz_source gives; labels are read, images are not."""
    files, rows, notes = _divided(config)
    train = files["train"]
    examples = {split: len(rows[split]) for split in SPLITS}
    shape = train.image_shape(config.image_size)
    if shape != train.shape[1:]:
        square = "the largest square in the middle of " if len(set(train.shape[-3:-1])) > 1 else ""
        notes = (*notes, f"{square}the {train.kind}, {_text(train)}, is resized to --image_size {config.image_size}")
    return Outline(_num_classes(train), shape, examples, train.classes, notes)


def _divided(config: Config) -> tuple[dict[str, NpzFile], dict[str, np.ndarray], tuple[str, ...]]:
    """The files by split, and which rows of them (of train's, where a split has none) each split holds."""
    assert config.data_dir is not None, "rules.check wants one"
    place = Path(config.data_dir)
    paths = {split: place / f"{split}.npz" for split in SPLITS} if place.is_dir() else {"train": place}
    if not paths["train"].is_file():
        what = "has no train.npz" if place.is_dir() else "is not there"
        raise UserError(f"--data_dir {place} {what}: type an .npz file, or a folder of train.npz, val.npz, test.npz")
    files = {split: _opened(path) for split, path in paths.items() if path.is_file()}
    _check(files, config)
    held, notes = shares({split: len(file.labels) for split, file in files.items()})
    rows = {split: np.argsort(_keys(file), kind="stable") for split, file in files.items()}
    rows |= hold_back(files["train"].labels, _keys(files["train"]), held)
    if empty := [split for split in SPLITS if not len(rows[split])]:
        raise UserError(f"--data_dir {place}: too few examples, none is left for {empty[0]}")
    return files, rows, notes


def _keys(file: NpzFile) -> np.ndarray:
    return order_keys([str(i) for i in range(len(file.labels))])


def _num_classes(train: NpzFile) -> int:
    return len(train.classes) or int(train.labels.max()) + 1


def _check(files: dict[str, NpzFile], config: Config) -> None:
    """That the files agree with each other, and that their images are or become squares."""
    train = files["train"]
    num_classes = _num_classes(train)
    if num_classes < 2:
        raise UserError(f"{train.path}: all labels are 0, there is nothing to tell apart")
    for file in files.values():
        if file.shape[1:] != train.shape[1:]:
            raise UserError(f"{file.path}: {file.kind} are {_text(file)}, but {_text(train)} in {train.path}")
        low, high = int(file.labels.min()), int(file.labels.max())
        if low < 0 or high >= num_classes:
            bad = low if low < 0 else high
            raise UserError(f"{file.path}: a label is {bad}, and labels go from 0 to {num_classes - 1}")
    height, width = train.shape[-3:-1]
    if config.image_size is None and height != width:
        raise UserError(
            f"{train.path}: {train.kind} are {width} wide and {height} high, and models take squares: type "
            f"--image_size {min(height, width)} for the largest square in the middle, or another size to resize it to"
        )


def _text(file: NpzFile) -> str:
    return "x".join(map(str, file.shape[1:]))


def _opened(path: Path) -> NpzFile:
    """Everything but the images. UserError where the file is not of the form."""
    try:
        with zipfile.ZipFile(path) as archive:
            keys = [name.removesuffix(".npy") for name in archive.namelist()]
            found = [kind for kind in KINDS if kind in keys]
            if len(found) != 1 or "labels" not in keys:
                raise UserError(f"{path} holds {', '.join(keys) or 'nothing'}: must hold {FORM}")
            kind = found[0]
            shape, dtype, _ = header(archive, kind)
            labels = _array(archive, "labels")
            classes = tuple(map(str, _array(archive, "classes"))) if "classes" in keys else ()
    except NOT_NPZ as error:
        raise UserError(f"{path} cannot be read as .npz: {reason(error)}") from error
    file = NpzFile(path, kind, shape if len(shape) != 3 else (*shape, 1), dtype, labels, classes)
    _check_form(file, shape)
    return NpzFile(path, kind, file.shape, dtype, labels.astype(np.int32), classes)


def _check_form(file: NpzFile, shape: tuple[int, ...]) -> None:
    path, kind, labels = file.path, file.kind, file.labels
    if len(shape) not in KINDS[kind] or 0 in shape:
        raise UserError(f"{path}: {kind} have shape {list(shape)}: must be {FORM}, and not empty")
    if file.dtype != np.uint8 and file.dtype not in FLOATS:
        raise UserError(f"{path}: {kind} are {file.dtype}: must be uint8, or float32 or float64 from 0 to 1")
    if labels.ndim != 1 or len(labels) != shape[0] or labels.dtype.kind not in "iu":
        raise UserError(
            f"{path}: labels are {labels.dtype} of shape {list(labels.shape)}: must be whole numbers, "
            f"one for each of the {shape[0]} {kind}"
        )
    if int(labels.max()) >= MOST_CLASSES:
        raise UserError(f"{path}: a label is {labels.max()}: labels count classes, from 0")


def header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape and dtype of an array in the archive, and whether it lies in Fortran order. ValueError for objects."""
    with archive.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are not read since they may run programs")
    return shape, dtype, fortran


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _read_pixels(file: NpzFile, size: int | None, progress: Progress) -> _Pixels:
    """All images of a file: uint8 [N, *file.image_shape(size)]."""
    status = file.path.stat()
    key = (file.path.resolve(), status.st_mtime_ns, status.st_size, file.image_shape(size))
    if (held := _pixels.get(key)) is not None:
        return held
    try:
        with zipfile.ZipFile(file.path) as archive:
            values = _array(archive, file.kind)
    except NOT_NPZ as error:
        raise UserError(f"{file.path} cannot be read as .npz: {reason(error)}") from error
    values = values.reshape(file.shape)
    values = values if values.dtype == np.uint8 else from_floats(values, file)
    held = _pixels[key] = _Pixels(resized_to(values, file.image_shape(size), progress))
    return held


def resized_to(images: np.ndarray, shape: tuple[int, ...], progress: Progress = None) -> np.ndarray:
    """[N, ..., H, W, C] -> [N, *shape]: the largest square in the middle, antialiased; as they are if of that shape."""
    if images.shape[1:] == shape:
        return images
    found = np.empty((len(images), *shape), np.uint8)
    for i, image in enumerate(images):
        frames, made = image.reshape(-1, *image.shape[-3:]), found[i].reshape(-1, *shape[-3:])
        for frame, place in zip(frames, made, strict=True):
            place[:] = squared(frame, shape[-2])
        if progress and (i + 1) % BLOCK == 0:
            progress(i + 1, len(images))
    return found


def from_floats(values: np.ndarray, file: NpzFile) -> np.ndarray:
    """Floats from 0 to 1 -> uint8, where each is a pixel's value divided by 255, to rounding."""
    pixels = np.empty(values.shape, np.uint8)
    allowed = 4 * 255 * float(np.finfo(values.dtype).eps)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK] * 255
        nearest = np.rint(block)
        exact = (np.abs(block - nearest) <= allowed) & (nearest >= 0) & (nearest <= 255)
        if not exact.all():
            wrong = (block[~exact] / 255)[0]
            raise UserError(
                f"{file.path}: {file.kind} hold {wrong:.6g}, which is no whole number of 255ths from 0 to 1: "
                f"save uint8 pixels from 0 to 255"
            )
        pixels[start : start + BLOCK] = nearest
    return pixels
