"""Settings that do not go together are refused with a way out, and each way out works."""

import dataclasses
import re

import pytest

from cssm.config import KNOBS, Config, UserError, warnings_for
from cssm.settings.data import FILES, GENERATED

# Another value than the default, for each type of setting that has no choices.
OTHER = {int: 8, float: 0.25, bool: True, str: "x"}


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
    if cause == "late_mixer":
        met["arch"] = "shvit"
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
        (
            {"arch": "baseline", "num_heads": 5},
            "--num_heads 5 does not divide embed_dim 32: type 4 or 8, or --embed_dim 30 or 40",
        ),
        (
            {"arch": "baseline", "num_heads": 99},
            "--num_heads 99 does not divide embed_dim 32: type 32, or --embed_dim 198",
        ),
        (
            {"arch": "convnext", "embed_dim": 64},
            "--embed_dim 64 does not apply with --arch convnext: it needs --arch simple or vit or baseline, others "
            "have --dims",
        ),
        (
            {"arch": "shvit", "depth": 3},
            "--depth 3 does not apply with --arch shvit: it needs --arch simple or vit or baseline, others have "
            "--depths",
        ),
        (
            {"arch": "vit", "dims": "8,16"},
            "--dims 8,16 does not apply with --arch vit: it needs --arch convnext or shvit, others have --embed_dim",
        ),
        ({"arch": "convnext", "preset": "small"}, "--preset small is not for --arch convnext: type nano or tiny"),
        ({"arch": "shvit", "preset": "tiny"}, "--preset tiny is not for --arch shvit: type nano or s1 or s2 or s3"),
        ({"arch": "vit", "preset": "s1"}, "--preset s1 is not for --arch vit: type nano or tiny or small or base"),
        ({"arch": "shvit", "stem_stride": 3}, "--stem_stride 3 is not for --arch shvit: type 1 or 2 or 4"),
        ({"arch": "convnext", "dims": "8,x"}, "--dims 8,x: must be whole numbers of at least 1, separated by commas"),
        ({"arch": "convnext", "depths": "1,0"}, "--depths 1,0: must be whole numbers of at least 1"),
        ({"arch": "convnext", "dims": "8,13"}, "--dims 8,13: each must be even, instead of 13 type 12 or 14"),
        (
            {"arch": "shvit", "dims": "8,16", "depths": "1,1,1"},
            "--dims 8,16 and --depths 1,1,1 speak of 2 and 3 stages: type as many numbers in both",
        ),
        (
            {"arch": "shvit", "cssm": "gdn", "delta_key_dim": 6, "dims": "6,12,16", "depths": "1,1,1"},
            "--delta_key_dim 6 does not divide each of 12, 16 (--dims): type 4",
        ),
        (
            {"arch": "convnext", "cssm": "spatial_attn", "num_heads": 3, "dims": "8,12", "depths": "1,1"},
            "--num_heads 3 does not divide each of 8, 12 (--dims): type 2 or 4",
        ),
        (
            {"arch": "shvit", "late_mixer": "attention", "cssm": "gated"},
            "--cssm gated does not apply with --late_mixer",
        ),
        (
            {"arch": "baseline", "cssm": "gated"},
            "--cssm gated does not apply with --arch baseline: it needs --arch simple",
        ),
        ({"arch": "shvit", "late_mixer": "attention", "seq_len": 3}, "--seq_len 3 does not apply with --late_mixer"),
        ({"arch": "shvit", "n_register_tokens": 3}, "--n_register_tokens 3 does not apply with --arch shvit"),
        (
            {"arch": "shvit", "pos_embed": "separate"},
            "--pos_embed separate differs between steps, and from block to block of shvit a still image is one: type "
            "learnable, or mrope",
        ),
        (
            {"arch": "shvit", "late_mixer": "attention", "pos_embed": "mrope"},
            "--pos_embed mrope is not for --late_mixer attention: type none or learnable",
        ),
        (
            {"arch": "shvit", "dims": "8,16,32,64", "depths": "1,1,1,1", "image_size": 8, "stem_stride": 2},
            "--image_size 8 leaves a map of 1x1 before the last of 4 stages (stride 2 by --stem_stride): type "
            "--image_size 9 or more, a smaller --stem_stride, or fewer --dims and --depths",
        ),
        (
            {"arch": "convnext", "preset": "tiny", "image_size": 16},
            "--image_size 16 leaves a map of 1x1 before the last of 4 stages (stride 4 by --stem_stride): type "
            "--image_size 17 or more",
        ),
        (
            {"arch": "convnext", "preset": "tiny", "image_size": 32, "norm_type": "instance"},
            "--norm_type instance leaves nothing of a map of 1x1 (--image_size 32, stride 4",
        ),
        ({"arch": "convnext", "image_size": 1}, "--image_size 1 is smaller than the stride of the stem, 2"),
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
        (
            {"cssm": "gdn", "delta_key_dim": 5},
            "--delta_key_dim 5 does not divide embed_dim 32: type 4 or 8, or --embed_dim 30 or 40",
        ),
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
        ({"devices": "1,x"}, "--devices 1,x: must be different numbers from 1 on, separated by commas"),
        ({"batch_sizes": "8,0"}, "--batch_sizes 8,0: must be different numbers from 1 on"),
        ({"batch_sizes": "8,8"}, "--batch_sizes 8,8: must be different numbers from 1 on"),
        ({"batch_sizes": "8,16", "batch_size": 4}, "--batch_sizes 8,16 and --batch_size 4 both set the batch"),
        ({"batch_sizes": "8", "global_batch_size": 4}, "--batch_sizes 8 and --global_batch_size 4 both set the batch"),
        ({"arch": "vit", "remat": False, "remat_keep": "costly"}, "--remat_keep costly and --no_remat: leave one"),
        ({"find_batch_size": True, "batch_size": 4}, "--find_batch_size and --batch_size 4 both set the batch"),
        ({"find_batch_size": True, "dry_run": True}, "--find_batch_size takes steps, and --dry_run takes none"),
    ],
)
def test_settings_that_do_not_go_together(settings, sentence):
    assert refusal(**settings).startswith(sentence)


@pytest.mark.parametrize(
    "settings, name", [({"arch": "baseline", "num_heads": 5}, "num_heads"), ({"embed_dim": 33}, "embed_dim")]
)
def test_what_an_error_tells_to_type_is_accepted(settings, name):
    numbers, *wider = refusal(**settings).split("type ")[1].split(", or --embed_dim ")
    assert len(re.findall(r"\d+", numbers)) == 2
    for number in re.findall(r"\d+", numbers):
        Config(**{**settings, name: number})
    for number in re.findall(r"\d+", *wider) if wider else ():
        Config(**{**settings, "embed_dim": number})


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


def test_a_stable_transition_is_for_what_has_one_and_needless_where_it_is_a_contraction():
    for name in KNOBS["cssm"].choices:
        if name in ("s4nd", "spatial_attn", "spatiotemporal_attn"):
            assert refusal(cssm=name, stable_transition=True).startswith(
                f"--stable_transition does not apply with --cssm {name}: it needs --cssm hgru_bi or hgru or "
            )
            continue
        notes = warnings_for(Config(cssm=name, stable_transition=True))
        needless = name in ("gated", "gdn", "no_gate", "no_fft", "conv_ssm", "standard")
        assert notes == [f"{name} is a contraction already, --stable_transition changes nothing"] * needless
    assert refusal(arch="baseline", stable_transition=True).startswith("--stable_transition does not apply with --arch")
    assert warnings_for(Config(cssm="gdn", spectral_clip=False, stable_transition=True)) == []


@pytest.mark.parametrize("cell", ["hgru_bi", "hgru", "opponent", "transformer", "mult_transformer", "gdn"])
def test_many_steps_of_what_may_grow_lead_to_the_stable_transition(cell):
    settings = {"cssm": cell, "spectral_clip": cell != "gdn"}
    (sentence,) = warnings_for(Config(**settings, seq_len=65))
    assert sentence == f"states of {cell} may overflow over 65 steps: --stable_transition keeps them bounded"
    for others in ({"seq_len": 64}, {"seq_len": 65, "stable_transition": True}, {"seq_len": 65, "scan": "goom"}):
        assert warnings_for(Config(**settings, **others)) == []
    assert warnings_for(Config(cssm="add_kqv", seq_len=1024)) == []


def test_a_kernel_larger_than_the_map_of_a_stage_warns_if_the_stage_has_one():
    sizes = {"dims": "8,8,8", "depths": "1,1,1", "stem_stride": 2, "image_size": 16}
    assert warnings_for(Config(arch="convnext", kernel_size=2, **sizes)) == []
    (two,) = warnings_for(Config(arch="convnext", kernel_size=5, **sizes))
    assert two == "--kernel_size 5 is larger than the 4x4 and 2x2 maps, kernels are cropped to them"
    (one,) = warnings_for(Config(arch="shvit", kernel_size=3, **sizes))
    assert one == "--kernel_size 3 is larger than the 2x2 map, kernels are cropped to it"
    (late,) = warnings_for(Config(arch="shvit", kernel_size=9, **sizes))
    assert "8x8" not in late, "a stage of convolutions has no kernels of this size"
    assert warnings_for(Config(arch="shvit", late_mixer="attention", **sizes)) == []


@pytest.mark.parametrize(
    "settings", [{"arch": "shvit", "dims": "8,16,32,64"}, {"arch": "convnext", "dims": "8,8,8,8,8"}]
)
def test_the_smallest_image_that_is_told_is_the_smallest_that_is_accepted(settings):
    depths = ",".join("1" for _ in settings["dims"].split(","))
    for stride in (1, 2, 4):
        staged = {**settings, "depths": depths, "stem_stride": stride}
        least = int(re.search(r"type --image_size (\d+) or more", refusal(**staged, image_size=stride))[1])
        Config(**staged, image_size=least)
        refusal(**staged, image_size=least - 1)


@pytest.mark.parametrize("shard", ["optimizer", "params"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
def test_an_optimizer_of_elements_goes_with_split_state(optimizer, shard):
    assert Config(optimizer=optimizer, shard=shard).shard == shard


def test_attention_has_no_kernel_to_warn_of():
    assert warnings_for(Config(arch="baseline")) == []


@pytest.mark.parametrize("dataset", [name for name in FILES if name not in GENERATED])
def test_files_are_read_from_where_they_are(dataset):
    assert "type --data_dir" in refusal(dataset=dataset)
    assert Config(dataset=dataset, data_dir="x").data_dir == "x"


def test_generated_images_are_never_unreadable():
    assert "generated images are never unreadable" in refusal(dataset="pathfinder", max_bad_examples=1)
    assert Config(dataset="pathfinder", max_bad_examples=1, data_dir="x").max_bad_examples == 1


def test_a_size_that_the_files_will_tell_is_checked_when_they_have():
    open_size = Config(dataset="npz", data_dir="x", arch="vit", stem_mode="patch", patch_size=4)
    assert open_size.image_size is None and warnings_for(open_size) == []
    with pytest.raises(UserError, match="does not split into patches of 4"):
        dataclasses.replace(open_size, image_size=6)
    assert warnings_for(dataclasses.replace(open_size, image_size=8, kernel_size=9))
