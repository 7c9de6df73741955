"""What no longer moves is ended, with the stacks of all threads; what moves, or was stopped, is not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import pytest

from cssm.loop import Loop
from cssm.watchdog import STALLED, Watchdog

ROOT = Path(__file__).resolve().parents[1]
STALLS = """
import threading, time
from cssm.watchdog import Watchdog
def the_thread_that_hangs():
    time.sleep(60)
threading.Thread(target=the_thread_that_hangs, daemon=True).start()
tell = lambda said: print("told", said, flush=True)
with Watchdog(0.5, lambda: "the batch of step 7", "what was done is kept", tell) as dog:
    time.sleep(60)
"""
STOPPED = """
import time
from cssm.watchdog import Watchdog
with Watchdog(4, lambda: "", "", print) as dog:
    print("started", flush=True)
    time.sleep(0.5)
"""


def run(code):
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_stall_shows_every_stack_and_what_was_waited_for():
    process = run(STALLS)
    out, err = process.communicate(timeout=30)
    assert process.returncode == STALLED == 4
    assert "the_thread_that_hangs" in err and "Current thread" in err
    sentence = err.splitlines()[-1]
    assert sentence.startswith(
        "error: nothing has moved for 0.5 s, the program waits for the batch of step 7: what was"
    )
    assert out == f"told {sentence.removeprefix('error: ')}\n"


@pytest.mark.slow
def test_time_in_which_the_process_was_stopped_does_not_count():
    with run(STOPPED) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(4.5)
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0, process.stderr.read()


def test_what_moves_is_left_alone_and_so_is_everything_without_a_timeout(monkeypatch):
    def ended(code):
        raise AssertionError(f"ended with {code}")

    monkeypatch.setattr(os, "_exit", ended)
    with Watchdog(0.2, str, "", print) as dog:
        for _ in range(10):
            time.sleep(0.05)
            dog.beat()
    assert not dog._thread.is_alive()
    with Watchdog(0, str, "", print) as dog:
        assert not dog._thread.is_alive()


@pytest.mark.parametrize("jump", [1e6, -1e6])
def test_a_change_of_the_clock_is_no_stall(monkeypatch, jump):
    now = time.time
    with Watchdog(0.5, str, "", print):
        monkeypatch.setattr(time, "time", lambda: now() + jump)
        time.sleep(0.2)


@pytest.mark.parametrize(
    "platform,number,processes,told",
    [("gpu", 4, 1, True), ("gpu", 1, 1, False), ("cpu", 4, 1, False), ("gpu", 4, 2, False)],
)
def test_a_first_step_that_does_not_come_on_several_gpus_may_come_with_a_process_for_each(
    monkeypatch, platform, number, processes, told
):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    setup = SimpleNamespace(devices=[SimpleNamespace(platform=platform)] * number)
    loop = SimpleNamespace(setup=setup, meter=SimpleNamespace(now="compile"), step=0)
    assert ("--nproc_per_node 4 gives each GPU a process" in Loop._awaited(cast(Loop, loop))) == told
