"""Trunks built from a configuration: names, parameters, shapes, still images, rematerialisation, reduced precision."""

import dataclasses
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm import models
from cssm.config import ARCHS, Config

SIZE = {"embed_dim": 8, "image_size": 8, "depth": 2}
SMALL = {**SIZE, "kernel_size": 3}
CONFIGS = {
    "simple hgru_bi": Config(arch="simple", seq_len=3, **SMALL),
    "simple gated": Config(arch="simple", cssm="gated", seq_len=3, stem_mode="pathtracker", **SMALL),
    "vit hgru_bi": Config(arch="vit", seq_len=3, **SMALL),
    "vit gated patches": Config(arch="vit", cssm="gated", seq_len=3, stem_mode="patch", patch_size=2, **SMALL),
    "baseline": Config(arch="baseline", num_heads=2, **SIZE),
}
IMAGES = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 8, 1)), jnp.float32)


def test_the_names_of_trunks_are_those_of_the_command_line():
    assert tuple(models.MODELS) == ARCHS


@cache
def variables(name):
    return jax.jit(models.build(CONFIGS[name], 10).init)(jax.random.key(0), IMAGES)


def apply(config, variables, images, **how):
    return jax.jit(lambda v, x: models.build(config, 10, **how).apply(v, x))(variables, images)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_float32_and_differ_between_images(name):
    logits = apply(CONFIGS[name], variables(name), IMAGES)
    assert logits.shape == (2, 10) and logits.dtype == jnp.float32
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


@pytest.mark.parametrize("name", ["simple hgru_bi", "vit gated patches", "baseline"])
def test_a_still_image_is_the_clip_of_its_copies(name):
    config = CONFIGS[name]
    clip = jnp.repeat(IMAGES[:, None], config.seq_len or 3, axis=1)
    np.testing.assert_allclose(apply(config, variables(name), IMAGES), apply(config, variables(name), clip), atol=2e-5)


def test_the_last_frame_counts_and_earlier_ones_reach_it_through_the_cell():
    name = "vit hgru_bi"
    clip = jnp.asarray(np.random.default_rng(1).standard_normal((1, 3, 8, 8, 1)), jnp.float32)
    changed = clip.at[:, 0].add(1.0)
    logits, other = (apply(CONFIGS[name], variables(name), x) for x in (clip, changed))
    assert np.abs(logits - other).max() > 1e-5


def test_rematerialised_blocks_have_the_same_parameters_gradients_and_names():
    config = CONFIGS["vit hgru_bi"]

    def gradients(wrap_block):
        model = models.build(config, 10, wrap_block)
        return jax.jit(jax.grad(lambda v: jnp.sum(model.apply(v, IMAGES, train=True) ** 2)))(variables("vit hgru_bi"))

    plain, remat = gradients(None), gradients(nn.remat)
    traces = [
        str(jax.make_jaxpr(lambda v, w=wrap: models.build(config, 10, w).apply(v, IMAGES))(variables("vit hgru_bi")))
        for wrap in (None, nn.remat)
    ]
    assert traces[1].count("prevent_cse") == traces[0].count("prevent_cse") + config.depth
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), plain, remat)


def test_bf16_has_float32_parameters_and_nearly_the_same_logits():
    config = dataclasses.replace(CONFIGS["vit hgru_bi"], dtype="bf16")
    low = apply(config, variables("vit hgru_bi"), IMAGES)
    full = apply(CONFIGS["vit hgru_bi"], variables("vit hgru_bi"), IMAGES)
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
