"""Settings that do not go together are refused with a way out, and each way out works."""

import re

import pytest

from cssm.config import KNOBS, Config, UserError, warnings_for

# Another value than the default, for each type of setting that has no choices.
OTHER = {int: 8, float: 0.5, bool: True, str: "x"}


def refusal(**settings) -> str:
    with pytest.raises(UserError) as caught:
        Config(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def conditions():
    """(setting, one of those it depends on), where no other that it depends on is refused first."""
    for name, knob in KNOBS.items():
        for way in knob.applies[:1]:
            for cause in way:
                if not any(cause in ways for key in way if key != cause for ways in KNOBS[key].applies):
                    yield name, cause


@pytest.mark.parametrize("name,cause", list(conditions()))
def test_a_setting_that_cannot_apply_is_refused_and_its_default_is_not(name, cause):
    """Of several ways to apply, the first is told."""
    knob, way = KNOBS[name], KNOBS[name].applies[0]
    other = next((choice for choice in knob.choices if choice != knob.default), OTHER[knob.type])
    if knob.default is True:
        other = False
    met = {key: wanted[0] for key, wanted in way.items() if key != cause}
    unmet = next(choice for choice in KNOBS[cause].choices if choice not in way[cause])
    if cause == "stem_mode":  # patch and pathtracker each belong to an architecture
        unmet = "pathtracker" if met.get("arch") == "simple" else unmet
        met["arch"] = met.get("arch", "vit")
    sentence = refusal(**met, **{cause: unmet, name: other})
    assert sentence.startswith(f"--{'no_' if other is False else ''}{name}")
    assert f"does not apply with --{cause} {unmet}: it needs --{cause} {' or '.join(way[cause])}" in sentence
    if knob.default is not None:
        assert getattr(Config(**met, **{cause: unmet, name: knob.default}), name) == knob.default


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"stem_mode": "patch"}, "--stem_mode patch is not for --arch simple: type conv or pathtracker"),
        (
            {"arch": "vit", "stem_mode": "pathtracker"},
            "--stem_mode pathtracker is not for --arch vit: type conv or patch",
        ),
        (
            {"arch": "baseline", "pos_embed": "mrope"},
            "--pos_embed mrope is not for --arch baseline: type none or learnable",
        ),
        (
            {"cssm": "gdn", "qkv_conv_full": True},
            "--qkv_conv_full needs a convolution, and --qkv_conv_size is 1: type 3 or 5",
        ),
        (
            {"inter_mlp_ratio": 2.0},
            "--inter_mlp_ratio 2.0 lies between cells, and --depth is 1: type --depth 2 or more",
        ),
        (
            {"arch": "baseline", "temporal_attn_every": 3},
            "--temporal_attn_every 3 is more than --depth 2: type 2 or less, or 0 for none",
        ),
        (
            {"cssm": "spatial_attn", "pos_embed": "temporal"},
            "--pos_embed temporal turns all pixels of a frame alike, which spatial_attn does not see: type mrope",
        ),
        ({"arch": "baseline", "num_heads": 5}, "--num_heads 5 does not divide embed_dim 32: type 4 or 8"),
        ({"arch": "baseline", "num_heads": 99}, "--num_heads 99 does not divide embed_dim 32: type 32"),
        ({"warmup_steps": 0, "warmup_epochs": 0}, "--warmup_steps and --warmup_epochs both set the warm-up"),
        ({"gpus": "0,x"}, "--gpus 0,x: must be device indices separated by commas, for example 0,1"),
        ({"gpus": "0,,1"}, "--gpus 0,,1: must be device indices"),
        ({"gpus": "-1"}, "--gpus -1: must be device indices"),
        ({"xla_flags": "--xla_a=1 b"}, "--xla_flags --xla_a=1 b: each of them must begin with two dashes"),
        ({"cssm": "gated", "gate_type": "channel"}, "--gate_type channel is for --cssm gdn"),
        ({"cssm": "hgru", "readout_state": "xyz"}, "--readout_state xyz: hgru has x, y, type some in this order"),
        ({"readout_state": "zx"}, "--readout_state zx: hgru_bi has x, y, z, type some in this order"),
        ({"cssm": "transformer", "k_state": False, "readout_state": "qk"}, "--no_k_state leaves nothing for --readout"),
        ({"cssm": "transformer", "k_state": False, "asymmetric_qk": True}, "--no_k_state leaves nothing for --asym"),
        ({"cssm": "transformer", "k_state": False, "feedback": False}, "--no_k_state leaves nothing for --no_feedback"),
        ({"cssm": "transformer", "feedback": False, "readout_state": "q"}, "--no_feedback keeps A from"),
        ({"cssm": "gdn", "delta_key_dim": 5}, "--delta_key_dim 5 does not divide embed_dim 32: type 4 or 8"),
        ({"cssm": "standard", "transition": "scalar", "kernel_size": 3}, "--kernel_size 3 does not apply with"),
        ({"nproc_per_node": "x"}, "--nproc_per_node x: must be a number of processes, at least 1, or auto"),
        ({"nproc_per_node": "0"}, "--nproc_per_node 0: must be a number"),
        ({"num_processes": 2}, "--num_processes 2 tells of a job of several processes: type --process_id and"),
        (
            {"nproc_per_node": "2", "process_id": 0},
            "--nproc_per_node starts all processes by itself, --process_id 0 is for those started by hand",
        ),
        ({"multi_gpu": "ddp", "coordinator_address": "a"}, "--multi_gpu ddp starts all processes by itself"),
        (
            {"coordinator_address": "a", "num_processes": 2, "process_id": 2},
            "--process_id 2: 2 processes count from 0 to 1",
        ),
        ({"multi_gpu": "off", "nproc_per_node": "2"}, "--multi_gpu off uses one device in one process"),
        ({"sync_backend": "cpu", "shard": "optimizer"}, "--sync_backend cpu does without collectives, --shard"),
        (
            {"sync_backend": "cpu", "sync_bn": True, "norm_type": "batch"},
            "--sync_backend cpu does without collectives, --sync_bn",
        ),
        ({"sync_backend": "cpu", "nproc_per_node": "2"}, "--sync_backend cpu works in one process"),
        ({"norm_type": "instance", "image_size": 2}, "--norm_type instance leaves nothing of a map of 1x1"),
        ({"image_size": 1}, "--image_size 1 is smaller than the stride of the stem, 2 (--stem_layers)"),
        ({"stem_layers": 5}, "--image_size 16 is smaller than the stride of the stem, 32 (--stem_layers)"),
        (
            {"arch": "vit", "stem_stride": 17},
            "--image_size 16 is smaller than the stride of the stem, 17 (--stem_stride)",
        ),
        *(
            (
                {"optimizer": optimizer, "shard": shard},
                f"--optimizer {optimizer} needs whole arrays, --shard {shard} splits them over devices: "
                "type --optimizer adamw or sgd or lion, or leave --shard out",
            )
            for optimizer in ("lamb", "muon")
            for shard in ("optimizer", "params")
        ),
        (
            {"arch": "vit", "stem_mode": "patch", "image_size": 8},
            "--image_size 8 is smaller than the stride of the stem, 16 (--patch_size)",
        ),
        (
            {"arch": "vit", "stem_mode": "patch", "image_size": 24},
            "--image_size 24 does not split into patches of 16: it must be a multiple of 16, type 16 or 32",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings, sentence):
    assert refusal(**settings).startswith(sentence)


@pytest.mark.parametrize(
    "settings, name", [({"arch": "baseline", "num_heads": 5}, "num_heads"), ({"embed_dim": 33}, "embed_dim")]
)
def test_what_an_error_tells_to_type_is_accepted(settings, name):
    numbers = re.findall(r"\d+", refusal(**settings).split("type ")[1])
    assert len(numbers) == 2
    for number in numbers:
        Config(**{**settings, name: number})


@pytest.mark.parametrize(
    "settings, side",
    [
        ({"image_size": 21}, 11),
        ({"image_size": 40, "stem_layers": 2}, 10),
        ({"stem_mode": "pathtracker", "image_size": 10}, 10),
        ({"arch": "vit", "image_size": 21}, 11),
        ({"arch": "vit", "stem_mode": "patch", "patch_size": 4}, 4),
    ],
)
def test_a_kernel_larger_than_the_map_only_warns(settings, side):
    assert warnings_for(Config(**settings, kernel_size=side)) == []
    (sentence,) = warnings_for(Config(**settings, kernel_size=side + 1))
    assert sentence.startswith(f"--kernel_size {side + 1} is larger than the {side}x{side} map")


@pytest.mark.parametrize("shard", ["optimizer", "params"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
def test_an_optimizer_of_elements_goes_with_split_state(optimizer, shard):
    assert Config(optimizer=optimizer, shard=shard).shard == shard


def test_attention_has_no_kernel_to_warn_of():
    assert warnings_for(Config(arch="baseline")) == []
