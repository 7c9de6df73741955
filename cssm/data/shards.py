"""The published data sets as TFRecords: which files make up which split, and what a record of each holds."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cssm.config import UserError
from cssm.data.splits import SPLITS
from cssm.data.tfrecord import Features, Record, content, example, is_compressed, read, records

# With which images were normalised before they were written as floats
MEAN, STD = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)
NEAR = 0.02  # of a grey level


def has_splits(root: Path) -> bool:
    """Whether there is {train,val,test}/*.tfrecord."""
    return any(root.glob("train/*.tfrecord"))


def is_flat(root: Path) -> bool:
    """Whether there is train-*, the names of a data set written in one folder."""
    return any(path.is_file() for path in root.glob("train-*"))


def in_folders(root: Path, folder: Path | None) -> dict[str, list[Record]]:
    """Records by split, in the order of the files; `folder`: as of tfrecord.records."""
    return _by_split({split: sorted(root.glob(f"{split}/*.tfrecord")) for split in SPLITS}, folder)


def flat(root: Path, folder: Path | None) -> dict[str, list[Record]]:
    """The same where the names of the files begin with that of the split."""
    return _by_split({split: sorted(p for p in root.glob(f"{split}-*") if p.is_file()) for split in SPLITS}, folder)


def _by_split(files: dict[str, list[Path]], folder: Path | None) -> dict[str, list[Record]]:
    try:
        packed = [path for paths in files.values() for path in paths if is_compressed(path)]
        if packed and folder is not None and not folder.exists():
            print(f"unpacking {len(packed)} files of {packed[0].parent} into {folder}", file=sys.stderr, flush=True)
        return {
            split: [record for path in paths for record in records(path, folder)]
            for split, paths in files.items()
            if paths
        }
    except OSError as error:
        raise UserError(f"--data_dir: {error.filename} cannot be read, {error.strerror}") from error


def still(record: Record) -> tuple[np.ndarray, int]:
    """uint8 [S, S, 1], label, of {image, label, height, width, channels}. ValueError where it is damaged."""
    features = example(read(record))
    shape = tuple(_number(features, name) for name in ("height", "width", "channels"))
    image = _pixels(content(features, "image"), shape)
    if (image != image[..., :1]).any():
        raise ValueError("it has colours, where grey was expected")
    if shape[0] != shape[1]:
        raise ValueError(f"it is {shape[1]}x{shape[0]} pixels, not square")
    return image[..., :1], _number(features, "label")


def clip(record: Record) -> tuple[np.ndarray, int]:
    """uint8 [T, H, W, C], label, of {video, label, num_frames, height, width, channels} or, where the number of frames
    follows from that of the bytes, {image, label, height, width}.
    """
    features = example(read(record))
    if "video" in features:
        shape = tuple(_number(features, name) for name in ("num_frames", "height", "width", "channels"))
        return _pixels(content(features, "video"), shape), _number(features, "label")
    raw, label = content(features, "image"), content(features, "label")
    height, width = _number(features, "height"), _number(features, "width")
    frame = height * width * 3
    if frame <= 0 or len(raw) % frame or not raw:
        raise ValueError(f"its {len(raw)} bytes are no frames of {height}x{width}x3")
    if len(label) != 1:
        raise ValueError(f"its label has {len(label)} bytes, not 1")
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3), label[0]


def _number(features: Features, name: str) -> int:
    values = features.get(name)
    if not isinstance(values, np.ndarray) or values.dtype != np.int64 or len(values) != 1:
        raise ValueError(f"it has no whole number {name}, but {', '.join(sorted(features)) or 'nothing'}")
    return int(values[0])


def _pixels(raw: memoryview, shape: Sequence[int]) -> np.ndarray:
    """uint8 from bytes: pixels as they are, or float32, little-endian, normalised by MEAN and STD."""
    size = int(np.prod(shape, dtype=np.int64)) if min(shape) > 0 else 0
    if size and len(raw) == size:
        return np.frombuffer(raw, np.uint8).reshape(shape)
    if not size or len(raw) != 4 * size or shape[-1] != 3:
        raise ValueError(f"its {len(raw)} bytes are neither uint8 nor float32 of shape {list(shape)}")
    levels = (np.frombuffer(raw, "<f4").reshape(shape) * STD + MEAN) * np.float32(255)
    nearest = np.rint(levels)
    if not (np.abs(levels - nearest) <= NEAR).all() or nearest.min() < 0 or nearest.max() > 255:
        raise ValueError("its numbers are no 8-bit pixels that were normalised with the constants of ImageNet")
    return nearest.astype(np.uint8)
