"""One owner at a time, named by the file; none where there are no locks; none after a death."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from cssm import lock
from cssm.lock import lock_file

ROOT = Path(__file__).resolve().parents[1]
HOLDER = """
import sys, time
from pathlib import Path
from cssm.lock import lock_file
with lock_file(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


class TakenError(Exception):
    """Raised in place of waiting."""


def refuse(owner):
    raise TakenError(owner)


def test_the_owner_is_named_and_the_file_goes_with_the_lock(tmp_path):
    path = tmp_path / "lock"
    with lock_file(path, refuse) as locked:
        assert locked
        with pytest.raises(TakenError, match=f"process {os.getpid()} of "), lock_file(path, refuse):
            pass
    assert not path.exists()
    with lock_file(path, refuse) as locked:
        assert locked


def test_the_system_lifts_the_lock_of_a_process_that_was_killed(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TakenError, match=f"process {holder.pid} of"), lock_file(tmp_path / "lock", refuse):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / "lock").read_text().startswith(f"process {holder.pid}"), "what it wrote is still there"
    with lock_file(tmp_path / "lock", refuse) as locked:
        assert locked


def test_a_lock_on_a_file_that_its_owner_has_removed_does_not_count(tmp_path, monkeypatch):
    tried = []

    def take(file, wait):
        tried.append(wait)
        if len(tried) == 1:
            (tmp_path / "lock").unlink()
        return True

    monkeypatch.setattr(lock, "_lock", take)
    with lock_file(tmp_path / "lock", refuse) as locked:
        assert locked
    assert tried == [False, False]


@pytest.mark.parametrize("number, held", [(errno.ENOLCK, False), (errno.EOPNOTSUPP, False), (errno.EIO, None)])
def test_file_systems_without_locks_let_all_pass_and_other_failures_none(tmp_path, monkeypatch, number, held):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with ExitStack() as stack:
        if held is None:
            stack.enter_context(pytest.raises(OSError, match="Input/output"))
        for _ in range(2):
            assert stack.enter_context(lock_file(tmp_path / "lock", refuse)) is held
