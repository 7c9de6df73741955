"""Stopping on request: Ctrl-C and SIGTERM end the step in flight, save, and leave."""

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from cssm.config import UserError

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


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

    Python runs handlers in the main thread alone; used in another one, this does nothing.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        try:
            self._before = {number: signal.signal(number, self._note) for number in NAMES}
        except ValueError:  # not the main thread
            self._before = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number)
