"""Training: `train` opens a run, puts it together and takes its steps (loop.py)."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import jax

from cssm.batch_size import with_found_batch_size
from cssm.checkpoint import Checkpoints
from cssm.config import Config, UserError
from cssm.dry_run import dry_run
from cssm.find_lr import find_lr
from cssm.loop import Loop
from cssm.meter import Meter
from cssm.report import Reporter
from cssm.runs import Run, only_here, open_run, saved
from cssm.setup import set_up
from cssm.signals import StopSignals
from cssm.tracing import check_length
from parallel import devices as par
from parallel import job


def train(config: Config, typed: Mapping[str, Any] | None = None, json_stream: IO[str] | None = None) -> dict[str, Any]:
    """Train as configured on the devices that are there; returns the run's summary, or the facts of a dry run or of a
    test of learning rates.

    typed: the settings given by hand (`Parsed.typed`), which win over a resumed run's. json_stream: where --headless
    writes its events. Raises UserError for a mistake or a loss that is not finite (exit code 5), and
    `signals.Stopped`, with everything saved, when asked to stop.
    """
    meter = Meter()
    _check_reached_jax(config)
    devices = par.select_devices(config.platform, config.gpus, config.num_devices, config.multi_gpu == "off")
    if config.compile_cache and not config.dry_run:
        par.enable_compile_cache(Path(str(config.cache_dir)) / "xla")
    run = open_run(config, typed or {}, job.share, make=not config.dry_run)
    with nullcontext(()) if config.dry_run else only_here(run, job.share) as notes:
        return _train_here(replace(run, notes=(*notes, *run.notes)), devices, meter, json_stream)


def _train_here(run: Run, devices: list[jax.Device], meter: Meter, json_stream: IO[str] | None) -> dict[str, Any]:
    """`train` in the directory that no other program writes to."""
    first_process, config = jax.process_index() == 0, run.config
    options = {
        "headless_stream": json_stream,
        "quiet": run.config.quiet,
        "tensorboard": run.config.tensorboard,
        "wandb": run.config.wandb,
        "primary": first_process,
    }
    try:
        stop_signals = StopSignals(alone=jax.process_count() == 1, idle=True)
        keeps = not (config.dry_run or config.find_lr)
        with Reporter(run.directory if keeps else None, **options) as report, stop_signals as stop:
            if run.config.find_batch_size:
                run = with_found_batch_size(run, devices, report)
            setup = set_up(run, devices, report, load=not config.dry_run)
            check_length(config.profile, setup.total_steps - _step_before(run))
            if config.dry_run:
                return dry_run(setup, report)
            if config.find_lr:
                return find_lr(setup, report, meter)
            with Checkpoints(run.checkpoints, run.config.max_checkpoints, first_process) as checkpoints:
                loop = Loop(setup, report, checkpoints, stop, meter)
                with loop.watchdog:
                    loop.start()
                    loop.take_steps()
                    return loop.finish()
    except (UserError, par.DeviceError):
        if first_process and not config.dry_run:
            run.discard_if_unused()
        raise


def _step_before(run: Run) -> int:
    """The last step of the run that goes on here, 0 for a new one."""
    return saved(run.checkpoints)["step"] if run.resumed else 0


def _check_reached_jax(config: Config) -> None:
    """The command line sets these before jax is loaded; a Python program must, or they would do nothing."""
    ways = "set it before jax is imported, or use the command line"
    missing = [flag for flag in config.wanted_xla_flags if flag not in os.environ.get("XLA_FLAGS", "").split()]
    if missing:
        name = "deterministic:" if missing[0] not in (config.xla_flags or "") else "xla_flags"
        raise UserError(f"{name} {missing[0]} is not in the XLA_FLAGS variable: {ways}")
    if config.mem_fraction and os.environ.get("XLA_CLIENT_MEM_FRACTION") != str(config.mem_fraction):
        raise UserError(f"mem_fraction {config.mem_fraction} is not in the XLA_CLIENT_MEM_FRACTION variable: {ways}")
    if config.multi_gpu == "ddp" and jax.process_count() == 1 and jax.local_device_count() > 1:
        raise UserError("multi_gpu ddp, but there is 1 process: several are started by the command line")
    wanted = config.nproc_per_node if config.nproc_per_node != "auto" else None
    for name, processes in (("nproc_per_node", wanted), ("num_processes", config.num_processes)):
        if processes and int(processes) != jax.process_count():
            raise UserError(f"{name} {processes}, but there is 1 process: several are started by the command line")
