"""--profile: a trace of a few steps, written by jax.profiler for Perfetto or TensorBoard."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from cssm.config import UserError

# The steps of a start that are traced: so many, after those in which things settle.
BEFORE, TRACED = 5, 5


def check_length(directory: str | None, steps: int) -> None:
    """Raise UserError where a trace is asked for and so few steps are left that none is reached in full."""
    if directory and steps < BEFORE + TRACED:
        raise UserError(
            f"--profile {directory} traces steps {BEFORE + 1} to {BEFORE + TRACED} of a start, and there are {steps}: "
            f"type --max_steps for {BEFORE + TRACED} or more"
        )


class Trace:
    """A context manager; told of each step before it is taken, it traces those TRACED after the first BEFORE.

    directory: where to, None for no trace; of several processes each has a folder in it, as the files are named after
    the host. wait(): until the devices have done what they were given, so that the trace
    holds the work of its own steps. Tracing ends at the latest with the context.
    """

    def __init__(self, directory: str | None, wait: Callable[[], None], before: int = BEFORE):
        self.directory, self._wait, self._before = directory, wait, before
        self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def at(self, taken: int) -> None:
        """So many steps have been taken, and another one is about to be."""
        if self.directory and taken == self._before:
            self._wait()
            several = jax.process_count() > 1
            jax.profiler.start_trace(
                str(Path(self.directory, f"process_{jax.process_index()}")) if several else self.directory
            )
            self._running = True
        elif taken == self._before + TRACED:
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            self._wait()
            jax.profiler.stop_trace()
