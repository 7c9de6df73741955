"""Data sets of TensorFlow Datasets that are prepared as array_record: DIR/NAME[/CONFIG]/VERSION. Without TensorFlow."""

import io
import json
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cssm.config import Config, UserError, did_you_mean
from cssm.data.decode import cropped, photo, view
from cssm.data.examples import FileSource
from cssm.data.generated import EXAMPLES
from cssm.data.pipeline import Outline
from cssm.data.splits import hold_back, order_keys, shares
from cssm.data.tfrecord import Features, content, example

NAME = re.compile(r"tfds:(\w+)(?:/([^/:]+))?(?::(\d+\.\d+\.\d+))?")
VERSION = re.compile(r"\d+\.\d+\.\d+")
# What a split may be called there, the first that is found
NAMES = {"train": ("train",), "val": ("validation", "val", "valid"), "test": ("test",)}
SIZE, CROP_SCALE = 224, 0.08  # of images that differ in size, as for folders


@dataclass(frozen=True)
class Prepared:
    """A data set on disk. records: of each split that is there, bytes by number; rows: which of them (of train's, where
    a split has none) each split holds.

    image, label: names of the features; shape: of all images, None where they differ; pixels: how to get them from a
    record that holds them as they are, None where it holds an image file.
    """

    folder: Path
    records: dict[str, Sequence[bytes]]
    rows: dict[str, np.ndarray]
    image: str
    label: str
    shape: tuple[int | None, ...]
    pixels: Callable[[Features], np.ndarray] | None
    classes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_clips(self) -> bool:
        """Whether examples are clips, not still images."""
        return len(self.shape) == 4

    @property
    def side(self) -> int | None:
        """Of the images or clips where all are squares of one size."""
        high, wide = self.shape[-3:-1]
        return high if high == wide else None


def prepared_source(config: Config, split: str, progress: Callable[[int, int], None] | None = None) -> FileSource:
    """One split: uint8 [n, S, S, C], cropped for training as config.crop_scale and flip say (see data.decode.view), or
    clips [n, T, S, S, C]. No more than config.max_train_examples or max_eval_examples.
    """
    found = _opened(config)
    limit = config.max_train_examples if split == "train" else config.max_eval_examples
    there = split if split in found.records else "train"
    records, rows, shape = found.records[there], found.rows[split][:limit], _shape(found, config)
    crop_scale = config.crop_scale or (CROP_SCALE if found.side is None else 1.0)
    flip = config.flip if config.flip is not None else found.side is None

    def read(index: int, epoch: int | None) -> tuple[np.ndarray, int]:
        features = _features(records, int(rows[index]))
        label = int(features[found.label][0])
        if found.pixels and found.is_clips:
            return found.pixels(features), label
        box_of, mirrored = view(config.seed, epoch, index, crop_scale, flip)
        if found.pixels:
            return cropped(found.pixels(features), shape[0], box_of, mirrored), label
        return photo(content(features, found.image), shape[0], box_of, mirrored)[..., : shape[-1]], label

    return FileSource(
        len(rows),
        read,
        lambda index: f"example {rows[index]} of {there} in {found.folder}",
        num_classes=len(found.classes),
        image_shape=shape,
        most_bad=config.max_bad_examples,
    )


def prepared_outline(config: Config) -> Outline:
    """What prepared_source gives; no image is decoded."""
    found = _opened(config)
    examples = {split: len(rows) for split, rows in found.rows.items()}
    return Outline(len(found.classes), _shape(found, config), examples, found.classes, found.notes)


def _shape(found: Prepared, config: Config) -> tuple[int, ...]:
    side, asked = found.side, config.image_size
    if not found.is_clips:
        size = asked or side or SIZE
        return size, size, 1 if found.shape[-1] == 1 else 3
    if None in found.shape or side is None:
        raise UserError(
            f"{found.folder}: clips are {list(found.shape)}, and all must be squares of one size and length"
        )
    given = {f"--image_size {asked}": asked not in (None, side), "--flip": config.flip}
    given |= {f"--crop_scale {config.crop_scale}": config.crop_scale not in (None, 1)}
    for flag in (flag for flag, changes in given.items() if changes):
        raise UserError(
            f"{flag}: the clips of {found.folder} are {side} pixels wide and are taken as they are, "
            f"leave {flag.split()[0]} out"
        )
    return tuple(n for n in found.shape if n is not None)


def _features(records: Sequence[bytes], number: int) -> Any:
    """Of one record, by name. One of UNREADABLE where it is damaged."""
    try:
        return example(records[number])
    except RuntimeError as error:  # which array_record raises whatever is wrong
        raise ValueError(str(error)) from error


def place(config: Config) -> Path:
    """The folder of the version that config.dataset means, tfds:NAME[/CONFIG][:VERSION]: the newest, unless said; of
    several configs, one must be. UserError where it is not there, or not of array_record.
    """
    assert config.data_dir is not None, "rules.check wants one"
    root = Path(config.data_dir).absolute()
    name, variant, version = parts(config.dataset)
    what = f"{name} --format array_record" if name in EXAMPLES else config.dataset
    how = f"to prepare it, type main.py prepare {what} --data_dir {config.data_dir}"
    if not _versions(root / name) and not _configs(root / name):
        there = [path.name for path in _folders(root) if _versions(path) or _configs(path)]
        near = did_you_mean(name, there, "tfds:") or (f", but {', '.join(there)}" if there else "") + f"; {how}"
        raise UserError(f"--dataset {config.dataset}: {root} holds no prepared {name}{near}")
    configs = _configs(root / name)
    if variant is None and not _versions(root / name):
        if len(configs) > 1:
            choices = " or ".join(f"tfds:{name}/{other}" for other in configs)
            raise UserError(f"--dataset {config.dataset}: {root / name} holds several, type --dataset {choices}")
        variant = configs[0]
    if variant is not None and variant not in configs:
        has = f"it has {', '.join(configs)}" if configs else "it has none"
        raise UserError(f"--dataset {config.dataset}: {root / name} has no {variant}, {has}; {how}")
    folder = root / name / (variant or "")
    versions = _versions(folder)
    if version is not None and version not in versions:
        raise UserError(
            f"--dataset {config.dataset}: {folder} has no version {version}, it has {', '.join(versions)}; {how}"
        )
    chosen = folder / (version or versions[-1])
    written = json.loads((chosen / "dataset_info.json").read_text()).get("fileFormat", "tfrecord")
    if written != "array_record":
        raise UserError(
            f"--dataset {config.dataset}: {chosen} is prepared as {written}, and array_record is read here: "
            f"type main.py prepare {config.dataset} --data_dir ANOTHER_FOLDER"
        )
    return chosen


def parts(dataset: str) -> tuple[str, str | None, str | None]:
    """Name, config and version of tfds:NAME[/CONFIG][:VERSION]."""
    match = NAME.fullmatch(dataset)
    if match is None:
        raise UserError(
            f"--dataset {dataset}: must be tfds:NAME, and may say /CONFIG and then :VERSION, for example "
            f"tfds:imagenet_resized/32x32:0.1.0"
        )
    return match[1], match[2], match[3]


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _versions(folder: Path) -> list[str]:
    """Those that are finished, the newest last."""
    found = [path.name for path in _folders(folder) if VERSION.fullmatch(path.name)]
    finished = [name for name in found if (folder / name / "dataset_info.json").is_file()]
    return sorted(finished, key=lambda name: [int(number) for number in name.split(".")])


def _configs(folder: Path) -> list[str]:
    return [path.name for path in _folders(folder) if _versions(path)]


def import_tfds() -> Any:
    """The library, which takes a while to load. UserError where it is not installed."""
    try:
        import array_record  # noqa: F401 - needed by it, and imported late
        import tensorflow_datasets as tfds
    except ModuleNotFoundError as error:
        raise UserError(
            f"tfds: data sets need {error.name}: type pip install tensorflow-datasets array-record"
        ) from None
    return tfds


def needs_tensorflow(dataset: str, where: str) -> UserError:
    """What to say where the library, or a feature of a data set, wants TensorFlow."""
    return UserError(
        f"{dataset} needs TensorFlow {where}, which is not installed here: type pip install 'cssm[prepare]'"
    )


def _opened(config: Config) -> Prepared:
    folder = place(config)
    return _read(folder, (folder / "dataset_info.json").stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _read(folder: Path, changed_ns: int) -> Prepared:
    tfds = import_tfds()
    try:
        with redirect_stdout(io.StringIO()):  # where it tells at length that TensorFlow is missing
            builder = tfds.builder_from_directory(folder)
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise needs_tensorflow(str(folder), "to be read, since its features are of such a kind") from None
    image, label = examples_of(tfds, str(folder), builder.info)
    feature, names = builder.info.features[image], builder.info.features[label].names
    is_file = isinstance(feature, tfds.features.Image)
    raw = tfds.decode.DeserializeMethod.RAW_BYTES
    there = builder.info.splits
    given = {split: next((name for name in usual if name in there), None) for split, usual in NAMES.items()}
    if given["train"] is None:
        raise UserError(f"{folder} has the splits {', '.join(there)}, and train is missing")
    records = {
        split: builder.as_data_source(name, deserialize_method=raw) for split, name in given.items() if name is not None
    }
    notes = []
    if aside := sorted(set(there) - {*given.values()}):
        notes.append(f"{folder} also has {', '.join(aside)}, which {'is' if len(aside) == 1 else 'are'} left aside")
    for split in [split for split in records if split != "train" and _first_label(records[split], label) < 0]:
        notes.append(f"{given[split]} in {folder} has no labels and is left aside")
        del records[split]
    rows, told = _divided({split: len(source) for split, source in records.items()})
    return Prepared(
        folder,
        records,
        rows,
        image,
        label,
        tuple(feature.shape),
        None if is_file else _pixels(feature, image),
        tuple(names),
        (*notes, *told),
    )


def examples_of(tfds: Any, dataset: str, info: Any) -> tuple[str, str]:
    """Names of the features that hold the image, or a clip, and its class. UserError where that is not clear."""
    features = dict(info.features.items()) if hasattr(info.features, "items") else {}
    keys = info.supervised_keys if info.supervised_keys and len(info.supervised_keys) == 2 else ()
    found = []
    for what, number, is_one in (
        ("image", 0, lambda feature: _is_image(tfds, feature)),
        ("label", 1, lambda feature: isinstance(feature, tfds.features.ClassLabel)),
    ):
        names = [name for name, feature in features.items() if is_one(feature)]
        usual = [name for name in (*keys[number : number + 1], what) if name in names]
        if not names or (len(names) > 1 and not usual):
            kind = "Image of uint8" if what == "image" else "ClassLabel"
            has = (
                ", ".join(f"{name} ({type(feature).__name__})" for name, feature in sorted(features.items()))
                or "others"
            )
            many = f"several of {kind}, and none is called {what}" if names else f"none of {kind}"
            raise UserError(f"{dataset} has {many} among its features, which are {has}: it cannot be trained on here")
        found.append((usual or names)[0])
    return found[0], found[1]


def _is_image(tfds: Any, feature: Any) -> bool:
    """Of a still image that is no mask, or of a still image or clip that is stored as it is."""
    kinds = tfds.features
    if isinstance(feature, kinds.Image):
        return not isinstance(feature, kinds.LabeledImage) and np.dtype(feature.np_dtype) == np.uint8
    if type(feature) is not kinds.Tensor or feature.np_dtype != np.uint8 or feature._encoding.name == "NONE":
        return False
    return len(feature.shape) == 4 or (len(feature.shape) == 3 and feature.shape[-1] in (1, 3))


def _pixels(feature: Any, name: str) -> Callable[[Features], np.ndarray]:
    """Of a Tensor of uint8: from the features of a record to its pixels, in the record's own bytes unless it is packed.
    ValueError or zlib.error for those that are not of such a shape.
    """
    shape, is_packed = tuple(feature.shape), feature._encoding.name == "ZLIB"
    varies = shape.count(None) > 1  # each one's shape then lies beside it

    def pixels(features: Features) -> np.ndarray:
        values = content(features, f"{name}/value" if varies else name)
        sides = [int(n) for n in features[f"{name}/shape"]] if varies else [-1 if n is None else n for n in shape]
        return np.frombuffer(zlib.decompress(values) if is_packed else values, np.uint8).reshape(sides)

    return pixels


def _first_label(records: Sequence[bytes], label: str) -> int:
    """0 where it cannot be read, which is told when examples are."""
    try:
        return int(_features(records, 0)[label][0])
    except (ValueError, LookupError):
        return 0


def _divided(counts: dict[str, int]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Which records make up each split: int64, in the order in which they lie, since they were shuffled as they were
    written. What is missing is held back from train, not by class, which only the records tell.
    """
    held, notes = shares(counts)
    rows = {split: np.arange(n) for split, n in counts.items()}
    if held:
        n = counts["train"]
        chosen = hold_back(np.zeros(n, np.int32), order_keys([str(i) for i in range(n)]), held)
        rows |= {split: np.sort(found) for split, found in chosen.items()}
    if empty := [split for split, found in rows.items() if not len(found)]:
        raise UserError(f"the data set has {counts['train']} training examples: too few, none is left for {empty[0]}")
    return {split: rows[split] for split in NAMES}, notes
