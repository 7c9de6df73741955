"""A run that no longer moves is ended, and what it waited for is told."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

STALLED = 4
"""Exit code: devices or processes failed."""
FIRST_STEP = "the compilation and the first step"
"""What may be waited for, in words."""
ROWS_KEPT = "rows before this one are written"
"""Of a benchmark."""
_LOOK_S = 1.0
# How long the record of what happened may take: what hangs may be the disk.
_TELL_S = 5.0


class Watchdog:
    """A context manager: while it is active, `beat` must be called at least every timeout_s seconds; 0: no matter.

    If it is not, the stacks of all threads and a sentence go to stderr, `tell(sentence)` records it, and the program
    ends with exit code 4. waiting(): what is waited for, in words; kept: what is not lost. Time in which the whole
    process was stopped does not count, and no change of the clock does.
    """

    def __init__(
        self,
        timeout_s: float,
        waiting: Callable[[], str],
        kept: str,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.timeout_s, self._waiting, self._kept, self._tell = timeout_s, waiting, kept, tell
        self._idle_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self.timeout_s:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        if self.timeout_s:
            self._thread.join()

    def beat(self) -> None:
        """Something was done."""
        self._idle_s = 0.0

    def _watch(self) -> None:
        look_s = min(_LOOK_S, self.timeout_s / 4)
        before = time.monotonic()
        while not self._done.wait(look_s):
            now = time.monotonic()
            self._idle_s += min(now - before, 2 * look_s)  # more is a process that was stopped
            before = now
            if self._idle_s > self.timeout_s:
                self._end()

    def _end(self) -> None:
        sentence = (
            f"nothing has moved for {self.timeout_s:g} s, the program waits for {self._waiting()}: {self._kept}; "
            "--stall_timeout waits longer, 0 for ever"
        )
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
        print(f"{show_cursor}error: {sentence}", file=sys.stderr, flush=True)
        teller = threading.Thread(target=self._tell, args=(sentence,), daemon=True)
        teller.start()
        teller.join(_TELL_S)
        os._exit(STALLED)
