"""--find_batch_size: the largest power of two with which the real step fits the memory of the real devices."""

import gc
import math
from collections.abc import Callable
from dataclasses import replace

import jax

from cssm import data
from cssm.config import UserError, applicable
from cssm.engine import Engine
from cssm.memory import is_out_of_memory, out_of_memory
from cssm.meter import Meter
from cssm.report import Reporter
from cssm.runs import Run
from cssm.setup import Setup, set_up
from parallel import job

OUT_OF_MEMORY = 3
# The first size that is tried; from there it is doubled, or halved where it does not fit.
FIRST = 8
# Here memory does not run out, but goes over to the disk.
ENDLESS = ("cpu",)
# The first step of a size, and one beside the state that it leaves.
STEPS = 2
ANSWER_S = 120


def with_found_batch_size(run: Run, devices: list[jax.Device], report: Reporter) -> Run:
    """The run with the batch_size that was found, the same in all processes, which must all call this.

    Raises UserError on a CPU, and with exit code 3 where not even one image fits.
    """
    # The largest batch without remat, unless it is asked for: with it, steps take longer.
    remat = bool(run.config.remat) if "remat" in applicable(run.config) else None
    config = replace(run.config, find_batch_size=False, batch_size=1, remat=remat)
    if devices[0].platform in ENDLESS:
        raise UserError(
            "--find_batch_size tries until the devices are out of memory, which a CPU never is: type --batch_size N"
        )
    with Reporter(None, primary=False) as silent:
        config = set_up(
            replace(run, config=config), devices, silent, load=False
        ).run.config  # with the size it asks for
        most = data.outline(config).examples["train"] // (len(devices) * (config.grad_accum or 1))

        def fits(size: int) -> bool:
            with report.busy(f"trying a batch_size of {size}"):
                trial = replace(run, config=replace(config, batch_size=size))
                fit = takes_steps(set_up(trial, devices, silent, load=False))
                # Where others have room, they wait for this process's part of the step, and never come to answer.
                return all(job.gather("fits", fit, math.inf if fit else ANSWER_S))

        found = largest(fits, most)
    if not found:
        raise UserError(out_of_memory(config), OUT_OF_MEMORY)
    why = f"{2 * found} does not fit" if 2 * found <= most else "the training set has no more for a step"
    report.line(f"note: --find_batch_size found --batch_size {found}: {why}")
    return replace(run, config=replace(config, batch_size=found))


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest power of two up to `most` that fits; 0 if none does. What fits, fits at half the size."""
    size = FIRST
    while size > max(most, 1):
        size //= 2
    if not fits(size):
        while size > 1:
            size //= 2
            if fits(size):
                return size
        return 0
    while 2 * size <= most and fits(2 * size):
        size *= 2
    return size


def takes_steps(setup: Setup) -> bool:
    """Whether its steps run with everything on the devices that training has there; the memory is given back."""
    try:
        _take(setup)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        gc.collect()  # what the failed step held
    return True


def _take(setup: Setup) -> None:
    engine = Engine(setup, Meter())
    ahead = [engine.random_batch() for _ in range(1 + setup.config.prefetch)]
    engine.initialise()
    for _ in range(STEPS):
        engine.take_first(ahead[0])
