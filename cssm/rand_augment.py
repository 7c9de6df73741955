"""RandAugment (Cubuk et al. 2020) in JAX: its 14 operations on one image or clip, whichever is drawn, without a branch.

Under vmap a branch computes all its sides. So an operation is the numbers of three stages that every image passes: a
warp, a table of the 256 levels for each channel, and a blend with a second image; two of them change nothing. Images
are float32 [..., H, W, C] of whole numbers from 0 to 255, rounded between stages as Pillow rounds them; all frames of a
clip are treated alike, and what is measured (a histogram, a mean) is measured over all of them.
"""

import jax
import jax.numpy as jnp

OPERATIONS = (
    *("identity", "auto_contrast", "equalize", "rotate", "solarize", "color", "posterize"),
    *("contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
# How far each goes at magnitude 10.
DEGREES, SHEAR, SHIFT = 30.0, 0.3, 0.45  # the shift in sides of the image
ENHANCE = 0.9  # factors from 1 - 0.9 to 1 + 0.9
POSTERIZED_BITS = 4
# Weights of red, green and blue in a grey value, of 65536 (ITU-R 601-2)
LUMA = (19595, 38470, 7471)


def rand_augment(key: jax.Array, image: jax.Array, ops: int, magnitude: float, fill: jax.Array) -> jax.Array:
    """`ops` operations, one after the other, each drawn from all and with a sign of its own; magnitude from 0 to 10.

    fill: [C] or [], the level of what a warp uncovers.
    """

    def one(image: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        which, sign = jax.random.split(key)
        drawn = jax.random.randint(which, (), 0, len(OPERATIONS))
        amount = jnp.where(jax.random.bernoulli(sign), 1.0, -1.0) * (magnitude / 10)
        return operate(image, drawn, amount, fill), None

    return jax.lax.scan(one, image, jax.random.split(key, ops))[0]  # one program, however many


def operate(image: jax.Array, which: jax.Array | int, amount: jax.Array | float, fill: jax.Array | float) -> jax.Array:
    """OPERATIONS[which]. amount: from -1 to 1; 0 changes nothing, except that auto_contrast and equalize have none.

    The sign is a direction, or less or more; solarize and posterize go by the size alone.
    """
    amount = jnp.asarray(amount, jnp.float32)
    chosen = {name: jnp.asarray(which == i) for i, name in enumerate(OPERATIONS)}
    image = _warped(image, _matrix(chosen, amount, *image.shape[-3:-1]), fill)
    image = _looked_up(image, chosen, amount)
    factor = jnp.where(chosen["color"] | chosen["sharpness"], 1 + ENHANCE * amount, 1.0)
    return _blend(jnp.where(chosen["color"], _grey(image), _smooth(image)), image, factor)


def _matrix(chosen: dict[str, jax.Array], amount: jax.Array, height: int, width: int) -> tuple[jax.Array, ...]:
    """a, b, c, d, e, f: the pixel at (x, y) is taken from (ax + by + c, dx + ey + f), as in Pillow."""

    def only(name: str, value: jax.Array) -> jax.Array:
        return jnp.where(chosen[name], value, 0.0)

    angle = only("rotate", amount * jnp.radians(DEGREES))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x, y = width / 2, height / 2  # the centre, about which is turned
    b, d = only("shear_x", SHEAR * amount) - sin, only("shear_y", SHEAR * amount) + sin
    c = only("translate_x", SHIFT * width * amount) + x - cos * x + sin * y
    f = only("translate_y", SHIFT * height * amount) + y - sin * x - cos * y
    return cos, b, c, d, cos, f


def _warped(image: jax.Array, matrix: tuple[jax.Array, ...], fill: jax.Array | float) -> jax.Array:
    """Bilinear. What comes from outside of the image is `fill`."""
    height, width = image.shape[-3:-1]
    a, b, c, d, e, f = matrix
    x, y = jnp.arange(width, dtype=jnp.float32) + 0.5, jnp.arange(height, dtype=jnp.float32)[:, None] + 0.5
    left, top = a * x + b * y + c, d * x + e * y + f
    inside = (left >= 0) & (left < width) & (top >= 0) & (top < height)
    column, row = jnp.floor(left - 0.5), jnp.floor(top - 0.5)
    right_share, low_share = (left - 0.5 - column)[..., None], (top - 0.5 - row)[..., None]

    def pick(down: int, right: int) -> jax.Array:
        rows = jnp.clip(row.astype(jnp.int32) + down, 0, height - 1)
        return image[..., rows, jnp.clip(column.astype(jnp.int32) + right, 0, width - 1), :]

    upper = pick(0, 0) + (pick(0, 1) - pick(0, 0)) * right_share
    lower = pick(1, 0) + (pick(1, 1) - pick(1, 0)) * right_share
    return jnp.where(inside[..., None], jnp.round(upper + (lower - upper) * low_share), fill)


def _looked_up(image: jax.Array, chosen: dict[str, jax.Array], amount: jax.Array) -> jax.Array:
    """Every level replaced by that of a table [C, 256]."""
    index, channel = image.astype(jnp.int32), jnp.arange(image.shape[-1])
    counts = jnp.zeros((image.shape[-1], 256), jnp.int32).at[channel, index].add(1)
    levels = jnp.broadcast_to(jnp.arange(256), counts.shape)
    size, factor = jnp.abs(amount), 1 + ENHANCE * amount
    step = 2 ** jnp.round(POSTERIZED_BITS * size).astype(jnp.int32)
    tables = {
        "auto_contrast": _stretched(counts, levels),
        "equalize": _equalized(counts, levels),
        "solarize": jnp.where(levels < 256 * (1 - size), levels, 255 - levels),
        "posterize": levels // step * step,
        "brightness": _blend(0.0, levels, factor),
        "contrast": _blend(jnp.floor(_grey(image).mean() + 0.5), levels, factor),
    }
    table = levels.astype(jnp.float32)
    for name, other in tables.items():
        table = jnp.where(chosen[name], other.astype(jnp.float32), table)
    return table[channel, index]


def _stretched(counts: jax.Array, levels: jax.Array) -> jax.Array:
    """The darkest level of a channel becomes 0, the lightest 255; where they are one, nothing changes."""
    low = jnp.argmax(counts > 0, axis=-1, keepdims=True)
    high = 255 - jnp.argmax(counts[:, ::-1] > 0, axis=-1, keepdims=True)
    stretched = jnp.clip((levels - low) * 255 // jnp.maximum(high - low, 1), 0, 255)
    return jnp.where(high > low, stretched, levels)


def _equalized(counts: jax.Array, levels: jax.Array) -> jax.Array:
    """All levels about equally frequent, by the rule of Pillow's ImageOps.equalize."""
    lightest = 255 - jnp.argmax(counts[:, ::-1] > 0, axis=-1, keepdims=True)
    others = counts.sum(-1, keepdims=True) - jnp.take_along_axis(counts, lightest, axis=-1)
    step = others // 255
    below = jnp.cumsum(counts, axis=-1) - counts
    return jnp.where(step > 0, jnp.clip((below + step // 2) // jnp.maximum(step, 1), 0, 255), levels)


def _grey(image: jax.Array) -> jax.Array:
    """[..., H, W, 1], whole numbers: of three channels the luminance, otherwise their mean."""
    values = image.astype(jnp.int32)
    weights = LUMA if image.shape[-1] == 3 else (1,) * image.shape[-1]
    total = sum(weights)
    weighted = (values * jnp.asarray(weights, jnp.int32)).sum(-1, keepdims=True)
    return ((weighted + total // 2) // total).astype(jnp.float32)


def _smooth(image: jax.Array) -> jax.Array:
    """A 3x3 mean in which the centre counts five times; the border as it is."""
    height, width = image.shape[-3:-1]
    if min(height, width) < 3:
        return image
    parts = [image[..., i : height - 2 + i, j : width - 2 + j, :] for i in range(3) for j in range(3)]
    inner = jnp.floor((sum(parts) + 4 * parts[4]) / 13 + 0.5)
    sides = [(0, 0)] * (image.ndim - 3) + [(1, 1), (1, 1), (0, 0)]
    is_inner = jnp.pad(jnp.ones(inner.shape[-3:], bool), sides[-3:])
    return jnp.where(is_inner, jnp.pad(inner, sides), image)


def _blend(other: jax.Array | float, image: jax.Array, factor: jax.Array) -> jax.Array:
    """From `other` (factor 0) to the image (1) and beyond, cut to whole numbers from 0 to 255."""
    return jnp.clip(jnp.floor(other + factor * (image - other)), 0, 255)
