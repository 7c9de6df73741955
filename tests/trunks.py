"""What tests of trunks share: the calls of their parts, their parameters, and the layers of blocks in plain numpy."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import laws
import numpy as np

from cssm import models
from cssm.config import Config


def calls(model, kind, note, images):
    """note(module, x) of every call of a module of this kind (or one of these), in order; nothing is computed."""
    notes = []

    def listen(call, args, kwargs, context):
        if isinstance(context.module, kind) and context.method_name == "__call__":
            notes.append(note(context.module, args[0]))
        return call(*args, **kwargs)

    with nn.intercept_methods(listen):
        jax.eval_shape(lambda key: model.init(key, images), jax.random.key(0))
    return notes


def variables_of(config, images, num_classes=10):
    """Shapes of the parameters and statistics, traced once for all tests that ask for the same."""
    return _variables_of(config, images.shape, num_classes)


@functools.cache
def _variables_of(config, shape, num_classes):
    return jax.eval_shape(models.build(config, num_classes).init, jax.random.key(0), jnp.zeros(shape))


def count(num_classes, side=224, **settings):
    """Parameters of a model of colour images."""
    config = Config(image_size=side, **settings)
    shapes = variables_of(config, jnp.zeros((1, side, side, 3)), num_classes)["params"]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


class Doubled(nn.Module):
    """In a cell's place: step t of x, or of a still image, times t + 2."""

    @nn.compact
    def __call__(self, x, num_steps=None, last_only=False):
        y = (
            jnp.broadcast_to(x, (x.shape[0], num_steps, *x.shape[2:]))
            * jnp.arange(2, num_steps + 2)[:, None, None, None]
        )
        return y[:, -1:] if last_only else y


def moved(block, x, key):
    """Parameters of a block, moved off their start, as a dict of numpy arrays in float64."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64) + 0.3 * rng.normal(size=leaf.shape), laws.init(block, key, x)
    )


def normed(p, x, axes=(-1,)):
    centred = x - x.mean(axes, keepdims=True)
    return p["scale"] * centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-6) + p["bias"]


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def depthwise(p, x):
    """Each channel by itself, zeros beyond the border; kernel [k, k, 1, C]."""
    kernel, (height, width) = p["kernel"][:, :, 0], x.shape[2:4]
    half = len(kernel) // 2
    padded = np.pad(x, ((0, 0), (0, 0), (half, half), (half, half), (0, 0)))
    taps = [
        kernel[i, j] * padded[:, :, i : i + height, j : j + width]
        for i in range(len(kernel))
        for j in range(len(kernel))
    ]
    return sum(taps) + p["bias"]


def mlp(p, x):
    hidden = gelu(dense(p["up"], x))
    return dense(p["down"], hidden + depthwise(p["dwconv"], hidden) if "dwconv" in p else hidden)
