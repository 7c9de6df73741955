"""The ViT trunk: residual blocks, the last step, stochastic depth, and the pooled frames of the baseline."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm import models
from cssm.cells.attention import MLP
from cssm.config import Config
from cssm.models import blocks

SIZE = {"depth": 3, "embed_dim": 4, "image_size": 8, "mlp_ratio": 1.0}
RECURRENT = Config(arch="vit", cssm="gated", kernel_size=3, seq_len=3, **SIZE)
BASELINE = Config(arch="baseline", num_heads=2, pool_type="mean", **SIZE)
STILL, CLIP = (
    jnp.asarray(np.random.default_rng(0).standard_normal(s), jnp.float32) for s in ((2, 8, 8, 1), (2, 5, 8, 8, 1))
)


def built(config, **changes):
    return models.build(dataclasses.replace(config, **changes), 10)


def parameters(config, **changes):
    return jax.eval_shape(built(config, **changes).init, jax.random.key(0), STILL)["params"]


def seen(kind, note, config, images=CLIP, **how):
    """note(module, x) of every call of a module of this kind, in order; nothing is computed."""
    notes = []

    def listen(call, args, kwargs, context):
        if isinstance(context.module, kind) and context.method_name == "__call__":
            notes.append(note(context.module, args[0]))
        return call(*args, **kwargs)

    with nn.intercept_methods(listen):
        jax.eval_shape(lambda key: built(config, **how).init(key, images), jax.random.key(0))
    return notes


@pytest.mark.parametrize("config", [RECURRENT, BASELINE], ids=["recurrent", "baseline"])
def test_depth_counts_blocks_and_each_has_its_norms_and_scales(config):
    shapes = parameters(config)
    assert set(shapes) == {"stem", "positions", "block_0", "block_1", "block_2", "head_norm", "head"}
    parts = {"mixer_norm", "mixer", "mixer_scale", "mlp_norm", "mlp", "mlp_scale"}
    assert all(set(shapes[f"block_{i}"]) == parts for i in range(3))


@pytest.mark.parametrize("images,steps", [(STILL, [1, 3, 3]), (CLIP, [5, 5, 5])], ids=["still", "clip"])
def test_only_the_last_step_leaves_the_last_block(images, steps):
    """A still image is unrolled by the first cell; the last block's MLP, and the head, run for one step."""
    unrolled = steps[1]
    assert seen(nn.LayerNorm, lambda m, x: x.shape[1], RECURRENT, images, norm_type="layer") == [
        *(steps[:1] * 2),  # of the stem and of block 0
        *(unrolled, unrolled, unrolled, unrolled, 1, 1),
    ]
    assert seen(MLP, lambda m, x: x.shape[1], RECURRENT, images) == [unrolled, unrolled, 1]
    assert seen(MLP, lambda m, x: x.shape[1], BASELINE, images) == [steps[0]] * 3


def test_drop_path_rates_rise_linearly_to_the_last_block():
    rates = seen(blocks.DropPath, lambda m, x: m.rate, RECURRENT, drop_path_rate=0.3)
    np.testing.assert_allclose(rates, [0.0, 0.0, 0.15, 0.15, 0.3, 0.3])
    assert seen(blocks.DropPath, lambda m, x: m.rate, RECURRENT, drop_path_rate=0.3, depth=1) == [0.0, 0.0]


def test_the_baseline_pools_all_frames():
    """Frames do not mix, so that the mean over a clip is the mean of its frames."""
    model = built(BASELINE)
    variables = jax.jit(model.init)(jax.random.key(0), STILL)
    apply = jax.jit(lambda images: model.apply(variables, images))
    whole = apply(CLIP)
    frames = apply(CLIP.reshape(10, 8, 8, 1)).reshape(2, 5, 10)
    np.testing.assert_allclose(whole, frames.mean(1), atol=1e-5)
    assert np.abs(whole - frames[:, -1]).max() > 1e-3


def test_blocks_are_residual():
    """With layer scale at nothing, all that a block could add is gone, and the last frame alone is read."""
    model = built(RECURRENT, layer_scale_init=1e-30)
    variables = jax.jit(model.init)(jax.random.key(0), CLIP)
    apply = jax.jit(lambda v, images: model.apply(v, images))
    logits = apply(variables, CLIP)
    np.testing.assert_allclose(logits, apply(variables, CLIP[:, -1]), atol=1e-6)
    assert np.abs(logits - apply(variables, CLIP[:, 0])).max() > 1e-3
    scaled = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 1.0 if path[-1].key == "gamma" else leaf, variables
    )
    assert np.abs(logits - apply(scaled, CLIP)).max() > 1e-3


def test_a_wrapper_goes_round_each_block():
    wrapped = []

    def wrap(block):
        wrapped.append(block.__name__)
        return block

    model = models.build(RECURRENT, 10, wrap)
    jax.eval_shape(model.init, jax.random.key(0), STILL)
    assert wrapped == ["Block"]
