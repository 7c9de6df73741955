"""Image folders: classes by name, splits that share nothing, the same batches however they are made."""

import json
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cssm import data, train
from cssm.config import Config, UserError, parse_args
from cssm.data import folder
from cssm.data.pipeline import step_indices, steps_per_epoch, train_batches
from cssm.settings.data import FOLDERS

ROOT = Path(__file__).resolve().parents[1]
SPLITS = ("train", "val", "test")


def tree(root, *paths):
    """Images of 9x7 random pixels."""
    rng = np.random.default_rng(len(paths))
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(rng.integers(0, 256, (7, 9, 3), np.uint8))
        image.save(root / path, format={"jpg": "JPEG", "jpeg": "JPEG"}.get(path.lower().rpartition(".")[2]))
    return root


def many(root, n=12, classes=("cat", "dog", "eel"), below=""):
    return tree(root, *(f"{below}{name}/{i % 2}/{i}.png" for name in classes for i in range(n)))


def config(root, **settings):
    defaults = {"dataset": "folder", "data_dir": str(root), "image_size": 8}
    return Config(**{**defaults, **settings})


def files(root, **settings):
    found = folder.listing(Path(root).absolute())
    return {split: dict(zip(found.files[split], found.labels[split].tolist(), strict=True)) for split in SPLITS}


def test_classes_have_the_order_of_their_names_and_files_any_depth_and_ending(tmp_path):
    endings = ("jpg", "JPEG", "png", "WebP", "bmp", "JPG", "gif", "tif", "TIFF", "ppm", "pgm")
    many(tmp_path, classes=("b", "B", "a b"))
    tree(tmp_path, *(f"a/deep/er/x{i}.{ending}" for i, ending in enumerate(endings)))
    for extra in ("b/notes.txt", "b/.hidden.png", ".DS_Store", "readme.csv", ".git/x.png"):
        (tmp_path / extra).parent.mkdir(exist_ok=True)
        (tmp_path / extra).write_text("x")
    outline = data.outline(config(tmp_path))
    assert outline.classes == ("B", "a", "a b", "b")
    kinds = ".jpg, .jpeg, .png, .webp, .bmp, .gif, .tif, .tiff, .ppm, .pgm"
    aside = f"left aside what is no image ({kinds}): 2 files, such as {tmp_path}/b/notes.txt"
    assert outline.notes[1:] == (aside,), "the first tells what is held back"
    every = {path: label for part in files(tmp_path).values() for path, label in part.items()}
    assert len(every) == 3 * 12 + 11 == sum(outline.examples.values())
    assert all(outline.classes[label] == path.split("/")[0] for path, label in every.items())
    sources = {split: data.load(config(tmp_path), split) for split in SPLITS}
    for split, source in sources.items():
        images, labels = source.gather(np.arange(len(source)))
        assert images.shape == (outline.examples[split], 8, 8, 3)
        assert labels.tolist() == list(files(tmp_path)[split].values())


@pytest.mark.parametrize("dataset", FOLDERS)
def test_image_folders_of_three_kinds(tmp_path, dataset):
    made = Config(dataset=dataset, data_dir=str(many(tmp_path)))
    size = {"imagenette": 160}.get(dataset, 224)
    assert data.outline(made).image_shape == data.load(made, "val").image_shape == (size, size, 3)


@pytest.mark.parametrize("given", [("train",), ("train", "val"), ("train", "test"), SPLITS], ids=str)
def test_splits_are_those_of_the_folders_and_what_is_missing_is_part_of_train(tmp_path, given):
    for split in given:
        many(tmp_path, 20, below=f"{split}/")
    found, outline = files(tmp_path), data.outline(config(tmp_path))
    assert not set(found["train"]) & set(found["val"]) and not set(found["val"]) & set(found["test"])
    assert not set(found["train"]) & set(found["test"])
    for split in SPLITS:
        assert {path.split("/")[0] for path in found[split]} == {split if split in given else "train"}
        assert set(found[split].values()) == {0, 1, 2}
    assert sum(map(len, found.values())) == 60 * len(given)
    assert len(outline.notes) == (given != SPLITS)
    if given == ("train", "val"):
        assert len(found["val"]) == 60 and "only train and val" in outline.notes[0] and "for test" in outline.notes[0]
    assert files(tmp_path) == found == files(str(tmp_path) + "/.")


def test_the_first_examples_are_a_fair_sample_and_stay_when_more_come(tmp_path):
    few = list(files(many(tmp_path, 40))["train"])
    first = data.load(config(tmp_path, max_train_examples=30), "train")
    assert len(first) == 30 and np.bincount(first.gather(np.arange(30))[1], minlength=3).min() >= 4
    more = list(files(many(tmp_path, 50))["train"])
    assert len(set(few[:30]) & set(more[:40])) >= 24


def test_a_listing_is_read_again_only_where_something_changed(tmp_path, monkeypatch):
    many(tmp_path, 4)
    first = folder.listing(tmp_path)
    assert folder.listing(tmp_path) is first
    tree(tmp_path, "cat/1/new.png")
    assert sum(map(len, folder.listing(tmp_path).files.values())) == 13
    (tmp_path / "cat/1/new.png").unlink()
    assert sum(map(len, folder.listing(tmp_path).files.values())) == 12


def test_links_are_followed_but_not_in_circles(tmp_path):
    many(tmp_path / "there", 4)
    (tmp_path / "here").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "here" / name).symlink_to(tmp_path / "there" / name)
    (tmp_path / "there/cat/circle").symlink_to(tmp_path / "there/cat")
    assert sum(map(len, files(tmp_path / "here").values())) == 8


@pytest.mark.parametrize(
    "paths, sentence",
    [
        ((), "no folder with images"),
        (("a/1.png",), "has one class, a"),
        (("train/a/1.png", "val/a/1.png"), "has one class, a"),
        (("a/1.png", "b/x.mp4"), "b holds no image"),
        (("a/1.png", "b/1.png", "c.png"), "c.png lies beside the folders"),
        (("val/a/1.png", "val/b/1.png"), "has val but no train"),
        (("train/a/1.png", "plane/b/1.png"), "is train a split or a class"),
        (("train/a/1.png", "train/b/1.png", "val/c/1.png"), "c: the training images have no class c"),
        (("a/1.png", "b/1.png"), "too few images, none is left for val"),
    ],
)
def test_other_folders_are_refused_with_one_sentence(tmp_path, paths, sentence):
    tree(tmp_path, *(path for path in paths if not path.endswith("mp4")))
    for path in (path for path in paths if path.endswith("mp4")):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("x")
    with pytest.raises(UserError, match=sentence) as error:
        data.outline(config(tmp_path))
    assert str(tmp_path) in str(error.value) and error.value.exit_code == 2


def test_a_folder_that_is_not_there_or_twice(tmp_path):
    with pytest.raises(UserError, match="nowhere cannot be read, No such file or directory"):
        data.outline(config(tmp_path / "nowhere"))
    many(tmp_path / "train", 4)
    (tmp_path / "val").symlink_to(tmp_path / "train")
    with pytest.raises(UserError, match="links to one folder, splits must share no image"):
        data.outline(config(tmp_path))


def test_training_images_change_with_the_epoch_the_seed_and_nothing_else(tmp_path):
    many(tmp_path)
    train = data.load(config(tmp_path), "train")
    n = len(train)

    def gathered(epoch, source=train):
        return source.gather(np.arange(n), epoch)[0]

    np.testing.assert_array_equal(gathered(3), gathered(3))
    np.testing.assert_array_equal(gathered(3)[::-1], train.gather(np.arange(n)[::-1], 3)[0])
    assert (gathered(0) != gathered(1)).any((1, 2, 3)).mean() > 0.9
    assert (gathered(0) != gathered(0, data.load(config(tmp_path, seed=1), "train"))).any((1, 2, 3)).mean() > 0.9
    plain = data.load(config(tmp_path, crop_scale=1, flip=False), "train")
    np.testing.assert_array_equal(gathered(0, plain), gathered(None))
    mirrored = data.load(config(tmp_path, crop_scale=1), "train")
    same = (gathered(0, mirrored) == gathered(None)).all((1, 2, 3))
    np.testing.assert_array_equal(gathered(0, mirrored)[~same], gathered(None)[~same][:, :, ::-1])
    assert 0.2 < same.mean() < 0.8


def contents(batches):
    return [(batch["image"].tobytes(), batch["label"].tolist()) for batch in batches]


def test_batches_do_not_depend_on_threads_processes_or_where_a_run_begins(tmp_path):
    many(tmp_path)
    (tmp_path / "cat/1/1.png").write_bytes(b"")
    (tmp_path / "dog/0/4.png").write_bytes(b"")

    def batches(first=1, **how):
        source = data.load(config(tmp_path, max_bad_examples=2), "train")
        return list(train_batches(source, 8, 2, first, 9, **how))

    whole = batches(workers=0)
    for workers, prefetch in ((1, 2), (2, 0), (2, 2), (3, 8)):
        assert contents(batches(workers=workers, prefetch=prefetch)) == contents(whole)
    assert contents(batches(first=5)) == contents(whole[4:])
    for processes in (2, 4):
        parts = [batches(process_index=p, process_count=processes) for p in range(processes)]
        for one, *rest in zip(whole, *parts, strict=True):
            for name, values in one.items():
                np.testing.assert_array_equal(np.concatenate([part[name] for part in rest]), values)


def test_the_ids_of_an_epoch_are_exact_on_any_number_of_processes_and_after_a_resume():
    """Of N examples every process and every run that goes on sees the rows that one process sees from the start."""

    class Ids:
        num_classes, image_shape, decodes, bad = 1, (1,), True, ()

        def __init__(self, n):
            self.n = n

        def __len__(self):
            return self.n

        def gather(self, indices, epoch=None, out=None):
            return np.full((len(indices), 1), epoch, np.uint8), indices.astype(np.int32)

    for n in range(1, 51):
        for processes in (1, 2, 4):
            for rows in range(1, 6):
                size = processes * rows
                if size > n:
                    continue
                steps = steps_per_epoch(n, size)
                last, first = 2 * steps, 1 + (7 * n + size) % (2 * steps)  # of two epochs; a resume somewhere
                how = [{"process_index": p, "process_count": processes, "workers": 0} for p in range(processes)]
                parts = [list(train_batches(Ids(n), size, 1, 1, last, **each)) for each in how]
                again = [list(train_batches(Ids(n), size, 1, first, last, **each)) for each in how]
                for whole, rest in zip(parts, again, strict=True):
                    assert [b["label"].tolist() for b in whole[first - 1 :]] == [b["label"].tolist() for b in rest]
                for epoch in range(2):
                    of_epoch = [part[epoch * steps : (epoch + 1) * steps] for part in parts]
                    seen = [*chain(*(b["label"].tolist() for part in of_epoch for b in part))]
                    assert len(seen) == len(set(seen)) == n - n % size and set(seen) <= set(range(n))
                    assert {int(b["image"].max(initial=epoch)) for part in of_epoch for b in part} == {epoch}
                    expected = [step_indices(n, size, 1, epoch * steps + s).tolist() for s in range(1, steps + 1)]
                    assert [
                        [*chain(*(b["label"].tolist() for b in step))] for step in zip(*of_epoch, strict=True)
                    ] == expected


def learnable(root, n=60):
    """Two classes: a bright square on the left, or at the top."""
    rng = np.random.default_rng(0)
    for name in ("left", "top"):
        (root / name).mkdir(parents=True)
        for i in range(n):
            pixels = rng.integers(0, 90, (24, 32, 3), np.uint8)
            pixels[(slice(4, 20), slice(4, 10)) if name == "left" else (slice(2, 8), slice(8, 24))] = 250
            Image.fromarray(pixels).save(root / name / f"{i}.{'jpg' if i % 2 else 'png'}")
    return root


COMMAND = "--dataset folder --image_size 16 --embed_dim 8 --kernel_size 5 --seq_len 2 --cssm gated --batch_size 16"
COMMAND += " --crop_scale 0.6 --no_flip --num_devices 1 --log_every 1 --lr 0.01"


def main(*words, **how):
    command = [sys.executable, "main.py", *COMMAND.split(), *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **how)


def events(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_classes_are_learnt_from_a_folder_and_the_run_keeps_their_names(tmp_path):
    images = learnable(tmp_path / "images")
    where = ("--data_dir", images, "--checkpoint_dir", tmp_path / "runs")
    ended = main(*where, "--run_name", "one", "--max_steps", 60)
    assert ended.returncode == 0, ended.stderr
    assert "note: the data set has only train" in ended.stdout
    found = events(tmp_path / "runs/one")
    assert found[0]["classes"] == ["left", "top"] and found[0]["image_shape"] == [16, 16, 3]
    assert found[-1]["test"]["accuracy"] >= 0.9, found[-1]
    # Another class, or a broken file, is not passed over.
    shutil.copytree(images / "top", images / "up")
    refused = main(*where, "--resume", tmp_path / "runs/one", "--max_steps", 70)
    assert refused.returncode == 2 and "class up is new" in refused.stderr
    shutil.rmtree(images / "up")
    for split in ("train", "val"):
        (images / next(iter(files(images)[split]))).write_bytes(b"")
    broken = main(*where, "--max_steps", 12)
    assert broken.returncode == 2 and "cannot be read (the file is empty)" in broken.stderr
    assert "Traceback" not in broken.stderr
    tolerant = main(*where, "--max_steps", 12, "--max_bad_examples", 1, "--run_name", "two")
    assert tolerant.returncode == 0 and tolerant.stderr.count("is left out, number 1 of at most 1") == 2
    assert events(tmp_path / "runs/two")[-1]["bad_examples"] == {"train": 1, "val": 1}


@pytest.mark.slow
def test_the_losses_of_a_folder_do_not_depend_on_prefetch_and_workers(tmp_path):
    images, seen = learnable(tmp_path / "images", 20), []
    for i, (prefetch, workers) in enumerate([(0, 0), (2, 0), (8, 0), (0, 2), (2, 2), (8, 2)]):
        words = f"--prefetch {prefetch} --num_workers {workers} --max_steps 6 --quiet --run_name {i}".split()
        where = ["--data_dir", str(images), "--checkpoint_dir", str(tmp_path)]
        train(parse_args([*COMMAND.split(), *words, *where]).config)
        seen.append([event["loss"] for event in events(tmp_path / str(i)) if event["event"] == "step"])
    assert all(losses == seen[0] for losses in seen) and len(seen[0]) == 6
