"""Photographs of a folder decoded once: the squares that evaluation sees, as pixels, for TFDS."""

import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from cssm.config import Config, UserError
from cssm.data.decode import central, photo
from cssm.data.examples import UNREADABLE, BadExamples, reason
from cssm.data.folder import Listing, listing
from cssm.data.prepared import import_tfds
from cssm.data.records import in_workers
from cssm.data.written import TFDS_SPLITS, Example, Progress, build, builder_of, starts

VERSION = "1.0.0"
SIZE = 256  # unless another is asked for: crops of the usual 224 are cut from it
CHUNK = 32  # files that a worker decodes at a time


def write_folder(config: Config, size: int, root: Path, progress: Progress) -> tuple[Path, dict[str, int], int]:
    """The images of config.data_dir as uint8 [size, size, 3], in root/NAME/SIZE/VERSION of TFDS, which must not be
    there: that folder, how many by split, and how many could not be read. Splits, their order and the classes are those
    of cssm.data.folder; no more than config.max_train_examples and max_eval_examples of each.

    UserError for a folder that is not of the form, or more than config.max_bad_examples of a split that cannot be read;
    OSError from the disk.
    """
    tfds = import_tfds()
    assert config.data_dir is not None, "the command line wants one"
    source = Path(config.data_dir).absolute()
    found = listing(source)
    if odd := [name for name in found.classes if name != name.strip() or not name.isprintable()]:
        raise UserError(f"{source}: TFDS keeps names of classes as lines of text, and {odd[0]!r} is none: rename it")
    kinds = tfds.features
    features = {
        "image": kinds.Tensor(shape=(size, size, 3), dtype=np.uint8, encoding="bytes"),
        "label": kinds.ClassLabel(names=found.classes),
    }
    limits = {
        split: config.max_train_examples if split == "train" else config.max_eval_examples for split in found.files
    }
    examples = {split: len(files[: limits[split]]) for split, files in found.files.items()}
    records = partial(_records, config, found, source, size, examples, progress)
    builder = builder_of(tfds, (set_name(source), str(size), VERSION), features, root, records)
    if Path(builder.data_dir).resolve().is_relative_to(source.resolve()):
        raise UserError(f"--output {root}: {builder.data_dir} would lie among the images: type a folder elsewhere")
    folder = build(tfds, builder, "--output")
    written = {split: builder.info.splits[name].num_examples for split, name in TFDS_SPLITS.items()}
    return folder, written, sum(examples.values()) - sum(written.values())


def set_name(folder: Path) -> str:
    """What TFDS calls the set made of a folder: its name in letters, digits and underscores, a letter first."""
    name = re.sub(r"\W+", "_", os.path.basename(os.path.abspath(folder)), flags=re.ASCII).strip("_").lower()
    return name if name[:1].isalpha() else f"folder_{name}".rstrip("_")


def _records(
    config: Config,
    found: Listing,
    source: Path,
    size: int,
    examples: Mapping[str, int],
    progress: Progress,
    split: str,
) -> Iterator[Example]:
    n, bad = examples[split], BadExamples(config.max_bad_examples)
    first, total = starts(examples)[split], sum(examples.values())
    parts = [found.files[split][start : min(start + CHUNK, n)] for start in range(0, n, CHUNK)]
    decoded = in_workers(partial(_decoded, source, size), parts, config.num_workers or 0)
    index = 0
    for files, images in zip(parts, decoded, strict=True):
        for file, image in zip(files, images, strict=True):
            if isinstance(image, str):
                bad.add(str(source / file), image)
            else:
                yield {"image": image, "label": int(found.labels[split][index])}
            index += 1
        progress(first + index, total)
    if len(bad.names) == n:
        raise UserError(f"none of the {n} images of {split} in {source} can be read")


def _decoded(source: Path, size: int, files: list[str]) -> list[np.ndarray | str]:
    """The square of each file, in a worker, or why it cannot be read."""
    return [_square(source / file, size) for file in files]


def _square(path: Path, size: int) -> np.ndarray | str:
    try:
        return photo(path, size, central)
    except UNREADABLE as error:
        return reason(error)
