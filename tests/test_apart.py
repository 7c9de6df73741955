"""Calls in other processes: their answers, their errors, and what is said where neither comes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cssm.apart import apart, ranks
from cssm.config import UserError


def refuse():
    raise UserError("it is so", 6)


def meet(rank, folder, number):
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < number:
        time.sleep(0.05)
    return os.getpid(), 10 * rank


def die():
    os._exit(9)


@pytest.mark.slow
def test_answers_and_errors_come_back_and_a_process_that_is_killed_is_told(tmp_path):
    assert apart(os.getpid) != os.getpid()
    with pytest.raises(UserError, match="it is so") as refused:
        apart(refuse)
    assert refused.value.exit_code == 6
    pids, products = zip(*ranks(meet, 3, tmp_path, 3), strict=True)
    assert len(set(pids)) == 3 and products == (0, 10, 20)
    with pytest.raises(UserError, match="ended without an answer") as refused:
        apart(die)
    assert refused.value.exit_code == 4


# Says who it is as soon as it is asked, and does not answer.
PARENT = """
import sys
sys.path.insert(0, "tests")
from test_apart import linger
from cssm.apart import apart
apart(linger)
"""


def linger():
    print(os.getpid(), flush=True)
    time.sleep(100)


@pytest.mark.slow
def test_no_process_outlives_the_one_that_started_it():
    root = Path(__file__).resolve().parents[1]
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=root, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
