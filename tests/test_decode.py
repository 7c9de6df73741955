"""Files to pixels: every kind of colour, every orientation, any part, at any reduced size."""

import numpy as np
import pytest
from PIL import Image

from cssm.data.decode import DRAWS, UPRIGHT, central, cropped, grey, photo, random_part, resized, view
from cssm.data.draw import bits, fold
from cssm.data.examples import UNREADABLE

rng = np.random.default_rng(0)
NOISE = rng.integers(0, 256, (12, 12, 3), np.uint8)
# Smooth, so that reductions of it can be compared.
Y, X = np.mgrid[:480, :640]
SMOOTH = np.stack([X // 3, Y // 2, (X + Y) // 5], -1).clip(0, 255).astype(np.uint8)


def write(path, pixels, mode=None, **how):
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path, **how)
    return path


def whole(width, height):
    return 0, 0, width, height


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.PNG", "a.webp", "a.tif", "a.tiff", "a.ppm"])
def test_an_image_of_the_right_size_is_not_touched(tmp_path, name):
    path = write(tmp_path / name, NOISE, **({"lossless": True} if name == "a.webp" else {}))
    np.testing.assert_array_equal(photo(path, 12, central), NOISE)
    np.testing.assert_array_equal(photo(path, 12, central, mirrored=True), NOISE[:, ::-1])


COLOURS = {
    "grey": (Image.fromarray(NOISE[..., 0]), np.repeat(NOISE[..., :1], 3, -1)),
    "black and white": (Image.fromarray(NOISE[..., 0] > 127), np.repeat((NOISE[..., :1] > 127) * 255, 3, -1)),
    "palette": (Image.fromarray(NOISE // 128 * 255).convert("P", palette=Image.Palette.ADAPTIVE), NOISE // 128 * 255),
    "16 bits": (
        Image.fromarray(NOISE[..., 0].astype(np.uint16) * 257 + 100),
        np.repeat((NOISE[..., :1].astype(int) * 257 + 100).clip(0, 65535) * 255 // 65535, 3, -1),
    ),
    "opaque": (Image.fromarray(np.dstack([NOISE, np.full((12, 12), 255, np.uint8)])), NOISE),
    "transparent": (Image.fromarray(np.dstack([NOISE, np.zeros((12, 12), np.uint8)])), np.full_like(NOISE, 255)),
    "grey, transparent": (Image.fromarray(NOISE[..., :2] * np.uint8([1, 0])), np.full_like(NOISE, 255)),
}


@pytest.mark.parametrize("kind", COLOURS)
def test_all_colours_become_three_channels(tmp_path, kind):
    image, expected = COLOURS[kind]
    found = photo(write(tmp_path / "a.png", image), 12, central)
    assert found.shape == (12, 12, 3) and found.dtype == np.uint8
    assert np.abs(found.astype(int) - expected).max() <= (1 if kind == "16 bits" else 0)


def test_a_palette_with_a_transparent_colour_shows_white_there(tmp_path):
    image = Image.fromarray(NOISE // 128 * 255).convert("P", palette=Image.Palette.ADAPTIVE)
    path = write(tmp_path / "a.png", image, transparency=0)
    hidden = np.asarray(image) == 0
    found = photo(path, 12, central)
    assert hidden.any() and (found[hidden] == 255).all()
    np.testing.assert_array_equal(found[~hidden], (NOISE // 128 * 255)[~hidden])


def test_cmyk_has_the_colours_that_it_shows(tmp_path):
    flat = np.broadcast_to(np.uint8([200, 60, 20]), (16, 16, 3))
    path = write(tmp_path / "a.jpg", Image.fromarray(flat), "CMYK", quality=95)
    assert np.abs(photo(path, 16, central).astype(int) - flat).max() <= 6


@pytest.mark.parametrize("orientation", [1, *UPRIGHT])
@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_a_photo_is_turned_upright_and_its_parts_with_it(tmp_path, name, orientation):
    upright = Image.fromarray(SMOOTH)
    back = {6: 8, 8: 6}.get(orientation, orientation)  # the others undo themselves
    stored = upright if orientation == 1 else upright.transpose(UPRIGHT[back])
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = write(tmp_path / name, stored, exif=exif, **({"quality": 95} if name == "a.jpg" else {}))
    box = (400, 40, 600, 240)
    expected = np.asarray(upright.resize((50, 50), Image.Resampling.BILINEAR, box)).astype(int)
    sizes = []

    def part(width, height):
        sizes.append((width, height))
        return box

    assert np.abs(photo(path, 50, part) - expected).max() <= (6 if name == "a.jpg" else 0)
    assert sizes == [(640, 480)]


@pytest.mark.parametrize("size", [480, 239, 120, 60, 31])
def test_a_jpeg_is_decoded_at_reduced_size_to_the_same_picture(tmp_path, size, monkeypatch):
    path = write(tmp_path / "a.jpg", SMOOTH, quality=95)
    expected = np.asarray(Image.fromarray(SMOOTH).resize((size, size), Image.Resampling.BILINEAR, central(640, 480)))
    decoded = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda self, *a, **k: decoded.append(self.size) or resize(self, *a, **k))
    assert np.abs(photo(path, size, central).astype(int) - expected).max() <= 4
    times = {480: 1, 239: 2, 120: 4, 60: 8, 31: 8}[size]
    assert decoded == [(640 // times, 480 // times)]


def test_broken_exif_is_no_orientation(tmp_path):
    path = write(tmp_path / "a.jpg", SMOOTH, exif=b"Exif\0\0nonsense", quality=95)
    assert photo(path, 480, central).shape == (480, 480, 3)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp", "a.webp", "a.gif", "a.tif", "a.ppm"])
def test_damaged_files_say_so(tmp_path, name):
    content = write(tmp_path / name, SMOOTH).read_bytes()
    for damaged, why in ((b"", "the file is empty"), (b"text", "no image"), (content[: len(content) // 2], "")):
        (tmp_path / name).write_bytes(damaged)
        for read in (lambda path: photo(path, 30, central), grey):
            with pytest.raises(UNREADABLE) as error:
                read(tmp_path / name)
            assert why in str(error.value)
    with pytest.raises(FileNotFoundError):
        photo(tmp_path / "b.png", 30, central)


@pytest.mark.parametrize("name", ["a.gif", "a.tiff"])
def test_of_several_frames_the_first_is_taken(tmp_path, name):
    first, second = (Image.fromarray(np.full((12, 12, 3), level, np.uint8)) for level in (255, 0))
    first.save(tmp_path / name, save_all=True, append_images=[second])
    np.testing.assert_array_equal(photo(tmp_path / name, 12, central), np.full((12, 12, 3), 255))


def test_grey_images_have_one_channel_and_no_colours(tmp_path):
    plane = NOISE[..., 0]
    for mode in ("L", "RGB", "P"):
        np.testing.assert_array_equal(grey(write(tmp_path / "a.png", plane, mode))[..., 0], plane)
    half = np.asarray(Image.fromarray(plane).resize((6, 6), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(resized(plane[..., None], 6)[..., 0], half)
    for wrong, why in ((NOISE, "colours"), (plane[:6], "12x6 pixels, not square")):
        with pytest.raises(ValueError, match=why):
            grey(write(tmp_path / "a.png", wrong))


@pytest.mark.parametrize("width, height", [(640, 480), (480, 640), (30, 30), (1, 1), (1000, 10), (10, 1000), (3, 2)])
@pytest.mark.parametrize("least", [0.08, 0.5, 1.0])
def test_random_parts_lie_inside_and_have_the_area_and_the_ratio_asked_for(width, height, least):
    shares, ratios = [], []
    for _ in range(300):
        left, top, right, bottom = random_part(width, height, least, rng.random(DRAWS).tolist().__getitem__)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        shares.append((right - left) * (bottom - top) / (width * height))
        ratios.append((right - left) / (bottom - top))
    if min(width, height) > 100:
        assert min(ratios) > 0.74 and max(ratios) < 1.35
        assert min(shares) > least - 0.02
        assert least == 1 or (min(shares) < least + 0.1 and np.std(ratios) > 0.1)


def test_the_centre():
    assert central(640, 480) == (80, 0, 560, 480)
    assert central(3, 6) == (0, 1, 3, 4)


@pytest.mark.parametrize("seed, epoch, index", [(0, 0, 0), (3, 7, 1_234_567), (2**31, 89, 5)])
def test_a_view_takes_the_numbers_of_its_seed_epoch_and_index(seed, epoch, index):
    key = np.zeros(1, np.uint64)
    for word in (1, seed, epoch, index):
        key = fold(key, word)
    numbers = ((bits(key, 0, 1 + DRAWS)[0] >> np.uint64(11)) * 2.0**-53).tolist()
    part, mirrored = view(seed, epoch, index, 0.08, flip=True)
    assert mirrored == (numbers[0] < 0.5)
    assert part(1000, 10) == random_part(1000, 10, 0.08, numbers[1:].__getitem__), "after many tries"
    assert part(640, 480) == random_part(640, 480, 0.08, numbers[1:].__getitem__)
    assert view(seed, epoch, index, 1.0, flip=True) == (central, mirrored)
    assert view(seed, None, index, 0.08, flip=True) == view(seed, epoch, index, 1.0, flip=False) == (central, False)


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_cropped_as_those_of_a_file(tmp_path, channels):
    image = rng.integers(0, 256, (31, 40, channels), np.uint8)
    path = write(tmp_path / "a.png", image if channels == 3 else image[..., 0])
    for size in (8, 31, 50):
        for box in ((0, 0, 40, 31), (9, 0, 40, 31), (3, 2, 20, 30)):
            for mirrored in (False, True):
                found = cropped(image, size, lambda w, h, box=box: box if (w, h) == (40, 31) else None, mirrored)
                expected = photo(path, size, lambda w, h, box=box: box, mirrored)
                np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)
                assert found.shape == (size, size, channels)
