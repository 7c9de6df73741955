"""Generated data sets as files are read back to equal arrays; what is interrupted leaves nothing that looks whole."""

import errno
import json
import os
from functools import cache

import numpy as np
import pytest

from cssm import data
from cssm.config import Config, UserError, resolve
from cssm.data import written
from cssm.data.generated import generated
from cssm.data.written import write_array_record, write_published
from cssm.settings.data import GENERATED

EXAMPLES = {"train": 24, "val": 8, "test": 8}
SPLITS = ("train", "val", "test")
NOTHING = lambda done, total: None


def chosen(dataset):
    return generated(resolve({"dataset": dataset, **({"image_size": 64} if dataset == "cabc" else {})}, {}))


@cache
def made(dataset):
    return {split: chosen(dataset).make(split, np.arange(n)) for split, n in EXAMPLES.items()}


def read(dataset, root, **settings):
    config = Config(dataset=dataset, data_dir=str(root), cache_dir=f"{root}-cache", **settings)
    sources = {split: data.load(config, split) for split in SPLITS}
    return {split: source.gather(np.arange(len(source))) for split, source in sources.items()}


def rows(parts):
    images, labels = (np.concatenate([part[i] for part in parts]) for i in range(2))
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


@pytest.mark.parametrize("dataset", GENERATED)
def test_array_record_is_read_back_equal_split_by_split_in_order(tmp_path, dataset):
    seen = []
    folder = write_array_record(chosen(dataset), tmp_path, EXAMPLES, 0, lambda *done: seen.append(done))
    assert seen[-1] == (40, 40) and seen == sorted(seen)
    assert sorted(path.name for path in tmp_path.iterdir()) == [dataset], "nothing else, such as a folder of downloads"
    found = read(f"tfds:{dataset}/{folder.parent.name}", tmp_path)
    for split, (images, labels) in made(dataset).items():
        np.testing.assert_array_equal(found[split][0], images)
        np.testing.assert_array_equal(found[split][1], labels)
    source = data.load(Config(dataset=f"tfds:{dataset}", data_dir=str(tmp_path)), "train")
    np.testing.assert_array_equal(source.gather(np.arange(24), epoch=0)[0], found["train"][0])
    with pytest.raises(UserError, match="is there already"):
        write_array_record(chosen(dataset), tmp_path, EXAMPLES, 0, NOTHING)


@pytest.mark.parametrize("dataset", GENERATED)
def test_published_files_are_read_back_equal(tmp_path, dataset):
    seen = []
    folder = write_published(chosen(dataset), tmp_path / "set", EXAMPLES, 0, lambda *done: seen.append(done))
    assert seen == [(24, 40), (32, 40), (40, 40)]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    found = read(dataset, tmp_path / "set")
    assert rows(found.values()) == rows(made(dataset).values())
    assert [len(found[split][1]) for split in SPLITS] == ([24, 8, 8] if dataset == "cabc" else [32, 4, 4])
    if dataset == "cabc":  # whose splits are folders
        for split in SPLITS:
            assert rows([found[split]]) == rows([made(dataset)[split]])
    about = json.loads((folder / "generated.json").read_text())
    assert (about["dataset"], about["examples"], about["digest"]) == (dataset, EXAMPLES, chosen(dataset).digest)
    with pytest.raises(UserError, match="is there already: remove it"):
        write_published(chosen(dataset), tmp_path / "set", EXAMPLES, 0, NOTHING)


def test_an_empty_folder_is_filled_and_shares_the_rights_of_others(tmp_path):
    (tmp_path / "set").mkdir()
    folder = write_published(chosen("pathtracker"), tmp_path / "set", EXAMPLES, 0, NOTHING)
    other = tmp_path / "other"
    other.mkdir()
    assert folder == tmp_path / "set" and folder.stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize("write", [write_published, write_array_record])
@pytest.mark.parametrize("dataset", ["pathfinder", "pathtracker"])
def test_what_is_interrupted_leaves_nothing_that_looks_complete(tmp_path, dataset, write):
    def stop(done, total):
        if done > 24:
            raise KeyboardInterrupt

    root = tmp_path / "set"
    with pytest.raises(KeyboardInterrupt):
        write(chosen(dataset), root, EXAMPLES, 0, stop)
    left = [path for path in tmp_path.rglob("*") if path.suffix in (".png", ".npy") or "array_record" in path.name]
    assert left == []
    for name in (dataset, f"tfds:{dataset}"):
        with pytest.raises(UserError):
            read(name, root)
    write(chosen(dataset), root, EXAMPLES, 0, NOTHING)


def test_a_full_disk_is_an_error_of_the_system(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(written, "npy_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_published(chosen("pathtracker"), tmp_path / "set", EXAMPLES, 0, NOTHING)
    assert list(tmp_path.iterdir()) == []

    class Builder:
        def download_and_prepare(self, **_kwargs):
            raise RuntimeError("Failed to finalize: write() failed: No space left on device; writing x")

    class Bare:
        def disable_progress_bar(self):
            pass

    with pytest.raises(OSError, match="No space left") as error:
        written.prepare(Bare(), Builder())
    assert error.value.errno == errno.ENOSPC


def test_workers_write_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr("cssm.data.records.CHUNK", 9)
    here, there = (write_published(chosen("pathfinder"), tmp_path / str(n), EXAMPLES, n, NOTHING) for n in (0, 2))
    files = sorted(path.relative_to(here) for path in here.rglob("*.png"))
    assert len(files) == 40 and all((here / file).read_bytes() == (there / file).read_bytes() for file in files)
