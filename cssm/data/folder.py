"""Photographs in folders named after their classes: DIR/CLASS/** or DIR/{train,val,test}/CLASS/**."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cssm.config import Config, UserError
from cssm.data.decode import photo, view
from cssm.data.examples import FileSource
from cssm.data.pipeline import Outline
from cssm.data.splits import SPLITS, hold_back, order_keys, shares

# What ImageFolder of torchvision and the folders of Keras take, together
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True)
class Listing:
    """What a folder holds. files: relative to it, by split, in an order that mixes the classes; labels: int32 [n].

    folders: every folder that was read, and the time of its last change.
    """

    classes: tuple[str, ...]
    files: dict[str, list[str]]
    labels: dict[str, np.ndarray]
    notes: tuple[str, ...]
    folders: dict[str, int]

    def is_current(self) -> bool:
        """Whether no file came or went."""
        try:
            return all(os.stat(folder).st_mtime_ns == time for folder, time in self.folders.items())
        except OSError:
            return False


_last: dict[Path, Listing] = {}  # one: what splits share is read once


def folder_source(config: Config, split: str, progress: Callable[[int, int], None] | None = None) -> FileSource:
    """One split of config.data_dir, uint8 [n, S, S, 3]. For training, random parts of the images, some mirrored, as
    config.crop_scale and config.flip say; each follows from (config.seed, epoch, index). Otherwise the largest square
    in the middle. No more than config.max_train_examples or max_eval_examples.
    """
    root, size = _root(config), config.image_size
    crop_scale, flip = config.crop_scale, config.flip
    assert size is not None and crop_scale is not None and flip is not None, "the recipe has them"
    found = listing(root)
    limit = config.max_train_examples if split == "train" else config.max_eval_examples
    files, labels = found.files[split][:limit], found.labels[split]

    def read(index: int, epoch: int | None) -> tuple[np.ndarray, int]:
        box_of, mirrored = view(config.seed, epoch, index, crop_scale, flip)
        return photo(root / files[index], size, box_of, mirrored), int(labels[index])

    return FileSource(
        len(files),
        read,
        lambda index: str(root / files[index]),
        num_classes=len(found.classes),
        image_shape=(size, size, 3),
        most_bad=config.max_bad_examples,
    )


def folder_outline(config: Config) -> Outline:
    """What folder_source gives; no image is opened."""
    found, size = listing(_root(config)), config.image_size
    assert size is not None, "the recipe has one"
    examples = {split: len(files) for split, files in found.files.items()}
    return Outline(len(found.classes), (size, size, 3), examples, found.classes, found.notes)


def listing(root: Path) -> Listing:
    """All images below a folder, in three splits; what is missing of those is held back from train (splits.py).

    Classes are folders, in the order of their names. Read anew only where a file came or went. UserError for a folder
    that is not of this form.
    """
    known = _last.get(root)
    if known is None or not known.is_current():
        _last.clear()
        known = _last[root] = _listed(root)
    return known


def _root(config: Config) -> Path:
    assert config.data_dir is not None, "rules.check wants one"
    return Path(config.data_dir).absolute()


def _listed(root: Path) -> Listing:
    seen = _Seen()
    names = _subfolders(root, seen)
    given = [split for split in SPLITS if split in names]
    if given and "train" not in given:
        raise UserError(f"--data_dir {root} has {' and '.join(given)} but no train: images lie in {_FORM}")
    if given and (others := sorted(set(names) - {*SPLITS})):
        raise UserError(
            f"--data_dir {root} has {' and '.join(given)} and also {others[0]}: is train a split or a class? "
            f"Images lie in {_FORM}"
        )
    parts = {split: root / split for split in given} or {"train": root}
    if len({path.resolve() for path in parts.values()}) < len(parts):
        raise UserError(f"--data_dir {root}: {' and '.join(parts)} are links to one folder, splits must share no image")
    by_class = {split: _classes(path, seen) for split, path in parts.items()}
    classes = tuple(sorted(by_class["train"]))
    if len(classes) < 2:
        what = f"one class, {classes[0]}" if classes else "no folder with images"
        raise UserError(f"--data_dir {root} has {what}: images lie in {_FORM}, and there are at least two classes")
    for split, found in by_class.items():
        if strange := sorted(set(found) - set(classes)):
            raise UserError(f"{parts[split] / strange[0]}: the training images have no class {strange[0]}")
    files, labels = {}, {}
    for split, found in by_class.items():
        prefix = f"{split}/" if given else ""
        names = [(file, label) for label, name in enumerate(classes) for file in found.get(name, [])]
        keys = order_keys([file for file, _ in names])
        order = np.lexsort((np.arange(len(names)), keys))
        files[split] = [prefix + names[i][0] for i in order]
        labels[split] = np.array([names[i][1] for i in order], np.int32)
    notes = _hold_back(root, files, labels)
    if seen.aside:
        number = f"{len(seen.aside):,} {'file' if len(seen.aside) == 1 else 'files'}"
        notes += (f"left aside what is no image ({', '.join(SUFFIXES)}): {number}, such as {min(seen.aside)}",)
    return Listing(classes, files, labels, notes, seen.folders)


@dataclass(frozen=True)
class _Seen:
    """folders: those that were read, and the time of their last change. aside: files there that are no images."""

    folders: dict[str, int] = field(default_factory=dict)
    aside: set[str] = field(default_factory=set)


_FORM = "DIR/CLASS/ or DIR/train/CLASS/, DIR/val/CLASS/ and DIR/test/CLASS/"


def _hold_back(root: Path, files: dict[str, list[str]], labels: dict[str, np.ndarray]) -> tuple[str, ...]:
    """Fill in, from train, the splits that are missing."""
    held, notes = shares({split: len(names) for split, names in files.items()})
    # In the order of their hashes already
    places = hold_back(labels["train"], np.arange(len(labels["train"])), held)
    names, numbers = files["train"], labels["train"]
    for split, chosen in places.items():
        files[split], labels[split] = [names[i] for i in chosen], numbers[chosen]
    if empty := [split for split in SPLITS if not files[split]]:
        raise UserError(f"--data_dir {root}: too few images, none is left for {empty[0]}")
    return notes


def _classes(folder: Path, seen: _Seen) -> dict[str, list[str]]:
    """Images by class, as paths relative to `folder`, sorted."""
    found = {}
    for name in _subfolders(folder, seen):
        found[name] = sorted(_images(folder / name, name, seen, frozenset()))
        if not found[name]:
            raise UserError(f"{folder / name} holds no image ({', '.join(SUFFIXES)}): a class has at least one")
    return found


def _subfolders(folder: Path, seen: _Seen) -> list[str]:
    """Names of the folders in one that holds no images itself."""
    entries = list(_entries(folder, seen))
    if stray := sorted(entry.name for entry in entries if _is_image(entry)):
        raise UserError(
            f"{folder / stray[0]} lies beside the folders of the classes: an image lies in that of its class, {_FORM}"
        )
    return sorted(entry.name for entry in entries if entry.is_dir())


def _images(folder: Path, prefix: str, seen: _Seen, above: frozenset[Path]) -> Iterator[str]:
    """Images at any depth; links are followed, unless they lead back up."""
    real = folder.resolve()
    if real in above:
        return
    for entry in _entries(folder, seen):
        if entry.is_dir():
            yield from _images(folder / entry.name, f"{prefix}/{entry.name}", seen, above | {real})
        elif _is_image(entry):
            yield f"{prefix}/{entry.name}"


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(SUFFIXES) and not entry.is_dir()


def _entries(folder: Path, seen: _Seen) -> Iterator[os.DirEntry[str]]:
    """What a folder holds, but for hidden entries."""
    try:
        seen.folders[str(folder)] = folder.stat().st_mtime_ns
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if not entry.is_dir() and not _is_image(entry):
                    seen.aside.add(entry.path)
                yield entry
    except OSError as error:
        raise UserError(f"--data_dir: {folder} cannot be read, {error.strerror}") from error
