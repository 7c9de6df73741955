"""A run that is killed, or asked to stop, at every stage: nothing but steps since the last save is lost, none twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_processes import TINY, arrays, steps_of

from cssm.checkpoint import saved_meta, step_folder
from cssm.report import read_events
from cssm.runs import LOCK

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [*TINY, "--num_devices=1", "--eval_every=3", "--max_steps=21", "--resume=auto", "--run_name=run"]
# The program, which sends itself signals as it enters a stage for the n-th time.
STRUCK = """
import importlib, os, sys
module, name, count, *signals = sys.argv[1].split()
sys.argv = sys.argv[1:]
from cssm import cli
if module != "nowhere":
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), []
    def struck(*args, **kwargs):
        calls.append(1)
        if len(calls) == int(count):
            for number in signals:
                os.kill(os.getpid(), int(number))
        return real(*args, **kwargs)
    setattr(owner, last, struck)
sys.exit(cli.main(sys.argv[1:]))
"""
STAGES = {
    "start-up": "cssm.training set_up 1",
    "compilation": "cssm.engine Engine.take_first 1",
    "data wait": "cssm.engine Engine.next_of 3",
    "step": "cssm.engine Engine.take 3",
    "save": "cssm.checkpoint.step_folder write 1",
    "commit": "cssm.checkpoint.step_folder sync 1",
    "evaluation": "cssm.loop Loop._evaluate 1",
    "exit": "cssm.loop Loop.finish 1",
}

pytestmark = pytest.mark.slow


def run(root, stage="nowhere x 0", signals=(), *more):
    command = [sys.executable, "-c", STRUCK, " ".join([stage, *map(str, map(int, signals))]), *FLAGS]
    command += [f"--checkpoint_dir={root}", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Twenty-one steps that nothing happened to."""
    root = tmp_path_factory.mktemp("whole")
    result = run(root)
    assert result.returncode == 0, result.stderr
    assert "so a new run starts" in result.stdout, "auto finds nothing to go on with, and says so"
    return root / "run"


def check_record(run):
    """What a kill may leave: whole steps under their numbers, and half a line at the end of the metrics."""
    folders = [path for path in (run / "checkpoints").glob("*") if path.name.isdecimal()]
    for folder in folders:
        step_folder.check_files(folder)
    assert len(folders) >= 2 or not any(e["event"] == "checkpoint" and e["step"] > 3 for e in events_of(run))


def events_of(run):
    return read_events(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []


def assert_as_if_nothing_had_happened(run, whole):
    assert steps_of(run) == steps_of(whole)
    assert [json.loads(line)["event"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    there, here = arrays(whole, 21), arrays(run, 21)
    for path, leaf in there.items():
        np.testing.assert_array_equal(here[path], leaf, err_msg=path)


def test_a_run_killed_at_every_stage_in_turn_is_the_run_that_was_not(whole, tmp_path):
    """One run, resumed after each kill, to the bit: metrics without gap or repeat, parameters, optimizer state."""
    for stage in STAGES.values():
        result = run(tmp_path, stage, [signal.SIGKILL])
        assert result.returncode == -signal.SIGKILL, f"{stage}: {result.stdout}{result.stderr}"
        assert (tmp_path / "run" / LOCK).read_text().startswith("process "), "the lock is left, and held by no one"
        check_record(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    result = run(tmp_path)
    assert result.returncode == 0, result.stderr
    assert "ended within a line, which was cut off" in result.stdout
    assert_as_if_nothing_had_happened(tmp_path / "run", whole)


def test_a_run_asked_to_stop_at_every_stage_in_turn_is_the_run_that_was_not(whole, tmp_path):
    """Each time with the code of the signal, a save if there is something to be saved, and one sentence."""
    for stage, where in STAGES.items():
        before = saved_step(tmp_path / "run")
        result = run(tmp_path, where, [signal.SIGTERM])
        assert result.returncode == (0 if stage == "exit" else 143), f"{stage}: {result.stdout}{result.stderr}"
        assert "Traceback" not in result.stderr
        if stage in ("start-up", "compilation"):
            assert "before a step was taken: there is nothing to save" in result.stderr
            assert saved_step(tmp_path / "run") == before
        elif stage != "exit":
            last = max(steps_of(tmp_path / "run"))
            assert f"after step {last}, which is saved" in result.stderr and saved_step(tmp_path / "run") == last
    assert_as_if_nothing_had_happened(tmp_path / "run", whole)


def saved_step(run):
    folders = [path for path in (run / "checkpoints").glob("*") if path.name.isdecimal()]
    return saved_meta(run / "checkpoints")["step"] if folders else 0


def test_ctrl_c_twice_leaves_at_once_with_the_earlier_saves(whole, tmp_path):
    result = run(tmp_path, "cssm.engine Engine.take 7", [signal.SIGINT, signal.SIGINT])
    assert result.returncode == 130, result.stderr
    assert "stopped by Ctrl-C" in result.stderr and "Traceback" not in result.stderr
    check_record(tmp_path / "run")
    assert run(tmp_path).returncode == 0
    assert_as_if_nothing_had_happened(tmp_path / "run", whole)


COMPILES = """
import os, signal, sys, threading, jax
from cssm import cli
def listen(name, duration, **_):
    if name.endswith("jaxpr_to_mlir_module_duration") and duration > 0.1:  # a large program is lowered, XLA is next
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    elif name.endswith("backend_compile_duration") and duration > 2:
        print("compiled in", duration, flush=True)
jax.monitoring.register_event_duration_secs_listener(listen)
sys.exit(cli.main(sys.argv[1:]))
"""


def test_sigterm_ends_a_compilation(tmp_path):
    """XLA gives Python no turn: a thread ends the program. Without a cache, so that there is something to compile."""
    flags = ["--no_compile_cache", "--arch=vit", "--depth=6", "--embed_dim=32", "--cssm=hgru_bi", "--num_devices=1"]
    environ = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    del environ["XLA_FLAGS"]  # with which it is short
    command = [sys.executable, "-c", COMPILES, *flags, f"--checkpoint_dir={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100)
    assert result.returncode == 143, result.stdout + result.stderr
    assert "there is nothing to save" in result.stderr and "compiled in" not in result.stdout
