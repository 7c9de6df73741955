"""The disk under a run fills up, goes away, refuses, or knows no locks; the clock jumps."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time

import pytest
from test_training import ROOT, argv, losses, start

from cssm import cli
from cssm.checkpoint import step_folder
from cssm.config import Config, UserError
from cssm.loop import Loop
from cssm.report.events import EventLog

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps that nothing happened to."""
    root = tmp_path_factory.mktemp("whole")
    start(root, "run")
    return root / "run"


def at_step(monkeypatch, step, act):
    """Do something after the step."""
    after_step = Loop._after_step

    def then_act(self, *args):
        after_step(self, *args)
        if self.step == step:
            act(self)

    monkeypatch.setattr(Loop, "_after_step", then_act)


def code_and_sentence(error):
    return cli.explain(error, Config())


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_stops_the_run_with_the_last_checkpoint_intact(tmp_path, monkeypatch):
    def fill_up(loop):
        loop.checkpoints.wait()
        monkeypatch.setattr(step_folder, "write", full)

    at_step(monkeypatch, 4, fill_up)
    with pytest.raises(UserError, match=r"cannot write the checkpoint of step 6 .*No space left") as caught:
        start(tmp_path, "run")
    assert caught.value.exit_code == 6
    step_folder.check_files(tmp_path / "run" / "checkpoints" / "3")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]


def test_a_disk_that_is_full_for_the_metrics_stops_the_run(tmp_path, monkeypatch):
    def fill_up(loop):
        monkeypatch.setattr("cssm.report.events._append_whole", full)

    at_step(monkeypatch, 4, fill_up)
    with pytest.raises(OSError, match="No space left") as caught:
        start(tmp_path, "run")
    code, sentence = code_and_sentence(caught.value)
    assert code == 6 and "make room" in sentence
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]
    step_folder.check_files(tmp_path / "run" / "checkpoints" / "3")


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="a file system can be mounted by root")
def test_a_file_system_that_is_really_full(tmp_path):
    """2 MiB, of which checkpoints take more and more: the program ends with one sentence, without a traceback."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        command = [sys.executable, str(ROOT / "main.py"), *argv(disk, "run", max_checkpoints=50, save_every=1)]
        result = subprocess.run([*command, "--quiet", "--max_steps=100"], capture_output=True, text=True, timeout=100)
        assert result.returncode == 6, result.stdout + result.stderr
        assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1, result.stderr
        saved = [path for path in (disk / "run" / "checkpoints").iterdir() if path.name.isdecimal()]
        assert len(saved) >= 2
        for folder in saved:
            step_folder.check_files(folder)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# Root without the right to pass over permissions, which it would keep; anybody else is bound by them anyway.
ORDINARY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


def test_a_directory_that_may_not_be_written_ends_the_run_and_it_goes_on_once_it_may(tmp_path):
    program = [*ORDINARY, sys.executable, str(ROOT / "main.py"), "--quiet"]
    checkpoints, metrics = tmp_path / "run" / "checkpoints", tmp_path / "run" / "metrics.jsonl"

    def refused(said, code):
        assert code == 6 and len(said.splitlines()) == 1, said
        assert said.startswith("error: ") and "ermission denied" in said and str(tmp_path) in said

    tmp_path.chmod(0o555)
    never = subprocess.run([*program, *argv(tmp_path, "run")], capture_output=True, text=True)
    refused(never.stderr, never.returncode)
    tmp_path.chmod(0o755)
    command = [*program, *argv(tmp_path, "run", max_steps=10**6, save_every=3)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (metrics.exists() and '"checkpoint"' in metrics.read_text()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    checkpoints.chmod(0o555)
    refused(process.communicate(timeout=60)[1], process.returncode)
    checkpoints.chmod(0o755)
    saved = max(int(folder.name) for folder in checkpoints.iterdir() if folder.name.isdecimal())
    step_folder.check_files(checkpoints / str(saved))
    command = [*program, *argv(tmp_path, "run", max_steps=saved + 3), "--resume=auto"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert list(losses(tmp_path / "run")) == list(range(1, saved + 4))


def test_a_run_directory_that_is_deleted_ends_the_run(tmp_path, monkeypatch):
    def delete(loop):
        loop.checkpoints.wait()
        shutil.rmtree(loop.setup.run.directory)

    at_step(monkeypatch, 4, delete)
    with pytest.raises(UserError, match=r"metrics\.jsonl was deleted while the run wrote to it") as caught:
        start(tmp_path, "run")
    assert caught.value.exit_code == 6


def test_tensorboards_directory_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch):
    """A file is in its place, which stops root as well. tensorboardX's own writer would hang on a full disk."""
    out = EventLog(tmp_path, tensorboard=True)
    (tmp_path / "logs").write_text("")
    with pytest.raises(OSError, match="logs") as caught:
        out.write("step", {"step": 1, "loss": 0.5})
    out.close()
    code, sentence = code_and_sentence(caught.value)
    assert code == 6 and "logs" in sentence
    out = EventLog(tmp_path / "other", tensorboard=True)
    out.write("step", {"step": 1, "loss": 0.5})
    monkeypatch.setattr(out._viewers[0]._writer, "flush", full)
    with pytest.raises(OSError, match="No space left"):
        out.write("step", {"step": 2, "loss": 0.5})
    monkeypatch.undo()
    out.close()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    start(tmp_path, "run", max_steps=1)
    assert f"{tmp_path / 'run'} cannot be locked: nothing keeps a second run out of it" in capsys.readouterr().out


def test_a_clock_that_jumps_changes_nothing(whole, tmp_path, monkeypatch):
    """By days, forth and back, after every step: rates, and when to give up, follow a clock that cannot be set."""
    now = time.time

    def jump(loop):
        loop.checkpoints.wait()  # orbax itself looks at the clock while it writes
        monkeypatch.setattr(time, "time", lambda: now() + (-1) ** loop.step * 1e6)

    for step in range(1, 6):
        at_step(monkeypatch, step, jump)
    start(tmp_path, "run", stall_timeout=30)
    monkeypatch.undo()
    assert losses(tmp_path / "run") == losses(whole)
