"""A dry run tells what a run would be, and leaves no trace."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cssm import cli, data
from cssm.checkpoint import Checkpoints
from cssm.config import KNOBS, UserError, parse_args, resolve
from cssm.resume import resume_record
from cssm.training import train
from parallel import devices as par

TINY = {"cssm": "gated", "embed_dim": 4, "image_size": 8, "kernel_size": 3, "seq_len": 2, "num_devices": 2}
TINY |= {"max_train_examples": 40, "max_eval_examples": 21, "global_batch_size": 8, "epochs": 3}
ROOT = Path(__file__).resolve().parents[1]
HELD = ("parameter", "gradient", "optimizer", "average", "activation", "batch")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Where a run would write; what would load or make images, or keep compiled programs, fails."""
    monkeypatch.setattr(data, "load", None)
    monkeypatch.setattr(par, "enable_compile_cache", None)
    monkeypatch.chdir(tmp_path)
    return {"checkpoint_dir": str(tmp_path / "runs"), "cache_dir": str(tmp_path / "cache"), "dry_run": True}


def facts(places, **settings):
    """The config event of a dry run, which must be its only output."""
    stream = io.StringIO()
    config = resolve({**TINY, **places, **settings}, {})
    returned = train(config, json_stream=stream)
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event["event"] == "config" and event["dry_run"] is True
    assert set(returned) <= set(event)
    return event


def test_nothing_is_written_or_said_besides(places, tmp_path, capsys):
    event = facts(places, dataset="pathfinder", image_size=32)
    assert list(tmp_path.iterdir()) == []
    out, err = capsys.readouterr()
    assert out == err == ""
    assert event["run_dir"] is None and event["dataset"] == "pathfinder"
    assert [event[f"{split}_examples"] for split in ("train", "val", "test")] == [40, 21, 21]
    assert "dry_run" not in event["config"], "which describes the run, and not how it was asked for"


def test_the_numbers_add_up(places):
    event = facts(places, kernel_domain="spectral")
    assert sum(row["params"] for row in event["modules"]) == event["num_params"] > 0
    assert event["num_complex_params"] == sum(row["complex_params"] for row in event["modules"]) > 0
    for row in event["modules"]:
        sides = [[side for side in shape if side != "complex"] for shape in row["shapes"].values()]
        assert row["params"] == sum(int(np.prod(shape)) for shape in sides)
    assert event["modules"][0]["module"].startswith("stem/")
    assert event["modules"][-1]["module"] == "head"
    assert event["total_bytes"] == sum(event[f"{name}_bytes"] for name in HELD)
    assert (
        event["parameter_bytes"] == 4 * (event["num_params"] + event["num_complex_params"]) == event["gradient_bytes"]
    )
    assert 0 <= event["optimizer_bytes"] - 2 * event["parameter_bytes"] < 100, "two moments, and counters"
    assert event["batch_bytes"] == 3 * 4 * (8 * 8 + 4), "one in use and two ahead of 4 images and labels"
    assert 2 < event["train_flops_per_image"] / event["flops_per_image"] < 5
    assert (event["total_steps"], event["steps_per_epoch"], event["effective_batch"]) == (15, 5, 8)


def test_memory_follows_what_decides_it(places):
    few = facts(places)
    many = facts(places, global_batch_size=16)
    apart = facts(places, global_batch_size=16, grad_accum=2)
    averaged = facts(places, ema_decay=0.9)
    assert many["activation_bytes"] == pytest.approx(2 * few["activation_bytes"], rel=0.1)
    assert apart["activation_bytes"] < 1.2 * few["activation_bytes"] < 0.7 * many["activation_bytes"]
    assert averaged["average_bytes"] == few["parameter_bytes"] and not few["average_bytes"]
    assert few["train_flops_per_image"] == pytest.approx(many["train_flops_per_image"], rel=0.1)


def test_what_is_split_counts_by_the_part_of_a_device(places):
    whole = facts(places, num_devices=4)
    optimizer = facts(places, num_devices=4, shard="optimizer")
    params = facts(places, num_devices=4, shard="params")
    share = {name: [event[f"{name}_bytes"] for event in (optimizer, params)] for name in HELD}
    for name, parts in (("parameter", (1, 4)), ("gradient", (1, 4)), ("optimizer", (4, 4))):
        for held, part in zip(share[name], parts, strict=True):
            assert held == pytest.approx(whole[f"{name}_bytes"] / part, rel=0.1), name
    assert optimizer["num_params"] == params["num_params"] == whole["num_params"]


def test_the_size_that_is_looked_for_is_told(places, capsys):
    event = facts(places, embed_dim=None, target_params="2k")
    assert abs(event["num_params"] / 2000 - 1) <= 0.05
    assert event["target_params"] == event["config"]["target_params"] == 2000
    assert event["config"]["embed_dim"] > 4 and event["config"]["depth"] >= 1
    config = resolve({**TINY, **places, "embed_dim": None, "target_params": "2k"}, {})
    train(config)
    size = f"size: embed_dim {event['config']['embed_dim']} and depth {event['config']['depth']}, found for "
    assert size in capsys.readouterr().out


def saved_run(places, step=7):
    config = resolve({**TINY, "run_name": "a", "epochs": 2, "target_params": None}, {})
    directory = places["checkpoint_dir"] + "/a"
    with Checkpoints(directory + "/checkpoints") as checkpoints:
        meta = {"config": resume_record(config, 8, 1), "best": {}, "step": step}
        checkpoints.save(step, {"a": np.zeros(3)}, meta)
    return directory


def test_with_resume_it_is_the_run_that_would_go_on(places, capsys):
    directory = saved_run(places)
    argv = ["--resume", directory, "--epochs", "4", "--num_devices", "2", "--dry_run"]
    argv += ["--checkpoint_dir", places["checkpoint_dir"], "--cache_dir", places["cache_dir"]]
    parsed = parse_args(argv)
    event = train(parsed.config, parsed.typed)
    assert (event["step"], event["total_steps"], event["run_dir"]) == (7, 20, directory)
    assert event["config"]["embed_dim"] == 4
    out = capsys.readouterr().out
    assert "steps: 20, 5 an epoch, going on from step 7" in out and "epochs: was 2, now 4" in out


def test_what_a_run_would_refuse_is_refused(places):
    saved_run(places)
    with pytest.raises(UserError, match="exists already"):
        facts(places, run_name="a")
    assert facts(places, run_name="b")["run_dir"].endswith("b")
    with pytest.raises(UserError, match="one step takes 80"):
        facts(places, global_batch_size=80)
    with pytest.raises(UserError, match="Pathfinder easy takes"):
        facts(places, dataset="pathfinder")


def test_the_command_line(places, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "set_environment", lambda *_: None)
    argv = ["--dry_run"] + [f"--{name}={value}" for name, value in TINY.items()]
    assert cli.main([*argv, "--quiet"]) == 0
    (note, line) = capsys.readouterr().out.splitlines()
    assert note.startswith("note: ") and "parameters, " in line and line.endswith("on each device")
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "dry run, simple gated on digits" in out.splitlines()[0]
    assert "cell_0" in out and "memory of each device" in out
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="dry_run does not apply to the verb devices"):
        parse_args(["devices", "--dry_run"])


@pytest.mark.slow
def test_of_several_processes_one_speaks_and_all_have_its_size(tmp_path):
    flags = [f"--{name}={value}" for name, value in TINY.items() if name not in ("embed_dim", "num_devices")]
    flags += ["--target_params=2k", "--nproc_per_node=2", f"--checkpoint_dir={tmp_path}", f"--cache_dir={tmp_path}"]
    environ = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"}
    ended = {}
    for extra in ("--headless", "--quiet"):
        command = [sys.executable, str(ROOT / "main.py"), "--dry_run", extra, *flags]
        ended[extra] = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        assert ended[extra].returncode == 0, ended[extra].stderr
    (line,) = ended["--headless"].stdout.splitlines()
    event = json.loads(line)
    assert (event["processes"], event["devices"]) == (2, 4)
    assert abs(event["num_params"] / 2000 - 1) <= 0.05
    assert ended["--quiet"].stdout.count(f"{event['num_params']:,} parameters") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dataset", ["digits", "pathfinder"])  # of files: in the tests of what reads them
@pytest.mark.parametrize("limits", [{"train": 12, "eval": 40}, {"train": 40, "eval": None}], ids=str)
def test_an_outline_is_what_would_be_loaded(dataset, limits, tmp_path):
    limits = {f"max_{split}_examples": limit for split, limit in limits.items()}
    if dataset == "pathfinder":  # of which as many are made as are asked for
        limits = {name: limit or 10 for name, limit in limits.items()}
    config = resolve({"dataset": dataset, "cache_dir": str(tmp_path), "num_workers": 0, **limits}, {})
    outline = data.outline(config)
    sources = {split: data.load(config, split) for split in ("train", "val", "test")}
    assert outline.examples == {split: len(source) for split, source in sources.items()}
    for source in sources.values():
        assert (source.num_classes, source.image_shape) == (outline.num_classes, outline.image_shape)


def test_every_data_set_has_an_outline():
    assert set(data.OUTLINES) == set(data.LOADERS) == set(KNOBS["dataset"].choices)
    whole = {split: data.outline(resolve({"dataset": "pathfinder"}, {})).examples[split] for split in ("train", "val")}
    assert whole == {"train": 20_000, "val": 2_000}
