"""Precedence, the record that reproduces a run, and how a saved run goes on."""

import dataclasses
import os
import random

import pytest

from cssm.cli import _opening
from cssm.config import (
    ARCHS,
    KNOBS,
    Config,
    UserError,
    applicable,
    parse_args,
    read_yaml,
    resolve,
    write_yaml,
)


def config_of(*argv: str) -> Config:
    return parse_args(argv).config


def refusal(function, *args) -> str:
    with pytest.raises(UserError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"arch": "baseline", "cssm": "hgru_bi"}, "--cssm hgru_bi does not apply with --arch baseline"),
        ({"short_conv_size": 4}, "--short_conv_size 4 does not apply with --cssm hgru_bi: it needs --cssm gated"),
        ({"spectral_clip": "true"}, "--spectral_clip does not apply with --cssm hgru_bi: it needs --cssm"),
        ({"num_heads": 4}, "it needs --arch baseline, or --cssm spatial_attn or spatiotemporal_attn"),
    ],
)
def test_what_is_given_must_mean_something_also_where_it_is_the_default(given, sentence, tmp_path):
    path = tmp_path / "given.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in given.items()))
    for argv in ([f"--{name}={value}" for name, value in given.items()], ["-f", str(path)]):
        assert sentence in refusal(parse_args, argv)


def test_typed_wins_over_file_over_recipe_over_default(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("arch: vit\nlr: 0.1\ndepth: 3\nlog_every: 7\n")
    assert config_of("--arch", "vit").lr == 4e-3
    assert config_of("--arch", "vit").log_every == Config().log_every == 10
    from_file = config_of("-f", str(path))
    assert (from_file.lr, from_file.depth, from_file.log_every, from_file.mlp_ratio) == (0.1, 3, 7, 2.0)
    # Whether a flag stands before or after --config makes no difference.
    for argv in (["--lr", "0.2", "-f", str(path)], ["-f", str(path), "--lr", "0.2"]):
        parsed = parse_args(argv)
        assert (parsed.config.lr, parsed.config.depth) == (0.2, 3)
        assert parsed.typed == {"arch": "vit", "lr": 0.2, "depth": 3, "log_every": 7}
    assert resolve(parsed.typed, {}) == parsed.config


def test_a_files_rate_under_another_optimizer_is_noted_once_and_stays(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: 0.002\n")
    parsed = parse_args(["-f", str(path), "--optimizer", "sgd"])
    assert parsed.config.lr == 0.002
    (note,) = parsed.notes
    sentence = (
        f"the learning rate 0.002 of {path} is meant for --optimizer adamw: the recipe of sgd has 0.09, --lr 0.09"
    )
    assert note.startswith(sentence)
    assert _opening(parsed).splitlines()[1:] == [f"note: {note}"]
    takes = note.partition("--lr ")[2].split()[0]
    assert config_of("--optimizer", "sgd").lr == float(takes)
    for argv in (["--optimizer", "sgd", "--lr", "0.002"], ["--optimizer", "adamw"], [], ["--resume", "auto"]):
        assert parse_args(["-f", str(path), *argv]).notes == ()
    path.write_text("lr: 0.1\noptimizer: sgd\n")
    assert parse_args(["-f", str(path)]).notes == ()
    assert "meant for --optimizer sgd" in parse_args(["-f", str(path), "--optimizer", "lion"]).notes[0]
    path.write_text("depth: 2\n")
    assert parse_args(["-f", str(path), "--optimizer", "sgd"]).notes == (), (
        "the recipe's own rate follows the optimizer"
    )


@pytest.mark.parametrize(
    "typed, file, expected",
    [
        ({}, {}, {"epochs": 15, "max_steps": None}),
        ({"max_steps": 6}, {}, {"epochs": None, "max_steps": 6}),
        ({"max_steps": 6}, {"epochs": 5}, {"epochs": None, "max_steps": 6}),
        ({"epochs": 5}, {"max_steps": 6}, {"epochs": 5, "max_steps": None}),
        ({}, {"max_steps": 6, "epochs": 5}, {"epochs": 5, "max_steps": 6}),
        ({"dataset": "pathfinder"}, {}, {"epochs": None, "max_steps": 2000}),
        ({"dataset": "pathfinder", "epochs": 3}, {}, {"epochs": 3, "max_steps": None}),
        ({"warmup_epochs": 1}, {"warmup_steps": 9}, {"warmup_epochs": 1.0, "warmup_steps": None}),
        ({}, {}, {"batch_size": 32, "global_batch_size": None, "grad_accum": None}),
        ({"global_batch_size": 96}, {}, {"batch_size": None, "global_batch_size": 96}),
        (
            {"global_batch_size": 96},
            {"batch_size": 8, "grad_accum": 2},
            {"batch_size": None, "grad_accum": None},
        ),
        (
            {"batch_size": 4},
            {"global_batch_size": 96, "grad_accum": 2},
            {"batch_size": 4, "grad_accum": None},
        ),
        (
            {"grad_accum": 4},
            {"global_batch_size": 96, "batch_size": 8},
            {"batch_size": None, "grad_accum": 4},
        ),
        ({"grad_accum": 4, "batch_size": 2}, {"global_batch_size": 96}, {"global_batch_size": None}),
        ({"batch_size": 4}, {"grad_accum": 2}, {"batch_size": 4, "grad_accum": 2}),
    ],
)
def test_one_way_to_say_a_thing_replaces_the_others_of_lower_rank(typed, file, expected):
    config = resolve(typed, file)
    assert {name: getattr(config, name) for name in expected} == expected


def test_python_users_get_the_same_checks():
    assert Config(arch="vit", gpus=[0, 1], lr="1e-3") == config_of("--arch=vit", "--gpus=0,1", "--lr=1e-3")
    assert "embed_dim 33: must be even" in refusal(lambda: Config(embed_dim=33))
    assert "did you mean embed_dim?" in refusal(resolve, {"embed_dimm": 32}, {})
    assert dataclasses.replace(Config(), lr=0.5).lr == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lr = 0.5


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Config().cache_dir == str(tmp_path / "cssm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config().cache_dir == str(tmp_path / ".cache" / "cssm")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert Config().num_workers == 8


def random_settings(draw: random.Random) -> dict:
    """Settings of which each is in range; whether they go together is another matter."""
    numbers = {int: [1, 2, 3, 8, 16, 32], float: [0.5, 1e-7, 0.25]}
    kept = sorted(name for name, knob in KNOBS.items() if knob.saved and "train" in knob.verbs)
    names = draw.sample(kept, draw.randrange(1, 12))
    values = {"gpus": ["0,1", "3"], "xla_flags": ["--a=1 --b=2"], "max_checkpoints": [2, 5], "seed": [7]}
    values |= {"arch": ARCHS}
    settings = {"arch": draw.choice(ARCHS)}
    for name in names:
        knob = KNOBS[name]
        among = values.get(name) or knob.choices or numbers.get(knob.type)
        settings[name] = draw.choice(among or ([True, False] if knob.type is bool else ["1e-3", "a b: c", "null"]))
    return settings


def test_the_saved_record_gives_the_same_config_again(tmp_path):
    draw = random.Random(3)
    accepted = 0
    while accepted < 60:
        try:
            config = resolve(random_settings(draw), {})
        except UserError:
            continue
        accepted += 1
        record = applicable(config)
        write_yaml(tmp_path / "config.yaml", record)
        assert resolve({}, read_yaml(tmp_path / "config.yaml")) == config
        # What is left out cannot matter: it has its default.
        assert all(getattr(config, name) == KNOBS[name].default for name in KNOBS.keys() - record.keys())


def test_the_record_holds_what_applies_and_nothing_else():
    simple, vit, baseline = (applicable(Config(arch=arch)) for arch in ("simple", "vit", "baseline"))
    assert not simple.keys() & {
        "mlp_ratio",
        "num_heads",
        "stem_stride",
        "preset",
        "remat",
        "layer_scale_init",
    }
    assert "stem_layers" in simple
    assert "stem_layers" not in vit
    assert not baseline.keys() & {"cssm", "kernel_size", "seq_len", "scan", "gate_type"}
    assert {"mlp_ratio", "stem_stride"} <= vit.keys() & baseline.keys()
    assert "num_heads" in baseline
    assert "num_heads" not in vit
    assert "pathfinder_difficulty" not in vit
    assert "short_conv_size" in applicable(Config(cssm="gated"))
    assert "kernel_origin" not in applicable(Config(kernel_domain="spectral"))


def test_the_devices_verb_takes_what_concerns_devices(tmp_path):
    assert parse_args(["devices", "--platform", "cpu", "--headless"]).verb == "devices"
    assert "--lr does not apply to the verb devices: it is for train" in refusal(parse_args, ["devices", "--lr", "1"])
    assert "--parity does not apply to the verb train" in refusal(parse_args, ["--parity"])
    assert parse_args(["devices", "--parity"]).config.parity
    path = tmp_path / "run.yaml"
    path.write_text("epochs: 3\n")
    assert "--epochs does not apply" in refusal(parse_args, ["devices", "-f", str(path)])


def test_where_a_process_stands_in_a_job_is_not_saved():
    job = {"coordinator_address": "host", "coordinator_port": 1234, "num_processes": 2, "process_id": 1}
    assert not applicable(Config(**job)).keys() & {*job, "parity"}


def test_a_preset_by_name():
    config = Config.from_preset("tiny", batch_size=32)
    assert (config.arch, config.embed_dim, config.depth, config.batch_size) == ("vit", 192, 12, 32)
    assert Config.from_preset("small", arch="baseline").num_heads == 6
    assert "--preset huge: must be one of" in refusal(Config.from_preset, "huge")
