"""The shvit trunk: convolutions early and cells or attention late, batch norm between them, and where steps are."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trunks import Doubled, calls, count, dense, depthwise, gelu, mlp, moved, normed, variables_of

from cssm import models
from cssm.cells.attention import MLP
from cssm.cells.gated import Gated
from cssm.config import Config
from cssm.models import blocks
from cssm.models.shvit import AttentionBlock, CellBlock, ConvBlock

SIZE = {"dims": "4,6,8", "depths": "1,1,2", "stem_stride": 1, "image_size": 8, "mlp_ratio": 2.0}
CELLS = Config(arch="shvit", cssm="gated", kernel_size=2, seq_len=3, **SIZE)
ATTENTION = Config(arch="shvit", late_mixer="attention", **SIZE)
STILL, CLIP = (
    jnp.asarray(np.random.default_rng(0).standard_normal(s), jnp.float32) for s in ((2, 8, 8, 1), (2, 5, 8, 8, 1))
)


def seen(kind, note, config, images=CLIP, **how):
    return calls(models.build(dataclasses.replace(config, **how), 10), kind, note, images)


@pytest.mark.parametrize(
    "config,parts",
    [
        (CELLS, {"mixer_norm", "pos_conv", "mixer", "mlp_norm", "mlp"}),
        (ATTENTION, {"mixer_norm", "mixer", "mlp_norm", "mlp"}),
    ],
    ids=["cells", "attention"],
)
def test_the_last_two_stages_mix_and_those_before_are_convolutions(config, parts):
    shapes = variables_of(config, STILL)["params"]
    between = {"stem", "downsample_1", "downsample_2", "head_norm", "head"}
    assert set(shapes) == between | {f"block_{i}" for i in range(4)}
    assert set(shapes["block_0"]) == {"conv_norm", "conv", "proj", "mlp_norm", "mlp"}
    assert all(set(shapes[f"block_{i}"]) == parts for i in (1, 2, 3))
    assert ["dwconv" in shapes[f"block_{i}"]["mlp"] for i in range(4)] == [False, True, True, True]


@pytest.mark.parametrize("stride,side", [(1, 8), (2, 4), (4, 2)])
def test_the_stem_has_two_convolutions_of_which_as_many_have_a_stride_as_asked(stride, side):
    size = lambda module, x: x.shape[2:]
    sizes = seen(MLP, size, CELLS, stem_stride=stride, dims="4,6", depths="1,1")
    assert sizes == [(side, side, 4), (side // 2, side // 2, 6)]
    stem = variables_of(dataclasses.replace(CELLS, stem_stride=stride, image_size=16), STILL)["params"]["stem"]
    assert stem["conv_0"]["kernel"].shape == (3, 3, 1, 2)
    assert stem["conv_1"]["kernel"].shape == (3, 3, 2, 4)


def test_the_norm_of_stem_and_downsampling_is_batch_norm_unless_another_is_asked_for():
    stats = variables_of(CELLS, STILL)["batch_stats"]
    assert set(stats) == {"stem", "downsample_1", "downsample_2"}
    assert set(stats["stem"]) == {"norm_0", "norm_1"}
    for kind in ("layer", "instance", "global_layer"):
        other = variables_of(dataclasses.replace(CELLS, norm_type=kind), STILL)
        assert set(other) == {"params"}
        assert set(other["params"]) == set(variables_of(CELLS, STILL)["params"])


def test_a_still_image_is_one_frame_between_blocks_and_a_clip_keeps_its_steps():
    frames = lambda module, x: x.shape[1]
    assert seen(MLP, frames, CELLS, STILL) == [1, 1, 1, 1]
    assert seen(MLP, frames, CELLS) == [3, 3, 3, 1]
    # The early stages see the frames of a clip once, however many steps show them.
    assert seen(MLP, frames, CELLS, seq_len=10) == [5, 10, 10, 1]
    assert seen(MLP, frames, ATTENTION) == [5, 5, 5, 5]
    # Every cell of a still image takes its steps, and hands on the last.
    steps = []

    def note(calling, args, kwargs, context):
        if isinstance(context.module, Gated) and context.method_name == "__call__":
            steps.append((kwargs["num_steps"], kwargs["last_only"]))
        return calling(*args, **kwargs)

    with nn.intercept_methods(note):
        for images in (STILL, CLIP):
            jax.eval_shape(models.build(CELLS, 10).init, jax.random.key(0), images)
    assert steps == [(3, True)] * 3 + [(3, False)] * 2 + [(3, True)]


def test_drop_path_rates_rise_over_all_stages():
    rates = seen(blocks.DropPath, lambda m, x: m.rate, CELLS, drop_path_rate=0.3)
    np.testing.assert_allclose(rates, np.repeat([0.0, 0.1, 0.2, 0.3], 2), atol=1e-9)


def attention(p, x):
    """One head over the pixels of each frame; x [B, T, H, W, C]."""
    tokens = dense(p["qkv"], x).reshape(*x.shape[:2], -1, 3, x.shape[-1])
    q, k, v = (tokens[:, :, :, i] for i in range(3))
    weights = np.exp(np.einsum("btqc,btkc->btqk", q, k) / np.sqrt(x.shape[-1]))
    weights /= weights.sum(-1, keepdims=True)
    y = np.einsum("btqk,btkc->btqc", weights, v).reshape(x.shape)
    return dense(p["proj"], y + depthwise(p["pos_conv"], y))


def equations(block, p, z, last_only):
    if block is ConvBlock:
        z = z + dense(p["proj"], gelu(depthwise(p["conv"], normed(p["conv_norm"], z))))
    elif block is AttentionBlock:
        z = z + attention(p["mixer"], normed(p["mixer_norm"], z))
    else:
        y = normed(p["mixer_norm"], z, axes=(1, 2, 3, 4))
        y = np.arange(2, 5)[:, None, None, None] * (y + depthwise(p["pos_conv"], y))
        z = z + np.tanh(y)
        z = z[:, -1:] if last_only else z
    return z + mlp(p["mlp"], normed(p["mlp_norm"], z))


@pytest.mark.parametrize(
    "block,steps,last_only",
    [(ConvBlock, 2, False), (AttentionBlock, 2, False), (CellBlock, 3, False), (CellBlock, 1, True)],
)
def test_a_block_is_its_equations(block, steps, last_only, key):
    """docs/math.md, section 5, in plain float64."""
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, steps, 8, 5, 4)), jnp.float32)
    cell = {"mixer": lambda channels, name: Doubled(name=name), "output_act": jnp.tanh, "num_steps": 3}
    shared = {"mlp_ratio": 2.0, "drop_path_rate": 0.0, "train": False, "dtype": jnp.float32}
    module = block(**shared, **({**cell, "last_only": last_only} if block is CellBlock else {}))
    p = moved(module, x, key)
    got = jax.jit(module.apply)({"params": jax.tree.map(jnp.float32, p)}, x)
    np.testing.assert_allclose(got, equations(block, p, np.asarray(x, np.float64), last_only), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "preset,attention,gated,gdn",
    [
        ("s1", 5.41, 5.18, 5.79),
        pytest.param("s2", 9.46, 9.04, 10.13, marks=pytest.mark.slow),
        pytest.param("s3", 12.88, 12.27, 13.83, marks=pytest.mark.slow),
        pytest.param("s4", 15.26, 14.54, 16.35, marks=pytest.mark.slow),
    ],
)
def test_it_has_as_many_parameters_as_was_published(preset, attention, gated, gdn):
    def millions(**settings):
        return round(count(1000, arch="shvit", preset=preset, **settings) / 1e6, 2)

    assert millions(late_mixer="attention") == attention
    assert millions(cssm="gated", kernel_size=1, short_conv_spatial_size=0) == gated
    assert millions(cssm="gdn", kernel_size=5) == gdn


def test_each_class_of_blocks_is_wrapped_once():
    wrapped = []
    wrap = lambda block: wrapped.append(block.__name__) or block
    for config in (CELLS, ATTENTION):
        jax.eval_shape(models.build(config, 10, wrap).init, jax.random.key(0), STILL)
    assert wrapped == ["ConvBlock", "CellBlock", "ConvBlock", "AttentionBlock"]


def test_running_statistics_move_in_training_and_are_used_in_evaluation(key):
    """A tenth of the way to the batch's at each step."""
    model = models.build(dataclasses.replace(ATTENTION, dims="4,4", depths="1,1"), 10)
    variables = jax.jit(model.init)(key, STILL)
    train = jax.jit(lambda v, x: model.apply(v, x, train=True, mutable=["batch_stats"]))
    logits, updates = train(variables, STILL)
    conv = variables["params"]["stem"]["conv_0"]["kernel"]
    maps = jax.lax.conv_general_dilated(STILL, conv, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    want = 0.9 * 1 + 0.1 * np.asarray(maps).var((0, 1, 2))
    np.testing.assert_allclose(updates["batch_stats"]["stem"]["norm_0"]["var"], want, rtol=1e-5)
    evaluate = jax.jit(model.apply)
    before, after = evaluate(variables, STILL), evaluate({**variables, **updates}, STILL)
    assert np.abs(before - logits).max() > 1e-3, "evaluation normalises with the batch"
    assert np.abs(before - after).max() > 1e-4, "evaluation does not see the statistics"
