"""Stopping on request: Ctrl-C and SIGTERM end the step in flight, save, and leave; before the first step, at once."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from cssm.config import UserError

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
# How long the main thread may take to unwind before the first step. A compilation would not let it.
GRACE_S = 2.0
# So many Ctrl-C end the program at once, whatever it does: the second interrupts, if Python gets a turn.
LAST_CTRL_C = 3


class Stopped(UserError):
    """The run was asked to stop, and everything is saved. exit_code: 130 after Ctrl-C, 143 after SIGTERM."""


def stopped(number: int, step: int, directory: Path) -> Stopped:
    """The exception to leave with after `step` was saved in the run `directory` because of signal `number`."""
    name = NAMES[signal.Signals(number)]
    return Stopped(
        f"stopped by {name} after step {step}, which is saved; go on with --resume {directory}", 128 + number
    )


class StopSignals:
    """While active, the first Ctrl-C or SIGTERM is only noted in `requested`; a second Ctrl-C interrupts at once.

    As long as `idle`, when there is no step to be saved, the first raises Stopped instead; where that finds no hearing,
    as in a compilation, or where others would wait for this process (alone=False), the program ends there and then.
    Python runs handlers in the main thread alone; used in another one, this does nothing.
    """

    def __init__(self, alone: bool = True, idle: bool = False) -> None:
        self.requested: signal.Signals | None = None
        self.alone, self.idle = alone, idle
        self._before: dict[signal.Signals, Any] = {}
        self._left = threading.Event()

    def __enter__(self) -> Self:
        try:
            self._before = {number: signal.signal(number, self._note) for number in NAMES}
        except ValueError:  # not the main thread
            self._before = {}
            return self
        # Python's handlers wait for the main thread; the number of a signal is in this pipe at once.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._watch = threading.Thread(target=self._listen, name="stop signals", daemon=True)
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._write)
        self._watch.join()
        os.close(self._read)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number)
        if self.idle:
            if not self.alone:
                _end_at_once(number)
            raise Stopped(_nothing_saved(number), 128 + number)

    def _listen(self) -> None:
        """In a thread: end the program where the main thread cannot."""
        interrupts = 0
        while received := os.read(self._read, 1):
            number = received[0]
            interrupts += number == signal.SIGINT
            if interrupts >= LAST_CTRL_C:
                _end_at_once(number)
            if number in NAMES and self.idle and not self._left.wait(GRACE_S if self.alone else 0) and self.idle:
                _end_at_once(number)


def _nothing_saved(number: int) -> str:
    return f"stopped by {NAMES[signal.Signals(number)]} before a step was taken: there is nothing to save"


def _end_at_once(number: int) -> NoReturn:
    """Without what Python and jax do at exit, for which they may wait."""
    show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
    print(f"{show_cursor}{_nothing_saved(number)}", file=sys.stderr, flush=True)
    os._exit(128 + number)
