"""Every spelling of every setting, on the command line and in YAML; what is refused; what a file may hold."""

import itertools
import math
import random
import sys
from types import SimpleNamespace

import pytest

from cssm import flags
from cssm.config import KNOBS, VERBS, Config
from cssm.knobs import UserError

# A value that each type of setting accepts.
VALUES = {int: "2", float: "0.5", str: "x"}


def typed(*argv: str) -> dict:
    return flags.read_argv(argv, KNOBS, VERBS).typed


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        flags.read_argv(argv, KNOBS, VERBS)
    return str(caught.value)


def value_for(name: str) -> str:
    choices = KNOBS[name].choices
    return choices[-1] if choices else VALUES[KNOBS[name].type]


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if knob.type is not bool])
def test_a_setting_answers_to_all_its_spellings(name):
    value = value_for(name)
    expected = {name: KNOBS[name].coerce(value, name)}
    for spelling in (name, *KNOBS[name].aliases):
        for flag in {f"--{spelling}", f"--{spelling.replace('_', '-')}"}:
            assert typed(flag, value) == expected
            assert typed(f"{flag}={value}") == expected
    assert refusal(f"--{name}") == f"--{name} needs a value: type --{name} VALUE"
    assert "needs a value" in refusal(f"--{name}", "--seed", "1")


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if knob.type is bool])
def test_a_switch_is_on_or_off(name):
    for spelling in {name, name.replace("_", "-")}:
        assert typed(f"--{spelling}") == typed(f"--{spelling}=true") == {name: True}
        assert typed(f"--no-{spelling}") == typed(f"--{spelling}=false") == {name: False}
    assert "takes no value" in refusal(f"--no_{name}=true")
    assert "unexpected argument" in refusal(f"--{name}", "true")


# The names that people bring along. Written out: an alias that goes missing must be noticed.
ALIASES = {
    "save_dir": "checkpoint_dir", "output_dir": "checkpoint_dir", "grad_accum_steps": "grad_accum",
    "gradient_accumulation": "grad_accum", "gradient_accumulation_steps": "grad_accum", "gpu_ids": "gpus",
    "prefetch_batches": "prefetch", "learning_rate": "lr", "num_epochs": "epochs",
    "max_grad_norm": "grad_clip",
    "per_device_train_batch_size": "batch_size", "log_interval": "log_every", "save_interval": "save_every",
    "target_device": "platform", "rope_mode": "pos_embed",
}  # fmt: skip


@pytest.mark.parametrize("alias, name", ALIASES.items())
def test_names_from_elsewhere_are_understood(alias, name):
    assert list(typed(f"--{alias}", value_for(name))) == [name]


@pytest.mark.parametrize(
    "flag, expected",
    [
        ("--bf16", {"dtype": "bf16"}),
        ("--no_amp", {"dtype": "f32"}),
        ("--no-amp", {"dtype": "f32"}),
        ("--multi_device", {"multi_gpu": "auto"}),
        ("--no-multi-device", {"multi_gpu": "off"}),
    ],
)
def test_shorthands(flag, expected):
    assert typed(flag) == expected
    assert refusal(f"{flag}=1") == f"{flag} takes no value, but 1 was given: type {flag} alone"


@pytest.mark.parametrize(
    "argv, instead",
    [
        (["--mode", "flatten"], "--multi_gpu"),
        (["--force_multi_gpu"], "leave it out"),
        (["--checkpointer", "simple"], "leave it out"),
        (["--no_goom"], "--scan"),
        (["--no-log"], "--scan goom"),
        (["--use_ssd"], "--scan reference, chunked, associative, goom or fused"),
        (["--scan_mode", "pallas"], "--scan reference, chunked, associative, goom or fused"),
        (["--ssd_chunk_size", "8"], "--scan chunked"),
        (["--block_size", "32"], "leave it out"),
        (["--mixing", "dense"], "leave it out"),
        (["--use_complex32"], "--dtype bf16"),
        (["--use_complex16"], "--dtype bf16"),
        (["--project", "x"], "WANDB_PROJECT"),
        (["--vocab-size", "5"], "vision"),
        (["--tokenizer=x"], "vision"),
        (["--dtype", "f16"], "--dtype bf16"),
        (["--dataset", "girik"], "--dataset pathtracker"),
    ],
)
def test_names_that_are_refused_say_what_to_do(argv, instead):
    assert "is not accepted" in refusal(*argv)
    assert instead in refusal(*argv)


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--embed_dimm", "3"], "unknown flag --embed_dimm, did you mean --embed_dim?"),
        (["--learning-rat=3"], "unknown flag --learning-rat, did you mean --learning_rate?"),
        (["-lr", "3"], "unknown flag -lr, did you mean --lr?"),
        (["--batch"], "unknown flag --batch, did you mean --batch_size?"),
        (["--qqq"], "unknown flag --qqq, --help lists them all"),
        (["trian", "--lr", "1"], "unknown verb trian, did you mean train?"),
        (["fly"], f"unknown verb fly: type {' or '.join(VERBS)}"),
        (["--lr", "1", "train"], "unexpected argument train: settings are typed as --name value"),
        (["-f"], "-f needs a value: type -f VALUE"),
        (["--config="], "--config needs a value: type --config FILE"),
        (["--help=1"], "--help takes no value, but 1 was given: type --help alone"),
        (["--confg", "x.yaml"], "unknown flag --confg, did you mean --config?"),
        (["--config", "--lr", "1"], "--config needs a value: type --config VALUE"),
    ],
)
def test_what_is_not_understood_names_the_nearest(argv, sentence):
    assert refusal(*argv) == sentence


def test_flags_are_never_abbreviated():
    for name in ("embed", "head", "rem", "see"):
        assert refusal(f"--{name}").startswith(f"unknown flag --{name}")


def test_the_last_of_a_repeated_flag_wins_in_any_spelling():
    assert typed("--lr", "1", "--learning-rate=2", "--lr=3") == {"lr": 3.0}
    assert typed("--remat", "--no-remat") == {"remat": False}
    assert typed("--bf16", "--dtype", "f32") == {"dtype": "f32"}


def test_a_value_may_look_like_a_flag_or_hold_an_equals_sign():
    assert typed("--xla_flags", "--xla_a=1 --xla_b=2") == {"xla_flags": "--xla_a=1 --xla_b=2"}
    assert typed("--xla_flags=--xla_a=1", "--seed", "3") == {"xla_flags": "--xla_a=1", "seed": 3}
    assert refusal("--lr", "-1").startswith("--lr -1: must be above 0")


def test_verbs_and_requests():
    assert flags.read_argv([], KNOBS, VERBS) == flags.Command("train", {})
    assert flags.read_argv(["devices", "--gpus", "0"], KNOBS, VERBS).verb == "devices"
    for argv in (["--config", "a.yaml"], ["--config=a.yaml"], ["-f", "a.yaml"], ["-f=a.yaml"]):
        assert flags.read_argv(argv, KNOBS, VERBS).config_path == "a.yaml"
    assert flags.read_argv(["--lr", "1", "-h"], KNOBS, VERBS).show == "help"
    assert flags.read_argv(["devices", "--help"], KNOBS, VERBS).show == "help"
    assert flags.read_argv(["--version"], KNOBS, VERBS).show == "version"


def test_help_names_every_setting_with_its_default_choices_aliases_and_conditions():
    text = flags.help_text(KNOBS, VERBS)
    for knob in KNOBS.values():
        entry = " ".join(text.split(f"\n  --{knob.name} ")[1].split("\n  -")[0].split())
        assert knob.help in entry
        assert "default: " in entry
        assert knob.default in (None, True, False) or f"default: {knob.default}" in entry
        assert all(choice in entry for choice in knob.choices)
        assert all(f"--{alias}" in entry for alias in knob.aliases)
        for way in flags.conditions(knob, KNOBS):
            for name, values in way.items():
                others = " or ".join(choice for choice in KNOBS[name].choices if choice not in values)
                assert f"--{name} {' or '.join(values)}" in entry or f"any --{name} but {others}" in entry
    assert all(f"\n{knob.group}:\n" in text for knob in KNOBS.values())
    assert all(f"--{name} " in text for name in (*flags.SHORTHANDS, "config", "help", "version"))
    assert max(len(line) for line in text.splitlines()) <= 110


SHORTENED = [
    name
    for name, knob in KNOBS.items()
    if len(knob.applies) == 1 and flags.conditions(knob, KNOBS) != list(knob.applies)
]


@pytest.mark.parametrize("name", SHORTENED)
def test_conditions_that_help_leaves_out_follow_from_those_it_tells(name):
    """Told of settings which themselves apply, a way is the one that was declared."""
    (way,), (told,) = KNOBS[name].applies, flags.conditions(KNOBS[name], KNOBS)
    causes = {*way, "arch", "late_mixer"}
    kept = {n: knob.default for n, knob in KNOBS.items()}
    for values in itertools.product(*(KNOBS[cause].choices for cause in causes)):
        settings = SimpleNamespace(**{**kept, **dict(zip(causes, values, strict=True))})
        holds = all(getattr(settings, n) in values and not KNOBS[n].unmet(settings) for n, values in told.items())
        if any(getattr(settings, n) != kept[n] and KNOBS[n].unmet(settings) for n in causes):
            continue  # refused
        assert holds == (not KNOBS[name].unmet(settings))


def yaml(tmp_path, text: str) -> dict:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return flags.read_yaml(path, KNOBS)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("lr: 1e-3", {"lr": 1e-3}),
        ("lr: '1e-3'\nepochs: 1e1", {"lr": 1e-3, "epochs": 10}),
        ("max_steps: 1.5k\nmax_train_examples: 2M", {"max_steps": 1500, "max_train_examples": 2_000_000}),
        ("run_name: 007\ngpus: 0,1", {"run_name": "007", "gpus": "0,1"}),
        ("gpus: [0, 1]", {"gpus": "0,1"}),
        ("pathfinder_difficulty: 14", {"pathfinder_difficulty": "14"}),
        ("remat: true\nheadless: False", {"remat": True, "headless": False}),
        ("run_name: 'null'\nmax_steps: null\nlr: ~\nepochs:", {"run_name": "null"}),
        ("learning-rate: 2\nno_remat: true\nbf16: true", {"lr": 2.0, "remat": False, "dtype": "bf16"}),
        ("# a comment\n\n", {}),
        (
            "model:\n  arch: vit\n  depth: 3\ntrainer: {lr: 0.5}\nseed: 1",
            {"arch": "vit", "depth": 3, "lr": 0.5, "seed": 1},
        ),
        ("a: &d {lr: 0.5}", {"lr": 0.5}),
    ],
)
def test_files_are_read_flat_or_in_sections(tmp_path, text, expected):
    assert yaml(tmp_path, text) == expected


@pytest.mark.parametrize(
    "text, line, words",
    [
        ("arch: vit\nembed_dimm: 3", 2, "unknown key, did you mean embed_dim?"),
        ("model:\n  archh: vit", 2, "unknown key, did you mean arch?"),
        ("seed: 1\n\nlr: fast", 3, "lr fast: must be a number"),
        ("lr: 0.1\nembed_dim: 33", 2, "must be even, type 32 or 34"),
        ("lr: 1\nlr: 2", 2, "lr is set twice"),
        ("lr: 1\nm:\n  learning_rate: 2", 3, "lr is set twice"),
        ("arch: [vit\nlr: 1", 2, "not YAML"),
        ("lr: 1\n\tseed: 2", 2, "not YAML"),
        ("a: b: c", 1, "not YAML"),
        ("lr: 1\n---\nlr: 2", 2, "not YAML"),
        ("- lr\n- seed", 1, "must be lines of the form `name: value`"),
        ("just words", 1, "must be lines of the form"),
        ("a:\n  b:\n    lr: 1", 2, "sections go one level deep"),
        ("lr: 1\ngpus: &g [*g]", 2, "must be a value"),
        ("gpus: [0, 1.5]", 1, "must be a text"),
        ("%YAML 1.3\n---\nlr: 1", 1, "not YAML 1.2"),
        ("mode: flatten", 1, "is not accepted"),
        ("dtype: f16", 1, "is not accepted"),
        ("bf16: false", 1, "can only be true, otherwise set dtype"),
        ("dtype: [f32, bf16]", 1, "must be a text"),
        ("? [a, b]\n: 1", 1, "must be lines of the form"),
    ],
)
def test_mistakes_in_a_file_name_the_file_and_the_line(tmp_path, text, line, words):
    with pytest.raises(UserError) as caught:
        yaml(tmp_path, text)
    sentence = str(caught.value)
    assert sentence.startswith(f"{tmp_path / 'run.yaml'} line {line}: ")
    assert words in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"lr: 1\nseed: \x00\n"])
def test_what_is_no_text_is_no_yaml(tmp_path, content):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"run\.yaml line \d: not YAML"):
        flags.read_yaml(path, KNOBS)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(UserError, match=f"--config {path}: cannot be read, "):
            flags.read_yaml(path, KNOBS)


def test_without_a_yaml_library_the_error_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    with pytest.raises(UserError, match=r"pip install ruamel\.yaml"):
        yaml(tmp_path, "lr: 1")


def test_writing_needs_no_yaml_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    flags.write_yaml(tmp_path / "run.yaml", {"lr": 1e-7, "gpus": None, "remat": True, "run_name": "a: b"})
    assert (tmp_path / "run.yaml").read_text() == 'lr: 1.0e-07\ngpus: null\nremat: true\nrun_name: "a: b"\n'


def test_what_is_written_is_read_back(tmp_path):
    draw = random.Random(0)
    texts = [
        "0,1",
        "1e-3",
        "007",
        "null",
        "true",
        "~",
        "a: b # c",
        'q"uo\\te',
        "ümlaut ☃ 😀",
        "- x",
        " pad ",
        "[",
        "{}",
    ]
    for text in texts:
        values = {
            "lr": math.ldexp(draw.random(), draw.randrange(-60, 3)) + 1e-300,
            "weight_decay": 1e-7,
            "seed": draw.randrange(2**32),
            "remat": draw.random() < 0.5,
            "gpus": "0,1",
            "run_name": text,
            "max_steps": None,
        }
        flags.write_yaml(tmp_path / "run.yaml", values)
        found = flags.read_yaml(tmp_path / "run.yaml", KNOBS)
        assert found == {name: value for name, value in values.items() if value is not None}
        assert {name: type(value) for name, value in found.items()} == {n: KNOBS[n].type for n in found}


def test_every_default_survives_a_file(tmp_path):
    values = {name: getattr(Config(), name) for name in KNOBS}
    flags.write_yaml(tmp_path / "run.yaml", values)
    assert Config(**flags.read_yaml(tmp_path / "run.yaml", KNOBS)) == Config()
