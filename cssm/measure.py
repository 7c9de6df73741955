"""One row of a benchmark: the steps of training, timed. Meant for a process of its own, which then holds no memory of
another row, and whose peak is this row's.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import jax

from cssm.augment import unaugmented
from cssm.cards import peak_flops
from cssm.config import Config
from cssm.engine import Batch, Engine
from cssm.flops import UncountedError, flops_of
from cssm.hardware import gather
from cssm.jaxprs import trace
from cssm.memory import is_out_of_memory, out_of_memory
from cssm.meter import Meter
from cssm.report import Reporter
from cssm.runs import Run
from cssm.setup import Setup, load_split, set_up
from cssm.step import Totals, make_backward
from cssm.tracing import TRACED, Trace
from cssm.watchdog import FIRST_STEP, ROWS_KEPT, Watchdog
from parallel import devices as par
from parallel import sharded
from parallel.sync import Replicated

# Steps before those that are timed, the one that compiles being the first.
BURN_IN = 5


def survey(config: Config) -> dict[str, Any]:
    """What there is to measure on: see cssm.hardware.gather."""
    return gather(config, par.select_devices(config.platform, config.gpus), {})


def measure(config: Config, profile: str | None = None, speak: bool = True) -> dict[str, Any]:
    """Times of config.steps steps of this configuration on its num_devices devices: see `timed`.

    {"out_of_memory": a sentence} where it does not fit. profile: a folder for a trace of further steps. speak: whether
    to show what takes long.
    """
    devices = par.select_devices(config.platform, config.gpus, config.num_devices)
    if config.compile_cache:
        par.enable_compile_cache(Path(str(config.cache_dir)) / "xla")
    try:
        with Reporter(None, primary=False) as silent, Reporter(None, primary=speak, quiet=config.quiet) as report:
            setup = set_up(Run(Path(), config, resumed=False), devices, silent, load=False)
            if config.input == "pipeline":
                setup = replace(setup, sources={"train": load_split(config, "train", report)})
            return timed(setup, report, profile)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"out_of_memory": out_of_memory(config, error)}


def timed(setup: Setup, report: Reporter, profile: str | None) -> dict[str, Any]:
    """{devices, batch_size (of a device), grad_accum, effective_batch, compile_s, step_ms (median), step_ms_quartiles,
    images_per_s, data_wait_ms, loss, peak_bytes_per_device, flops_per_image, flops_uncounted (why there is none), mfu,
    trace (its folder)}.

    step_ms: from a step's dispatch until the devices are done, each waited for. images_per_s, data_wait_ms and loss:
    of as many steps after those, with the host running ahead as in training; a loss is nan where one of them was not
    finite. What a backend does not tell is None.
    """
    config, batching, meter = setup.config, setup.batching, Meter()
    engine = Engine(setup, meter)
    watchdog = Watchdog(config.stall_timeout, partial(_awaited, engine), ROWS_KEPT)
    last = BURN_IN + 2 * config.steps + (TRACED if profile else 0)
    with watchdog, closing(_batches(engine, last, watchdog.beat)) as batches:
        engine.initialise()
        with report.compiling(f"compiling for {par.count(batching.devices)}, {batching.batch_size} images each"):
            engine.take_first(engine.next_of(batches))
        for _ in range(BURN_IN - 1):
            _take_alone(engine, batches)
        alone_ms = [1e3 * _take_alone(engine, batches) for _ in range(config.steps)]
        engine.reset()
        meter.window(0, 0)
        for _ in range(config.steps):
            engine.take(engine.next_of(batches))
        engine.wait()
        rates = meter.window(config.steps, config.steps * batching.effective)
        totals = Totals.of(engine.window, setup.devices)
        with Trace(profile, engine.wait, before=0) as trace_:
            for step in range(TRACED if profile else 0):
                trace_.at(step)
                engine.take(engine.next_of(batches))
    lower, median, upper = quantiles(alone_ms, n=4, method="inclusive")
    flops, why = model_flops(setup)
    peak = peak_flops(setup.devices[0].device_kind, config.dtype)
    return {
        "devices": batching.devices,
        "batch_size": batching.batch_size,
        "grad_accum": batching.grad_accum,
        "effective_batch": batching.effective,
        "compile_s": meter.seconds["compile"],
        "step_ms": median,
        "step_ms_quartiles": [lower, upper],
        "images_per_s": rates["images_per_s"],
        "data_wait_ms": rates["data_wait_ms"],
        "loss": math.nan if totals.nonfinite else totals.means["loss"],
        "peak_bytes_per_device": max(par.memory_bytes(setup.devices)["peak"], default=None),
        "flops_per_image": flops,
        "flops_uncounted": why,
        "trace": profile,
        "mfu": flops * rates["images_per_s"] / (batching.devices * peak) if flops and peak else None,
    }


def model_flops(setup: Setup) -> tuple[int | None, str | None]:
    """(of a forward and a backward pass for each image, None), or (None, why they cannot be counted).

    Of the model as it is defined: what --remat computes again, the update, and augmentation do not count.
    """
    images = setup.batching.batch_size
    backward = make_backward(setup.model, Replicated(), unaugmented(setup.config), 1)
    state = sharded.whole_shapes(setup.layout)
    axes = [(par.AXIS, setup.batching.devices)]
    try:
        return flops_of(trace(backward, state, setup.batch_shapes(images), axes=axes)) // images, None
    except UncountedError as error:
        return None, str(error)


def _batches(engine: Engine, last: int, beat: Callable[[], None]) -> Generator[Batch]:
    """For `last` steps; beat() before each, of which none is asked for while the devices are STEPS_AHEAD behind."""
    if engine.setup.config.input == "pipeline":
        with closing(engine.batches(1, last)) as batches:
            for batch in batches:
                beat()
                yield batch
    else:
        batch = engine.random_batch()
        for _ in range(last):
            beat()
            yield batch


def _awaited(engine: Engine) -> str:
    spans = {"data_wait": f"the batch of step {engine.taken + 1}", "compile": FIRST_STEP}
    return spans.get(engine.meter.now, f"the devices, which take step {engine.taken} or one before")


def _take_alone(engine: Engine, batches: Iterator[Batch]) -> float:
    """Seconds of a step that nothing overlaps, without what was waited for its batch."""
    batch = engine.next_of(batches)
    start = time.perf_counter()
    engine.take(batch)
    engine.wait()
    return time.perf_counter() - start
