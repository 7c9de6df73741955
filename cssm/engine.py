"""What takes the steps of a run, whoever asks for them: training, a benchmark, the search for a batch size.

The program of a step, the state that it turns into the next one, the batches on their way to it. The host runs a few
steps ahead: no step waits for another's numbers.
"""

from collections import deque
from collections.abc import Generator, Iterator

import jax
import numpy as np

from cssm.data.pipeline import train_batches
from cssm.meter import Meter
from cssm.setup import Setup
from cssm.step import Sums, TrainState, make_backward, make_finish
from parallel import devices as par
from parallel import sharded

# How many steps the host may be ahead of the devices: enough to hide dispatch, little enough to stop promptly.
STEPS_AHEAD = 4

Batch = dict[str, jax.Array]


def fresh_state(setup: Setup) -> TrainState:
    """Of config.seed, in which parameters given (--init_from) take no part. Each device makes its own part: nowhere
    need the whole state fit.
    """
    with par.drawn_by_kernel():
        return par.spmd(setup.initial_state, setup.devices)(par.device_indices(setup.devices))


class Engine:
    """state: what the last step left; set it, or call `initialise`. window: the sums of the steps since `reset`. taken:
    how many steps this engine has taken.

    The meter gets the spans "compile" (of fresh parameters and of the first step) and "data_wait".
    """

    def __init__(self, setup: Setup, meter: Meter) -> None:
        self.setup, self.meter = setup, meter
        backward = make_backward(setup.step_model, setup.strategy, setup.config, setup.batching.grad_accum)
        finish = make_finish(setup.tx, setup.strategy, setup.config)
        self.program = setup.strategy.program(backward, finish, setup.devices)
        self.no_sums = par.replicate(Sums.zeros(), setup.devices)
        self.own_share = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        self.state: TrainState
        self.window = self.no_sums
        self.taken = 0
        self._in_flight: deque[jax.Array] = deque()

    def initialise(self) -> None:
        """A fresh state, with the parameters given (--init_from), for which the whole state must fit on the host."""
        with self.meter.span("compile"):
            self.state = fresh_state(self.setup)
            if self.setup.initial is not None:
                whole = self.setup.initial.put(sharded.fetch(self.state, self.setup.devices))
                self.state = sharded.place(whole, self.setup.layout, self.setup.devices)

    def batches(self, first: int, last: int) -> Generator[Batch]:
        """Of the training data, for steps first..last, some of them ahead on the devices; close it to end threads."""
        config = self.setup.config
        host_batches = train_batches(
            self.setup.sources["train"],
            self.setup.batching.effective,
            config.seed,
            first,
            last,
            workers=config.num_workers or 0,
            prefetch=config.prefetch,
            **self.own_share,
        )
        return par.prefetch_to_device(host_batches, self.setup.devices, config.prefetch)

    def random_batch(self) -> Batch:
        """One batch of noise on the devices, of the shapes that `batches` yields."""
        outline = self.setup.outline
        images = self.setup.batching.effective // self.own_share["process_count"]
        draw = np.random.default_rng(self.setup.config.seed)
        host = {
            "image": draw.integers(0, 256, (images, *outline.image_shape), np.uint8),
            "label": draw.integers(0, outline.num_classes, images, np.int32),
        }
        return par.shard_batch(host, self.setup.devices)

    def next_of(self, batches: Iterator[Batch]) -> Batch:
        """The next batch; what it is waited for counts as data_wait."""
        with self.meter.span("data_wait"):
            return next(batches)

    def take(self, batch: Batch) -> None:
        """One step; returns before it is done, at most STEPS_AHEAD ahead of the devices."""
        with jax.profiler.StepTraceAnnotation("training step", step_num=self.taken):
            self.state, self.window = self.program(self.state, self.window, batch)
        self.taken += 1
        self._in_flight.append(self.window.steps)
        if len(self._in_flight) > STEPS_AHEAD:
            self._in_flight.popleft().block_until_ready()

    def take_first(self, batch: Batch) -> None:
        """One step, which is compiled before and waited for."""
        with self.meter.span("compile"):
            self.take(batch)
            self.wait()

    def wait(self) -> None:
        """Until the devices have done all steps."""
        jax.block_until_ready((self.state, self.window))

    def reset(self) -> None:
        """Begin a new window of sums."""
        self.window = self.no_sums
