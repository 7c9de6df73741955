"""What predict is to look at: image files, folders of them, .npz arrays. Batches come in the order of the inputs.

Arrays are never held whole: of an uncompressed .npz the rows are mapped from the disk, a compressed one is unpacked as
it is read.
"""

import os
import struct
import sys
import warnings
import zipfile
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from cssm.config import UserError
from cssm.data.decode import central, photo
from cssm.data.examples import UNREADABLE, reason
from cssm.data.folder import SUFFIXES
from cssm.data.npz import KINDS, NOT_NPZ, NpzFile, from_floats, header, resized_to

LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip's entry: lengths of its name and of its extra field


@dataclass(frozen=True)
class Piece:
    """Up to a batch of inputs: their names, and uint8 [n, *image_shape] in the same order."""

    names: list[str]
    images: np.ndarray


@dataclass
class Inputs:
    """Inputs in order. bad: those met so far that could not be read, and why. others: files of folders left aside."""

    image_shape: tuple[int, ...]
    parts: list["list[Path] | NpzFile"]
    others: int
    bad: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many there are, those included that will turn out to be unreadable."""
        return sum(len(part) if isinstance(part, list) else part.shape[0] for part in self.parts)

    def pieces(self, size: int, workers: int) -> Generator[Piece]:
        """All inputs, at most `size` at a time; files are decoded by so many threads. Each that cannot be read is named
        on stderr and left out. UserError for an .npz that breaks off.
        """
        with warnings.catch_warnings(), ThreadPoolExecutor(max(1, workers), thread_name_prefix="cssm-decode") as pool:
            # Of images from 89 megapixels on, which are read; those of twice as many Pillow refuses.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            for part in self.parts:
                if isinstance(part, NpzFile):
                    yield from self._of_npz(part, size)
                    continue
                for start in range(0, len(part), size):
                    paths = part[start : start + size]
                    found = list(pool.map(self._decoded, paths))
                    names = [str(path) for path, image in zip(paths, found, strict=True) if image is not None]
                    if names:
                        yield Piece(names, np.stack([image for image in found if image is not None]))

    def _of_npz(self, file: NpzFile, size: int) -> Iterator[Piece]:
        start = 0
        for rows in _rows(file, size):
            rows = rows if rows.dtype == np.uint8 else from_floats(rows, file)
            names = [f"{file.path}[{i}]" for i in range(start, start + len(rows))]
            yield Piece(names, resized_to(rows, self.image_shape))
            start += len(rows)

    def _decoded(self, path: Path) -> np.ndarray | None:
        """uint8 [S, S, C]: the largest square in the middle, resized; of a model of one channel, its luminance."""
        size, channels = self.image_shape[-2:]
        try:
            image = photo(path, size, central)
        except UNREADABLE as error:
            self.bad[str(path)] = reason(error)
            print(f"warning: {path} cannot be read and is left out: {reason(error)}", file=sys.stderr, flush=True)
            return None
        return image if channels == 3 else np.asarray(Image.fromarray(image).convert("L"))[..., None]


def open_inputs(paths: Sequence[str], image_shape: tuple[int, ...]) -> Inputs:
    """Files, folders (images at any depth, by name) and .npz files, in the order given.

    image_shape: what the model takes, (H, W, C) or of clips (T, H, W, C). UserError for a path that is not there, where
    there is no input at all, and for what the model cannot take.
    """
    if not paths:
        raise UserError("predict needs images: type --input with files, a folder, or an .npz file")
    parts: list[list[Path] | NpzFile] = []
    others = 0
    for path in map(Path, paths):
        if path.is_dir():
            images, strange = _images(path)
            others += strange
            parts.append(images)
        elif not path.is_file():
            raise UserError(f"--input {path}: there is no such file or folder")
        else:
            parts.append(_array(path, image_shape) if path.suffix == ".npz" else [path])
    inputs = Inputs(image_shape, _joined(parts), others)
    if not len(inputs):
        aside = f", and {others} other file{'s' if others > 1 else ''}" if others else ""
        raise UserError(f"--input {' '.join(paths)}: holds no image ({', '.join(SUFFIXES)}){aside}")
    if any(isinstance(part, list) for part in inputs.parts):
        _check_takes_files(image_shape)
    return inputs


def _check_takes_files(image_shape: tuple[int, ...]) -> None:
    if len(image_shape) == 4:
        raise UserError(
            f"the model takes clips of {image_shape[0]} frames, and an image file holds one: type --input with an .npz"
        )
    if image_shape[-1] not in (1, 3):
        raise UserError(
            f"the model takes {image_shape[-1]} channels, and images have 3: type --input with an .npz file"
        )


def _joined(parts: list[list[Path] | NpzFile]) -> list[list[Path] | NpzFile]:
    """Neighbouring files as one part, so that they share batches."""
    joined: list[list[Path] | NpzFile] = []
    for part in parts:
        if isinstance(part, list) and joined and isinstance(joined[-1], list):
            joined[-1] = [*joined[-1], *part]
        else:
            joined.append(part)
    return joined


def _images(folder: Path) -> tuple[list[Path], int]:
    """Images below a folder, sorted, and how many other files there are; hidden ones do not count."""
    found, others = [], 0
    try:
        for where, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
            above = {(here := Path(where).resolve()), *here.parents}  # where a link may lead back to
            folders[:] = sorted(n for n in folders if n[0] != "." and Path(where, n).resolve() not in above)
            shown = sorted(name for name in names if not name.startswith("."))
            images = [name for name in shown if name.lower().endswith(SUFFIXES)]
            found += [Path(where, name) for name in images]
            others += len(shown) - len(images)
    except OSError as error:
        raise UserError(f"--input {error.filename}: cannot be read, {error.strerror}") from error
    return found, others


def _raise(error: OSError) -> None:
    raise error


def _array(path: Path, image_shape: tuple[int, ...]) -> NpzFile:
    """What is known of an .npz before its rows are read; labels and class names in it are not looked at."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = [kind for kind in KINDS if f"{kind}.npy" in archive.namelist()]
            if len(found) != 1:
                raise UserError(f"--input {path} holds {', '.join(archive.namelist()) or 'nothing'}: must hold {FORM}")
            shape, dtype, fortran = header(archive, found[0])
    except NOT_NPZ as error:
        raise UserError(f"--input {path} cannot be read as .npz: {reason(error)}") from error
    kind = found[0]
    if len(shape) not in KINDS[kind] or 0 in shape[1:]:
        raise UserError(f"--input {path}: {kind} have shape {list(shape)}: must be {FORM}")
    shape = (*shape, 1) if len(shape) == 3 else shape
    if dtype not in (np.uint8, np.float32, np.float64) or fortran:
        what = "in Fortran order" if fortran else str(dtype)
        raise UserError(f"--input {path}: {kind} are {what}: save uint8 pixels from 0 to 255, in C order")
    if len(shape) - 1 != len(image_shape) or shape[-1] != image_shape[-1] or shape[1:-3] != image_shape[:-3]:
        there, here = ("x".join(map(str, s)) for s in (shape[1:], image_shape))
        raise UserError(f"--input {path}: {kind} are {there}, and the model takes {here} (other sides are resized)")
    return NpzFile(path, kind, shape, dtype, np.empty(0, np.int32), ())


FORM = "images [N, H, W] or [N, H, W, C], or clips [N, T, H, W, C]"


def _rows(file: NpzFile, size: int) -> Iterator[np.ndarray]:
    """The rows of the array, `size` at a time."""
    count, row = file.shape[0], file.shape[1:]
    try:
        with zipfile.ZipFile(file.path) as archive:
            info = archive.getinfo(f"{file.kind}.npy")
            row_bytes = int(np.prod(row)) * file.dtype.itemsize
            if info.compress_type == zipfile.ZIP_STORED and count:
                mapped = np.memmap(file.path, file.dtype, "r", _offset(file.path, info, count * row_bytes), file.shape)
                yield from (mapped[start : start + size] for start in range(0, count, size))
                return
            with archive.open(info) as stream:
                stream.read(info.file_size - count * row_bytes)  # the header
                for start in range(0, count, size):
                    n = min(size, count - start)
                    block = stream.read(n * row_bytes)
                    yield np.frombuffer(block, file.dtype).reshape(n, *row)
    except NOT_NPZ as error:
        raise UserError(f"--input {file.path} cannot be read to its end: {reason(error)}") from error


def _offset(path: Path, info: zipfile.ZipInfo, data_bytes: int) -> int:
    """Where the numbers of an uncompressed entry begin in the file."""
    with path.open("rb") as stream:
        stream.seek(info.header_offset)
        name, extra = LOCAL_HEADER.unpack(stream.read(LOCAL_HEADER.size))
    return info.header_offset + LOCAL_HEADER.size + name + extra + info.file_size - data_bytes
