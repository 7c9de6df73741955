"""Training: `train` opens a run and takes its steps. Read top to bottom.

Metrics stay on the devices until a log line is due, and the host runs a few steps ahead: no step waits for another's
numbers. A checkpoint holds everything that the next step needs, and is never made of a state that is not finite.
"""

import math
import os
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from cssm.batch_size import with_found_batch_size
from cssm.checkpoint import Checkpoints, saved_meta
from cssm.config import Config, UserError, applicable, write_yaml
from cssm.data.pipeline import eval_batches
from cssm.dry_run import dry_run
from cssm.engine import STEPS_AHEAD, Engine
from cssm.meter import Meter
from cssm.report import Reporter
from cssm.resume import resume_record
from cssm.rules import states_may_grow
from cssm.runs import Run, open_run
from cssm.setup import Setup, data_record, describe, set_up
from cssm.signals import StopSignals, stopped
from cssm.step import Totals, TrainState, make_eval_step
from cssm.tracing import Trace, check_length
from cssm.waiting import Waiting, advice, waited
from parallel import devices as par
from parallel import job, sharded
from parallel.selftest import collective_self_test

NON_FINITE = 5


def train(config: Config, typed: Mapping[str, Any] | None = None, json_stream: IO[str] | None = None) -> dict[str, Any]:
    """Train as configured on the devices that are there; returns the run's summary, or the facts of a dry run.

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
    first_process = jax.process_index() == 0
    options = {
        "headless_stream": json_stream,
        "quiet": run.config.quiet,
        "tensorboard": run.config.tensorboard,
        "primary": first_process,
    }
    try:
        with Reporter(None if config.dry_run else run.directory, **options) as report, StopSignals() as stop:
            if run.config.find_batch_size:
                run = with_found_batch_size(run, devices, report)
            setup = set_up(run, devices, report, load=not config.dry_run)
            check_length(config.profile, setup.total_steps - _step_before(run))
            if config.dry_run:
                return dry_run(setup, report)
            with Checkpoints(run.checkpoints, run.config.max_checkpoints, first_process) as checkpoints:
                loop = Loop(setup, report, checkpoints, stop, meter)
                loop.start()
                loop.take_steps()
                return loop.finish()
    except (UserError, par.DeviceError):
        if first_process and not config.dry_run:
            run.discard_if_unused()
        raise


def _step_before(run: Run) -> int:
    """The last step of the run that goes on here, 0 for a new one."""
    return saved_meta(run.checkpoints)["step"] if run.resumed else 0


def _check_reached_jax(config: Config) -> None:
    """The command line sets these before jax is loaded; a Python program must, or they would do nothing."""
    ways = "set it before jax is imported, or use the command line"
    missing = [flag for flag in (config.xla_flags or "").split() if flag not in os.environ.get("XLA_FLAGS", "").split()]
    if missing:
        raise UserError(f"xla_flags {missing[0]} is not in the XLA_FLAGS variable: {ways}")
    if config.mem_fraction and os.environ.get("XLA_CLIENT_MEM_FRACTION") != str(config.mem_fraction):
        raise UserError(f"mem_fraction {config.mem_fraction} is not in the XLA_CLIENT_MEM_FRACTION variable: {ways}")
    if config.multi_gpu == "ddp" and jax.process_count() == 1 and jax.local_device_count() > 1:
        raise UserError("multi_gpu ddp, but there is 1 process: several are started by the command line")
    wanted = config.nproc_per_node if config.nproc_per_node != "auto" else None
    for name, processes in (("nproc_per_node", wanted), ("num_processes", config.num_processes)):
        if processes and int(processes) != jax.process_count():
            raise UserError(f"{name} {processes}, but there is 1 process: several are started by the command line")


class Loop:
    """One run, from its first step here to its summary. step: the last one taken, counted from 1."""

    def __init__(
        self, setup: Setup, report: Reporter, checkpoints: Checkpoints, stop: StopSignals, meter: Meter
    ) -> None:
        self.setup, self.config = setup, setup.config
        self.report, self.checkpoints, self.stop, self.meter = report, checkpoints, stop, meter
        self.engine, self.waiting = Engine(setup, meter), Waiting()
        self.eval_step = par.spmd(make_eval_step(setup.step_model, setup.strategy, self.config), setup.devices)
        self.highest = par.spmd(lambda number: jax.lax.pmax(number, par.AXIS), setup.devices)
        self.asked: jax.Array | None = None
        self.step = 0
        self.saved_step = -1
        self.best: dict[str, Any] = {}
        self.last: dict[str, dict[str, Any]] = {}
        self.time_to_first_step_s: float | None = None

    def start(self) -> None:
        """The state before the first step: fresh, or as the newest intact checkpoint holds it; and the banner."""
        setup, report, run = self.setup, self.report, self.setup.run
        layout = setup.layout()
        shapes = sharded.whole_shapes(layout)
        facts = describe(setup, shapes)
        report.banner(facts)
        report.line(par.running_line(setup.devices))
        report.event("config", **facts)
        self._test_collectives(shapes)
        if run.resumed:
            with report.busy("restoring the checkpoint"):
                state, self.best, self.step, notes = self._restored(shapes)
            self.saved_step = self.step
            ahead = f"going on from step {self.step} of {setup.total_steps}"
            if self.step >= setup.total_steps:
                ahead = f"step {self.step} was the last, no step is left; a larger --epochs or --max_steps goes on"
            for note in (*notes, ahead):
                report.line(f"note: {note}")
            self.engine.state = sharded.place(state, layout, setup.devices)
        else:
            with report.busy("initialising the parameters"):
                self.engine.initialise()
        if jax.process_index() == 0:
            write_yaml(run.directory / "config.yaml", applicable(self.config))

    def _restored(self, shapes: TrainState) -> tuple[TrainState, dict[str, Any], int, list[str]]:
        """(whole state, best metrics, step, notes) of the newest intact checkpoint, which the first process finds."""
        found: list[TrainState] = []

        def newest() -> tuple[dict[str, Any], int, list[str]]:
            state, meta, step, notes = self.checkpoints.restore(shapes)
            found.append(state)
            return meta["best"], step, notes

        best, step, notes = job.share("restored", newest)
        state = found[0] if found else self.checkpoints.restore(shapes, step)[0]
        return state, best, step, notes

    def _test_collectives(self, shapes: TrainState) -> None:
        """One reduction as large as the gradient's: what does not work shows here, and not as a run that hangs."""
        setup, timeout_s = self.setup, self.config.self_test_timeout
        if len(setup.devices) == 1 or self.config.sync_backend == "cpu" or not timeout_s:
            return
        size_bytes = sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.params))
        with self.report.busy("testing the collectives"):
            collective_self_test(setup.devices, size_bytes, timeout_s)

    def take_steps(self) -> None:
        """Every step that is left; raises Stopped after the first one at which that was asked for."""
        total, first = self.setup.total_steps, self.step + 1
        if first > total:
            return
        batches, trace = self.engine.batches(first, total), Trace(self.config.profile, self.engine.wait)
        with self.report.progress(total, self.step), closing(batches), trace:
            for self.step in range(first, total + 1):
                trace.at(self.engine.taken)
                batch = self.engine.next_of(batches)
                if self.step == first:
                    self._first_step(batch)
                else:
                    self.engine.take(batch)
                self.report.update(self.step)
                self._after_step(first, total)
                if self.step < total and (signal_number := self._agreed_signal()):
                    self._save()
                    self._wait_for_checkpoints()
                    raise stopped(signal_number, self.step, self.setup.run.directory)

    def finish(self) -> dict[str, Any]:
        """The test split, the summary, the curves."""
        self._evaluate("test")
        self._wait_for_checkpoints()
        wall_s = time.monotonic() - self.meter.started
        summary = {
            "run_dir": str(self.setup.run.directory),
            "step": self.step,
            "best": self.best,
            **self.last,
            "time_to_first_step_s": self.time_to_first_step_s,
            "compile_s": self.meter.seconds["compile"],
            "wall_s": wall_s,
            "goodput": self.meter.goodput(),
            **({"trace": self.config.profile} if self.config.profile else {}),
        }
        if bad := {split: len(source.bad) for split, source in self.setup.sources.items() if source.bad}:
            summary["bad_examples"] = bad
        memory = par.memory_bytes(self.setup.devices)
        if in_use := memory["in_use"]:
            summary |= {"peak_bytes_per_device": max(memory["peak"]), "memory_spread": 1 - min(in_use) / max(in_use)}
        self.report.event("summary", **summary)
        self.report.plots()
        return summary

    def _first_step(self, batch: dict[str, jax.Array]) -> None:
        with self.report.compiling("compiling the training step"):
            self.engine.take_first(batch)
        self.time_to_first_step_s = time.monotonic() - self.meter.started

    def _agreed_signal(self) -> int:
        """The number of the signal on which all processes stop after this same step; 0: they go on.

        Of several processes, each tells all every few steps what it was sent, and reads what they were told the time
        before, when the answer is there without waiting.
        """
        requested = int(self.stop.requested or 0)
        if jax.process_count() == 1:
            return requested
        if self.step % STEPS_AHEAD:
            return 0
        before, self.asked = self.asked, self.highest(par.replicate(np.int32(requested), self.setup.devices))
        return 0 if before is None else int(par.unreplicate(before))

    def _after_step(self, first: int, total: int) -> None:
        """What is due after this step: a log line, an evaluation, a checkpoint."""
        config, step, last = self.config, self.step, self.step == total
        if step % config.log_every == 0 or step == first or last:
            self._log()
        evaluate = step % (config.eval_every or self.setup.epoch_steps) == 0 or last
        if evaluate:
            self._evaluate("val")
        save_due = step % config.save_every == 0 if config.save_every else evaluate
        if save_due or last or (evaluate and self.best["step"] == step):
            self._save()
        self._report_commits()

    def _log(self) -> None:
        totals = self._checked_window()
        self.engine.reset()
        rates = self.meter.window(totals.steps, totals.count)
        share = self.waiting.share(totals.steps, rates, self.meter.seconds["compile"])
        note = f"{waited(share)}: {advice(applicable(self.config), os.cpu_count() or 1)}" if share else None
        self.report.event(
            "step",
            step=self.step,
            epoch=(self.step - 1) // self.setup.epoch_steps + 1,
            **totals.means,
            learning_rate=self._learning_rate(),
            grad_norm=totals.grad_norm / totals.steps,
            **rates,
            **({"note": note} if note else {}),
        )
        if note:
            self.report.line(f"note: {note}")
        self.report.update(self.step, **totals.means, images_per_s=rates["images_per_s"])

    def _learning_rate(self) -> float:
        """Of the step just taken."""
        rate: Any = self.setup.schedule(self.step - 1)
        return float(rate)

    def _checked_window(self) -> Totals:
        """The totals since the last log line, if they are finite."""
        totals = Totals.of(self.engine.window, self.setup.devices)
        if math.isfinite(totals.loss) and math.isfinite(totals.grad_norm):
            return totals
        what = "loss" if not math.isfinite(totals.loss) else "gradient"
        before = self.step - totals.steps + 1
        saved = f"the checkpoint of step {self.saved_step} is good" if self.saved_step > 0 else "nothing was saved yet"
        message = (
            f"the {what} is not finite between steps {before} and {self.step} (learning rate "
            f"{self._learning_rate():.3g}); {saved}; try a smaller --lr or --grad_clip"
            f"{', or --stable_transition' if states_may_grow(self.config) else ''}"
        )
        self.report.event("error", step=self.step, message=message)
        raise UserError(message, NON_FINITE)

    def _evaluate(self, split: str) -> None:
        """Every example of the split once, whatever the number of devices; with the averaged parameters if any."""
        self.engine.wait()
        state = self.engine.state
        params = state.ema_params if self.config.ema_decay else state.params
        batch_size = self.setup.batching.batch_size * self.setup.batching.devices
        own_size = batch_size // jax.process_count()
        workers, sums = self.config.num_workers or 0, self.engine.no_sums
        with self.report.busy(f"evaluating {split}"), self.meter.span("evaluate"):
            ragged = eval_batches(self.setup.sources[split], batch_size, workers=workers, **self.engine.own_share)
            padded = (par.pad_and_mask(batch, own_size) for batch in ragged)
            with closing(par.prefetch_to_device(padded, self.setup.devices, self.config.prefetch)) as batches:
                for batch in batches:
                    sums = self.eval_step(params, state.batch_stats, sums, batch)
            totals = Totals.of(sums, self.setup.devices)
        result = {"step": self.step, **totals.means, "count": totals.count}
        best = split == "val" and result["accuracy"] >= self.best.get("accuracy", -1.0)
        if best:
            self.best = result
        self.last[split] = result
        self.report.event("eval", split=split, **result, **({"best": True} if best else {}))

    def _save(self) -> None:
        if self.saved_step == self.step:
            return
        self._checked_window()
        with self.meter.span("save"):
            val = self.last.get("val", {})
            meta = {
                "step": self.step,
                "best": self.best,
                "config": resume_record(self.config, self.setup.batching.effective, self.setup.batching.grad_accum),
                "data": data_record(self.setup.outline),
            }
            metric = val["accuracy"] if val.get("step") == self.step else None
            self.checkpoints.save(self.step, sharded.fetch(self.engine.state, self.setup.devices), meta, metric)
        self.saved_step = self.step

    def _wait_for_checkpoints(self) -> None:
        with self.report.busy("writing the checkpoint"), self.meter.span("save"):
            self.checkpoints.wait()
        self._report_commits()

    def _report_commits(self) -> None:
        for step in self.checkpoints.drain():
            self.report.event("checkpoint", step=step, path=str(self.setup.run.checkpoints / str(step)))
