"""The simple trunk: how it calls its cells, what lies between them, and what is read."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from cssm import models
from cssm.config import Config
from cssm.models.simple import Simple

CONFIG = Config(arch="simple", cssm="gated", depth=3, embed_dim=4, image_size=8, kernel_size=3, seq_len=3)


def randn(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def trunk(depth=2, **changes):
    """A trunk whose cells return zeros; and the list of (steps in, steps out) of each call."""
    calls = []

    class Nothing(nn.Module):
        @nn.compact
        def __call__(self, x, num_steps=None, last_only=False):
            y = jnp.broadcast_to(x, (x.shape[0], num_steps, *x.shape[2:])) if x.shape[1] == 1 else x
            y = y[:, -1:] if last_only else y
            calls.append((x.shape[1], y.shape[1]))
            return jnp.zeros_like(y)

    config = dataclasses.replace(CONFIG, depth=depth, **changes)
    fields = {field.name: getattr(models.build(config, 10), field.name) for field in dataclasses.fields(Simple)}
    mixer = lambda channels, name: Nothing(name=name)
    return Simple(**{**fields, "mixer": mixer, "name": None, "parent": None}), calls


def parameters(**changes):
    model = models.build(dataclasses.replace(CONFIG, **changes), 10)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]


def test_depth_counts_cells_and_norms_lie_between_them():
    names = {f"cell_{i}" for i in range(3)} | {"body_norm_0", "body_norm_1"}
    assert set(parameters(pos_embed="mrope")) == names | {"stem", "readout_norm", "norm_post", "head"}
    assert set(parameters(depth=1, pos_embed="mrope")) == {"cell_0", "stem", "readout_norm", "norm_post", "head"}
    assert set(parameters(pos_embed="learnable")) - set(parameters(pos_embed="mrope")) == {"positions"}


@pytest.mark.parametrize("layers,side", [(1, 4), (2, 2)])
def test_each_layer_of_the_stem_halves_the_map(layers, side):
    shapes = parameters(stem_layers=layers, pos_embed="learnable")
    assert shapes["positions"]["pos_embed"].shape == (side, side, 4)
    assert sum(name.startswith("conv") for name in shapes["stem"]) == layers


def test_a_still_image_is_unrolled_by_the_first_cell_and_the_last_returns_one_step():
    still, clip = randn(2, 8, 8, 1), randn(2, 5, 8, 8, 1)
    model, calls = trunk(depth=3, pos_embed="none")
    jax.eval_shape(model.init, jax.random.key(0), still)
    # The sum of a still image and its unrolled cell has every step.
    assert calls == [(1, 3), (3, 3), (3, 1)]
    for seq_len, steps in ((3, 3), (8, 8)):
        model, calls = trunk(depth=3, pos_embed="none", seq_len=seq_len)
        jax.eval_shape(model.init, jax.random.key(0), clip)
        assert calls == [(steps, steps), (steps, steps), (steps, 1)]
    model, calls = trunk(depth=2, pos_embed="none", frame_readout="all", n_register_tokens=2)
    jax.eval_shape(model.init, jax.random.key(0), still)
    assert calls == [(5, 5), (5, 5)]


def test_an_mlp_lies_between_cells():
    assert set(parameters(inter_mlp_ratio=2.0)) - set(parameters()) == {"mlp_0", "mlp_1"}
    assert parameters(inter_mlp_ratio=2.0)["mlp_0"]["up"]["kernel"].shape == (4, 8)


@pytest.mark.parametrize("change", [{"act_type": "relu"}, {"frame_readout": "all"}, {"pos_embed": "separate"}])
def test_an_option_changes_the_logits(change):
    images = randn(2, 8, 8, 1)
    logits = []
    for settings in ({}, change):
        model = models.build(dataclasses.replace(CONFIG, depth=1, **settings), 10)
        logits.append(jax.jit(model.init_with_output)(jax.random.key(0), images)[0])
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


def test_cells_are_residual():
    """With cells that return nothing the last frame goes through alone."""
    clip, key = randn(2, 3, 8, 8, 1), jax.random.key(0)
    model, _ = trunk(pos_embed="none")
    variables = {"params": laws.init(model, key, clip)}
    logits = jax.jit(model.apply)(variables, clip)
    np.testing.assert_allclose(logits, jax.jit(model.apply)(variables, clip[:, -1]), atol=1e-5)
    assert np.abs(logits - jax.jit(model.apply)(variables, clip[:, 0])).max() > 1e-3
