"""Every published layout, made here as it is described, is read back to equal arrays and labels."""

import re

import numpy as np
import pytest
from on_disk import (
    CLIPS,
    LABELS,
    SPLITS,
    STILLS,
    N,
    check,
    clip_arrays,
    config,
    everything,
    flat_records,
    legacy_records,
    pathfinder_folders,
    pathfinder_metadata,
    png,
    put,
    refusal,
    rows,
    still_records,
)
from PIL import Image

from cssm import data, train
from cssm.config import Config, UserError, parse_args


@pytest.mark.parametrize("make", [pathfinder_folders, pathfinder_metadata])
def test_pathfinder_images(tmp_path, make):
    make(tmp_path)
    settings = config("pathfinder", tmp_path, pathfinder_difficulty="14")
    found = everything(settings)
    check(found, STILLS)
    assert [len(part[1]) for part in found.values()] == [32, 4, 4]
    check(everything(config("pathfinder", tmp_path / "curv_contour_length_14")), STILLS)
    # The published split: the permutation of NumPy's first generator with seed 42.
    files = np.argsort(LABELS, kind="stable") if make is pathfinder_folders else np.arange(N)
    order = files[np.random.RandomState(42).permutation(N)]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in found.values()]), STILLS[order])
    np.testing.assert_array_equal(np.concatenate([part[1] for part in found.values()]), LABELS[order])


@pytest.mark.parametrize("form", [{"text": True}, {"dtype": "S"}], ids=str)
def test_metadata_of_two_more_forms(tmp_path, form):
    pathfinder_metadata(tmp_path, "curv_baseline", **form)
    check(everything(config("pathfinder", tmp_path, pathfinder_difficulty="6")), STILLS)


def test_a_joined_table_does_not_count_twice(tmp_path):
    pathfinder_metadata(tmp_path)
    folder = tmp_path / "curv_contour_length_14/metadata"
    np.save(folder / "combined.npy", np.concatenate([np.load(path) for path in sorted(folder.iterdir())]))
    check(everything(config("pathfinder", tmp_path, pathfinder_difficulty="14")), STILLS)


def test_cabc_images(tmp_path):
    parts = dict(zip(("train", "test"), np.split(np.arange(N), [30]), strict=True))
    for split, indices in parts.items():
        for i in indices:
            put(
                tmp_path / "hard/images" / split / ("neg", "pos")[LABELS[i]] / str(i % 3) / f"sample_{i}.png",
                png(STILLS[i]),
            )
    found = everything(config("cabc", tmp_path, cabc_difficulty="hard"))
    check(found, STILLS)
    assert rows(*found["test"]) == rows(STILLS[30:], LABELS[30:])
    assert set(found["val"][1].tolist()) == {0, 1}


def test_stills_are_resized_where_that_is_asked_for(tmp_path):
    still_records(tmp_path / "records")
    pathfinder_folders(tmp_path / "images", "")
    small = [np.asarray(Image.fromarray(still[..., 0]).resize((6, 6), Image.Resampling.BILINEAR)) for still in STILLS]
    for layout in ("records", "images"):
        check(everything(config("pathfinder", tmp_path / layout, image_size=6)), np.stack(small)[..., None])


@pytest.mark.parametrize(
    "make", [clip_arrays, legacy_records, lambda root: legacy_records(root, lambda clip: clip), flat_records],
    ids=["npy", "float32", "uint8", "gzip"],
)  # fmt: skip
def test_pathtracker(tmp_path, make):
    make(tmp_path / "clips")
    settings = config("pathtracker", tmp_path / "clips")
    found = everything(settings)
    check(found, CLIPS)
    assert data.outline(settings).image_shape == (5, 8, 8, 3)
    if make is flat_records:
        np.testing.assert_array_equal(found["test"][0], CLIPS[30:])
        np.testing.assert_array_equal(found["test"][1], LABELS[30:])
    with pytest.raises(UserError, match="--pathtracker_difficulty 14 is of generated clips"):
        data.outline(config("pathtracker", tmp_path / "clips", pathtracker_difficulty="14"))
    with pytest.raises(UserError, match=r"--image_size 6: the clips of .* are 8 pixels wide"):
        data.outline(config("pathtracker", tmp_path / "clips", image_size=6))


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        content = content[: len(content) // 2]
    elif how == "empty":
        content = b""
    else:
        content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    return path


WHY = {
    "truncated": "ends within it|truncated|not fully written",
    "empty": "is empty",
    "flipped": "CRC|broken",
}


MADE = {
    "train/shard_00001.tfrecord": ("pathfinder", still_records),
    "imgs/pos/sample_003.png": ("pathfinder", lambda root: pathfinder_folders(root, "")),
    "train/shard_0001.tfrecord": ("pathtracker", legacy_records),
    "1/1_sample_3.npy": ("pathtracker", clip_arrays),
}
# Arrays of numpy have no checksum.
DAMAGED = [(name, how) for name in MADE for how in WHY if (how, name[-3:]) != ("flipped", "npy")]


@pytest.mark.parametrize("name, how", DAMAGED)
def test_damaged_files_are_named_and_may_be_left_out(tmp_path, name, how, capsys):
    dataset, make = MADE[name]
    make(tmp_path / "set")
    path = damage(tmp_path / "set" / name, how)
    sentence = refusal(config(dataset, tmp_path / "set"))
    assert str(path) in sentence and "--max_bad_examples 1" in sentence and re.search(WHY[how], sentence)
    tolerant = data.load(config(dataset, tmp_path / "set", max_bad_examples=1), "train")
    images, _ = tolerant.gather(np.arange(len(tolerant)))
    assert len(images) == len(tolerant) - 1 and len(tolerant.bad) == 1
    assert f"{path} cannot be read and is left out" in capsys.readouterr().err


def test_labels_and_shapes_that_are_wrong_are_found(tmp_path, capsys):
    pathfinder_metadata(tmp_path / "a", "")
    table = np.load(tmp_path / "a/metadata/2.npy")
    table[:, 3] = "7"
    np.save(tmp_path / "a/metadata/2.npy", table)
    assert "its label in" in refusal(config("pathfinder", tmp_path / "a")) and "metadata" in str(
        tmp_path / "a/metadata"
    )
    (tmp_path / "a/imgs/0/sample_4.png").unlink()
    settings = config("pathfinder", tmp_path / "a", max_bad_examples=30)
    bad = set()
    for split in SPLITS:
        source = data.load(settings, split)
        source.gather(np.arange(len(source)))
        bad |= set(source.bad)
    assert len(bad) == 11 and str(tmp_path / "a/imgs/0/sample_4.png") in bad

    pathfinder_folders(tmp_path / "b", "")
    for i in range(0, N, 2):
        put(tmp_path / "b/imgs/neg" / f"sample_{i:03}.png", png(STILLS[i][:, :6]))
    assert "pixels, not square" in refusal(config("pathfinder", tmp_path / "b"))
    for i in range(0, N, 2):
        put(tmp_path / "b/imgs/neg" / f"sample_{i:03}.png", png(STILLS[i][:6, :6]))
    for size in (None, 12):  # nor is it made to fit where a size is given
        assert "its shape is" in refusal(config("pathfinder", tmp_path / "b", image_size=size))

    clip_arrays(tmp_path / "c")
    (tmp_path / "c/1/1_sample_1.npy").rename(tmp_path / "c/1/0_sample_1.npy")
    np.save(tmp_path / "c/0/0_sample_2.npy", CLIPS[0][:3])
    np.save(tmp_path / "c/0/0_sample_4.npy", CLIPS[0] / 255)
    capsys.readouterr()
    for split in SPLITS:
        source = data.load(config("pathtracker", tmp_path / "c", max_bad_examples=3), split)
        source.gather(np.arange(len(source)))
    said = capsys.readouterr().err
    for name, why in (("1/0_sample_1", "another label"), ("0/0_sample_2", "its shape"), ("0/0_sample_4", "not uint8")):
        assert re.search(rf"{name}.npy cannot be read .*{why}", said)


def test_folders_that_hold_something_else_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for dataset, sentence in (
        ("pathfinder", "easy was never published"),
        ("cabc", "no cABC"),
        ("pathtracker", "no PathTracker"),
    ):
        assert sentence in refusal(config(dataset, tmp_path / "empty"))
        assert "there is no such folder" in refusal(config(dataset, tmp_path / "nowhere"))
    still_records(tmp_path / "both")
    pathfinder_folders(tmp_path / "both", "")
    assert "holds images and TFRecords" in refusal(config("pathfinder", tmp_path / "both"))
    (tmp_path / "curv_contour_length_9/imgs/0").mkdir(parents=True)
    other = config("pathfinder", tmp_path / "curv_contour_length_9", pathfinder_difficulty="14")
    assert "is that of 9" in refusal(other)
    assert "which tell the labels" in refusal(config("pathfinder", tmp_path / "curv_contour_length_9"))
    clip_arrays(tmp_path / "two")
    legacy_records(tmp_path / "two")
    assert "several layouts" in refusal(config("pathtracker", tmp_path / "two"))
    for content in ("", "imgs/0 sample_0.png 0", "\x93NUMPY"):
        put(tmp_path / "d/metadata/0.npy", content.encode("latin-1"))
        (tmp_path / "d/imgs/0").mkdir(parents=True, exist_ok=True)
        assert "cannot be read as metadata" in refusal(config("pathfinder", tmp_path / "d"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["simple", "vit"])
@pytest.mark.parametrize("dataset, make", [("pathtracker", flat_records), ("pathfinder", still_records)])
def test_runs_train_on_them_and_go_on(tmp_path, dataset, make, arch):
    """Clips pass the model frame by frame; the size that the files have is kept with the run."""
    make(tmp_path / "set")
    settings = {"dataset": dataset, "data_dir": str(tmp_path / "set"), "cache_dir": str(tmp_path / "cache")}
    settings |= {
        "arch": arch,
        "cssm": "gated",
        "embed_dim": 4,
        "depth": 1,
        "kernel_size": 3,
        "seq_len": 2,
        "num_devices": 1,
    }
    settings |= {"checkpoint_dir": str(tmp_path), "run_name": "run", "batch_size": 8, "quiet": True, "num_workers": 2}
    summary = train(Config(**settings, max_steps=2))
    assert summary["test"]["count"] == data.outline(Config(**settings)).examples["test"]
    again = [
        "--resume",
        tmp_path / "run",
        "--cache_dir",
        tmp_path / "cache",
        "--max_steps",
        3,
        "--num_devices",
        1,
        "--quiet",
    ]
    parsed = parse_args([str(word) for word in again])
    assert train(parsed.config, parsed.typed)["step"] == 3
    assert f"image_size: {8 if dataset == 'pathtracker' else 12}" in (tmp_path / "run/config.yaml").read_text()
