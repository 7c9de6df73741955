"""An image file, or its pixels, to uint8 pixels by Pillow: which way up, which colours, which part, how large."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from cssm.data.draw import folded
from cssm.data.examples import UNREADABLE

Box = tuple[float, float, float, float]  # left, top, right, bottom
ORIENTATION = 0x0112  # the EXIF tag, and what to do where it has a value
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)
BEFORE_PIXELS = ("JPEG", "MPO")  # formats whose EXIF is known before the pixels are decoded
DRAWS = 22  # random numbers that a crop takes
TRIES = 10
RATIOS = (3 / 4, 4 / 3)
CROP = 1  # stream of random numbers


def photo(file: Path | memoryview, size: int, box_of: Callable[[int, int], Box], mirrored: bool = False) -> np.ndarray:
    """uint8 [size, size, 3]: the part box_of(width, height) of an image, antialiased; mirrored: left to right. `file`:
    a path, or what the file holds.

    EXIF orientation is followed. Grey values are copied to three channels, palettes and CMYK converted, transparent
    parts show white, 16 bits are rounded to 8. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that is enough.
    OSError, ValueError or another of UNREADABLE for a file that is no image, or damaged.
    """
    with _opened(file) as image:
        turn = _orientation(image)
        width, height = image.size[::-1] if turn in SIDEWAYS else image.size
        left, top, right, bottom = box_of(width, height)
        shrink = max(1.0, min(right - left, bottom - top) / size)
        # Of an image that lies on its side too: both sides shrink alike.
        drafted = image.draft(None, (math.ceil(image.width / shrink), math.ceil(image.height / shrink)))
        scale = drafted[1][2] / (height if turn in SIDEWAYS else width) if drafted else 1.0
        pixels = _rgb(image)
        if turn in UPRIGHT:
            pixels = pixels.transpose(UPRIGHT[turn])
        box = (left * scale, top * scale, min(right * scale, pixels.width), min(bottom * scale, pixels.height))
        return _taken(pixels, size, box, mirrored)


def cropped(image: np.ndarray, size: int, box_of: Callable[[int, int], Box], mirrored: bool = False) -> np.ndarray:
    """uint8 [H, W, 1 or 3] -> [size, size, 1 or 3]: what `photo` takes of a file that holds these pixels. An image that
    is taken whole, at its size, is not copied.
    """
    height, width, channels = image.shape
    box = box_of(width, height)
    if box == (0, 0, width, height) and height == width == size:
        return _mirrored(image) if mirrored else image
    pixels = _taken(Image.fromarray(image[..., 0] if channels == 1 else image), size, box, mirrored)
    return pixels[..., None] if channels == 1 else pixels


def _taken(pixels: Image.Image, size: int, box: Box, mirrored: bool) -> np.ndarray:
    pixels = pixels.resize((size, size), Image.Resampling.BILINEAR, box)
    return np.asarray(pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else pixels)


def _mirrored(image: np.ndarray) -> np.ndarray:
    """Left to right, pixel by pixel, which takes less than half the time of channel by channel."""
    whole = np.ascontiguousarray(image).view(f"V{image.shape[-1]}")
    return np.ascontiguousarray(whole[:, ::-1]).view(np.uint8)


def grey(path: Path) -> np.ndarray:
    """uint8 [S, S, 1] of a square image without colours."""
    with _opened(path) as image:
        pixels = image if image.mode == "L" else _rgb(image)
        if image.mode != "L":
            channels = np.asarray(pixels)
            if (channels != channels[..., :1]).any():
                raise ValueError("it has colours, where grey was expected")
            pixels = pixels.convert("L")
        if pixels.width != pixels.height:
            raise ValueError(f"it is {pixels.width}x{pixels.height} pixels, not square")
        return np.asarray(pixels)[..., None]


def resized(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 [H, H, 1] -> [size, size, 1], bilinear, antialiased; as it is where it has that size."""
    if size == len(image):
        return image
    plane = Image.fromarray(image[..., 0])
    return np.asarray(plane.resize((size, size), Image.Resampling.BILINEAR))[..., None]


def squared(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 [H, W, C] -> [size, size, C], each channel by itself: the largest square in the middle, antialiased."""
    box = central(image.shape[1], image.shape[0])
    planes = [Image.fromarray(np.ascontiguousarray(image[..., c])) for c in range(image.shape[-1])]
    resized = [plane.resize((size, size), Image.Resampling.BILINEAR, box) for plane in planes]
    return np.stack([np.asarray(plane) for plane in resized], -1)


def central(width: int, height: int) -> Box:
    """The largest square in the middle."""
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def random_part(width: int, height: int, least: float, number: Callable[[int], float]) -> Box:
    """A part with a share of the area from `least` to 1 and a ratio of sides from 3/4 to 4/3 (Szegedy et al. 2015).

    number(i): one of DRAWS, uniform in [0, 1). Where ten proposals do not fit, the largest part in the middle whose
    ratio is allowed.
    """
    low, high = (math.log(ratio) for ratio in RATIOS)
    for i in range(TRIES):
        area = width * height * (least + (1 - least) * number(2 * i))
        ratio = math.exp(low + (high - low) * number(2 * i + 1))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(number(DRAWS - 2) * (width - w + 1)), int(number(DRAWS - 1) * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIOS[1])), min(height, round(width / RATIOS[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def view(seed: int, epoch: int | None, index: int, crop_scale: float, flip: bool) -> tuple[Callable[..., Box], bool]:
    """What `photo` takes of an example: for training (in an epoch from 0) a random part with at least the share
    crop_scale of its area, and mirrored in half of the epochs with `flip`; both follow from (seed, epoch, index). The
    largest square in the middle where crop_scale is 1, and for evaluation (epoch None).
    """
    if epoch is None or (crop_scale == 1 and not flip):
        return central, False
    key = folded(_of_epoch(seed, epoch), index, 0)
    part = partial(random_part, least=crop_scale, number=partial(_number, key)) if crop_scale < 1 else central
    return part, flip and _number(key, -1) < 0.5


@lru_cache(maxsize=16)
def _of_epoch(seed: int, epoch: int) -> int:
    return folded(0, CROP, seed, epoch)


def _number(key: int, i: int) -> float:
    """One of the numbers of an example, in [0, 1): -1 decides on the mirror, those from 0 on make its part."""
    return (folded(key, 1 + i) >> 11) * 2.0**-53


@contextmanager
def _opened(file: Path | memoryview) -> Iterator[Image.Image]:
    if not (file.stat().st_size if isinstance(file, Path) else file):
        raise ValueError("the file is empty")
    try:
        with Image.open(file if isinstance(file, Path) else BytesIO(file)) as image:
            yield image
    except UnidentifiedImageError:
        raise ValueError("it is no image, or of no kind that Pillow knows") from None
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error


def _orientation(image: Image.Image) -> int:
    """The value of the EXIF tag, 1 where there is none that can be read."""
    if image.format not in BEFORE_PIXELS:
        image.load()  # looking for EXIF would; what is wrong with the pixels must be told here
    try:
        return image.getexif().get(ORIENTATION, 1)
    except UNREADABLE:
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode.startswith("I"):
        image = Image.fromarray(_eight_bits(np.asarray(image)))
    elif image.mode == "F":
        raise ValueError("its pixels are floating-point numbers")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _eight_bits(values: np.ndarray) -> np.ndarray:
    """0 .. 65535 -> uint8 0 .. 255, to the nearest."""
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("its pixels have more than 16 bits")
    return ((values.astype(np.int64) * 255 + 32767) // 65535).astype(np.uint8)
