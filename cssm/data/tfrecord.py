"""TFRecord files and tf.train.Example, without TensorFlow.

A record is its length (uint64), the masked CRC of that, its bytes, and the masked CRC of those. An Example is a map
from names to lists of bytes, floats or whole numbers, in the encoding of protocol buffers.
"""

import gzip
import hashlib
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path

import numpy as np

from cssm.config import UserError
from cssm.data.crc32c import masked_crc32c

HEADER, FOOTER = struct.Struct("<QI"), struct.Struct("<I")
GZIP_MAGIC = b"\x1f\x8b"
CUT_SHORT = (EOFError, zlib.error, gzip.BadGzipFile)
PIECE = 1 << 20  # bytes read at once
Features = dict[str, list[memoryview] | np.ndarray]


@dataclass(frozen=True)
class Record:
    """One record of a file, by its number from 0, and where its bytes are; packed: in a compressed file, so that it is
    slow to read. flaw: why it and all after it are lost.
    """

    path: Path
    number: int
    file: Path
    offset: int = 0
    size: int = 0
    packed: bool = False
    flaw: str = ""

    def __str__(self) -> str:
        return f"record {self.number} of {self.path}"


def records(path: Path, folder: Path | None) -> list[Record]:
    """The records of a file, whose bytes are not looked at. Where it goes wrong, the last one says so.

    A compressed file is unpacked into `folder` first, unless it was before; with None nothing is written.
    """
    status = path.stat()
    return _known(path, folder, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1024)
def _known(path: Path, folder: Path | None, mtime_ns: int, size: int) -> list[Record]:
    file = unpacked(path, folder) if folder is not None and is_compressed(path) else path
    return list(_records(path, file))


def _records(path: Path, file: Path) -> Iterator[Record]:
    number, at, packed = 0, 0, is_compressed(file)
    # Without a buffer, which would be filled anew for the few bytes of each header.
    with gzip.open(file) if packed else file.open("rb", buffering=0) as stream:
        while True:
            header = _some(stream, HEADER.size)
            if not header and number:
                return
            if len(header) < HEADER.size:
                yield Record(path, number, file, flaw="the file ends within it" if header else "the file is empty")
                return
            size, crc = HEADER.unpack(header)
            if masked_crc32c(header[:8]) != crc:
                yield Record(path, number, file, flaw="its length has a wrong CRC, and what follows is lost")
                return
            if not _skip(stream, size + FOOTER.size):
                yield Record(path, number, file, flaw="the file ends within it")
                return
            yield Record(path, number, file, at + HEADER.size, size, packed)
            at += HEADER.size + size + FOOTER.size
            number += 1


def _some(stream: gzip.GzipFile | FileIO, size: int) -> bytes:
    """The next bytes; of a compressed file that is damaged, as many as can be had."""
    if not isinstance(stream, gzip.GzipFile):
        return stream.read(size)
    found, missing = [], size
    with suppress(*CUT_SHORT):
        while missing and (piece := stream.read1(missing)):
            found.append(piece)
            missing -= len(piece)
    return b"".join(found)


def _skip(stream: gzip.GzipFile | FileIO, size: int) -> bool:
    """Go on by so many bytes; whether there are as many."""
    if not isinstance(stream, gzip.GzipFile):
        return stream.seek(size, os.SEEK_CUR) <= os.fstat(stream.fileno()).st_size
    while size and (piece := _some(stream, min(size, PIECE))):
        size -= len(piece)
    return not size


def read(record: Record) -> bytes:
    """The bytes of a record; ValueError for one that is damaged."""
    if record.flaw:
        raise ValueError(record.flaw)
    with gzip.open(record.file) if record.packed else record.file.open("rb") as file:
        file.seek(record.offset)
        data, footer = file.read(record.size), file.read(FOOTER.size)
    if len(footer) < FOOTER.size:
        raise ValueError("the file ends within it")
    if masked_crc32c(data) != FOOTER.unpack(footer)[0]:
        raise ValueError("its CRC is wrong")
    return data


def is_compressed(path: Path) -> bool:
    """Whether a file is one of gzip."""
    with path.open("rb") as file:
        return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC


def unpacked(path: Path, folder: Path) -> Path:
    """The uncompressed copy of a file in `folder`, made unless it is there. Of a damaged one, as much as there is.

    UserError, exit code 6, where there is no room.
    """
    status = path.stat()
    name = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    copy = folder / f"{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:16]}.tfrecord"
    if copy.exists():
        return copy
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".building", delete=False) as file:
            try:
                with gzip.open(path) as stream:
                    while piece := _some(stream, PIECE):
                        file.write(piece)
                file.close()
                os.replace(file.name, copy)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UserError(
            f"{path} cannot be unpacked into {folder}: {error.strerror or error}; type --cache_dir FOLDER", exit_code=6
        ) from error
    return copy


def example(data: bytes) -> Features:
    """The features of a tf.train.Example: lists of bytes (parts of `data`, which are not copied), arrays of float32 or
    int64. ValueError for anything else.
    """
    features: Features = {}
    for number, inner in _fields(memoryview(data)):
        if number == 1:
            for entry, pair in _fields(_bytes(inner)):
                if entry == 1:
                    parts = dict(_fields(_bytes(pair)))
                    features[bytes(_bytes(parts.get(1, b""))).decode()] = _values(_bytes(parts.get(2, b"")))
    return features


def content(features: Features, name: str) -> memoryview:
    """The bytes of a feature that has one value. ValueError where there is none."""
    values = features.get(name)
    if not isinstance(values, list) or len(values) != 1:
        raise ValueError(f"it has no feature {name} of bytes, but {', '.join(sorted(features)) or 'none'}")
    return values[0]


def _values(feature: memoryview) -> list[memoryview] | np.ndarray:
    for kind, values in _fields(feature):
        found = [value for number, value in _fields(_bytes(values)) if number == 1]
        if kind == 1:
            return [_bytes(value) for value in found]
        if kind == 2:
            return np.frombuffer(b"".join(_bytes(value) for value in found), "<f4")
        if kind == 3:
            numbers = [n for value in found for n in ([value] if isinstance(value, int) else _varints(value))]
            return np.array([n - (1 << 64) if n >> 63 else n for n in numbers], np.int64)
    return []


def _bytes(value: "int | bytes | memoryview") -> memoryview:
    if isinstance(value, int):
        raise ValueError("it is no tf.train.Example")
    return memoryview(value)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of each field of a message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("it is no tf.train.Example")
        if at + size > len(data):
            raise ValueError("it is no tf.train.Example: a field is longer than what is left")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("it is no tf.train.Example: a number does not end")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value
