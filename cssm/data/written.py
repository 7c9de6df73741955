"""Generated data sets as files for others: in the layouts in which such sets were published, or for TFDS."""

import errno
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from cssm.config import UserError
from cssm.data.generated import Generated
from cssm.data.prepared import import_tfds
from cssm.data.records import Made, chunks_of, in_workers, npy_file
from cssm.data.splits import SPLITS

Progress = Callable[[int, int], None]
Example = dict[str, Any]  # image and label, as TFDS wants them
FOLDERS = {"pathfinder": "curv_contour_length_{}", "cabc": "{}", "pathtracker": ""}
CLASSES = ("neg", "pos")
A_FOLDER = 1000  # images of cABC in one folder
SHARD_BYTES = 1 << 30
# One record at a time can be read. Images are packed already, or are not packed so that they are read fast.
WRITER = "group_size:1,uncompressed"
TFDS_SPLITS = {"train": "train", "val": "validation", "test": "test"}


def write_published(
    chosen: Generated, root: Path, examples: Mapping[str, int], num_workers: int, progress: Progress
) -> Path:
    """The first examples of each split as PNG, of clips as .npy, in root/FOLDERS (of clips: root itself), which must
    not be there; returns that folder. They are written beside it and moved into place whole. OSError from the disk.

    Only cABC keeps splits: published sets of the others are one pool, which a permutation divides.
    """
    folder = root / FOLDERS[chosen.dataset].format(chosen.difficulty)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: remove it, or type another --data_dir")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f"{folder.name}.{os.getpid()}.building")
    done, total = 0, sum(examples.values())
    try:
        building.mkdir()
        for split, first in starts(examples).items():
            write = partial(_write, chosen, building, split, first)
            for count in in_workers(write, chunks_of(examples[split], chosen.image_shape), num_workers):
                done += count
                progress(done, total)
        about = {"dataset": chosen.dataset, "difficulty": chosen.difficulty, "image_shape": chosen.image_shape}
        about |= {"examples": dict(examples), "version": chosen.version, "digest": chosen.digest}
        (building / "generated.json").write_text(json.dumps(about, indent=2) + "\n")
        building.rename(folder)  # also over an empty folder
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def starts(examples: Mapping[str, int]) -> dict[str, int]:
    """The number of the first example of each split, counted through all."""
    return {split: sum(examples[before] for before in SPLITS[:i]) for i, split in enumerate(SPLITS)}


def _write(chosen: Generated, folder: Path, split: str, first: int, indices: np.ndarray) -> int:
    """Some examples of a split, in a worker; how many."""
    images, labels = chosen.make(split, indices)
    for image, label, number in zip(images, labels.tolist(), (first + indices).tolist(), strict=True):
        path = folder / _name(chosen.dataset, split, number, label)
        path.parent.mkdir(parents=True, exist_ok=True)
        if chosen.dataset == "pathtracker":
            with npy_file(path, np.uint8, image.shape) as file:
                file.write(np.ascontiguousarray(image).data)
        else:
            Image.fromarray(image[..., 0]).save(path)
    return len(labels)


def _name(dataset: str, split: str, number: int, label: int) -> str:
    if dataset == "pathtracker":
        return f"{label}/{label}_sample_{number}.npy"
    if dataset == "cabc":
        return f"images/{split}/{CLASSES[label]}/{number // A_FOLDER}/sample_{number}.png"
    return f"imgs/{CLASSES[label]}/sample_{number:07}.png"


def write_array_record(
    chosen: Generated, root: Path, examples: Mapping[str, int], num_workers: int, progress: Progress
) -> Path:
    """The first examples of each split as root/DATASET/DIFFICULTY-SIZE/VERSION of TFDS, which must not be there;
    returns that folder. OSError from the disk.
    """
    tfds = import_tfds()
    shape, kinds = chosen.image_shape, tfds.features
    clip = kinds.Tensor(shape=shape, dtype=np.uint8, encoding="zlib")
    builder = builder_of(
        tfds,
        (chosen.dataset, f"{chosen.difficulty}-{shape[-2]}", f"{chosen.version}.0.0"),
        {"image": clip if len(shape) == 4 else kinds.Image(shape=shape), "label": kinds.ClassLabel(names=CLASSES)},
        root,
        partial(_records, chosen, examples, num_workers, progress),
    )
    return build(tfds, builder, "--data_dir")


def build(tfds: Any, builder: Any, flag: str) -> Path:
    """Run a builder that downloads nothing; the folder that it made. UserError where that is there already: the flag
    says where else it may be.
    """
    folder = Path(builder.data_dir)
    if folder.exists():
        raise UserError(f"{folder} is there already: remove it, or type another {flag}")
    try:
        with TemporaryDirectory() as nothing:
            prepare(tfds, builder, nothing)
    finally:
        _without_empty(folder)
    return folder


def _without_empty(folder: Path) -> None:
    """Remove what TFDS has put around the folder of a version, unless that is there, or another one."""
    config, named = folder.parent, folder.parents[1]
    if config.is_dir() and not any(config.iterdir()):
        config.rmdir()
        if [path.name for path in named.iterdir()] == [".config"]:
            shutil.rmtree(named)


def prepare(tfds: Any, builder: Any, downloads: str | None = None) -> None:
    """Run a builder without its own bars and lines; what it writes is moved into place whole. OSError from the disk.

    downloads: a folder for what it downloads; None: where TFDS keeps that.
    """
    tfds.disable_progress_bar()
    try:
        with redirect_stdout(io.StringIO()):
            builder.download_and_prepare(download_dir=downloads, file_format="array_record")
    except RuntimeError as error:  # of array_record
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def _records(
    chosen: Generated, examples: Mapping[str, int], num_workers: int, progress: Progress, split: str
) -> Iterator[Example]:
    first, total = starts(examples)[split], sum(examples.values())
    chunks = chunks_of(examples[split], chosen.image_shape)
    made: Iterator[Made] = in_workers(partial(chosen.make, split), chunks, num_workers)
    for indices, (images, labels) in zip(chunks, made, strict=True):
        for image, label in zip(images, labels.tolist(), strict=True):
            yield {"image": image if image.ndim == 4 else _png(image), "label": label}
        progress(first + int(indices[-1]) + 1, total)


def _png(image: np.ndarray) -> io.BytesIO:
    """Encoded here, since TFDS would need TensorFlow to."""
    stream = io.BytesIO()
    Image.fromarray(image[..., 0]).save(stream, "PNG")
    stream.seek(0)
    return stream


def builder_of(
    tfds: Any,
    called: tuple[str, str, str],
    features: Mapping[str, Any],
    root: Path,
    records: Callable[[str], Iterator[Example]],
) -> Any:
    """What TFDS makes a data set with, below root. called: its name, config and version; features: of image and label;
    records(split): its examples, in the order in which they will lie.
    """

    class Builder(tfds.core.dataset_builder.FileReaderBuilder, skip_registration=True):  # pyright: ignore - not known
        """Here, since its base is only loaded when it is needed. It writes by itself: the writers of TFDS sort, for
        which they keep a gigabyte and more in memory and, of what is larger, want TensorFlow.
        """

        name = called[0]
        code_path = None  # looked up with a library that TFDS does not require
        VERSION = tfds.core.Version(called[2])
        BUILDER_CONFIGS = (tfds.core.BuilderConfig(name=called[1]),)

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("image", "label"),
                disable_shuffling=True,  # examples come in random order, and keep it
            )

        def _download_and_prepare(self, dl_manager: Any, download_config: Any) -> None:
            splits = []
            for split, name in TFDS_SPLITS.items():
                template = self._get_filename_template(name)
                serialized = map(self.info.features.serialize_example, records(split))
                lengths, size = _write_shards(serialized, template)
                splits.append(tfds.core.SplitInfo(name, lengths, size, template))
            self.info.set_splits(tfds.core.splits.SplitDict(splits))

    return Builder(data_dir=root, file_format="array_record")


def _write_shards(records: Iterator[bytes], template: Any) -> tuple[list[int], int]:
    """Records to files of up to SHARD_BYTES, named by a template of TFDS: how many are in each, and their bytes."""
    from array_record.python.array_record_module import ArrayRecordWriter

    lengths, total, room, writer, parts = list[int](), 0, 0, None, list[Path]()
    for record in records:
        if writer is None or len(record) > room:
            if writer is not None:
                writer.close()
            parts.append(Path(template.data_dir) / f"{template.split}.{len(parts)}.part")
            writer, room = ArrayRecordWriter(str(parts[-1]), WRITER), SHARD_BYTES
            lengths.append(0)
        writer.write(record)
        lengths[-1] += 1
        room, total = room - len(record), total + len(record)
    if writer is not None:
        writer.close()
    for part, path in zip(parts, template.sharded_filepaths(len(parts)), strict=True):
        part.rename(path)
    return lengths, total
