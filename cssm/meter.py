"""Where a run's wall time goes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Meter:
    """Seconds by purpose, and the rate of the steps since the last `window`. now: the span of this moment, or "".

    Spans "compile", "evaluate", "save" are kept out of the rate of steps; "data_wait" is part of it and told apart.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.now = ""
        self.seconds: dict[str, float] = defaultdict(float)
        self._reset()

    def _reset(self) -> None:
        self._since = time.monotonic()
        self._aside_s = 0.0
        self._waited_s = 0.0

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Account the block to `name`."""
        start = time.monotonic()
        before, self.now = self.now, name
        try:
            yield
        finally:
            self.now = before
            took = time.monotonic() - start
            self.seconds[name] += took
            if name == "data_wait":
                self._waited_s += took
            else:
                self._aside_s += took

    def window(self, steps: int, images: int) -> dict[str, float]:
        """images_per_s, step_ms and data_wait_ms of the `steps` since the last call; 0 steps give no rate."""
        busy_s = time.monotonic() - self._since - self._aside_s
        waited_s = self._waited_s
        self._reset()
        if not steps:
            return {}
        return {
            "images_per_s": images / busy_s,
            "step_ms": 1e3 * busy_s / steps,
            "data_wait_ms": 1e3 * waited_s / steps,
        }

    def goodput(self) -> float:
        """Share of the wall time so far that went into training steps."""
        wall_s = time.monotonic() - self.started
        return max(0.0, wall_s - sum(self.seconds.values())) / wall_s
