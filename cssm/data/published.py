"""Pathfinder, cABC and PathTracker from the files in which they were published (docs/data.md draws every layout)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cssm.config import KNOBS, Config, UserError
from cssm.data import shards
from cssm.data.decode import grey, resized
from cssm.data.examples import UNREADABLE, FileSource, check_shape, reason
from cssm.data.pipeline import Outline
from cssm.data.splits import SPLITS, hold_back, order_keys, shares
from cssm.data.tfrecord import Record

CLASSES = {"neg": 0, "pos": 1}
PERMUTATION_SEED = 42  # of the published splits
PATHTRACKER_TRAIN, PATHTRACKER_TEST = 20_000, 2_000
TRIED = 20  # examples looked at for the shape of all


@dataclass(frozen=True)
class File:
    """An example that is a file, its label, and why it is not to be trusted, if so."""

    path: Path
    label: int
    flaw: str = ""

    def __str__(self) -> str:
        return str(self.path)


Entry = File | Record
Reader = Callable[[Entry], tuple[np.ndarray, int]]
Parts = dict[str, Sequence[Entry]]


@dataclass(frozen=True)
class Found:
    """The examples by split, what reads one, and notes."""

    parts: Parts
    read: Reader
    notes: tuple[str, ...]


def published_source(config: Config, split: str, progress: Callable[[int, int], None] | None = None) -> FileSource:
    """One split of config.dataset below config.data_dir: grey images uint8 [n, S, S, 1], resized where
    config.image_size says so, or clips [n, T, S, S, 3].
    """
    found = _found(config, write=True)
    limit = config.max_train_examples if split == "train" else config.max_eval_examples
    entries = found.parts[split][:limit]
    native, shape = _shapes(found, config)

    def read(index: int, epoch: int | None) -> tuple[np.ndarray, int]:
        image, label = found.read(entries[index])
        check_shape(image, native)  # a file that differs from all others is not made to fit
        return image if native == shape else resized(image, shape[0]), label

    return FileSource(
        len(entries),
        read,
        lambda index: str(entries[index]),
        num_classes=2,
        image_shape=shape,
        most_bad=config.max_bad_examples,
    )


def published_outline(config: Config) -> Outline:
    """What published_source gives; one image is decoded for its shape."""
    found = _found(config, write=not config.dry_run)
    examples = {split: len(found.parts[split]) for split in SPLITS}
    return Outline(2, _shapes(found, config)[1], examples, (), found.notes)


def _found(config: Config, write: bool) -> Found:
    assert config.data_dir is not None and config.cache_dir is not None, "rules.check and the recipe see to it"
    folder = Path(config.cache_dir) / "unpacked" if write else None
    root = Path(config.data_dir).absolute()
    if not root.is_dir():
        raise UserError(f"--data_dir {root}: there is no such folder")
    layouts = {"pathfinder": _pathfinder, "cabc": _cabc, "pathtracker": _pathtracker}
    found = layouts[config.dataset](config, root, folder)
    if empty := [split for split in SPLITS if not found.parts[split]]:
        raise UserError(f"--data_dir {root}: too few examples, none is left for {empty[0]}")
    return found


def _shapes(found: Found, config: Config) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of all examples: as the first that can be read has it, and as it is to be."""
    why = ""
    for entry in found.parts["train"][:TRIED]:
        try:
            shape = found.read(entry)[0].shape
        except UNREADABLE as error:
            why = why or f"{entry}: {reason(error)}"
            continue
        size = config.image_size or shape[-2]
        if len(shape) == 3:
            return shape, (size, size, shape[-1])
        if size != shape[-2]:
            raise UserError(
                f"--image_size {config.image_size}: the clips of {config.data_dir} are {shape[-2]} pixels wide and are "
                f"taken as they are, leave --image_size out"
            )
        return shape, shape
    raise UserError(f"--data_dir {config.data_dir}: the first {TRIED} training examples cannot be read ({why})")


def _pathfinder(config: Config, root: Path, folder: Path | None) -> Found:
    difficulty = config.pathfinder_difficulty
    trees = {f"curv_contour_length_{difficulty}", "curv_baseline" if difficulty == "6" else ""}
    named = re.fullmatch(r"(?:curv_contour_length|difficulty)_(\d+)", root.name)
    if named and difficulty not in ("easy", named[1]):
        raise UserError(f"--pathfinder_difficulty {difficulty}: --data_dir {root} is that of {named[1]}, leave one out")
    tree = _one_of(root, [root, *(root / name for name in sorted(trees) if name)], _is_tree)
    records = _one_of(root, [root, root / f"difficulty_{difficulty}"], shards.has_splits)
    if tree and records:
        raise UserError(f"--data_dir {root} holds images and TFRecords: type the folder of one of them")
    if records:
        return _of_records(shards.in_folders(records, folder), shards.still)
    if tree is None:
        easy = " (easy was never published: type 6, 9, 14, 20 or 25, or prepare it)" if difficulty == "easy" else ""
        raise UserError(
            f"--data_dir {root} holds no Pathfinder of --pathfinder_difficulty {difficulty}{easy}: looked for imgs, "
            f"train/*.tfrecord, curv_contour_length_{difficulty}/imgs and difficulty_{difficulty}/train/*.tfrecord"
        )
    return Found(_permuted(_tree(tree)), _still, ())


def _is_tree(folder: Path) -> bool:
    return (folder / "imgs").is_dir()


def _one_of(root: Path, folders: Sequence[Path], is_it: Callable[[Path], bool]) -> Path | None:
    found = [folder for folder in folders if is_it(folder)]
    if len(found) > 1:
        raise UserError(f"--data_dir {root} holds {found[0]} and {found[1]}: type the one to use")
    return found[0] if found else None


def _tree(folder: Path) -> list[Entry]:
    """Images of a Pathfinder set: in folders of their class, or with labels in metadata."""
    images = folder / "imgs"
    if all((images / name).is_dir() for name in CLASSES):
        return [File(path, label) for name, label in CLASSES.items() for path in sorted((images / name).glob("*.png"))]
    tables = sorted((folder / "metadata").glob("*.npy"), key=lambda path: _numbers(path.stem))
    if not tables:
        raise UserError(f"{folder} has neither imgs/neg and imgs/pos nor metadata/*.npy, which tell the labels")
    if len(tables) > 1:  # which it joins
        tables = [path for path in tables if path.stem != "combined"]
    return [_listed(folder, table, row) for table in tables for row in _rows(table)]


def _listed(folder: Path, table: Path, row: Sequence[str]) -> Entry:
    path, label = folder / row[0] / row[1], row[3]
    flaw = "" if label in ("0", "1") else f"its label in {table} is {label}, not 0 or 1"
    return File(path, int(label) if not flaw else -1, flaw)


def _rows(table: Path) -> list[list[str]]:
    """The rows of a metadata file, which is an array of numpy or, in spite of its name, lines of text."""
    try:
        with table.open("rb") as file:
            is_array = file.read(6) == np.lib.format.MAGIC_PREFIX
        if is_array:
            rows = np.load(table, allow_pickle=False)
            rows = [[_text(value) for value in row] for row in rows.reshape(len(rows), -1)]
        else:
            rows = [line.split() for line in table.read_text().splitlines() if line.strip()]
    except UNREADABLE as error:
        raise UserError(f"{table} cannot be read as metadata: {reason(error)}") from error
    if short := [row for row in rows if len(row) < 4]:
        raise UserError(
            f"{table} cannot be read as metadata: a row has {len(short[0])} columns, the label is the fourth"
        )
    if not rows:
        raise UserError(f"{table} cannot be read as metadata: it has no rows")
    return rows


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _numbers(name: str) -> tuple[int, str]:
    """A key that puts 2 before 10."""
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else -1, name


def _permuted(entries: Sequence[Entry], train: int | None = None, test: int = 0) -> Parts:
    """The published split: 80% / 10% / 10% of a permutation, or `train` and then `test` of it, and of the former the
    last tenth for val.
    """
    n = len(entries)
    shuffled = [entries[i] for i in np.random.RandomState(PERMUTATION_SEED).permutation(n)]
    if train is None:
        first, second = int(0.8 * n), int(0.8 * n) + int(0.1 * n)
        return {"train": shuffled[:first], "val": shuffled[first:second], "test": shuffled[second:]}
    val = train - train // 10
    return {"train": shuffled[:val], "val": shuffled[val:train], "test": shuffled[train : train + test]}


def _still(entry: Entry) -> tuple[np.ndarray, int]:
    assert isinstance(entry, File)
    if entry.flaw:
        raise ValueError(entry.flaw)
    return grey(entry.path), entry.label


def _cabc(config: Config, root: Path, folder: Path | None) -> Found:
    level = config.cabc_difficulty
    places = [root / level] if (root / level).is_dir() else [root]
    tree = _one_of(root, places, lambda place: (place / "images" / "train").is_dir())
    records = _one_of(root, places, shards.has_splits)
    if tree and records:
        raise UserError(f"--data_dir {root} holds images and TFRecords: type the folder of one of them")
    if records:
        return _of_records(shards.in_folders(records, folder), shards.still)
    if tree is None:
        raise UserError(
            f"--data_dir {root} holds no cABC: looked for {level}/images/train/pos and {level}/train/*.tfrecord"
        )
    parts: Parts = {
        split: [
            File(path, label)
            for name, label in CLASSES.items()
            for path in sorted((tree / "images" / split / name).rglob("*.png"))
        ]
        for split in SPLITS
        if (tree / "images" / split).is_dir()
    }
    return _completed(parts, _still)


def _pathtracker(config: Config, root: Path, folder: Path | None) -> Found:
    if config.pathtracker_difficulty != KNOBS["pathtracker_difficulty"].default:
        raise UserError(
            f"--pathtracker_difficulty {config.pathtracker_difficulty} is of generated clips, and those of "
            f"--data_dir {root} are what they are: leave one of the two out"
        )
    flat, in_folders = shards.is_flat(root), shards.has_splits(root)
    arrays = all((root / name).is_dir() for name in "01")
    if flat + in_folders + arrays != 1:
        what = "holds several layouts of" if flat + in_folders + arrays else "holds no"
        raise UserError(
            f"--data_dir {root} {what} PathTracker: 0/0_sample_N.npy and 1/1_sample_N.npy, train/*.tfrecord, or "
            f"train-batch_0-00000-of-00040"
        )
    if flat or in_folders:
        return _of_records((shards.flat if flat else shards.in_folders)(root, folder), shards.clip)
    entries = [
        File(path, label, "" if re.fullmatch(rf"{label}_sample_\d+", path.stem) else _misplaced(path, label))
        for label in (0, 1)
        for path in sorted((root / str(label)).glob("*.npy"), key=lambda path: _numbers(path.stem.split("_")[-1]))
    ]
    if len(entries) >= PATHTRACKER_TRAIN + PATHTRACKER_TEST:
        return Found(_permuted(entries, PATHTRACKER_TRAIN, PATHTRACKER_TEST), _clip, ())
    return Found(_permuted(entries), _clip, ("fewer clips than were published: 80% are for training, 10% for val",))


def _misplaced(path: Path, label: int) -> str:
    return f"its name says another label than its folder: must be {label}_sample_N.npy"


def _clip(entry: Entry) -> tuple[np.ndarray, int]:
    assert isinstance(entry, File)
    if entry.flaw:
        raise ValueError(entry.flaw)
    if not entry.path.stat().st_size:
        raise ValueError("the file is empty")
    clip = np.load(entry.path, allow_pickle=False)
    if clip.dtype != np.uint8 or clip.ndim != 4:
        raise ValueError(f"it holds {clip.dtype} of shape {list(clip.shape)}, not uint8 [T, H, W, C]")
    return clip, entry.label


def _of_records(parts: dict[str, list[Record]], read: Callable[[Record], tuple[np.ndarray, int]]) -> Found:
    def of_record(entry: Entry) -> tuple[np.ndarray, int]:
        assert isinstance(entry, Record)
        return read(entry)

    return _completed({split: list(found) for split, found in parts.items()}, of_record)


def _completed(parts: Parts, read: Reader) -> Found:
    """With what is missing held back from train: by class where that is known without reading, as of files."""
    held, notes = shares({split: len(entries) for split, entries in parts.items()})
    train = parts["train"]
    labels = np.array([entry.label if isinstance(entry, File) else 0 for entry in train])
    names = [f"{entry.path.parent.name}/{entry.path.name}/{getattr(entry, 'number', '')}" for entry in train]
    keys = order_keys(names)
    chosen = hold_back(labels, keys, held)
    if all(isinstance(entry, Record) for entry in train):  # they were shuffled when they were written
        chosen = {split: np.sort(rows) for split, rows in chosen.items()}
    divided = {split: [train[i] for i in rows] for split, rows in chosen.items()}
    return Found({**parts, **divided}, read, notes)
