"""The first signal is noted, a second Ctrl-C interrupts, and the handlers of before come back."""

import os
import signal
import threading
from pathlib import Path

import pytest

from cssm.signals import StopSignals, stopped


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
