"""Inputs come in their order, whole batches at a time; what cannot be read is named and left out."""

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cssm.config import UserError
from cssm.data import inputs as module
from cssm.data.decode import central, photo
from cssm.data.inputs import open_inputs

rng = np.random.default_rng(0)
SHAPE = (8, 8, 3)
ARRAYS = rng.integers(0, 256, (5, *SHAPE), np.uint8)


def picture(path, side=(12, 10), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (*side, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def read(inputs, size=4, workers=2):
    pieces = list(inputs.pieces(size, workers))
    assert all(len(piece.names) == len(piece.images) <= size for piece in pieces)
    assert all(piece.images.dtype == np.uint8 and piece.images.shape[1:] == inputs.image_shape for piece in pieces)
    return (
        [name for piece in pieces for name in piece.names],
        np.concatenate([piece.images for piece in pieces]),
        pieces,
    )


def refusal(paths, shape=SHAPE):
    with pytest.raises(UserError) as error:
        list(open_inputs([str(path) for path in paths], shape).pieces(2, 1))
    return str(error.value)


def test_files_come_in_the_order_given_and_folders_by_name(tmp_path):
    last = picture(tmp_path / "z.png")
    for name in ("b/2.jpg", "b/10.PNG", "a/x.webp", ".hidden/y.png", "b/.z.png"):
        picture(tmp_path / "folder" / name)
    for name in ("notes.txt", "b/data.csv", ".DS_Store"):
        (tmp_path / "folder" / name).write_text("x")
    inputs = open_inputs([str(last), str(tmp_path / "folder"), str(last)], SHAPE)
    names, images, pieces = read(inputs)
    inside = [str(tmp_path / "folder" / name) for name in ("a/x.webp", "b/10.PNG", "b/2.jpg")]
    assert names == [str(last), *inside, str(last)] and len(inputs) == 5
    assert inputs.others == 2 and [len(piece.names) for piece in pieces] == [4, 1]
    for name, image in zip(names, images, strict=True):
        np.testing.assert_array_equal(image, photo(Path(name), 8, central))


def test_a_folder_has_the_kinds_of_images_that_are_read_by_name(tmp_path):
    paths = [picture(tmp_path / f"{kind}.{kind}") for kind in ("bmp", "gif", "jpeg", "png", "ppm", "tif", "webp")]
    named = read(open_inputs([str(path) for path in paths], SHAPE))
    found = read(open_inputs([str(tmp_path)], SHAPE))
    assert found[0] == named[0] == [str(path) for path in paths]
    np.testing.assert_array_equal(found[1], named[1])


def test_the_order_of_a_folder_is_not_that_of_the_disk(tmp_path):
    names = [f"{i:02}/{j}.png" for i in (3, 1, 2, 0) for j in (5, 1, 9, 0, 7, 3)]
    for name in names:
        picture(tmp_path / name)
    assert read(open_inputs([str(tmp_path)], SHAPE))[0] == [str(tmp_path / name) for name in sorted(names)]


def test_links_are_followed_but_not_in_circles(tmp_path):
    picture(tmp_path / "real" / "x.png")
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "seen" / "back").symlink_to(tmp_path / "seen")
    names, _, _ = read(open_inputs([str(tmp_path / "seen")], SHAPE))
    assert names == [str(tmp_path / "seen" / "link" / "x.png")]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_arrays_come_in_order_whole_batches_at_a_time(tmp_path, save, size):
    save(tmp_path / "x.npz", images=ARRAYS, labels=np.zeros(5, int))
    names, images, pieces = read(open_inputs([str(tmp_path / "x.npz")], SHAPE), size)
    np.testing.assert_array_equal(images, ARRAYS)
    assert names == [f"{tmp_path / 'x.npz'}[{i}]" for i in range(5)]
    assert [len(piece.names) for piece in pieces] == [min(size, 5 - i) for i in range(0, 5, size)]
    mapped = isinstance(pieces[0].images, np.memmap)
    assert mapped == (save is np.savez), "the rows of an uncompressed file are not read before they are needed"


def test_a_compressed_array_is_unpacked_as_it_is_read(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", images=np.zeros((64, *SHAPE), np.uint8))
    inputs = open_inputs([str(tmp_path / "x.npz")], SHAPE)
    reads = []
    plain = module.zipfile.ZipExtFile.read
    monkeypatch.setattr(module.zipfile.ZipExtFile, "read", lambda self, n=-1: reads.append(n) or plain(self, n))
    read(inputs, 4)
    assert max(reads) == 4 * 8 * 8 * 3 and min(reads) > 0


def test_arrays_of_other_sizes_and_types(tmp_path):
    floats = ARRAYS[..., :1].astype(np.float32) / 255
    np.savez(tmp_path / "floats.npz", images=floats[..., 0])
    _, images, _ = read(open_inputs([str(tmp_path / "floats.npz")], (8, 8, 1)))
    np.testing.assert_array_equal(images, ARRAYS[..., :1])
    np.savez(tmp_path / "large.npz", images=np.full((3, 20, 30, 3), 7, np.uint8))
    _, images, _ = read(open_inputs([str(tmp_path / "large.npz")], SHAPE))
    assert images.shape == (3, *SHAPE) and (images == 7).all()
    np.savez(tmp_path / "clips.npz", clips=np.zeros((2, 4, 8, 8, 3), np.uint8))
    assert len(read(open_inputs([str(tmp_path / "clips.npz")], (4, 8, 8, 3)))[0]) == 2


def test_a_model_of_one_channel_sees_the_luminance(tmp_path):
    path = picture(tmp_path / "x.png", (8, 8))
    _, images, _ = read(open_inputs([str(path)], (8, 8, 1)))
    np.testing.assert_array_equal(images[0, ..., 0], np.asarray(Image.open(path).convert("L")))


def bomb(path, side=30_000):
    """A PNG that says it has side x side pixels."""

    def chunk(kind, data):
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")))
    return path


def test_what_cannot_be_read_is_named_and_left_out(tmp_path, capsys):
    good = [picture(tmp_path / "a.png"), picture(tmp_path / "e.png", (1, 1)), picture(tmp_path / "f.png", (1, 900))]
    (tmp_path / "b.jpg").write_bytes(b"no image")
    (tmp_path / "c.png").write_bytes(b"")
    stream = io.BytesIO()
    Image.fromarray(ARRAYS[0]).save(stream, "PNG")
    (tmp_path / "d.png").write_bytes(stream.getvalue()[:60])
    bomb(tmp_path / "g.png")
    inputs = open_inputs([str(tmp_path)], SHAPE)
    names, images, _ = read(inputs, 3)
    assert names == [str(path) for path in good] and len(images) == 3
    assert sorted(inputs.bad) == [str(tmp_path / name) for name in ("b.jpg", "c.png", "d.png", "g.png")]
    told = capsys.readouterr().err
    assert told.count("cannot be read and is left out") == 4 and "decompression bomb" in told


@pytest.mark.slow
def test_a_huge_image_is_read(tmp_path):
    """Of more pixels than Pillow likes."""
    Image.new("L", (9600, 9600), 77).save(tmp_path / "huge.png")
    _, images, _ = read(open_inputs([str(tmp_path / "huge.png")], SHAPE))
    assert images.shape == (1, *SHAPE) and (images == 77).all()


def test_no_input_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("x")
    np.savez(tmp_path / "none.npz", images=np.zeros((0, *SHAPE), np.uint8))
    assert "type --input with files" in refusal([])
    assert "holds no image (.jpg, .jpeg" in refusal([tmp_path / "empty"])
    assert refusal([tmp_path / "others"]).endswith("and 1 other file")
    assert "holds no image" in refusal([tmp_path / "none.npz"])
    assert "there is no such file or folder" in refusal([tmp_path / "nowhere.png"])


@pytest.mark.parametrize(
    "arrays, shape, sentence",
    [
        ({"x": ARRAYS}, SHAPE, "holds x.npy: must hold images"),
        ({"images": ARRAYS}, (8, 8, 1), "are 8x8x3, and the model takes 8x8x1"),
        ({"images": ARRAYS.astype(int)}, SHAPE, "images are int64: save uint8"),
        ({"images": np.asfortranarray(ARRAYS)}, SHAPE, "in Fortran order"),
        ({"images": ARRAYS.astype(object)}, SHAPE, "Python objects"),
        ({"images": ARRAYS}, (4, 8, 8, 3), "the model takes 4x8x8x3"),
        ({"images": ARRAYS[:, 0, 0, 0]}, SHAPE, "have shape [5]: must be"),
        ({"images": ARRAYS.astype(np.float32)}, SHAPE, "no whole number of 255ths"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, arrays, shape, sentence):
    np.savez(tmp_path / "x.npz", **arrays)
    assert sentence in refusal([tmp_path / "x.npz"], shape)


def test_a_file_that_breaks_off_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", images=rng.integers(0, 256, (40, *SHAPE), np.uint8))
    whole = bytearray((tmp_path / "x.npz").read_bytes())
    (tmp_path / "short.npz").write_bytes(whole[:-100])
    assert "cannot be read as .npz" in refusal([tmp_path / "short.npz"])
    whole[len(whole) // 2] ^= 255
    (tmp_path / "x.npz").write_bytes(whole)
    assert "cannot be read to its end" in refusal([tmp_path / "x.npz"])


def test_image_files_are_not_for_models_of_clips_or_other_channels(tmp_path):
    path = picture(tmp_path / "x.png")
    assert "takes clips of 4 frames" in refusal([path], (4, 8, 8, 3))
    assert "takes 2 channels" in refusal([path], (8, 8, 2))
