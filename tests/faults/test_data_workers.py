"""What makes batches raises, hangs, or returns what is no image; what it is, is told, and the last save stays."""

import errno
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from test_every_stage import ROOT, TINY
from test_training import start

from cssm import cli
from cssm.checkpoint import step_folder
from cssm.config import Config
from cssm.data.records import ArraySource
from cssm.report import read_events

pytestmark = pytest.mark.slow
# A worker that never comes back with the images of step 5.
HANGS = """
import sys, time
from cssm import cli
from cssm.data.records import ArraySource
gather = ArraySource.gather
calls = []
def the_gather_that_hangs(self, indices, epoch=None, out=None):
    calls.append(1)
    if epoch is not None and len(calls) > 5:
        time.sleep(1000)
    return gather(self, indices, epoch, out)
ArraySource.gather = the_gather_that_hangs
sys.exit(cli.main(sys.argv[1:]))
"""
ORPHANS = """
import os, signal, sys, threading, time
import numpy as np
from functools import partial
from pathlib import Path
from cssm.data.records import cached_arrays
def make(indices):
    print(os.getpid(), flush=True)
    time.sleep(1)
    return np.zeros((len(indices), 1, 1, 1), np.uint8), np.zeros(len(indices), np.int32)
if __name__ == "__main__":
    cached_arrays(Path(sys.argv[1]), make, 40_000, (1, 1, 1), num_workers=2)
"""


@pytest.mark.parametrize(
    "fault, code",
    [(OSError(errno.EIO, "Input/output error"), 6), (ValueError("it is broken"), 1), (MemoryError(), 3)],
    ids=["disk", "bug", "memory"],
)
def test_a_worker_that_raises_ends_the_run_with_its_reason(tmp_path, monkeypatch, fault, code):
    gather = ArraySource.gather

    def raising(self, indices, epoch=None, out=None):
        if epoch == 1:
            raise fault
        return gather(self, indices, epoch, out)

    monkeypatch.setattr(ArraySource, "gather", raising)
    with pytest.raises(type(fault)) as caught:
        start(tmp_path, "run", num_workers=2)
    assert cli.explain(caught.value, Config())[0] == code
    step_folder.check_files(tmp_path / "run" / "checkpoints" / "3")


def test_a_worker_that_hangs_ends_the_run_with_the_stacks_of_all_threads(tmp_path):
    command = [sys.executable, "-c", HANGS, *TINY, "--num_devices=1", "--num_workers=1", "--stall_timeout=15"]
    command += [f"--checkpoint_dir={tmp_path}", "--run_name=run", "--max_steps=20", "--eval_every=2"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 4, result.stdout + result.stderr
    assert "the_gather_that_hangs" in result.stderr and "next_of" in result.stderr
    assert "the program waits for the batch of training data of step" in result.stderr
    (error,) = [e for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "error"]
    assert error["exit_code"] == 4 and "waits for the batch" in error["message"]
    step_folder.check_files(tmp_path / "run" / "checkpoints" / "2")


def test_images_that_are_no_whole_numbers_are_refused_before_they_could_be_nan(tmp_path):
    images = np.full((40, 8, 8, 1), np.nan, np.float32)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(40) % 2)
    code, sentence = None, ""
    try:
        start(tmp_path, "run", dataset="npz", data_dir=str(tmp_path / "a.npz"))
    except Exception as error:  # noqa: BLE001 - whatever it is, it must be told well
        code, sentence = cli.explain(error, Config())
    assert code == 2 and "a.npz" in sentence


def test_workers_end_with_a_parent_that_was_killed(tmp_path):
    """They make images for nobody, and would wait for ever."""
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(tmp_path / "cache")]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        pids = {int(process.stdout.readline()) for _ in range(2)}
        process.kill()
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in pids if alive(pid)]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
