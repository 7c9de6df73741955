"""The convnext trunk: its stages and blocks, when steps begin, and what is read."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trunks import Doubled, calls, count, dense, depthwise, mlp, moved, normed, variables_of

from cssm import models
from cssm.cells.attention import MLP
from cssm.config import Config
from cssm.models import blocks
from cssm.models.convnext import HybridBlock, PureBlock

PURE = Config(
    arch="convnext", cssm="gated", dims="4,6", depths="1,2", stem_stride=2, image_size=8, kernel_size=2, seq_len=3
)
HYBRID = dataclasses.replace(PURE, convnext_block="hybrid")
STILL, CLIP = (
    jnp.asarray(np.random.default_rng(0).standard_normal(s), jnp.float32) for s in ((2, 8, 8, 1), (2, 5, 8, 8, 1))
)


def seen(kind, note, config, images=CLIP, **how):
    return calls(models.build(dataclasses.replace(config, **how), 10), kind, note, images)


@pytest.mark.parametrize(
    "config,parts",
    [
        (PURE, {"mixer_norm", "mixer", "mlp", "mlp_scale"}),
        (HYBRID, {"conv", "mlp_norm", "mlp", "mlp_scale", "mixer_norm", "mixer", "mixed_norm"}),
    ],
    ids=["pure", "hybrid"],
)
def test_blocks_are_numbered_through_all_stages(config, parts):
    shapes = variables_of(config, STILL)["params"]
    between = {"stem", "stem_norm", "downsample_norm_1", "downsample_1", "head_norm", "head"}
    assert set(shapes) == between | {"block_0", "block_1", "block_2"}
    assert all(set(shapes[f"block_{i}"]) == parts for i in range(3))


def test_stages_have_their_width_and_half_the_map_of_the_last():
    size = lambda module, x: x.shape[2:]
    assert seen(MLP, size, PURE) == [(4, 4, 4), (2, 2, 6), (2, 2, 6)]
    odd = seen(MLP, size, PURE, jnp.zeros((1, 9, 9, 1)), image_size=9, stem_stride=1)
    assert odd == [(9, 9, 4), (5, 5, 6), (5, 5, 6)]
    assert variables_of(PURE, STILL)["params"]["downsample_1"]["kernel"].shape == (2, 2, 4, 6)


@pytest.mark.parametrize("images,steps", [(STILL, 1), (CLIP, 3)], ids=["still", "clip"])
def test_every_step_passes_every_block_and_the_last_is_read(images, steps):
    frames = lambda module, x: x.shape[1]
    assert seen(MLP, frames, PURE, images) == [3, 3, 1]
    assert seen(MLP, frames, PURE, images, frame_readout="all") == [3, 3, 3]
    assert seen(MLP, frames, PURE, images, n_register_tokens=2) == [5, 5, 1]
    # A convolution comes before the first cell: it sees a still image once.
    assert seen(MLP, frames, HYBRID, images) == [steps, 3, 3]


@pytest.mark.parametrize("how,steps", [({}, 1), ({"frame_readout": "all"}, 3)])
def test_steps_that_are_read_are_pooled_and_registers_are_not(how, steps, monkeypatch):
    pooled = []
    pool = blocks.pool
    monkeypatch.setattr(blocks, "pool", lambda x, kind: pooled.append(x.shape) or pool(x, kind))
    variables_of(dataclasses.replace(PURE, n_register_tokens=2, **how), STILL)
    assert pooled == [(2, steps, 2, 2, 6)]


def test_the_stem_sees_no_frame_that_no_step_shows():
    stem = lambda m, x: x.shape[1] if m.name == "stem" else None
    assert seen(nn.Conv, stem, PURE)[0] == 3
    assert seen(nn.Conv, stem, PURE, seq_len=10)[0] == 5
    assert seen(nn.Conv, stem, PURE, STILL)[0] == 1


def test_drop_path_rates_rise_over_all_stages():
    rates = seen(blocks.DropPath, lambda m, x: m.rate, PURE, drop_path_rate=0.3)
    np.testing.assert_allclose(rates, [0.0, 0.15, 0.3])
    rates = seen(blocks.DropPath, lambda m, x: m.rate, HYBRID, drop_path_rate=0.3)
    np.testing.assert_allclose(rates, [0.0, 0.0, 0.15, 0.15, 0.3, 0.3])


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("block", [PureBlock, HybridBlock])
def test_a_block_is_its_equations(block, last_only, key):
    """docs/math.md, section 5, in plain float64."""
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 1, 8, 5, 4)), jnp.float32)
    mixer = lambda channels, name: Doubled(name=name)
    module = block(mixer, 2.0, 0.5, 0.0, 3, last_only, False, jnp.float32)
    p = moved(module, x, key)
    got = jax.jit(module.apply)({"params": jax.tree.map(jnp.float32, p)}, x)
    z, steps = np.asarray(x, np.float64), np.arange(2, 5)[:, None, None, None]
    scaled = lambda y: p["mlp_scale"]["gamma"] * mlp(p["mlp"], y)
    if block is PureBlock:
        want = z + scaled(steps * normed(p["mixer_norm"], z))
    else:
        z = z + scaled(normed(p["mlp_norm"], depthwise(p["conv"], z)))
        want = z + normed(p["mixed_norm"], steps * normed(p["mixer_norm"], z))
    np.testing.assert_allclose(got, want[:, -1:] if last_only else want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind,millions", [("pure", 11.45), ("hybrid", 11.53)])
def test_it_has_as_many_parameters_as_was_published(kind, millions):
    """ModelFactory with gated's own defaults there: dense gates and kernels of 15."""
    sizes = {"preset": "tiny", "cssm": "gated", "gate_type": "dense", "kernel_size": 15}
    assert round(count(10, arch="convnext", convnext_block=kind, **sizes) / 1e6, 2) == millions


def test_one_class_of_blocks_is_wrapped():
    wrapped = []
    wrap = lambda block: wrapped.append(block.__name__) or block
    for config in (PURE, HYBRID):
        jax.eval_shape(models.build(config, 10, wrap).init, jax.random.key(0), STILL)
    assert wrapped == ["PureBlock", "HybridBlock"]


@pytest.mark.slow
def test_the_head_normalises_what_is_pooled():
    model = models.build(dataclasses.replace(PURE, cssm="no_gate", gate_type=None, depths="1,1", pool_type="mean"), 10)
    variables = jax.jit(model.init)(jax.random.key(0), STILL)

    def last_block(module, x):
        logits, state = module.apply(x, STILL, capture_intermediates=lambda m, _: m.name in ("block_1", "head_norm"))
        return logits, state["intermediates"]["block_1"]["__call__"][0]

    logits, maps = jax.jit(lambda v: last_block(model, v))(variables)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    pooled = np.asarray(maps, np.float64).mean((1, 2, 3))
    np.testing.assert_allclose(logits, dense(p["head"], normed(p["head_norm"], pooled)), atol=1e-4)
