"""Parts of trunks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm.cells.core import LayerNorm
from cssm.fused_rows import max_pool_2x2
from cssm.models import blocks
from cssm.positions import rope


def randn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("height,width", [(4, 6), (5, 7)])
def test_max_pool_is_flaxs(height, width):
    x = randn(2, 3, height, width, 4)
    want = nn.max_pool(x.reshape(6, height, width, 4), (2, 2), (2, 2), "SAME").reshape(
        2, 3, -(-height // 2), -(-width // 2), 4
    )
    np.testing.assert_array_equal(max_pool_2x2(x), want)


def test_layer_norm_survives_a_mean_far_above_the_spread(key):
    """As the difference of two squares the variance of such values would be noise."""
    x = randn(1, 1, 2, 2, 64) * 1e-2 + 100.0
    norm = LayerNorm(jnp.float32)
    y = norm.apply(norm.init(key, x), x)
    exact = np.asarray(x, np.float64)
    want = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(y, want, atol=1e-2)


def test_batch_norm_uses_running_statistics_outside_of_training(key):
    x = randn(4, 1, 3, 3, 2) + 5
    train, test = (blocks.Norm("batch", jnp.float32)(train, "norm") for train in (True, False))
    variables = train.init(key, x)
    y, updates = train.apply(variables, x, mutable=["batch_stats"])
    np.testing.assert_allclose(np.asarray(y).mean((0, 1, 2, 3)), 0, atol=1e-5)
    assert np.asarray(test.apply(variables, x)).mean() > 4
    np.testing.assert_allclose(updates["batch_stats"]["mean"], 0.01 * np.asarray(x).mean((0, 1, 2, 3)), rtol=1e-4)


@pytest.mark.parametrize("kind,axes", [("layer", (4,)), ("instance", (2, 3)), ("global_layer", (1, 2, 3, 4))])
def test_a_norm_takes_its_mean_and_variance_over_its_axes(kind, axes, key):
    x = randn(2, 3, 4, 5, 6) * 3 + 7
    norm = blocks.Norm(kind, jnp.float32)(True, "norm")
    variables = norm.init(key, x)
    assert {leaf.shape for leaf in jax.tree.leaves(variables)} == {(6,)}
    exact = np.asarray(x, np.float64)
    want = (exact - exact.mean(axes, keepdims=True)) / np.sqrt(exact.var(axes, keepdims=True) + 1e-6)
    np.testing.assert_allclose(norm.apply(variables, x), want, atol=1e-5)


def test_drop_path_drops_whole_examples_and_keeps_the_mean(key):
    x = jnp.ones((4000, 1, 1, 1, 2))
    y = np.asarray(blocks.DropPath(0.25, train=True).apply({}, x, rngs={"drop_path": key}))
    np.testing.assert_allclose(np.unique(y), [0.0, 4 / 3], rtol=1e-6)
    assert (y[..., 0] == y[..., 1]).all()
    np.testing.assert_allclose(y.mean(), 1.0, atol=0.05)
    np.testing.assert_array_equal(blocks.DropPath(0.25, train=False).apply({}, x), x)


def test_pooling_types_are_ordered_mean_logsumexp_max():
    x = randn(3, 2, 4, 5, 6)
    mean, soft, top = (np.asarray(blocks.pool(x, name)) for name in ("mean", "logsumexp", "max"))
    assert mean.shape == (3, 6)
    assert (mean <= soft).all() and (soft <= top).all()
    np.testing.assert_allclose(mean, np.asarray(x).mean((1, 2, 3)), atol=1e-6)
    np.testing.assert_array_equal(top, np.asarray(x).max((1, 2, 3)))


@pytest.mark.parametrize(
    "stem,side",
    [
        (blocks.ConvPoolStem(6, 2, blocks.Norm("layer", jnp.float32), nn.softplus, jnp.float32), 3),
        (blocks.PointwiseStem(6, blocks.Norm("layer", jnp.float32), nn.softplus, jnp.float32), 9),
        (blocks.StridedStem(6, 4, blocks.Norm("batch", jnp.float32), jnp.float32), 3),
        (blocks.PatchStem(6, 3, jnp.float32), 3),
    ],
)
def test_stems_take_frames_to_maps(stem, side, key):
    x = randn(2, 3, 9, 9, 1)
    y, _ = stem.init_with_output(key, x, True)
    assert y.shape == (2, 3, side, side, 6)


def test_a_position_table_is_added_and_the_time_code_unrolls_a_still_image(key):
    x = jnp.zeros((2, 1, 3, 4, 8))
    table, params = blocks.AddPositions("learnable", 5, jnp.float32).init_with_output(key, x)
    np.testing.assert_array_equal(table[1, 0], params["params"]["pos_embed"])
    assert blocks.AddPositions("sinusoidal", 5, jnp.float32).apply({}, x).shape == (2, 5, 3, 4, 8)
    assert blocks.AddPositions("mrope", 5, jnp.float32).apply({}, x) is x


def test_separate_positions_turn_pixels_and_add_to_steps(key):
    x = randn(2, 1, 3, 4, 8)
    y, params = blocks.AddPositions("separate", 5, jnp.float32).init_with_output(key, x)
    table = params["params"]["pos_embed"]
    assert table.shape == (5, 8)
    np.testing.assert_allclose(y[:, 3], rope(x, "spatial_only")[:, 0] + table[3], rtol=1e-6)


@pytest.mark.parametrize(
    "frames,steps,shown",
    [(3, 3, [0, 1, 2]), (2, 6, [0, 0, 0, 1, 1, 1]), (9, 3, [1, 4, 7]), (5, 3, [0, 2, 4]), (1, 4, [0] * 4), (7, 1, [3])],
)
def test_steps_show_frames_at_even_distance(frames, steps, shown):
    clip = jnp.arange(frames)[None, :, None]
    assert blocks.sample_frames(clip, steps)[0, :, 0].tolist() == shown
    # Time has no direction here: of a clip run backwards the same frames are shown, backwards, where none is in doubt.
    if frames % 2 or frames <= steps:
        assert blocks.sample_frames(clip[:, ::-1], steps)[0, ::-1, 0].tolist() == shown


def test_registers_are_learned_frames_before_the_first_step(key):
    x = randn(2, 1, 3, 4, 8)
    y, params = blocks.RegisterTokens(2, 5).init_with_output(key, x)
    assert y.shape == (2, 7, 3, 4, 8)
    np.testing.assert_array_equal(y[1, :2, 2, 3], params["params"]["tokens"])
    np.testing.assert_array_equal(y[:, 6], x[:, 0])


def test_gradients_flow_through_the_pool_once_for_each_maximum():
    grads = jax.grad(lambda x: max_pool_2x2(x).sum())(randn(1, 1, 5, 5, 1))
    assert float(grads.sum()) == pytest.approx(9.0)
