"""The first signal is noted, a second Ctrl-C interrupts, and the handlers of before come back; before the first step
the program ends at once.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cssm.signals import Stopped, StopSignals, stopped

ROOT = Path(__file__).resolve().parents[1]
# A mutex that is locked twice holds the main thread as a compilation does: Python's handlers get no turn.
DEAF = """
import ctypes, os, sys, threading, time
from cssm.signals import StopSignals
number, times, idle, alone = map(int, sys.argv[1:])
def ask():
    for _ in range(times):
        time.sleep(0.2)
        os.kill(os.getpid(), number)
    time.sleep(5 if idle else 0.5)
    os._exit(77)
with StopSignals(alone=bool(alone), idle=bool(idle)):
    threading.Thread(target=ask, daemon=True).start()
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("number,code,name", [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_the_first_signal_is_only_noted(number, code, name):
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number
        error = stopped(number, 7, Path("runs/a"))
    assert (error.exit_code, signal.getsignal(number)) == (code, before)
    assert str(error) == f"stopped by {name} after step 7, which is saved; go on with --resume runs/a"


def test_a_second_ctrl_c_interrupts_at_once():
    with StopSignals() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


def test_outside_of_the_main_thread_it_does_nothing():
    seen = []

    def run():
        with StopSignals() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]


@pytest.mark.parametrize("number,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_before_the_first_step_a_signal_ends_the_run_where_python_gets_a_turn(number, code):
    with StopSignals(idle=True) as stop, pytest.raises(Stopped, match="there is nothing to save") as error:
        os.kill(os.getpid(), number)
    assert (error.value.exit_code, stop.requested) == (code, number)


@pytest.mark.parametrize(
    "number, times, idle, alone, code",
    [
        (signal.SIGTERM, 1, 1, 1, 143),  # in a compilation
        (signal.SIGINT, 1, 1, 0, 130),  # in one of several processes
        (signal.SIGTERM, 1, 0, 1, 77),  # there are steps to be saved: it is noted
        (signal.SIGINT, 2, 0, 1, 77),
        (signal.SIGINT, 3, 0, 1, 130),
    ],
)
def test_where_python_gets_no_turn_the_program_ends_all_the_same(number, times, idle, alone, code):
    command = [sys.executable, "-c", DEAF, *map(str, map(int, (number, times, idle, alone)))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert result.returncode == code, result.stderr
    assert ("nothing to save" in result.stderr) == (code != 77)
