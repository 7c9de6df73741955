"""The ViT trunk: residual blocks, the last step, stochastic depth, and the pooled frames of the baseline."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from trunks import calls

from cssm import models
from cssm.cells.attention import MLP
from cssm.cells.core import LayerNorm, ResidualNorm
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


@functools.cache
def parameters(config, **changes):
    return jax.eval_shape(built(config, **changes).init, jax.random.key(0), STILL)["params"]


def seen(kind, note, config, images=CLIP, **how):
    return calls(built(config, **how), kind, note, images)


@pytest.mark.parametrize("config", [RECURRENT, BASELINE], ids=["recurrent", "baseline"])
def test_depth_counts_blocks_and_each_has_its_norms_and_scales(config):
    shapes = parameters(config)
    assert set(shapes) == {"stem", "positions", "block_0", "block_1", "block_2", "head_norm", "head"}
    parts = {"mixer_norm", "mixer", "mixer_scale", "mlp_norm", "mlp", "mlp_scale"}
    assert all(set(shapes[f"block_{i}"]) == parts for i in range(3))


@pytest.mark.parametrize("images,steps", [(STILL, 1), (CLIP, 3)], ids=["still", "clip"])
def test_only_the_last_step_leaves_the_last_block(images, steps):
    """A still image is unrolled by the first cell; the last block's MLP, and the head, run for one step."""
    assert seen((LayerNorm, ResidualNorm), lambda m, x: x.shape[1], RECURRENT, images, norm_type="layer") == [
        *(steps, steps),  # of the stem and of block 0
        *(3, 3, 3, 3, 1, 1),
    ]
    assert seen(MLP, lambda m, x: x.shape[1], RECURRENT, images) == [3, 3, 1]
    assert seen(MLP, lambda m, x: x.shape[1], BASELINE, images) == [images.shape[1] if images is CLIP else 1] * 3
    assert seen(MLP, lambda m, x: x.shape[1], RECURRENT, images, frame_readout="all") == [3, 3, 3]


@pytest.mark.parametrize("seq_len,frames", [(3, 3), (5, 5), (10, 5)])
def test_the_stem_sees_no_frame_twice_and_none_that_no_step_shows(seq_len, frames):
    assert seen(blocks.StridedStem, lambda m, x: x.shape[1], RECURRENT, seq_len=seq_len) == [frames]
    assert seen(MLP, lambda m, x: x.shape[1], RECURRENT, seq_len=seq_len) == [seq_len, seq_len, 1]


def test_registers_come_before_the_first_step_and_are_not_read():
    def steps(**how):
        return seen(MLP, lambda m, x: x.shape[1], RECURRENT, n_register_tokens=2, **how)

    assert steps() == [5, 5, 1]
    assert seen(blocks.RegisterTokens, lambda m, x: x.shape[1], RECURRENT, STILL, n_register_tokens=2) == [1]
    everything = {"n_register_tokens": 2, "frame_readout": "all"}
    last = seen(nn.Dense, lambda m, x: x.shape[1] if m.name == "head" else None, RECURRENT, **everything)[-1]
    assert last == 3


def test_attention_over_time_comes_after_every_so_many_blocks():
    shapes = parameters(BASELINE, temporal_attn_every=2)
    assert set(shapes) - set(parameters(BASELINE)) == {"block_1_time"}
    model = built(BASELINE, temporal_attn_every=2, layer_scale_init=1.0)
    variables = {"params": laws.init(model, jax.random.key(0), STILL)}
    apply = jax.jit(lambda images: model.apply(variables, images))
    frames = apply(CLIP.reshape(10, 8, 8, 1)).reshape(2, 5, 10)
    assert np.abs(apply(CLIP) - frames.mean(1)).max() > 1e-3, "frames do not mix"


@functools.cache
def first_logits(**changes):
    model = built(RECURRENT, cssm="no_gate", gate_type=None, depth=1, **changes)
    return jax.jit(model.init_with_output)(jax.random.key(0), STILL)[0]


@pytest.mark.parametrize(
    "change,added",
    [
        ({"use_dwconv": True}, {"dwconv"}),
        ({"output_act": "silu"}, set()),
        ({"readout_act": "none"}, set()),
        ({"pos_embed": "separate"}, set()),
    ],
)
def test_an_option_of_the_trunk_changes_what_it_says(change, added):
    """Same parameters but for those added, other logits."""

    def names(**how):
        leaves = jax.tree_util.tree_leaves_with_path(parameters(RECURRENT, **how))
        return {path[-2].key for path, _ in leaves}

    assert names(**change) - names() == added
    assert np.abs(first_logits(**change) - first_logits()).max() > 1e-3


def test_drop_path_rates_rise_linearly_to_the_last_block():
    rates = seen(blocks.DropPath, lambda m, x: m.rate, RECURRENT, drop_path_rate=0.3)
    np.testing.assert_allclose(rates, [0.0, 0.0, 0.15, 0.15, 0.3, 0.3])
    assert seen(blocks.DropPath, lambda m, x: m.rate, RECURRENT, drop_path_rate=0.3, depth=1) == [0.0, 0.0]


def test_the_baseline_pools_all_frames():
    """Frames do not mix, so that the mean over a clip is the mean of its frames."""
    model = built(BASELINE)
    variables = {"params": laws.init(model, jax.random.key(0), STILL)}
    apply = jax.jit(lambda images: model.apply(variables, images))
    whole = apply(CLIP)
    frames = apply(CLIP.reshape(10, 8, 8, 1)).reshape(2, 5, 10)
    np.testing.assert_allclose(whole, frames.mean(1), atol=1e-5)
    assert np.abs(whole - frames[:, -1]).max() > 1e-3


@pytest.mark.slow
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
