"""--target_params finds a size of the real model, keeps what is given, and says what there is where there is none."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from cssm import data, models
from cssm.config import CELLS_NAMES, UserError, applicable, parse_args, resolve
from cssm.resume import resume_config, resume_record
from cssm.size import DEEPEST, DEPTHS, TOLERANCE, WIDEST, count_params, fitted


def found(**settings):
    config = resolve(settings, {})
    return dataclasses.replace(config, **fitted(config, data.outline(config)))


def off(config):
    """Relative distance of the parameters that the model really makes from its target."""
    outline = data.outline(config)
    images = jnp.zeros((1, *outline.image_shape))
    made = jax.eval_shape(models.build(config, outline.num_classes).init, jax.random.key(0), images)["params"]
    return abs(sum(leaf.size for leaf in jax.tree.leaves(made)) / config.target_params - 1)


def refused(**settings):
    with pytest.raises(UserError) as caught:
        found(**settings)
    return str(caught.value)


def test_parameters_are_counted_as_they_are_made():
    config = resolve({"embed_dim": 4, "image_size": 8, "kernel_domain": "spectral", "kernel_size": 3}, {})
    made = jax.jit(models.build(config, 10).init)(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]
    assert any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(made)), "of which each counts once"
    assert count_params(config, data.outline(config)) == sum(leaf.size for leaf in jax.tree.leaves(made))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_params": "20k"},
        pytest.param({"target_params": 30_000, "dataset": "pathfinder"}, marks=pytest.mark.slow),
        {"target_params": "300k", "arch": "baseline"},
        pytest.param({"target_params": "100k", "arch": "vit", "preset": "tiny"}, marks=pytest.mark.slow),
        pytest.param({"target_params": "100k", "arch": "convnext"}, marks=pytest.mark.slow),
        pytest.param({"target_params": "200k", "arch": "convnext", "preset": "tiny"}, marks=pytest.mark.slow),
        pytest.param({"target_params": "1M", "arch": "shvit"}, marks=pytest.mark.slow),
        pytest.param({"target_params": "10M", "arch": "shvit", "preset": "s4"}, marks=pytest.mark.slow),
        pytest.param({"target_params": "5M", "arch": "vit"}, marks=pytest.mark.slow),
        pytest.param({"target_params": "50M", "arch": "simple"}, marks=pytest.mark.slow),
        pytest.param({"target_params": "100M", "arch": "baseline", "preset": "base"}, marks=pytest.mark.slow),
        *(pytest.param({"target_params": "50k", "cssm": cell}, marks=pytest.mark.slow) for cell in CELLS_NAMES),
        pytest.param({"target_params": "1M", "cssm": "gdn", "delta_key_dim": 3, "arch": "vit"}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_the_size_found_is_within_the_tolerance(settings):
    config = found(**settings)
    assert off(config) <= TOLERANCE == 0.05
    assert found(**settings) == config, "whoever looks finds the same"
    if config.dims:
        return
    depths = DEPTHS[config.arch]
    assert 1 <= config.depth <= DEEPEST
    assert config.depth <= 2 + next((depth for width, depth in depths if width >= config.embed_dim), DEEPEST)


def test_published_sizes_are_found_again():
    """Of the baseline, a ViT: 192 x 12 has 5.35 million parameters here, and 384 x 12 21.3 million."""
    config = found(arch="baseline", preset="small", target_params="5.4M")
    assert (config.embed_dim, config.depth) == (192, 12)


def test_a_wide_model_has_a_width_that_hardware_likes():
    config = found(arch="baseline", target_params="300k")
    assert config.embed_dim % 8 == 0 and config.embed_dim >= 64
    config = found(arch="baseline", target_params="2M", depth=3)
    assert config.embed_dim % 16 == 0 and config.embed_dim >= 256


def test_what_is_given_stays():
    config = found(target_params="19k", depth=3)
    assert config.depth == 3 and off(config) <= TOLERANCE
    config = found(target_params="30k", embed_dim=24)
    assert config.embed_dim == 24 and config.depth >= 3 and off(config) <= TOLERANCE
    assert found(target_params="30k", embed_dim=24, depth=config.depth) == config, "and all three, where they agree"


def test_other_settings_bound_the_size():
    assert found(arch="baseline", num_heads=6, target_params="25k").embed_dim % 6 == 0
    assert found(cssm="gdn", delta_key_dim=5, target_params="24.5k").embed_dim % 10 == 0
    assert found(arch="baseline", temporal_attn_every=4, target_params="30k").depth >= 4


@pytest.mark.slow
def test_stages_keep_their_proportions_and_depths():
    config = found(arch="convnext", target_params="300k")
    widths = [int(width) for width in config.dims.split(",")]
    assert config.depths == "1,1" and len(widths) == 2
    assert widths[1] % 8 == 0 and widths[1] / widths[0] == pytest.approx(2, rel=0.1)
    config = found(arch="convnext", depths="2,1,1", image_size=32, target_params="300k")
    widths = [int(width) for width in config.dims.split(",")]
    assert config.depths == "2,1,1" and widths[2] / widths[0] == pytest.approx(4, rel=0.1)
    assert "--depths 1,x: must be whole numbers" in refused(arch="convnext", depths="1,x", target_params="300k")
    assert re.search(
        r"dims 32,64 makes [\d,]+ parameters, which is not within 5%",
        refused(arch="convnext", dims="32,64", target_params="300k"),
    )


def test_where_there_is_no_such_size_the_nearest_are_named():
    sentence = refused(target_params="1k")
    assert "--target_params 1,000: no size is within 5% of it, the nearest have" in sentence
    numbers = sentence.rpartition("type --target_params ")[2].split(" or ")
    assert len(numbers) == 2 and int(numbers[0]) < 1000 < int(numbers[1])
    for number in numbers:
        assert off(found(target_params=number)) == 0
    assert refused(target_params=10).count("embed_dim 2, depth 1") == 1
    sentence = refused(target_params="1k", depth=4)
    assert "with this depth, the nearest has" in sentence and sentence.endswith("or leave --depth out")
    assert "embed_dim 8, depth 1 make" in refused(target_params="2M", embed_dim=8, depth=1)


@pytest.mark.slow
def test_no_model_is_deeper_or_wider_than_the_limits():
    assert f"(embed_dim 64, depth {DEEPEST})" in refused(target_params="100G", embed_dim=64)
    assert f"(embed_dim {WIDEST}, depth {DEEPEST})" in refused(target_params="900G", arch="vit")


def test_what_is_found_is_saved_and_gives_the_same_again():
    config = found(target_params="20k", arch="vit")
    record = applicable(config)
    assert record["target_params"] == 20_000 and record["embed_dim"] == config.embed_dim and record["depth"]
    again = resolve({}, record)
    assert again == config and fitted(again, data.outline(again)) == {}
    saved = resume_record(config, 32, 1)
    for typed in ({}, {"target_params": "20k"}, {"depth": config.depth, "target_params": 20_000}):
        resumed, changes = resume_config(saved, typed)
        assert (resumed.embed_dim, resumed.depth, changes) == (config.embed_dim, config.depth, [])
    with pytest.raises(UserError, match="target_params 30000: the run to resume has 20000, which cannot change"):
        resume_config(saved, {"target_params": "30k"})


@pytest.mark.parametrize(
    "typed, expected",
    [
        ({}, (7000, 12, 2)),
        ({"target_params": 9000}, (9000, None, None)),
        ({"depth": 3}, (7000, None, 3)),
        ({"depth": 3, "target_params": 9000}, (9000, None, 3)),
        ({"depth": 3, "embed_dim": 16}, (None, 16, 3)),
    ],
)
def test_typed_sizes_have_the_rest_of_a_saved_record_found_anew(typed, expected):
    config = resolve(typed, {"target_params": 7000, "embed_dim": 12, "depth": 2})
    assert (config.target_params, config.embed_dim, config.depth) == expected


@pytest.mark.parametrize(
    "typed, expected",
    [
        ({}, (7000, "8,16", "1,1")),
        ({"target_params": 9000}, (9000, None, "1,1")),
        ({"depths": "1,2"}, (7000, None, "1,2")),
        ({"dims": "6,6"}, (None, "6,6", "1,1")),
    ],
)
def test_likewise_where_there_are_stages(typed, expected):
    config = resolve(typed, {"arch": "convnext", "target_params": 7000, "dims": "8,16", "depths": "1,1"})
    assert (config.target_params, config.dims, config.depths) == expected


def test_until_it_is_found_the_size_is_open_whatever_the_preset():
    config = resolve({"target_params": "5M", "arch": "vit", "preset": "tiny"}, {})
    assert (config.embed_dim, config.depth, config.mlp_ratio) == (None, None, 4.0)
    assert dataclasses.replace(config, target_params=None).embed_dim == 192
    kept = resolve({"target_params": "5M"}, {"depth": 3})
    assert (kept.embed_dim, kept.depth) == (None, 3), "of a file that holds one of the two, it is kept"


def test_all_three_typed_are_one_too_many():
    with pytest.raises(UserError, match="finds --embed_dim and --depth, and all of them are typed: leave one out"):
        parse_args(["--target_params", "5M", "--embed_dim", "192", "--depth", "12"])
    with pytest.raises(UserError, match="finds --dims, and all of them are typed: leave one out"):
        parse_args(["--target_params", "5M", "--arch", "convnext", "--dims", "32,64"])
    with pytest.raises(UserError, match=r"target_params 1\.5: must be a whole number"):
        parse_args(["--target_params", "1.5"])
