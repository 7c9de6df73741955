"""Arrays from .npz: equal to what was saved, or one sentence that says what is wrong."""

import numpy as np
import pytest
from PIL import Image

from cssm import data
from cssm.config import Config, UserError
from cssm.data import npz

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (60, 6, 6, 3), np.uint8)
LABELS = np.arange(60) % 4
SPLITS = ("train", "val", "test")


def save(path, **arrays):
    np.savez(path, **{"images": IMAGES, "labels": LABELS, **arrays})
    return path


def config(path, **settings):
    return Config(dataset="npz", data_dir=str(path), **settings)


def everything(settings):
    sources = {split: data.load(settings, split) for split in SPLITS}
    return {split: source.gather(np.arange(len(source))) for split, source in sources.items()}


def rows(images, labels):
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


@pytest.mark.parametrize(
    "arrays, shape",
    [
        ({}, (6, 6, 3)),
        ({"images": IMAGES[..., 0]}, (6, 6, 1)),
        ({"images": IMAGES[..., :2]}, (6, 6, 2)),
        ({"images": IMAGES.astype(np.float32) / 255}, (6, 6, 3)),
        ({"images": IMAGES * (1 / 255)}, (6, 6, 3)),
        ({"images": IMAGES.astype(np.float32) * np.float32(1 / 255)}, (6, 6, 3)),
    ],
    ids=["uint8", "grey", "two channels", "float32", "float64", "float32 times"],
)
def test_one_file_is_divided_and_read_back_equal(tmp_path, arrays, shape):
    settings = config(save(tmp_path / "a.npz", **arrays))
    outline, found = data.outline(settings), everything(settings)
    assert (outline.num_classes, outline.image_shape) == (4, shape)
    assert outline.examples == {split: len(labels) for split, (_, labels) in found.items()}
    assert outline.examples["val"] >= 4 and outline.examples["test"] >= 4
    assert "only train" in outline.notes[0]
    images, labels = (np.concatenate([part[i] for part in found.values()]) for i in range(2))
    assert images.dtype == np.uint8 and labels.dtype == np.int32
    assert rows(images, labels) == rows(IMAGES[..., : shape[-1]], LABELS)
    for one, other in zip(found.values(), everything(config(tmp_path / "a.npz", seed=5)).values(), strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def test_clips_of_separate_files_and_their_classes(tmp_path):
    clips = rng.integers(0, 256, (3, 12, 5, 4, 4, 1), np.uint8)
    for part, split in zip(clips, SPLITS, strict=True):
        np.savez_compressed(tmp_path / f"{split}.npz", clips=part, labels=np.arange(12) % 3, classes=["a", "b", "c"])
    settings = config(tmp_path)
    outline = data.outline(settings)
    assert (outline.image_shape, outline.classes, outline.notes) == ((5, 4, 4, 1), ("a", "b", "c"), ())
    for part, (images, labels) in zip(clips, everything(settings).values(), strict=True):
        assert rows(images, labels) == rows(part, np.arange(12) % 3)
    (tmp_path / "test.npz").unlink()
    assert "only train and val" in data.outline(settings).notes[0]
    assert len(data.load(settings, "val")) == 12 and len(data.load(settings, "train")) == 9


def test_images_are_held_once_for_all_splits(tmp_path, monkeypatch):
    settings = config(save(tmp_path / "a.npz"))
    sources = [data.load(settings, split) for split in SPLITS]
    assert len({id(source._images) for source in sources}) == 1
    del sources
    assert not npz._pixels


def test_outlines_read_no_image(tmp_path, monkeypatch):
    settings = config(save(tmp_path / "a.npz"))
    monkeypatch.setattr(npz, "_read_pixels", lambda *_: 1 / 0)
    assert data.outline(settings).examples["train"] == 44


@pytest.mark.parametrize(
    "arrays, sentence",
    [
        ({"images": IMAGES.astype(np.float32)}, "hold .* no whole number of 255ths from 0 to 1: save uint8"),
        ({"images": IMAGES / 255 + 1e-4}, "no whole number of 255ths"),
        ({"images": np.where(IMAGES / 255 > 2, 0, np.nan)}, "hold nan"),
        ({"images": IMAGES.astype(np.float16)}, "images are float16: must be uint8, or float32"),
        ({"images": IMAGES.astype(np.int64)}, "images are int64"),
        ({"images": IMAGES.astype(object)}, "Python objects"),
        ({"images": IMAGES[0]}, r"shape \[6, 6, 3\]|labels are int64 of shape"),
        ({"images": IMAGES[:, None]}, r"shape \[60, 1, 6, 6, 3\]: must be images \[N, H, W\]"),
        ({"images": IMAGES[:, :5]}, "6 wide and 5 high, and models take squares: type --image_size 5 for"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "not empty"),
        ({"images": IMAGES[:7]}, "one for each of the 7 images"),
        ({"labels": LABELS / 2}, "labels are float64"),
        ({"labels": LABELS[:, None]}, r"of shape \[60, 1\]"),
        ({"labels": LABELS - 1}, "a label is -1, and labels go from 0 to 2"),
        ({"labels": LABELS.astype(np.uint64) + np.uint64(2**63)}, "labels count classes"),
        ({"labels": LABELS * 0}, "nothing to tell apart"),
        ({"labels": LABELS.astype(object)}, "Object arrays"),
        ({"classes": ["a", "b", "c"]}, "a label is 3, and labels go from 0 to 2"),
        ({"clips": IMAGES[:, None]}, "holds images, labels, clips: must hold"),
        ({"labels": np.array([0, 1, *[2] * 58]), "images": IMAGES[:60]}, "^$"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(tmp_path, arrays, sentence):
    settings = config(save(tmp_path / "a.npz", **arrays))
    if sentence == "^$":  # rare classes stay in train
        assert data.outline(settings).examples["train"] > 0
        return
    with pytest.raises(UserError, match=sentence) as error:
        data.outline(settings)
        data.load(settings, "train")
    assert "a.npz" in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 2


def test_files_that_are_none(tmp_path):
    def refusal(path):
        with pytest.raises(UserError) as error:
            data.outline(config(path))
            data.load(config(path), "train")
        return str(error.value)

    whole = save(tmp_path / "a.npz").read_bytes()
    assert "no train.npz" in refusal(tmp_path) and "is not there" in refusal(tmp_path / "b.npz")
    for content in (b"", b"text", whole[: len(whole) // 2]):
        (tmp_path / "c.npz").write_bytes(content)
        assert "c.npz cannot be read as .npz" in refusal(tmp_path / "c.npz")
    damaged = bytearray(whole)
    damaged[len(whole) // 3] ^= 0xFF  # among the images: their checksum tells
    (tmp_path / "c.npz").write_bytes(damaged)
    assert "c.npz cannot be read as .npz: Bad CRC-32" in refusal(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", x=IMAGES, y=LABELS)
    assert "d.npz holds x, y: must hold images" in refusal(tmp_path / "d.npz")


def test_splits_must_agree_with_each_other_and_with_the_size(tmp_path):
    save(tmp_path / "train.npz")
    save(tmp_path / "val.npz", labels=LABELS + 1)
    with pytest.raises(UserError, match=r"val.npz: a label is 4, and labels go from 0 to 3"):
        data.outline(config(tmp_path))
    save(tmp_path / "val.npz", images=IMAGES[..., :1])
    with pytest.raises(UserError, match=r"val.npz: images are 6x6x1, but 6x6x3 in .*train.npz"):
        data.outline(config(tmp_path))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_another_size_is_that_of_the_square_in_the_middle(tmp_path, channels):
    """Of one channel or three as Pillow resizes an image; the splits share what was resized."""
    images = rng.integers(0, 256, (30, 8, 13, channels), np.uint8)
    settings = config(save(tmp_path / "a.npz", images=images, labels=np.arange(30) % 3), image_size=5)
    outline, sources = data.outline(settings), [data.load(settings, split) for split in SPLITS]
    assert outline.image_shape == sources[0].image_shape == (5, 5, channels)
    assert "the largest square in the middle of the images, 8x13x" in outline.notes[-1]
    assert len({id(source._images) for source in sources}) == 1

    def pillow(image):
        return np.asarray(Image.fromarray(image).resize((5, 5), Image.Resampling.BILINEAR, (2, 0, 10, 8)))

    np.testing.assert_array_equal(sources[0]._images[..., 0], [pillow(image[..., 0]) for image in images])
    if channels == 3:
        np.testing.assert_array_equal(sources[0]._images, [pillow(image) for image in images])
    whole = data.load(config(tmp_path / "a.npz", image_size=8), "train")
    np.testing.assert_array_equal(whole._images, images[:, :, 2:10])


def test_a_size_that_images_have_leaves_them_alone_and_clips_follow_it(tmp_path):
    same = config(save(tmp_path / "a.npz"), image_size=6)
    assert len(data.outline(same).notes) == 1
    np.testing.assert_array_equal(data.load(same, "train")._images, IMAGES)
    clips = rng.integers(0, 256, (30, 2, 6, 4, 1), np.uint8)
    np.savez(tmp_path / "c.npz", clips=clips, labels=np.arange(30) % 3)
    source = data.load(config(tmp_path / "c.npz", image_size=4), "train")
    assert source.image_shape == data.outline(config(tmp_path / "c.npz", image_size=4)).image_shape == (2, 4, 4, 1)
    np.testing.assert_array_equal(source._images, clips[:, :, 1:5])
