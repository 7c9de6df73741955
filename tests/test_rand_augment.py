"""Each operation of RandAugment against Pillow."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from cssm.rand_augment import OPERATIONS, operate, rand_augment

FILL = 77
AMOUNTS = (-1.0, -0.37, 0.5, 1.0)


def picture(height=20, width=31, channels=3, seed=0):
    """Smooth shades with some noise, so that histograms have gaps and interpolation has slopes."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    planes = [90 + 60 * np.sin(x / (3 + c)) + 40 * np.cos(y / (4 - c)) for c in range(channels)]
    noisy = np.stack(planes, -1) + rng.integers(-9, 10, (height, width, channels))
    return np.clip(noisy, 8, 240).astype(np.uint8)


def pillow(image, name, amount):
    """The operation as Pillow has it."""
    picture = Image.fromarray(image if image.shape[-1] == 3 else image[..., 0])
    width, height = picture.size
    fill = (FILL,) * 3 if picture.mode == "RGB" else FILL

    def warped(*matrix):
        return picture.transform(
            picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill
        )

    enhanced = {"color": "Color", "contrast": "Contrast", "brightness": "Brightness", "sharpness": "Sharpness"}
    if name in enhanced:
        result = getattr(ImageEnhance, enhanced[name])(picture).enhance(1 + 0.9 * amount)
    else:
        result = {
            "identity": lambda: picture,
            "auto_contrast": lambda: ImageOps.autocontrast(picture),
            "equalize": lambda: ImageOps.equalize(picture),
            "rotate": lambda: picture.rotate(30 * amount, Image.Resampling.BILINEAR, fillcolor=fill),
            "solarize": lambda: ImageOps.solarize(picture, math.ceil(256 * (1 - abs(amount)))),
            "posterize": lambda: ImageOps.posterize(picture, 8 - round(4 * abs(amount))),
            "shear_x": lambda: warped(1, 0.3 * amount, 0, 0, 1, 0),
            "shear_y": lambda: warped(1, 0, 0, 0.3 * amount, 1, 0),
            "translate_x": lambda: warped(1, 0, 0.45 * width * amount, 0, 1, 0),
            "translate_y": lambda: warped(1, 0, 0, 0, 1, 0.45 * height * amount),
        }[name]()
    return np.asarray(result).reshape(image.shape)


@jax.jit
def each(images, amounts):
    """[image, operation, amount, ...]; one program for each shape."""
    one = lambda image, which, amount: operate(image.astype(jnp.float32), which, amount, FILL)
    over_amounts = jax.vmap(one, (None, None, 0))
    over_operations = jax.vmap(over_amounts, (None, 0, None))
    return jax.vmap(over_operations, (0, None, None))(images, jnp.arange(len(OPERATIONS)), amounts)


def every(images, amounts):
    """Of each image, by name and amount."""
    done = np.asarray(each(np.stack(images), np.asarray(amounts, np.float32)))
    return [{n: dict(zip(amounts, per, strict=True)) for n, per in zip(OPERATIONS, i, strict=True)} for i in done]


@pytest.mark.parametrize("channels", [1, 3])
def test_operations_are_pillows(channels):
    """To one level: Pillow cuts off where a warp here rounds, and some sums are of other precision."""
    images = [picture(channels=channels, seed=seed) for seed in (0, 1)]
    for image, found in zip(images, every(images, AMOUNTS), strict=True):
        for name, amount in ((name, amount) for name in OPERATIONS for amount in AMOUNTS):
            got, want = found[name][amount], pillow(image, name, amount)
            assert (got == np.round(got)).all() and got.min() >= 0 and got.max() <= 255
            off = np.abs(got - want)
            assert off.max() <= 1, (name, amount)
            if name not in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
                assert (off > 0).mean() < 0.02, (name, amount)
            changes = name != "identity" and not (name == "color" and channels == 1)
            assert changes == (want != image).any()


def test_without_an_amount_nothing_changes():
    """Except that the two operations that have none are done in full."""
    image = picture()
    for name, found in every([image] * 2, [0.0] * 4)[0].items():
        assert (found[0.0] == image).all() == (name not in ("auto_contrast", "equalize")), name


@pytest.mark.parametrize("image", [np.full((4, 5, 3), 200, np.uint8), picture(2, 2, 2)])
def test_flat_and_tiny_images_stay_in_range(image):
    for name, found in every([image], [0.8, -0.8])[0].items():
        for got in found.values():
            assert got.shape == image.shape and np.isfinite(got).all() and 0 <= got.min() <= got.max() <= 255
            if len(image) == 4 and name in ("auto_contrast", "equalize"):
                assert (got == 200).all(), "one level cannot be spread"


def test_all_frames_of_a_clip_are_treated_alike():
    """Of two frames one has a part of the other's levels: with a histogram each they would be mapped differently."""
    first = picture(8, 8)
    clip = np.stack([first, np.clip(first, 60, 120), first[::-1]])
    same = clip[0] == clip[1]
    found, alone = every([clip], [0.6])[0], every([clip[2:]], [0.6])[0]
    for name in OPERATIONS:
        got = found[name][0.6]
        if name in ("auto_contrast", "equalize", "contrast"):
            np.testing.assert_array_equal(got[0][same], got[1][same], err_msg=name)
            np.testing.assert_array_equal(got[0], got[2][::-1], err_msg=name)
        else:
            np.testing.assert_array_equal(got[2], alone[name][0.6][0], err_msg=name)


def test_operations_are_drawn_alike_and_with_both_signs():
    image = picture(6, 6)
    draw = lambda key: rand_augment(key, jnp.asarray(image, jnp.float32), 1, 7.0, jnp.float32(FILL))
    drawn = [one.tobytes() for one in np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 600)))]
    possible = every([image], [0.7, -0.7])[0]
    assert set(drawn) == {got.tobytes() for found in possible.values() for got in found.values()}
    unchanged = np.mean([one == image.astype(np.float32).tobytes() for one in drawn])
    assert abs(unchanged - 1 / 14) < 0.04
