"""No checkpoint is lost to a damaged file, a full disk or a kill, and none that is damaged is believed."""

import errno
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from test_checkpoint import TARGET, assert_same, damage, fill, state_at

from cssm.checkpoint import Checkpoints, step_folder
from cssm.config import UserError


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_a_damaged_newest_step_falls_back_to_the_one_before(tmp_path, how, capfd):
    fill(tmp_path, [0.1, 0.2, 0.3])
    damage(tmp_path, 3, how)
    capfd.readouterr()
    with Checkpoints(tmp_path) as checkpoints:
        state, meta, step, notes = checkpoints.restore(TARGET)
        assert_same(state, state_at(2))
        assert (meta, step) == ({"epoch": 2}, 2)
        assert "step 3 is damaged" in notes[0]
        assert "going on from step 2" in notes[1]
        assert checkpoints.steps() == [1, 2, 3], "restoring alone removes nothing"
        checkpoints.save(3, state_at(3), {"epoch": 3}, 0.4)
        state, _, step, notes = checkpoints.restore(TARGET)
    assert_same(state, state_at(3))
    assert (step, notes) == (3, [])
    assert capfd.readouterr() == ("", ""), "libraries are kept from reading what is damaged"


@pytest.mark.parametrize(
    "fault, fallen_back",
    [(OSError(errno.EIO, "Input/output error"), True), (PermissionError(errno.EACCES, "denied", "f"), False)],
    ids=["bad sector", "permission"],
)
def test_a_step_that_cannot_be_read(tmp_path, monkeypatch, fault, fallen_back):
    fill(tmp_path, [0.1, 0.2])
    check_files = step_folder.check_files

    def read(folder):
        if folder.name == "2":
            raise fault
        check_files(folder)

    monkeypatch.setattr(step_folder, "check_files", read)
    with Checkpoints(tmp_path) as checkpoints:
        if fallen_back:
            _, _, step, notes = checkpoints.restore(TARGET)
            assert step == 1
            assert "step 2 is damaged" in notes[0]
            assert "Input/output error" in notes[0]
        else:
            with pytest.raises(UserError, match="cannot read f: permission denied") as caught:
                checkpoints.restore(TARGET)
            assert caught.value.exit_code == 6


def test_two_damaged_steps_and_then_no_good_one(tmp_path):
    fill(tmp_path, [0.1, 0.2, 0.3])
    damage(tmp_path, 3, "flip")
    shutil.rmtree(tmp_path / "2" / "state")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(TARGET)[2] == 1
        with pytest.raises(UserError, match=r"step 2 is damaged.*steps 1, 2, 3") as caught:
            checkpoints.restore(TARGET, step=2)
        assert caught.value.exit_code == 6
        (tmp_path / "1" / "files.json").write_text("")
        with pytest.raises(UserError, match="step 1 is damaged") as caught:
            checkpoints.restore(TARGET)
        assert caught.value.exit_code == 6


def test_the_best_outlives_a_better_one_that_could_not_be_written(tmp_path, monkeypatch):
    fill(tmp_path, [0.9, 0.1, 0.1], max_checkpoints=2)

    def full(*args):
        assert (tmp_path / "1").exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(step_folder, "write", full)
    checkpoints = Checkpoints(tmp_path, max_checkpoints=2)
    checkpoints.save(4, state_at(4), {}, 1.0)
    with pytest.raises(UserError, match="No space left"):
        checkpoints.close()
    assert checkpoints.steps() == [1, 2, 3]
    assert checkpoints.best() == 1


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("RESOURCE_EXHAUSTED: Failed to write 83261 bytes: No space left on device\nand more"),
        step_folder.DamagedError("params/w is not what was saved"),
    ],
    ids=["system", "orbax", "read back"],
)
def test_a_failed_save_is_told_once_and_leaves_no_rubbish(tmp_path, monkeypatch, fault):
    def fail(checkpointer, folder, leaves, record):
        folder.with_name(f"{folder.name}.orbax-checkpoint-tmp").mkdir()
        raise fault

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_at(1), {})
        checkpoints.save(2, state_at(2), {})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(step_folder, "write", fail)
            checkpoints.save(3, state_at(3), {})
            with pytest.raises(UserError, match="checkpoint of step 3") as caught:
                checkpoints.save(4, state_at(4), {})
        assert caught.value.exit_code == 6
        assert "\n" not in str(caught.value)
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["1", "2"]
        checkpoints.save(5, state_at(5), {})
    assert checkpoints.steps() == [1, 2, 5]
    assert checkpoints.drain() == [1, 2, 5]


def test_a_save_that_fails_after_an_interrupted_wait_is_still_told(tmp_path, monkeypatch):
    release = threading.Event()

    def fail(*args):
        assert release.wait(timeout=30)
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(step_folder, "write", fail)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_at(1), {})
    with monkeypatch.context() as patch:
        patch.setattr("cssm.checkpoint.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
    release.set()
    with pytest.raises(UserError, match="No space left"):
        checkpoints.close()


def test_a_directory_that_goes_away_is_told(tmp_path):
    with Checkpoints(tmp_path / "run") as checkpoints:
        (tmp_path / "run").rmdir()
        with pytest.raises(UserError, match="--checkpoint_dir") as caught:
            checkpoints.save(1, state_at(1), {})
    assert caught.value.exit_code == 6


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 10))
        with pytest.raises(UserError, match=r"0\.00 MB free") as caught:
            checkpoints.save(1, state_at(1), {})
    assert caught.value.exit_code == 6
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--checkpoint_dir") as caught:
        Checkpoints(tmp_path / "file" / "run")
    assert caught.value.exit_code == 6
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UserError, match="permission denied") as caught:
        Checkpoints(tmp_path)
    assert caught.value.exit_code == 6


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
from test_checkpoint import Checkpoints, state_at, step_folder
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
with Checkpoints({directory!r}, max_checkpoints=2) as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, state_at(step), {{}}, 0.1)
    checkpoints.wait()
    {where} = die
    checkpoints.save(3, state_at(3), {{}}, 0.2)
"""


@pytest.mark.parametrize(
    "where, newest",
    [
        ("step_folder._file_digests", 2),  # orbax has written, nothing is verified
        pytest.param("Path.rename", 2, marks=pytest.mark.slow),  # verified, not published
        pytest.param("shutil.rmtree", 3, marks=pytest.mark.slow),  # published, an old step half removed
    ],
)
def test_a_kill_leaves_the_earlier_steps(tmp_path, where, newest, request):
    directory, tests = tmp_path / "checkpoints", request.path.parent
    code = KILLED.format(tests=str(tests), root=str(tests.parent), directory=str(directory), where=where)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert len(list(directory.iterdir())) == 3, "something was left halfway"
    with Checkpoints(directory) as checkpoints:
        state, _, step, notes = checkpoints.restore(TARGET)
        assert (step, notes) == (newest, [])
        assert_same(state, state_at(newest))
        assert {path.name for path in directory.iterdir()} == {str(newest - 1), str(newest)}
        checkpoints.save(newest + 1, state_at(newest + 1), {})
    assert checkpoints.latest() == newest + 1
