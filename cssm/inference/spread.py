"""One function of a trained model on all devices, batch after batch: padded and masked, compiled once, some ahead."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from cssm.config import Config
from cssm.inference.weights import Trained
from parallel import devices as par

Label = TypeVar("Label")
# Batches that devices work on while the host takes what those before gave.
AHEAD = 2


def chosen_devices(config: Config) -> list[jax.Device]:
    """Those that the settings of an invocation ask for; compiled programs are kept from here on, unless told not to."""
    devices = par.select_devices(config.platform, config.gpus, config.num_devices, config.multi_gpu == "off")
    if config.compile_cache:
        par.enable_compile_cache(Path(str(config.cache_dir)) / "xla")
    return devices


class Spread:
    """fn(variables, batch) -> tree of arrays [b, ...], run with b = `size` examples on each device.

    Each device computes the same program on as many rows, whatever their number: so the same example gives the same
    numbers on one device and on many.
    """

    def __init__(
        self, trained: Trained, fn: Callable[[Any, Any], Any], devices: list[jax.Device], size: int, prefetch: int
    ) -> None:
        self.devices, self.size, self.prefetch = devices, size, prefetch
        self._program = par.spmd(fn, devices)
        self._variables = par.replicate(trained.variables, devices)

    @property
    def batch(self) -> int:
        """Examples of all devices at a time."""
        return self.size * len(self.devices)

    def warm_up(self, example: dict[str, np.ndarray]) -> None:
        """Run it once on as many copies of nothing as a batch holds; example: arrays [0, ...] of what will come."""
        jax.block_until_ready(self._program(self._variables, self._placed(example)))

    def run(self, batches: Iterable[tuple[Label, dict[str, np.ndarray]]]) -> Generator[tuple[Label, Any]]:
        """(label, fn of its examples as numpy [n, ...]) for each batch of up to `batch` examples, in order."""
        labels: deque[tuple[Label, int]] = deque()
        waiting: deque[Any] = deque()

        def padded() -> Generator[dict[str, np.ndarray]]:
            for label, batch in batches:
                labels.append((label, len(next(iter(batch.values())))))
                yield par.pad_and_mask(batch, self.batch)

        def taken() -> tuple[Label, Any]:
            label, n = labels.popleft()
            whole = lambda x: np.asarray(x).reshape(self.batch, *x.shape[2:])[:n]
            return label, jax.tree.map(whole, waiting.popleft())

        with closing(par.prefetch_to_device(padded(), self.devices, self.prefetch)) as placed:
            for batch in placed:
                waiting.append(self._program(self._variables, batch))
                if len(waiting) > AHEAD:
                    yield taken()
            while waiting:
                yield taken()

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return par.shard_batch(par.pad_and_mask(batch, self.batch), self.devices)
