"""Photographs decoded once: what prepare makes of a folder is what evaluation sees of it, or nothing is left."""

import errno
import json
import os
import shlex
import signal

import numpy as np
import pytest
from PIL import Image

from cssm import data
from cssm import prepare as verb
from cssm.cli import main
from cssm.config import Config, UserError, parse_args
from cssm.data import raw, written
from cssm.data.raw import set_name, write_folder
from cssm.data.records import AHEAD, in_workers

tfds = pytest.importorskip("tensorflow_datasets")
array_record_module = pytest.importorskip("array_record.python.array_record_module")
SPLITS = ("train", "val", "test")
CLASSES = ("a cat", "Dog", "été")
NOTHING = lambda done, total: None
rng = np.random.default_rng(0)


def fill(root, count=8):
    """Photographs of many sizes, in colour and grey, some lying on their side."""
    for number in range(count * len(CLASSES)):
        path = root / CLASSES[number % 3] / f"{number}.{('jpg', 'png', 'webp')[number % 5 % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (12 + number, 30 - number % 7, 3), np.uint8)
        image = Image.fromarray(pixels if number % 4 else pixels[..., 0])
        exif = Image.Exif()
        exif[0x0112] = 6 if number % 3 else 1
        image.save(path, exif=exif)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos") / "My photos"
    fill(root)
    return root


def folder(root, size=16, **settings):
    return Config(dataset="folder", data_dir=str(root), image_size=size, num_workers=0, **settings)


def everything(config, epoch=None):
    return {
        split: source.gather(np.arange(len(source)), epoch)
        for split, source in ((split, data.load(config, split)) for split in SPLITS)
    }


def check_equal(found, expected):
    for split in SPLITS:
        for one, other in zip(found[split], expected[split], strict=True):
            np.testing.assert_array_equal(one, other)


def prepare(root, *argv):
    return main(["prepare", "folder", "--data_dir", str(root), "--num_workers", "0", *map(str, argv)])


def left(root):
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("given", ["classes", "splits"])
def test_it_is_what_evaluation_sees_of_the_folder_in_the_same_order(photos, tmp_path, given):
    source = photos
    if given == "splits":
        source = tmp_path / "photos"
        for split, count in (("train", 5), ("val", 2), ("test", 1)):
            fill(source / split, count)
    seen = []
    made, examples, bad = write_folder(folder(source), 16, tmp_path / "sets", lambda *done: seen.append(done))
    name = set_name(source)
    assert made == tmp_path / "sets" / name / "16" / "1.0.0"
    found = Config(dataset=f"tfds:{name}/16", data_dir=str(tmp_path / "sets"))
    one, other = data.outline(found), data.outline(folder(source))
    assert one.classes == other.classes == tuple(sorted(CLASSES)) and one.image_shape == (16, 16, 3)
    assert one.examples == other.examples == examples and bad == 0
    check_equal(everything(found), everything(folder(source)))
    # Without crops both train on the same batches.
    check_equal(everything(found, 1), everything(folder(source, crop_scale=1, flip=False), 1))
    flipped = {"crop_scale": 1, "flip": True}
    check_equal(
        everything(Config(dataset=found.dataset, data_dir=found.data_dir, **flipped), 1),
        everything(folder(source, **flipped), 1),
    )
    assert seen == sorted(seen) and seen[-1] == (sum(examples.values()),) * 2


def test_workers_write_the_same_and_a_part_may_be_asked_for(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "CHUNK", 4)
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert prepare(photos, "--output", whole, "--image_size", 8) == 0
    assert prepare(photos, "--output", part, "--image_size", 8, "--num_workers", 2, "--max_train_examples", 5) == 0
    all_, few = (everything(Config(dataset="tfds:my_photos", data_dir=str(root))) for root in (whole, part))
    assert len(few["train"][1]) == 5
    check_equal(few, all_ | {"train": tuple(values[:5] for values in all_["train"])})


@pytest.mark.parametrize(
    "dataset, size, flags",
    [
        ("folder", None, ["--image_size", "224", "--crop_scale", "0.08", "--flip"]),
        ("imagenette", None, ["--image_size", "160", "--crop_scale", "0.08", "--flip"]),
        ("imagenet", "20", ["--crop_scale", "0.08", "--flip"]),
    ],
)
def test_it_says_how_to_train_on_what_it_wrote(photos, tmp_path, capsys, dataset, size, flags):
    root = tmp_path / "raw sets"
    argv = ["prepare", dataset, "--data_dir", str(photos), "--output", str(root), "--num_workers", "0"]
    assert main([*argv, *(["--image_size", size] if size else [])]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = shlex.split(lines[-1])
    told = ["--dataset", f"tfds:my_photos/{size or 256}", "--data_dir", str(root), *flags]
    assert words == ["train", "on", "it:", "python", "main.py", *told]
    assert lines[-2].endswith("1.0.0: 18 train, 3 val, 3 test")
    trained, usual = parse_args([*told, "--dry_run"]).config, Config(dataset=dataset, data_dir=str(photos))
    assert (trained.crop_scale, trained.flip) == (usual.crop_scale, usual.flip)
    side = int(size) if size else usual.image_size
    assert data.outline(trained).image_shape == (side, side, 3)
    views = everything(trained, 0)["train"][0]
    assert views.shape[1:] == (side, side, 3) and (views != everything(trained)["train"][0]).any()


def test_with_headless_it_is_one_event_which_counts_what_is_left_out(photos, tmp_path, capfd):
    source = tmp_path / "photos"
    fill(source)
    broken = source / "Dog" / "1.png"
    broken.write_bytes(b"no image")
    assert prepare(source, "--output", tmp_path / "sets") == 2
    assert f"error: {broken} cannot be read (it is no image" in capfd.readouterr().err
    assert left(tmp_path / "sets") == []
    argv = ["--output", tmp_path / "sets", "--image_size", 8, "--max_bad_examples", 1, "--headless"]
    assert prepare(source, *argv) == 0
    captured = capfd.readouterr()
    (event,) = [json.loads(line) for line in captured.out.splitlines()]
    assert event["event"] == "prepare" and event["dataset"] == "folder" and event["bad_examples"] == 1
    assert sum(event["examples"].values()) == 23 and f"warning: {broken} cannot be read and is left" in captured.err
    found = Config(dataset="tfds:photos/8", data_dir=str(tmp_path / "sets"))
    check_equal(everything(found), everything(folder(source, 8, max_bad_examples=1)))
    for number in range(24):
        next(source.glob(f"*/{number}.*")).write_bytes(b"")
    with pytest.raises(UserError, match="none of the 18 images of train in"):
        write_folder(folder(source, max_bad_examples=99), 9, tmp_path / "sets", NOTHING)
    assert left(tmp_path / "sets/photos/9") == []


def test_it_is_written_once(photos, tmp_path, capsys):
    argv = ["--output", tmp_path / "sets", "--image_size", 8]
    assert prepare(photos, *argv) == 0
    before = {path: path.read_bytes() for path in left(tmp_path)}
    assert prepare(photos, *argv) == 2
    assert "1.0.0 is there already: remove it, or type another --output" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in left(tmp_path)} == before
    assert prepare(photos, "--output", tmp_path / "sets", "--image_size", 9) == 0, "beside it"
    assert data.outline(Config(dataset="tfds:my_photos/9", data_dir=str(tmp_path / "sets"))).num_classes == 3


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm", "full", "not writable"])
def test_what_does_not_end_leaves_nothing(photos, tmp_path, monkeypatch, capsys, how):
    real, calls = raw._square, []

    def square(path, size):
        calls.append(path)
        if len(calls) == 20:
            if how == "ctrl-c":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)
        return real(path, size)

    root = tmp_path / "sets"
    code, why = {"full": (errno.ENOSPC, "the disk is full")}.get(how, (errno.EACCES, "it is not writable"))

    class Writer:
        def __init__(self, *_args):
            self.count = 0

        def write(self, record):
            self.count += 1
            if self.count == 10:  # array_record's own error, or that of the system
                text = f"Failed: write() failed: {os.strerror(code)}; writing x"
                raise RuntimeError(text) if how == "full" else OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        if how in ("ctrl-c", "sigterm"):
            patch.setattr(raw, "_square", square)
        else:
            patch.setattr(array_record_module, "ArrayRecordWriter", Writer)
        if how == "sigterm":
            with pytest.raises(SystemExit) as ended:
                prepare(photos, "--output", root)
            assert ended.value.code == 143
        elif how == "ctrl-c":
            argv = ["prepare", "folder", "--data_dir", str(photos), "--output", str(root), "--num_workers", "0"]
            parsed = parse_args(argv)
            with pytest.raises(KeyboardInterrupt):
                verb.prepare(parsed.config, parsed.typed)
        else:
            assert prepare(photos, "--output", root) == 6
    if how not in ("ctrl-c", "sigterm"):
        sentence = f"error: cannot write folder to {root}: {why}; make room, or type another --output\n"
        assert capsys.readouterr().err.endswith(sentence)
    assert left(root) == []
    assert prepare(photos, "--output", root) == 0


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["folder"], "prepare folder: it needs the images and a folder to write to: type --data_dir IMAGES --output"),
        (["folder", "--data_dir", "x"], "type --data_dir IMAGES --output FOLDER"),
        (["imagenet", "--output", "x"], "prepare imagenet: it needs the images and a folder to write to"),
        (["folder", "--data_dir", "nowhere", "--output", "x"], "nowhere cannot be read, No such file or directory"),
        (["folder", "--data_dir", "x", "--output", "y", "--format", "array_record"], "--format is not for data sets"),
        (["folder", "--data_dir", "x", "--output", "y", "--flip"], "--flip does not apply to the verb prepare"),
        (["pathfinder", "--data_dir", "x", "--output", "y"], "--output is not for data sets that are generated, as"),
        (["cabc", "--data_dir", "x", "--max_bad_examples", "1"], "--max_bad_examples is not for data sets that are"),
        (["tfds:mnist", "--data_dir", "x", "--output", "y"], "--output is not for data sets that are downloaded, as"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, monkeypatch, capsys, argv, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", *argv]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and left(tmp_path) == []


def test_no_set_is_written_among_its_own_images(tmp_path, capsys):
    fill(tmp_path / "photos")
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for root in (tmp_path / "photos", tmp_path / "photos/sets", tmp_path, tmp_path / "link/raw"):
        before = left(tmp_path)
        assert prepare(tmp_path / "photos", "--output", root) == 2
        assert "would lie among the images: type a folder elsewhere" in capsys.readouterr().err
        assert left(tmp_path) == before


def test_names_of_classes_that_tfds_would_change_are_refused(tmp_path, capsys):
    fill(tmp_path / "photos", 4)
    (tmp_path / "photos/Dog").rename(tmp_path / "photos/Dog ")
    assert prepare(tmp_path / "photos", "--output", tmp_path / "sets") == 2
    assert "'Dog ' is none: rename it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, expected",
    [("photos", "photos"), ("My photos.v2", "my_photos_v2"), ("2024", "folder_2024"), ("été", "t"), ("写真", "folder")],
)
def test_a_set_is_called_what_tfds_allows(tmp_path, name, expected):
    assert set_name(tmp_path / name) == set_name(tmp_path / "x" / ".." / name) == expected


def test_images_are_spread_over_files_and_tfds_reads_them(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(written, "SHARD_BYTES", 5 * (16 * 16 * 3 + 100))
    made, *_ = write_folder(folder(photos), 16, tmp_path / "sets", NOTHING)
    files = sorted(path.name for path in made.glob("my_photos-train.*"))
    assert files == [f"my_photos-train.array_record-{i:05}-of-00004" for i in range(4)]
    expected = everything(folder(photos))
    check_equal(everything(Config(dataset="tfds:my_photos", data_dir=str(tmp_path / "sets"))), expected)
    builder = tfds.builder_from_directory(made)
    assert builder.info.splits["train"].shard_lengths == [5, 5, 5, 3]
    assert builder.info.supervised_keys == ("image", "label")
    for split, name in written.TFDS_SPLITS.items():
        for i, example in enumerate(builder.as_data_source(name)):
            np.testing.assert_array_equal(example["image"], expected[split][0][i])
            assert example["label"] == expected[split][1][i]


def test_workers_are_no_further_ahead_than_is_said(monkeypatch):
    asked = []

    class Parts(list):
        def __iter__(self):
            for part in range(100):
                asked.append(part)
                yield part

    made = in_workers(abs, Parts(range(100)), 1)
    assert next(made) == 0 and len(asked) <= AHEAD + 1
    assert [next(made) for _ in range(10)] == list(range(1, 11)) and len(asked) <= AHEAD + 11
    made.close()


@pytest.mark.slow
def test_a_few_steps_of_training_on_what_was_prepared(photos, tmp_path, capfd):
    assert prepare(photos, "--output", tmp_path, "--image_size", 20) == 0
    command = shlex.split(capfd.readouterr().out.splitlines()[-1].partition("main.py ")[2])
    argv = ["--image_size", "16", "--max_steps", "2", "--batch_size", "4", "--num_devices", "1", "--embed_dim", "8"]
    argv += ["--seq_len", "2", "--kernel_size", "3", "--checkpoint_dir", str(tmp_path / "runs"), "--headless"]
    assert main([*command, *argv]) == 0
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert events[0]["image_shape"] == [16, 16, 3] and events[0]["classes"] == sorted(CLASSES)
    assert [event["count"] for event in events if event["event"] == "eval"][-1] == 3
