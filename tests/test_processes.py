"""Whole runs over several processes: one dies, stalls, or is asked to stop; and torchrun's variables."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cssm.checkpoint import step_folder
from cssm.report import read_events

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--cssm=gated", "--embed_dim=4", "--image_size=8", "--kernel_size=3", "--seq_len=2", "--global_batch_size=8"]
TINY += ["--max_train_examples=40", "--max_eval_examples=21", "--log_every=1", "--eval_every=10", "--ema_decay=0.9"]
TINY += ["--schedule=constant", "--warmup_steps=0"]
KEPT = {"config.yaml", "metrics.jsonl", "metrics.csv", "report.html"}
STEPS = 60
TWO = ["--nproc_per_node=2", "--heartbeat_timeout=5"]

pytestmark = pytest.mark.slow


def launch(*flags, env=None, **options):
    """main.py with two simulated devices in each process."""
    environ = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
        **(env or {}),
    }
    command = [sys.executable, str(ROOT / "main.py"), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environ, **{**pipes, **options})


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def workers(parent):
    """Pids of the processes that a parent has started, in their order."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        if len(children) == 2:
            return [int(pid) for pid in children]
        time.sleep(0.1)
    raise AssertionError("the parent has not started two processes")


def wait_for(path, event, step):
    """Until the run has said so in its metrics."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if path.exists() and any(e["event"] == event and e["step"] >= step for e in read_events(path)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no {event} of step {step} in {path}")


def gone(pid):
    """Whether the process is no more, or waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def arrays(run, step):
    folder = (run / "checkpoints" / str(step)).absolute()
    with step_folder.open_checkpointer() as checkpointer:
        return step_folder.read_arrays(checkpointer, folder, step_folder.read_record(folder)["arrays"])


def steps_of(run):
    return {e["step"]: e["loss"] for e in read_events(run / "metrics.jsonl") if e["event"] == "step"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """So many steps over two processes in one go: (directory, output)."""
    root = tmp_path_factory.mktemp("whole")
    process = launch(*TINY, *TWO, f"--checkpoint_dir={root}", "--run_name=run", f"--max_steps={STEPS}", "--headless")
    code, out, err = finish(process)
    assert code == 0, err
    return root / "run", out


def test_only_the_first_process_prints_and_writes(whole):
    run, out = whole
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["event"] for e in events].count("summary") == 1
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, STEPS + 1))
    assert events[0]["processes"] == 2 and events[0]["devices"] == 4
    assert events == read_events(run / "metrics.jsonl")
    assert {path.name for path in run.iterdir()} == {*KEPT, "checkpoints", "plots"}
    tested = next(e for e in events if e["event"] == "eval" and e["split"] == "test")
    assert f"of {tested['count']} right" in (run / "report.html").read_text(), "the answers of all processes"


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_or_stalls_ends_the_job_and_the_run_goes_on_bit_for_bit(how, victim, whole, tmp_path):
    """The metrics of its steps are those of the run that nothing happened to, and so is everything it saved."""
    flags = [*TINY, *TWO, f"--checkpoint_dir={tmp_path}", "--run_name=run"]
    process = launch(*flags, "--max_steps=100000")
    wait_for(tmp_path / "run" / "metrics.jsonl", "checkpoint", 10)
    pids = workers(process)
    os.kill(pids[victim], getattr(signal, how))
    began = time.monotonic()
    code, _, err = finish(process)
    assert code == 4, err
    assert time.monotonic() - began < 5 + 10
    assert all(gone(pid) for pid in pids)
    assert f"process {victim} of 2 was" in err
    code, _, err = finish(launch(*TWO, f"--resume={tmp_path / 'run'}", f"--max_steps={STEPS}", "--quiet"))
    assert code == 0, err
    run = whole[0]
    assert steps_of(tmp_path / "run") == steps_of(run)
    there, here = arrays(run, STEPS), arrays(tmp_path / "run", STEPS)
    for path, leaf in there.items():
        np.testing.assert_array_equal(here[path], leaf, err_msg=path)


@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_one_process_stops_all_after_a_common_save(number, code, tmp_path):
    run = tmp_path / "run"
    process = launch(*TINY, *TWO, f"--checkpoint_dir={tmp_path}", "--run_name=run", "--max_steps=100000")
    wait_for(run / "metrics.jsonl", "step", 2)
    os.kill(workers(process)[1], number)
    returned, _, err = finish(process)
    assert returned == code, err
    last = max(steps_of(run))
    assert step_folder.read_record(run / "checkpoints" / str(last))["meta"]["step"] == last
    assert f"after step {last}, which is saved" in err


def test_a_signal_to_the_parent_stops_all_likewise(tmp_path):
    process = launch(*TINY, *TWO, f"--checkpoint_dir={tmp_path}", "--run_name=run", "--max_steps=100000")
    wait_for(tmp_path / "run" / "metrics.jsonl", "step", 2)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143, err
    last = max(steps_of(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()


def test_torchruns_variables_give_the_same_run(whole, tmp_path):
    """Two commands, each with the variables that torchrun sets for its rank; both end with 0, one of them writes."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    flags = [
        *TINY,
        f"--checkpoint_dir={tmp_path}",
        "--run_name=run",
        f"--max_steps={STEPS}",
        "--headless",
        "--tensorboard",
    ]
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [launch(*flags, env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    (code, out, err), (other_code, other_out, other_err) = [finish(rank) for rank in ranks]
    assert (code, other_code) == (0, 0), err + other_err
    assert other_out == "" and out.count('"event": "summary"') == 1
    assert steps_of(tmp_path / "run") == steps_of(whole[0])
    assert len(list((tmp_path / "run").rglob("events.out.tfevents.*"))) == 1
    there, here = arrays(whole[0], STEPS), arrays(tmp_path / "run", STEPS)
    for path, leaf in there.items():
        np.testing.assert_array_equal(here[path], leaf, err_msg=path)


def test_a_mistake_is_told_once(tmp_path):
    process = launch(*TINY, *TWO, f"--checkpoint_dir={tmp_path}", "--global_batch_size=9")
    code, out, err = finish(process)
    assert code == 2 and err.count("--global_batch_size 9 does not divide by 4 devices") == 1, out + err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
