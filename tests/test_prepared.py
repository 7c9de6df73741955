"""What TFDS has prepared as array_record is read back to equal arrays, or one sentence says what is wrong."""

import io
import json
import re
import sys

import numpy as np
import pytest
from on_disk import refusal
from PIL import Image
from toys import CLASSES, encoded, examples, toy

from cssm import data
from cssm.config import Config
from cssm.data import decode, prepared

tfds = pytest.importorskip("tensorflow_datasets")
rng = np.random.default_rng(0)
STILLS = rng.integers(0, 256, (36, 6, 6, 1), np.uint8)
LABELS = np.arange(36) % 3
PHOTOS = [rng.integers(0, 256, (20 + i, 30 - i, 3), np.uint8) for i in range(12)]
SPLITS = ("train", "val", "test")
label = tfds.features.ClassLabel(names=CLASSES)
GREY = {"image": tfds.features.Image(shape=(6, 6, 1)), "label": label}


def config(root, dataset="tfds:toy", **settings):
    return Config(dataset=dataset, data_dir=str(root), **settings)


def everything(settings):
    sources = {split: data.load(settings, split) for split in SPLITS}
    outline = data.outline(settings)
    assert outline.examples == {split: len(source) for split, source in sources.items()}
    assert {source.image_shape for source in sources.values()} == {outline.image_shape}
    return {split: source.gather(np.arange(len(source))) for split, source in sources.items()}


@pytest.fixture(scope="module")
def grey(tmp_path_factory):
    """Of one size, in train and test."""
    root = tmp_path_factory.mktemp("grey")
    parts = {"train": slice(0, 30), "test": slice(30, 36)}
    toy(root, {split: examples(STILLS[part], LABELS[part]) for split, part in parts.items()}, GREY)
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Of different sizes, as JPEG; train, validation, test and one more."""
    root = tmp_path_factory.mktemp("photos")
    rows = examples(PHOTOS, LABELS[:12], "JPEG")
    toy(root, {"train": rows[:6], "validation": rows[6:9], "test": rows[9:], "extra": rows[:1]})
    return root


def test_images_of_one_size_are_taken_as_they_are(grey):
    settings = config(grey)
    found, outline = everything(settings), data.outline(settings)
    assert (outline.num_classes, outline.image_shape, outline.classes) == (3, (6, 6, 1), CLASSES)
    assert outline.examples == {"train": 27, "val": 3, "test": 6} and "only train and test" in outline.notes[0]
    np.testing.assert_array_equal(found["test"][0], STILLS[30:])
    np.testing.assert_array_equal(found["test"][1], LABELS[30:])
    both = [np.concatenate([found[split][i] for split in ("train", "val")]) for i in range(2)]
    rows = sorted((image.tobytes(), int(label)) for image, label in zip(*both, strict=True))
    assert rows == sorted((image.tobytes(), int(label)) for image, label in zip(STILLS[:30], LABELS[:30], strict=True))
    # Nor are they cropped or mirrored for training, unless that is asked for.
    source = data.load(settings, "train")
    np.testing.assert_array_equal(source.gather(np.arange(27), epoch=3)[0], found["train"][0])
    flipped = data.load(config(grey, flip=True), "train").gather(np.arange(27), epoch=3)[0]
    same = (flipped == found["train"][0]).all((1, 2, 3))
    assert 5 < same.sum() < 22
    np.testing.assert_array_equal(flipped[~same], found["train"][0][~same][:, :, ::-1])
    assert len(data.load(config(grey, max_train_examples=5), "train")) == 5


def test_what_is_held_back_does_not_depend_on_the_seed(grey):
    for one, other in zip(everything(config(grey)).values(), everything(config(grey, seed=5)).values(), strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def test_photographs_are_cropped_as_those_of_folders(photos):
    settings = config(photos, image_size=8)
    found, outline = everything(settings), data.outline(settings)
    assert outline.image_shape == (8, 8, 3) and outline.examples == {"train": 6, "val": 3, "test": 3}
    assert outline.notes == (f"{photos}/toy/1.0.0 also has extra, which is left aside",)
    assert data.outline(config(photos)).image_shape == (224, 224, 3)
    jpegs = [encoded(pixels, "JPEG").getvalue() for pixels in PHOTOS]
    expected = [decode.photo(jpeg, 8, decode.central) for jpeg in jpegs]
    for split, part in {"train": slice(0, 6), "val": slice(6, 9), "test": slice(9, 12)}.items():
        np.testing.assert_array_equal(found[split][0], expected[part])
        np.testing.assert_array_equal(found[split][1], LABELS[:12][part])
    source = data.load(settings, "train")
    for epoch in (0, 1):
        views = [decode.view(0, epoch, i, 0.08, flip=True) for i in range(6)]
        expected = [decode.photo(jpegs[i], 8, *views[i]) for i in range(6)]
        np.testing.assert_array_equal(source.gather(np.arange(6), epoch)[0], expected)


def test_clips_are_read_as_they_are(tmp_path):
    clips = rng.integers(0, 256, (12, 4, 5, 5, 3), np.uint8)
    kinds = {"clip": tfds.features.Tensor(shape=(4, 5, 5, 3), dtype=np.uint8, encoding="zlib"), "label": label}
    rows = [{"clip": clip, "label": i % 3} for i, clip in enumerate(clips)]
    toy(tmp_path, {"train": rows[:6], "val": rows[6:9], "test": rows[9:]}, kinds)
    found = everything(config(tmp_path))
    np.testing.assert_array_equal(np.concatenate([found[split][0] for split in SPLITS]), clips)
    np.testing.assert_array_equal(np.concatenate([found[split][1] for split in SPLITS]), LABELS[:12])
    for name, value in {"image_size": 8, "crop_scale": 0.5, "flip": True}.items():
        sentence = refusal(config(tmp_path, **{name: value}))
        assert "clips of" in sentence and f"leave --{name} out" in sentence
    everything(config(tmp_path, image_size=5, crop_scale=1, flip=False))


def test_a_test_split_without_labels_is_left_aside(tmp_path):
    rows = examples(STILLS[:24], LABELS[:24])
    toy(tmp_path, {"train": rows[:20], "test": [{**row, "label": -1} for row in rows[20:]]}, GREY)
    outline = data.outline(config(tmp_path))
    assert "test in" in outline.notes[0] and "has no labels" in outline.notes[0]
    assert outline.examples == {"train": 16, "val": 2, "test": 2}


def test_the_newest_version_and_the_only_config_are_meant(tmp_path):
    for size, version in ((6, "1.0.0"), (5, "1.10.0"), (4, "1.9.0")):
        rows = examples(STILLS[:, :size, :size], LABELS)
        toy(tmp_path, {"train": rows}, {**GREY, "image": tfds.features.Image(shape=(size, size, 1))}, version=version)
    assert data.outline(config(tmp_path)).image_shape == (5, 5, 1)
    assert data.outline(config(tmp_path, "tfds:toy:1.9.0")).image_shape == (4, 4, 1)
    assert "has no version 2.0.0, it has 1.0.0, 1.9.0, 1.10.0" in refusal(config(tmp_path, "tfds:toy:2.0.0"))
    rows = examples(STILLS, LABELS)
    toy(tmp_path, {"train": rows}, GREY, "other", config="small")
    assert data.outline(config(tmp_path, "tfds:other")).num_classes == 3
    toy(tmp_path, {"train": rows}, GREY, "other", config="large")
    assert "type --dataset tfds:other/large or tfds:other/small" in refusal(config(tmp_path, "tfds:other"))
    assert data.outline(config(tmp_path, "tfds:other/small:1.0.0")).num_classes == 3
    assert "has no tiny, it has large, small; to prepare it" in refusal(config(tmp_path, "tfds:other/tiny"))


def test_what_is_not_there_is_named_with_what_is(grey, tmp_path):
    near = refusal(config(grey, "tfds:toi"))
    assert "holds no prepared toi, did you mean tfds:toy?" in near
    far = refusal(config(grey, "tfds:mnist"))
    assert f"but toy; to prepare it, type main.py prepare tfds:mnist --data_dir {grey}" in far
    assert "type main.py prepare tfds:mnist --data_dir" in refusal(config(tmp_path / "nowhere", "tfds:mnist"))
    assert "prepare cabc --format array_record --data_dir" in refusal(config(tmp_path, "tfds:cabc/easy-128"))
    assert "must be tfds:NAME, and may say /CONFIG" in refusal(config(grey, "tfds:toy:train"))
    (tmp_path / "toy" / "incomplete.ABC_1.0.0").mkdir(parents=True)
    (tmp_path / "toy" / "1.0.0").mkdir()  # without dataset_info.json, which comes last
    assert "holds no prepared toy" in refusal(config(tmp_path))


@pytest.mark.parametrize(
    "kinds, sentence",
    [
        ({"text": tfds.features.Text(), "label": label}, r"none of Image of uint8 .* text \(Text\)"),
        ({"image": tfds.features.Image(shape=(6, 6, 1))}, "none of ClassLabel among its features"),
        ({"a": tfds.features.Image(), "b": tfds.features.Image(), "label": label}, "several of Image of uint8, and"),
        ({"image": tfds.features.Image(shape=(6, 6, 1), dtype=np.uint16), "label": label}, "none of Image of uint8"),
    ],
)  # fmt: skip
def test_other_features_are_refused(tmp_path, kinds, sentence):
    values = {"text": "t", "label": 0, "image": encoded(STILLS[0]), "a": encoded(STILLS[0]), "b": encoded(STILLS[0])}
    rows = [
        {name: io.BytesIO(v.getvalue()) if name in "image a b" else v for name, v in values.items() if name in kinds}
    ]
    toy(tmp_path, {"train": rows}, kinds)
    assert re.search(sentence, refusal(config(tmp_path)))


def test_of_several_the_usual_or_the_supervised_one_is_read(tmp_path):
    kinds = {**GREY, "coarse": label}
    rows = [{**row, "coarse": 2} for row in examples(STILLS[:9], LABELS[:9])]
    toy(tmp_path / "a", {"train": rows}, kinds)
    assert set(everything(config(tmp_path / "a"))["train"][1].tolist()) == {0, 1, 2}
    toy(
        tmp_path / "b",
        {"train": [dict(row) for row in examples(STILLS[:9], LABELS[:9])]},
        GREY,
        keys=("image", "label"),
    )
    info = json.loads((tmp_path / "b/toy/1.0.0/dataset_info.json").read_text())
    assert info["supervisedKeys"]
    features = {"image": kinds["image"], "label": label, "coarse": label}
    described = type("Info", (), {"features": features, "supervised_keys": ("image", "coarse")})
    assert prepared.examples_of(tfds, "x", described) == ("image", "coarse")


def test_a_data_set_in_another_file_format_or_without_train_is_refused(tmp_path):
    folder = toy(tmp_path / "a", {"train": examples(STILLS[:3], LABELS[:3])}, GREY)
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    sentence = refusal(config(tmp_path / "a"))
    assert "is prepared as tfrecord, and array_record is read here: type main.py prepare tfds:toy" in sentence
    toy(tmp_path / "b", {"dev": examples(STILLS[:3], LABELS[:3])}, GREY)
    assert "has the splits dev, and train is missing" in refusal(config(tmp_path / "b"))
    toy(tmp_path / "c", {"train": examples(STILLS[:2], LABELS[:2])}, GREY)
    assert "too few, none is left for" in refusal(config(tmp_path / "c"))


def test_what_is_missing_is_told_with_what_to_install(grey, tmp_path, monkeypatch, capsys):
    settings = config(grey)
    folder = toy(tmp_path, {"train": examples(STILLS[:9], LABELS[:9])}, GREY)
    features = json.loads((folder / "features.json").read_text())
    video = {"pythonClassName": "tensorflow_datasets.core.features.video_feature.Video", "video": {"shape": {}}}
    video["video"] = {"shape": {"dimensions": ["-1", "6", "6", "3"]}, "dtype": "uint8"}
    features["featuresDict"]["features"]["image"] = video
    (folder / "features.json").write_text(json.dumps(features))
    prepared._read.cache_clear()
    if "tensorflow" not in sys.modules:
        assert "needs TensorFlow to be read" in refusal(config(tmp_path)) and "cssm[prepare]" in refusal(
            config(tmp_path)
        )
        assert capsys.readouterr().out == ""
    prepared._read.cache_clear()
    monkeypatch.setitem(sys.modules, "array_record", None)
    assert "pip install tensorflow-datasets array-record" in refusal(settings)


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing", "not an image", "label"])
def test_damage_is_named_and_may_be_left_out(tmp_path, capsys, how):
    rows = examples([*STILLS[:29], b"no image" if how == "not an image" else STILLS[29]], LABELS[:30])
    if how == "label":
        rows[29]["label"] = -1
    parts = {"train": rows[20:], "val": rows[:10], "test": rows[10:20]}
    folder = toy(tmp_path, parts, GREY)
    (shard,) = folder.glob("toy-train.*")
    content = bytearray(shard.read_bytes())
    if how == "missing":
        shard.unlink()
    elif how in ("flipped", "truncated"):
        content[300] ^= 0xFF
        shard.write_bytes(content if how == "flipped" else content[:1000])
    count = 1 if how in ("flipped", "not an image", "label") else 10
    sentence = refusal(config(tmp_path))
    assert (
        re.search(rf"example \d of train in {folder} cannot be read", sentence) and "--max_bad_examples 1" in sentence
    )
    source = data.load(config(tmp_path, max_bad_examples=10), "train")
    images, _ = source.gather(np.arange(10))
    assert len(images) == 10 - count and len(source.bad) == count
    assert "cannot be read and is left out" in capsys.readouterr().err
    if count == 1:  # in training another takes its place
        assert len(source.gather(np.arange(10), epoch=0)[0]) == 10


def test_nothing_is_looked_for_elsewhere(grey, monkeypatch):
    """No bucket, no address, no TensorFlow."""
    import socket

    monkeypatch.setattr(socket, "socket", lambda *args, **kwargs: 1 / 0)
    prepared._read.cache_clear()
    assert len(everything(config(grey))["train"][0]) == 27
    assert not any(name == "tensorflow" or name.startswith("tensorflow.") for name, m in sys.modules.items() if m)


def test_grey_and_coloured_are_told_by_the_feature(tmp_path):
    rows = [{"image": encoded(np.repeat(still, 3, -1)), "label": 0} for still in STILLS[:9]]
    toy(tmp_path, {"train": rows}, {**GREY, "image": tfds.features.Image(shape=(6, 6, 3))})
    images = everything(config(tmp_path, image_size=3))["train"][0]
    assert images.shape[1:] == (3, 3, 3) and (images[..., :1] == images).all()
    plane = Image.fromarray(STILLS[0, ..., 0]).resize((3, 3), Image.Resampling.BILINEAR)
    assert any((image[..., 0] == np.asarray(plane)).all() for image in images)


def raw(shape, encoding="bytes"):
    return {"image": tfds.features.Tensor(shape=shape, dtype=np.uint8, encoding=encoding), "label": label}


def pixels(images):
    return [
        {"image": image, "label": label} for image, label in zip(images, LABELS[: len(images)].tolist(), strict=True)
    ]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("encoding", ["bytes", "zlib"])
def test_stills_stored_as_pixels_are_read_as_the_same_ones_in_files(tmp_path, channels, encoding):
    stills = rng.integers(0, 256, (12, 10, 10, channels), np.uint8)
    toy(tmp_path / "raw", {"train": pixels(stills)}, raw((10, 10, channels), encoding))
    toy(
        tmp_path / "png",
        {"train": examples(stills, LABELS[:12])},
        raw((1, 1, 1)) | {"image": tfds.features.Image(shape=(10, 10, channels))},
    )
    ways = [{}, {"flip": True}, {"crop_scale": 0.2}, {"crop_scale": 0.2, "flip": True, "image_size": 7}]
    for settings in (*ways, {"image_size": 14}, {"image_size": 4, "flip": True}):
        found, others = (config(tmp_path / kind, **settings) for kind in ("raw", "png"))
        assert data.outline(found).image_shape == data.outline(others).image_shape
        for split, (images, labels) in everything(found).items():
            assert images.shape[-1] == channels
            np.testing.assert_array_equal(images, everything(others)[split][0])
            np.testing.assert_array_equal(labels, everything(others)[split][1])
        for epoch in (0, 3):
            one, other = (data.load(each, "train") for each in (found, others))
            views = one.gather(np.arange(len(one)), epoch)[0]
            np.testing.assert_array_equal(views, other.gather(np.arange(len(one)), epoch)[0])
            changed = (views != everything(found)["train"][0]).any()
            assert changed == bool(settings.get("flip") or settings.get("crop_scale")), "of those asked for"


def test_what_is_taken_as_it_is_never_meets_pillow(tmp_path, monkeypatch):
    toy(tmp_path, {"train": pixels(STILLS)}, raw((6, 6, 1)))
    monkeypatch.setattr(decode, "Image", None)
    source = data.load(config(tmp_path, flip=True), "train")
    flipped, plain = source.gather(np.arange(20), 0)[0], source.gather(np.arange(20))[0]
    assert {still.tobytes() for still in plain} <= {still.tobytes() for still in STILLS}
    same = (flipped == plain).all((1, 2, 3))
    assert 3 < same.sum() < 17
    np.testing.assert_array_equal(flipped[~same], plain[~same][:, :, ::-1])


def test_pixels_of_different_sizes_are_treated_as_photographs(tmp_path):
    toy(tmp_path / "raw", {"train": pixels(PHOTOS)}, raw((None, None, 3), "zlib"))
    toy(tmp_path / "png", {"train": examples(PHOTOS, LABELS[:12])})
    found, others = (config(tmp_path / kind, image_size=9) for kind in ("raw", "png"))
    assert data.outline(config(tmp_path / "raw")).image_shape == (224, 224, 3)
    for split in SPLITS:
        np.testing.assert_array_equal(everything(found)[split][0], everything(others)[split][0])
    one, other = (data.load(each, "train").gather(np.arange(9), 1)[0] for each in (found, others))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("how", ["short", "packed", "shape", "channels"])
def test_pixels_that_are_not_of_their_shape_are_named(tmp_path, how):
    sides = (None, None) if how == "channels" else (6, 6)
    toy(tmp_path, {"train": pixels(STILLS[:9])}, raw((*sides, 1)))
    (path,) = tmp_path.glob("toy/1.0.0/features.json")
    change = {"short": ('"6"', '"7"'), "packed": ('"bytes"', '"zlib"')}.get(how, ('"1"', '"3"'))
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    prepared._read.cache_clear()
    assert re.search(r"example \d of train in .* cannot be read \(.+\): repair or remove", refusal(config(tmp_path)))


@pytest.mark.parametrize("shape, encoding", [((6, 6, 2), "bytes"), ((6, 6, 1), "none"), ((36, 1), "bytes")])
def test_other_tensors_are_no_images(tmp_path, shape, encoding):
    rows = [
        {"image": image.reshape(36, 1) if len(shape) == 2 else np.repeat(image, shape[-1], -1), "label": 0}
        for image in STILLS[:9]
    ]
    toy(tmp_path, {"train": rows}, raw(shape, encoding))
    assert "none of Image of uint8 among its features, which are image (Tensor)" in refusal(config(tmp_path))
