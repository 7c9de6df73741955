"""Augmentation on the device: from the uint8 images and labels that arrived to what the loss of training sees.

What becomes of an example follows from (seed, step, its position in the global batch) and, where two are mixed, from
its partner, which is its neighbour there: positions 2i and 2i + 1 are a pair. So neither the number of devices, nor
of processes, nor of accumulated passes changes anything, as long as each pass of a device holds whole pairs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from cssm.config import Config, UserError
from cssm.rand_augment import rand_augment

Batch = dict[str, jax.Array]
# Streams of random numbers: one set away from those of devices (which count from 0), then one for each purpose.
STREAM = 1 << 20
FLIP, OPERATIONS, ERASING, MIXING = range(4)
# Random erasing (Zhong et al. 2020): share of the area, ratio of the sides, proposals.
ERASED_AREA, ERASED_RATIO, ERASED_TRIES = (0.02, 1 / 3), (0.3, 1 / 0.3), 10


def make_augment(config: Config) -> Callable[[jax.Array, jax.Array, Batch], Batch] | None:
    """(key of the step, positions int32 [b] in the global batch, batch) -> the batch augmented; None: nothing to do.

    image uint8 [b, ..., H, W, C] becomes float32, still from 0 to 255. Where examples are mixed, b is even, label
    becomes the heavier of the two, and there are also other_label int32 [b] and share float32 [b]: of the label,
    from 0.5 to 1. The rest of the batch stays; with a mask, an example is not mixed with one that is left out.
    """
    mixes = bool(config.mixup or config.cutmix)
    if not (mixes or _alone(config)):
        return None

    def augment(step_key: jax.Array, positions: jax.Array, batch: Batch) -> Batch:
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(step_key, STREAM)))(positions)
        batch = batch | {"image": batch["image"].astype(jnp.float32)}
        if _alone(config):
            batch["image"] = jax.vmap(partial(_one, config))(keys, batch["image"])
        return _mixed(config, keys, batch) if mixes else batch

    return augment


def mixed_with(batch: Batch) -> tuple[jax.Array, jax.Array] | None:
    """(other_label, share) of an augmented batch; None where no examples are mixed."""
    return (batch["other_label"], batch["share"]) if "share" in batch else None


def unaugmented(config: Config) -> Config:
    """The same with none of this: for what is counted, and does not depend on it."""
    return replace(config, mixup=0.0, cutmix=0.0, random_erasing=0.0, rand_augment=None, flip=None)


def check_pairs(config: Config, batch_size: int) -> None:
    """UserError where a pass of a device would hold half a pair."""
    name = "mixup" if config.mixup else "cutmix"
    if (config.mixup or config.cutmix) and batch_size % 2:
        raise UserError(
            f"--{name} mixes neighbours in pairs, and a pass of a device has {batch_size} images: "
            f"type --batch_size {batch_size + 1}, or another even number"
        )


def _alone(config: Config) -> bool:
    """Whether anything is done to an example by itself."""
    return bool(config.flips_on_device or config.rand_augment or config.random_erasing)


def _one(config: Config, key: jax.Array, image: jax.Array) -> jax.Array:
    """One image or clip [..., H, W, C]: mirrored, operated on, erased, in this order."""
    if config.flips_on_device:
        mirrored = jax.random.bernoulli(jax.random.fold_in(key, FLIP))
        image = jnp.where(mirrored, image[..., ::-1, :], image)
    if operations := config.operations:
        image = rand_augment(jax.random.fold_in(key, OPERATIONS), image, *operations, mean_level(config))
    if config.random_erasing:
        image = _erased(config, jax.random.fold_in(key, ERASING), image)
    return image


def mean_level(config: Config) -> jax.Array:
    """What is 0 once it is normalised, to a whole level: [C], or [] where channels have no statistics."""
    mean = 0.5 if config.pixel_statistics is None else config.pixel_statistics[0]
    return jnp.round(jnp.asarray(mean, jnp.float32) * 255)


def _erased(config: Config, key: jax.Array, image: jax.Array) -> jax.Array:
    """With a probability, a rectangle takes the mean level; of ten proposals the first that fits, of all frames."""
    height, width = image.shape[-3:-1]
    chance, sides, place = jax.random.split(key, 3)
    area, ratio = jax.random.uniform(sides, (2, ERASED_TRIES))
    area = height * width * (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * area)
    low, high = (jnp.log(side) for side in ERASED_RATIO)
    ratio = jnp.exp(low + (high - low) * ratio)
    heights, widths = jnp.round(jnp.sqrt(area * ratio)), jnp.round(jnp.sqrt(area / ratio))
    fits = (heights >= 1) & (heights < height) & (widths >= 1) & (widths < width)
    first = jnp.argmax(fits)
    down, right = jax.random.uniform(place, (2,))
    top = jnp.floor(down * (height - heights[first] + 1))
    left = jnp.floor(right * (width - widths[first] + 1))
    inside = _box(height, width, top, left, top + heights[first], left + widths[first])
    erase = jax.random.bernoulli(chance, config.random_erasing) & fits.any()
    return jnp.where(inside & erase, mean_level(config), image)


def _mixed(config: Config, keys: jax.Array, batch: Batch) -> Batch:
    """Each example mixed with the other of its pair, in a share of its own."""
    images, labels = batch["image"], batch["label"]
    weights, share = jax.vmap(partial(_weights, config, *images.shape[-3:-1]))(keys)
    if "mask" in batch:
        alone = partner(batch["mask"]) == 0
        weights = jnp.where(alone[:, None, None, None], 1.0, weights)
        share = jnp.where(alone, 1.0, share)
    weights = weights.reshape(len(images), *(1,) * (images.ndim - 4), *weights.shape[1:])
    heavier = share >= 0.5
    return batch | {
        "image": weights * images + (1 - weights) * partner(images),
        "label": jnp.where(heavier, labels, partner(labels)),
        "other_label": jnp.where(heavier, partner(labels), labels),
        "share": jnp.maximum(share, 1 - share),
    }


def partner(x: jax.Array) -> jax.Array:
    """[b, ...] with the two of each pair in each other's place."""
    return x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape)


def _weights(config: Config, height: int, width: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(how much of each pixel is an example's own [H, W, 1], how much of the whole []).

    mixup (Zhang et al. 2018): the same everywhere. cutmix (Yun et al. 2019): none in a box, which is cut off at the
    border, all around it. With both, each example takes one of the two by a coin.
    """
    coin, beta, place = jax.random.split(jax.random.fold_in(key, MIXING), 3)
    cuts = jax.random.bernoulli(coin) if config.mixup and config.cutmix else bool(config.cutmix)
    alpha = jnp.where(cuts, config.cutmix, config.mixup).astype(jnp.float32)
    own = jax.random.beta(beta, alpha, alpha, dtype=jnp.float32)
    half = jnp.sqrt(1 - own) / 2
    y, x = jax.random.uniform(place, (2,))
    top, low = (jnp.round(jnp.clip(height * (y + side), 0, height)) for side in (-half, half))
    left, right = (jnp.round(jnp.clip(width * (x + side), 0, width)) for side in (-half, half))
    box = _box(height, width, top, left, low, right)
    kept = 1 - (low - top) * (right - left) / (height * width)
    return jnp.where(cuts, jnp.where(box, 0.0, 1.0), own), jnp.where(cuts, kept, own)


def _box(height: int, width: int, top: jax.Array, left: jax.Array, low: jax.Array, right: jax.Array) -> jax.Array:
    """bool [H, W, 1]: rows top to low, columns left to right, without the last."""
    y, x = jnp.arange(height)[:, None, None], jnp.arange(width)[None, :, None]
    return (y >= top) & (y < low) & (x >= left) & (x < right)
