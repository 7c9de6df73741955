"""Trunks built from a configuration: names, parameters, shapes, still images, rematerialisation, reduced precision."""

import dataclasses
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trunks import count

from cssm import models
from cssm.config import ARCHS, Config
from cssm.models import in_block

SIZE = {"embed_dim": 8, "image_size": 8, "depth": 2}
SMALL = {**SIZE, "kernel_size": 3}
STAGES = {"dims": "4,8", "depths": "1,1", "image_size": 8, "kernel_size": 3, "seq_len": 3}
CONFIGS = {
    "simple hgru_bi": Config(arch="simple", seq_len=3, **SMALL),
    "simple gated": Config(arch="simple", cssm="gated", seq_len=3, stem_mode="pathtracker", **SMALL),
    "vit hgru_bi": Config(arch="vit", seq_len=3, **SMALL),
    "vit gated patches": Config(arch="vit", cssm="gated", seq_len=3, stem_mode="patch", patch_size=2, **SMALL),
    "baseline": Config(arch="baseline", num_heads=2, **SIZE),
    "convnext pure": Config(arch="convnext", cssm="gated", **STAGES),
    "convnext hybrid": Config(arch="convnext", convnext_block="hybrid", **STAGES),
    "shvit": Config(arch="shvit", cssm="gated", **{**STAGES, "dims": "4,8,8", "depths": "1,1,1"}),
    "shvit attention": Config(arch="shvit", late_mixer="attention", dims="4,8", depths="1,1", image_size=8),
}
STAGED = [pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if "convnext" in name or "shvit" in name]
QUICK = ("simple hgru_bi", "baseline")
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CONFIGS]
IMAGES = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 8, 1)), jnp.float32)


def test_the_names_of_trunks_are_those_of_the_command_line():
    assert tuple(models.MODELS) == ARCHS


@cache
def variables(name):
    return jax.jit(models.build(CONFIGS[name], 10).init)(jax.random.key(0), IMAGES)


@cache
def program(config):
    return jax.jit(models.build(config, 10).apply)


def apply(config, variables, images):
    return program(config)(variables, images)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_float32_and_differ_between_images(name):
    logits = apply(CONFIGS[name], variables(name), IMAGES)
    assert logits.shape == (2, 10) and logits.dtype == jnp.float32
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


@pytest.mark.parametrize("name", ["simple hgru_bi", "vit gated patches", "baseline", *STAGED])
def test_a_still_image_is_the_clip_of_its_copies(name):
    config = CONFIGS[name]
    clip = jnp.repeat(IMAGES[:, None], config.seq_len or 3, axis=1)
    np.testing.assert_allclose(apply(config, variables(name), IMAGES), apply(config, variables(name), clip), atol=2e-5)


@pytest.mark.parametrize("name", ["vit hgru_bi", *STAGED])
def test_the_last_frame_counts_and_earlier_ones_reach_it(name):
    clip = jnp.asarray(np.random.default_rng(1).standard_normal((1, 3, 8, 8, 1)), jnp.float32)
    changed = clip.at[:, 0].add(1.0)
    logits, other = (apply(CONFIGS[name], variables(name), x) for x in (clip, changed))
    assert np.abs(logits - other).max() > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit hgru_bi", *STAGED])
def test_rematerialised_blocks_have_the_same_parameters_gradients_and_names(name):
    config = CONFIGS[name]
    blocks = sum(in_block(key) for key in variables(name)["params"])

    def gradients(wrap_block):
        model = models.build(config, 10, wrap_block)
        loss = lambda v: jnp.sum(model.apply(v, IMAGES, train=True, mutable=["batch_stats"])[0] ** 2)
        return jax.jit(jax.grad(loss))(variables(name))

    plain, remat = gradients(None), gradients(nn.remat)
    traces = [
        str(jax.make_jaxpr(lambda v, w=wrap: models.build(config, 10, w).apply(v, IMAGES))(variables(name)))
        for wrap in (None, nn.remat)
    ]
    assert traces[1].count("prevent_cse") == traces[0].count("prevent_cse") + blocks
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), plain, remat)


@pytest.mark.parametrize("name", ["vit hgru_bi", *STAGED])
def test_bf16_has_float32_parameters_and_nearly_the_same_logits(name):
    config = dataclasses.replace(CONFIGS[name], dtype="bf16")
    low = apply(config, variables(name), IMAGES)
    full = apply(CONFIGS[name], variables(name), IMAGES)
    assert low.dtype == jnp.float32
    assert 0 < np.abs(low - full).max() < 0.1 * np.abs(full).max()
    shapes = jax.eval_shape(models.build(config, 10).init, jax.random.key(0), IMAGES)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("preset,width", [("tiny", 192), ("small", 384), ("base", 768)])
def test_presets_are_twelve_blocks_of_their_width(preset, width):
    config = Config(arch="vit", preset=preset, image_size=224)
    shapes = jax.eval_shape(models.build(config, 10).init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))["params"]
    assert sorted(name for name in shapes if name.startswith("block")) == sorted(f"block_{i}" for i in range(12))
    assert shapes["block_11"]["mlp"]["up"]["kernel"].shape == (width, 4 * width)
    assert shapes["positions"]["pos_embed"].shape == (56, 56, width)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext pure", "convnext hybrid", "shvit", "shvit attention"])
def test_drop_path_drops_each_example_by_itself(name):
    """Twice the same image in a batch; where they differ, a block was dropped for one of them."""
    config = dataclasses.replace(CONFIGS[name], drop_path_rate=0.5)
    twice = jnp.stack([IMAGES[0]] * 2)
    model = models.build(config, 10)

    @jax.jit
    def draw(key):
        return model.apply(variables(name), twice, train=True, mutable=["batch_stats"], rngs={"drop_path": key})[0]

    differ = [np.abs(np.subtract(*draw(jax.random.key(seed)))).max() > 1e-4 for seed in range(8)]
    assert any(differ) and not all(differ)


# Parameters as published: exact, with 2 classes ...
EDGE, ONE = {"embed_dim": 32, "stem_layers": 2, "gate_type": "dense"}, {"embed_dim": 64, "stem_layers": 1}
SIMPLE = [
    (257_858, 128, {**EDGE, "cssm": "hgru_bi", "kernel_size": 11}),
    (721_178, 224, {**EDGE, "cssm": "hgru_bi", "kernel_size": 11}),
    (1_247_132, 300, {**EDGE, "cssm": "hgru_bi", "kernel_size": 11}),
    (1_451_962, 224, {**EDGE, "cssm": "hgru_bi", "kernel_size": 11, "embed_dim": 64}),
    (56_980, 128, {**ONE, "cssm": "gdn", "kernel_size": 11, "delta_key_dim": 4, "qkv_conv_size": 5}),
    (34_085, 128, {**ONE, "cssm": "gated", "kernel_size": 1, "short_conv_spatial_size": 0}),
    (42_405, 128, {**ONE, "cssm": "gated", "kernel_size": 11}),
    (435_330, 128, {**ONE, "cssm": "gated", "kernel_size": 11, "gate_type": "dense"}),
    (14_210, 128, {**ONE, "cssm": "no_gate", "kernel_size": 11}),
    (40_834, 128, {**ONE, "cssm": "no_fft"}),
    (22_658, 128, {**ONE, "cssm": "conv_ssm", "kernel_size": 11}),
    (39_220, 32, {"embed_dim": 64, "cssm": "gdn", "kernel_size": 11, "delta_key_dim": 4, "stem_mode": "pathtracker"}),
]
# ... and in millions with 1000 classes, 224 pixels and dense gates. "none": attention over space alone.
PATCHES = {"stem_mode": "patch", "patch_size": 16}
VIT = {
    "hgru_bi": (56.48, 125.10, 299.48),
    "hgru_bi patch": (10.54, 33.44, 116.41),
    "gated": (17.30, 44.27, 127.40),
    "gated patch": (6.37, 22.46, 83.85),
    "transformer": (44.92, 102.03, 253.41),
    "baseline": (6.32, 24.43, 96.04),
    "baseline none": (5.72, 22.06, 86.58),
}


@pytest.mark.parametrize("params,side,settings", SIMPLE)
def test_simple_has_as_many_parameters_as_was_published(params, side, settings):
    assert count(2, side, arch="simple", pos_embed="none", **settings) == params


@pytest.mark.parametrize("preset", [pytest.param(name, marks=pytest.mark.slow) for name in ("tiny", "small", "base")])
def test_vit_and_baseline_have_as_many_parameters_as_was_published(preset):
    for name, millions in VIT.items():
        kind, *options = name.split()
        settings = PATCHES if kind == "baseline" or options == ["patch"] else {"stem_stride": 4}
        if kind == "baseline":
            settings = {**settings, "arch": "baseline", "temporal_attn_every": 0 if options else 3}
        else:
            settings = {**settings, "arch": "vit", "cssm": kind, "gate_type": "dense", "kernel_size": 11}
        found = count(1000, preset=preset, pos_embed="learnable", **settings)
        assert round(found / 1e6, 2) == millions[("tiny", "small", "base").index(preset)], name
