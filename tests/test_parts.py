"""Parts by path: which leaves are frozen, and which share of the rate each layer has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trunks import variables_of

from cssm.config import ARCHS, Config, UserError
from cssm.optimizers import make_optimizer
from cssm.parts import check_frozen, frozen, layer_of, layer_scales, path_of
from parallel.sharded import split

IMAGES = jnp.zeros((1, 32, 32, 1))
# Every top-level part that a trunk may have.
VARIANTS = [
    *({"arch": arch} for arch in ARCHS),
    {"arch": "vit", "pos_embed": "separate", "n_register_tokens": 2},
    {"arch": "simple", "depth": 2, "inter_mlp_ratio": 2.0, "n_register_tokens": 2, "pos_embed": "learnable"},
    {"arch": "simple", "stem_mode": "pathtracker"},
    {"arch": "baseline", "temporal_attn_every": 1},
    {"arch": "convnext", "n_register_tokens": 1, "pos_embed": "learnable"},
]


def params_of(**settings):
    config = Config(**settings)
    return config, variables_of(config, IMAGES)["params"]


def by_name(tree):
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def ids(settings):
    return " ".join(map(str, settings.values()))


@pytest.mark.parametrize("settings", VARIANTS, ids=ids)
def test_every_part_of_every_trunk_has_a_layer(settings):
    """From the stem to the head in the order of the forward pass, each of them once at least."""
    config, params = params_of(layer_decay=0.5, **settings)
    scales = by_name(layer_scales(params, config))
    layers = sorted({round(-np.log2(scale)) for scale in scales.values()})
    assert layers == list(range(layers[-1] + 1))
    assert scales["head/kernel"] == 1.0
    assert all(scale == 0.5 ** layers[-1] for name, scale in scales.items() if name.startswith("stem"))


def test_the_rate_of_known_layers():
    """12 blocks: BEiT's table for a ViT-B at 0.75, and the blocks behind a downsampling."""
    config, params = params_of(arch="vit", depth=12, embed_dim=4, layer_decay=0.75)
    scales = by_name(layer_scales(params, config))
    assert scales["positions/pos_embed"] == scales["stem/conv/kernel"] == 0.75**13
    assert scales["block_0/mlp/up/kernel"] == 0.75**12 and scales["block_11/mlp/up/kernel"] == 0.75
    assert scales["head_norm/scale"] == scales["head/bias"] == 1.0
    assert (
        [layer_of(f"downsample_{i}", (2, 3, 1)) for i in (1, 2)]
        == [3, 6]
        == [layer_of(f"block_{i}", (2, 3, 1)) for i in (2, 5)]
    )


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "lamb", "muon"])
def test_an_update_is_that_of_one_rate_times_the_scale_of_its_layer(optimizer):
    """Decay included; against the same rule without it."""
    settings = {"arch": "vit", "optimizer": optimizer, "weight_decay": 0.1, "embed_dim": 4}
    config, shapes = params_of(layer_decay=0.5, **settings)
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.3, leaf.dtype), shapes)
    grads = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape), params)

    def updates(config):
        tx = make_optimizer(config, optax.constant_schedule(0.1))
        return tx.update(grads, tx.init(params), params)[0]

    plain, scaled = by_name(updates(Config(**settings))), by_name(updates(config))
    for name, scale in by_name(layer_scales(shapes, config)).items():
        np.testing.assert_allclose(scaled[name], scale * plain[name], rtol=1e-5)


TREE = {"stem": {"kernel": 1.0}, "block_0": {"mixer": {"kernel": 2.0}, "mlp": {"kernel": 3.0}}, "head": {"bias": 4.0}}
PATHS = ["block_0/mixer/kernel", "block_0/mlp/kernel", "head/bias", "stem/kernel"]


@pytest.mark.parametrize(
    "globs, fixed",
    [
        (None, ""),
        ("stem/*", "stem/kernel"),
        ("*/kernel", "block_0/mixer/kernel block_0/mlp/kernel stem/kernel"),
        ("block_0/m[il]*", "block_0/mixer/kernel block_0/mlp/kernel"),
        ("*, !head/*", "block_0/mixer/kernel block_0/mlp/kernel stem/kernel"),
        ("!head/*, *", " ".join(PATHS)),
        ("block_*,!*/mlp/*,stem/kernel", "block_0/mixer/kernel stem/kernel"),
    ],
)
def test_the_last_pattern_that_fits_decides(globs, fixed):
    assert [name for name, is_fixed in by_name(frozen(TREE, globs)).items() if is_fixed] == fixed.split()
    # The parts that a device holds of arrays are as frozen as the arrays.
    sliced = split(jax.tree.map(lambda x: jnp.full(5, x), TREE), 0, 2)
    assert [name for name, is_fixed in by_name(frozen(sliced, globs)).items() if is_fixed] == fixed.split()


def test_what_is_frozen_is_told_and_a_mistake_is_refused():
    params = jax.tree.map(lambda x: jnp.full(5, x), TREE)
    assert check_frozen(params, "stem/*") == "--freeze: 5 of 20 parameters stay as they are"
    with pytest.raises(UserError, match=r"--freeze sten/\*: no parameter .*paths begin with block_0, head, stem"):
        check_frozen(params, "stem/*,sten/*")
    with pytest.raises(UserError, match=r"--freeze !hat: no parameter"):
        check_frozen(params, "*,!hat")
    with pytest.raises(UserError, match=r"--freeze \*: nothing is left to be trained"):
        check_frozen(params, "*")


def test_frozen_leaves_have_no_state_and_no_update():
    config = Config(arch="vit", embed_dim=4, freeze="block_*,stem/*", weight_decay=0.5)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), variables_of(config, IMAGES)["params"])
    tx = make_optimizer(config, optax.constant_schedule(0.1))
    state = tx.init(params)
    free = sum(leaf.size for name, leaf in by_name(params).items() if not name.startswith(("block", "stem")))
    assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim) == 2 * free, "Adam's two averages"
    updates = by_name(tx.update(params, state, params)[0])
    for name, update in updates.items():
        assert bool(jnp.any(update != 0)) is not name.startswith(("block", "stem")), name
