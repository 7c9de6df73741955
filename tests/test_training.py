"""Whole runs in this process: what they leave behind, and that an interruption changes nothing."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import flax
import jax
import numpy as np
import pytest

from cssm import data, models, train
from cssm.checkpoint import Checkpoints
from cssm.checkpoint.step_folder import open_checkpointer, read_arrays, read_record
from cssm.config import Config, UserError, parse_args
from cssm.inference.evaluate import evaluate
from cssm.report import read_events
from cssm.step import cross_entropy, normalise
from parallel.devices import DeviceError

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "cssm": "gated",
    "embed_dim": 4,
    "image_size": 8,
    "kernel_size": 3,
    "seq_len": 2,
    "max_train_examples": 40,
    "max_eval_examples": 21,
    "global_batch_size": 8,
    "log_every": 1,
    "eval_every": 3,
    "max_steps": 6,
    "ema_decay": 0.9,
    "norm_type": "batch",
    "num_devices": 1,
}


def argv(root, name, **settings):
    given = {**TINY, "checkpoint_dir": root, "run_name": name, **settings}
    return [f"--{key}={value}" for key, value in given.items() if value is not None]


def start(root, name, **settings):
    return train(Config(**{**TINY, "checkpoint_dir": str(root), "run_name": name, "quiet": True, **settings}))


def go_on(root, name, *more):
    parsed = parse_args(["--resume", str(root / name), "--checkpoint_dir", str(root), "--quiet", *more])
    return train(parsed.config, parsed.typed)


def arrays(run, step):
    folder = run / "checkpoints" / str(step)
    with open_checkpointer() as checkpointer:
        return read_arrays(checkpointer, folder.absolute(), read_record(folder)["arrays"])


def losses(run):
    return {
        e["step"]: (e["loss"], e["learning_rate"]) for e in read_events(run / "metrics.jsonl") if e["event"] == "step"
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps in one go."""
    root = tmp_path_factory.mktemp("whole")
    return root / "run", start(root, "run")


def test_a_run_leaves_what_it_promises(whole):
    run, summary = whole
    events = read_events(run / "metrics.jsonl")
    assert events[0]["event"] == "config" and events[0]["schema"] == 1
    assert (events[0]["devices"], events[0]["effective_batch"], events[0]["grad_accum"]) == (1, 8, 1)
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4, 5, 6] and steps[-1]["epoch"] == 2
    wanted = {"loss", "accuracy", "learning_rate", "grad_norm", "images_per_s", "step_ms", "data_wait_ms"}
    assert wanted <= steps[0].keys()
    evals = [(e["split"], e["step"], e["count"]) for e in events if e["event"] == "eval"]
    assert evals == [("val", 3, 21), ("val", 6, 21), ("test", 6, 21)]
    assert {e["step"] for e in events if e["event"] == "checkpoint"} == {3, 6}
    assert events[-1]["event"] == "summary" and events[-1]["test"] == summary["test"]
    aside = [summary[f"{span}_s"] for span in ("compile", "data_wait", "evaluate", "save")]
    assert min(aside) > 0 and summary["goodput"] == pytest.approx(1 - sum(aside) / summary["wall_s"], abs=0.02)
    assert (run / "plots" / "loss.png").stat().st_size > 1000
    assert f"{round(21 * summary['test']['accuracy'])} of 21 right" in (run / "report.html").read_text()
    assert (run / "metrics.csv").read_text().count("\n") == 1 + 6 + 3
    assert "embed_dim: 4" in (run / "config.yaml").read_text()


def test_evaluation_uses_the_averaged_parameters(whole):
    """The logged loss is that of the saved average on the whole split, and not that of the parameters themselves."""
    run, _ = whole
    config, saved = Config(**TINY), arrays(run, 6)
    images, labels = data.load(config, "val").gather(np.arange(21))
    model = models.build(config, 10)

    def tree(prefix):
        paths = {tuple(name.split("/")[1:]): leaf for name, leaf in saved.items() if name.split("/")[0] == prefix}
        return flax.traverse_util.unflatten_dict(paths)

    def loss(params):
        variables = {"params": params, "batch_stats": tree("batch_stats")}
        return float(cross_entropy(jax.jit(model.apply)(variables, normalise(images)), labels, 0.0).mean())

    (logged,) = [
        e["loss"]
        for e in read_events(run / "metrics.jsonl")
        if e["event"] == "eval" and e["split"] == "val" and e["step"] == 6
    ]
    np.testing.assert_allclose(loss(tree("ema_params")), logged, rtol=1e-5)
    assert abs(loss(tree("params")) - logged) > 1e-4


def test_evaluating_the_run_gives_what_it_said_of_itself(whole, tmp_path):
    run, summary = whole
    latest = ["eval", "--checkpoint", str(run), "--checkpoint_step", "latest", "--output", str(tmp_path), "--quiet"]
    parsed = parse_args([*latest, "--num_devices", "3"])
    found = evaluate(parsed.config, parsed.typed)
    for name in ("step", "count", "accuracy"):
        assert found[name] == summary["test"][name]
    assert found["averaged"] and found["loss"] == pytest.approx(summary["test"]["loss"], rel=1e-5)


def test_the_saved_configuration_reproduces_the_run(whole, tmp_path):
    run, summary = whole
    pytest.importorskip("ruamel.yaml")
    again = [
        "--config",
        str(run / "config.yaml"),
        "--run_name",
        "again",
        "--checkpoint_dir",
        str(tmp_path),
        "--quiet",
    ]
    assert train(parse_args(again).config)["test"] == summary["test"]


def test_three_steps_a_kill_and_three_more_are_six_steps_bit_for_bit(whole, tmp_path):
    run, _ = whole
    command = [
        sys.executable,
        str(ROOT / "main.py"),
        *argv(tmp_path, "killed"),
        "--max_steps=6",
        "--headless",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout:
        if json.loads(line)["event"] == "checkpoint":
            process.kill()
            break
    process.wait()
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    with Checkpoints(tmp_path / "killed" / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 3
    go_on(tmp_path, "killed", "--num_devices", "1")
    assert losses(tmp_path / "killed") == losses(run)
    there, here = arrays(run, 6), arrays(tmp_path / "killed", 6)
    assert there.keys() == here.keys()
    for name, leaf in there.items():
        np.testing.assert_array_equal(here[name], leaf, err_msg=name)


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_devices(tmp_path):
    """With statistics of the whole batch (layer norm), four devices and two take the same steps, to rounding."""
    settings = {
        "norm_type": "layer",
        "optimizer": "sgd",
        "lr": 0.01,
        "schedule": "constant",
        "warmup_steps": 0,
    }
    start(tmp_path, "four", num_devices=4, max_steps=3, **settings)
    start(tmp_path, "straight", num_devices=2, **settings)
    summary = go_on(tmp_path, "four", "--num_devices", "2", "--max_steps", "6")
    assert summary["step"] == 6
    there, here = arrays(tmp_path / "straight", 6), arrays(tmp_path / "four", 6)
    for name, leaf in there.items():
        np.testing.assert_allclose(here[name], leaf, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_finished_run_says_so_and_goes_on_when_given_more_steps(tmp_path, capsys):
    start(tmp_path, "run", max_steps=3)
    files = tmp_path / "run" / "checkpoints" / "3" / "files.json"
    before = files.stat().st_mtime_ns
    assert go_on(tmp_path, "run", "--num_devices", "1")["step"] == 3
    assert "no step is left" in capsys.readouterr().out
    assert files.stat().st_mtime_ns == before
    summary = go_on(tmp_path, "run", "--max_steps", "5", "--num_devices", "1")
    assert summary["step"] == 5
    assert set(losses(tmp_path / "run")) == {1, 2, 3, 4, 5}


def test_a_batch_that_does_not_divide_is_refused_and_leaves_no_directory(tmp_path):
    with pytest.raises(DeviceError, match="type 8 or 12"):
        start(tmp_path, "run", num_devices=4, global_batch_size=10)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path):
    with pytest.raises(UserError, match="not finite at step") as error:
        start(
            tmp_path,
            "run",
            lr=1e30,
            optimizer="sgd",
            grad_clip=0.0,
            log_every=2,
            ema_decay=0.0,
            norm_type="layer",
            cssm="hgru",
        )
    assert error.value.exit_code == 5
    assert str(error.value).endswith("try --nonfinite skip, a smaller --lr or --grad_clip, or --stable_transition")
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert not [step for step in checkpoints.steps() if step > 1]


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(whole, tmp_path, capsys):
    import shutil

    run, _ = whole
    shutil.copytree(run, tmp_path / "copy")
    data_file = max(
        (tmp_path / "copy" / "checkpoints" / "6").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size
    )
    content = bytearray(data_file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    data_file.write_bytes(content)
    go_on(tmp_path, "copy", "--num_devices", "1")
    said = capsys.readouterr().out
    assert "the checkpoint of step 6 is damaged" in said and "going on from step 3" in said
    assert losses(tmp_path / "copy") == losses(run)


def test_resuming_with_other_channels_is_refused(whole, tmp_path):
    run, _ = whole
    parsed = parse_args(["--resume", str(run), "--depth", "3"])
    with pytest.raises(UserError, match="--depth 3: the run to resume has 1"):
        train(parsed.config, parsed.typed)


@pytest.mark.slow
def test_simple_trains_with_split_parameters(tmp_path):
    """It has no blocks to gather one by one; its steps are those of one device all the same."""
    settings = {"norm_type": "layer", "optimizer": "sgd", "lr": 0.01, "max_steps": 2}
    one, two = (
        start(tmp_path, f"on_{n}", num_devices=n, shard=shard, **settings)["test"]["loss"]
        for n, shard in ((1, "none"), (2, "params"))
    )
    assert two == pytest.approx(one, rel=1e-5)


def test_what_only_the_command_line_can_do_is_refused_in_a_program(tmp_path):
    for settings in ({"multi_gpu": "ddp"}, {"nproc_per_node": "2"}):
        with pytest.raises(UserError, match="there is 1 process: several are started by the command line"):
            start(tmp_path, "run", **settings)
    with pytest.raises(UserError, match="XLA_FLAGS variable: set it before jax is imported"):
        start(tmp_path, "run", xla_flags="--xla_of_no_such_name=1")
    with pytest.raises(UserError, match="deterministic: --xla_gpu_deterministic_ops=true is not in the XLA_FLAGS"):
        start(tmp_path, "run", deterministic=True)
