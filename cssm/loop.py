"""The loop of a run: its steps, and what is due after each. Read top to bottom.

Metrics stay on the devices until a log line is due, and the host runs a few steps ahead: no step waits for another's
numbers. A checkpoint holds everything that the next step needs, and is never made of a state that is not finite.
"""

import math
import os
import time
from contextlib import closing
from typing import Any

import jax
import numpy as np

from cssm.checkpoint import Checkpoints
from cssm.config import UserError, applicable, write_yaml
from cssm.engine import STEPS_AHEAD, Engine
from cssm.evaluation import Answers, Evaluation
from cssm.meter import Meter
from cssm.nonfinite import IN_A_ROW, NON_FINITE, NonFiniteError, batch_ids, find_origin, sentence, ways_out
from cssm.report import Reporter
from cssm.report.terminal import clock
from cssm.resume import resume_record
from cssm.setup import Setup, check_collectives, data_record, describe, with_lr
from cssm.signals import StopSignals, stopped
from cssm.step import Totals, TrainState
from cssm.tracing import Trace
from cssm.waiting import Waiting, advice, waited
from cssm.watchdog import FIRST_STEP, STALLED, Watchdog
from parallel import devices as par
from parallel import job, sharded

KEPT = "checkpoints are intact, if one was saved, go on with --resume auto"


class Loop:
    """One run, from its first step here to its summary. step: the last one taken, counted from 1."""

    def __init__(
        self, setup: Setup, report: Reporter, checkpoints: Checkpoints, stop: StopSignals, meter: Meter
    ) -> None:
        self.setup, self.config = setup, setup.config
        self.report, self.checkpoints, self.stop, self.meter = report, checkpoints, stop, meter
        self.engine, self.waiting = Engine(setup, meter), Waiting()
        self.highest = par.spmd(lambda number: jax.lax.pmax(number, par.AXIS), setup.devices)
        self.asked: jax.Array | None = None
        self.step = 0
        self.saved_step = -1
        self.best: dict[str, Any] = {}
        self.last: dict[str, dict[str, Any]] = {}
        self.answers: Answers | None = None
        self.time_to_first_step_s: float | None = None
        self.skipped = self.skipped_in_a_row = self.rollbacks = 0
        self.watchdog = Watchdog(self.config.stall_timeout, self._awaited, KEPT, self._tell_error)
        self.evaluation = Evaluation(self.engine, self.watchdog.beat)

    def start(self) -> None:
        """The state before the first step: fresh, or as the newest intact checkpoint holds it; and the banner."""
        setup, report, run = self.setup, self.report, self.setup.run
        layout = setup.layout
        shapes = sharded.whole_shapes(layout)
        facts = describe(setup, shapes)
        report.banner(facts)
        report.line(par.running_line(setup.devices))
        report.event("config", **facts)
        with report.busy("testing the collectives"):
            check_collectives(setup, shapes)
        if run.resumed:
            with report.busy("restoring the checkpoint"):
                notes = self._restore(shapes)
            ahead = f"going on from step {self.step} of {setup.total_steps}"
            if self.step >= setup.total_steps:
                ahead = f"step {self.step} was the last, no step is left; a larger --epochs or --max_steps goes on"
            for note in (*notes, ahead):
                report.line(f"note: {note}")
        else:
            self._begin()
        if jax.process_index() == 0:
            write_yaml(run.directory / "config.yaml", applicable(self.config))

    def _begin(self) -> None:
        """The state before the first step of all."""
        with self.report.busy("initialising the parameters"):
            self.engine.initialise()

    def _restore(self, shapes: TrainState) -> list[str]:
        """Go back to the newest intact checkpoint, which the first process finds; returns what is to be said."""
        found: list[TrainState] = []

        def newest() -> tuple[dict[str, Any], int, list[str]]:
            state, meta, step, notes = self.checkpoints.restore(shapes)
            found.append(state)
            return {"best": meta["best"], "skipped": meta.get("skipped", 0)}, step, notes

        meta, step, notes = job.share("restored", newest)
        state = found[0] if found else self.checkpoints.restore(shapes, step)[0]
        self.step = self.saved_step = step
        self.best, self.skipped = meta["best"], meta["skipped"]
        self.engine.state = sharded.place(state, self.setup.layout, self.setup.devices)
        return notes

    def take_steps(self) -> None:
        """Every step that is left; raises Stopped after the first one at which that was asked for."""
        while self.step < self.setup.total_steps:
            try:
                self._take_steps(self.step + 1, self.setup.total_steps)
            except NonFiniteError as error:
                self._roll_back(error.totals)

    def _take_steps(self, first: int, total: int) -> None:
        batches, trace = self.engine.batches(first, total), Trace(self.config.profile, self.engine.wait)
        with self.report.progress(total, self.step), closing(batches), trace:
            for self.step in range(first, total + 1):
                trace.at(self.engine.taken)
                batch = self.engine.next_of(batches)
                if self.step == first:
                    self._first_step(batch)
                else:
                    self.engine.take(batch)
                self.watchdog.beat()
                self.report.update(self.step)
                self._after_step(first, total)
                if self.step < total and (signal_number := self._agreed_signal()):
                    self._log_rest()
                    self._save()
                    self._wait_for_checkpoints()
                    end = stopped(signal_number, self.step, self.setup.run.directory)
                    self._leave(str(end))
                    raise end

    def _roll_back(self, totals: Totals) -> None:
        """After steps that were not finite: end the run, or go back to the last checkpoint with a smaller lr."""
        config, bad = self.config, totals.first_nonfinite
        with self.report.busy("looking for what is not finite"):
            state = sharded.fetch(self.engine.state, self.setup.devices)
            origin = find_origin(self.setup, state, bad)
        said = sentence(self.setup, totals, origin)
        fields = {"module": origin.module, "batch": batch_ids(self.setup, bad)}
        if config.nonfinite != "rollback" or self.rollbacks == config.max_rollbacks:
            saved = (
                f"the checkpoint of step {self.saved_step} is good" if self.saved_step > 0 else "nothing was saved yet"
            )
            message = f"{said}; {saved}; {ways_out(self.setup)}"
            self.report.event("error", step=bad, message=message, **fields)
            self._leave(f"ended in an error: {message}")
            raise UserError(message, NON_FINITE)
        self.rollbacks += 1
        assert config.lr is not None
        self.setup = with_lr(self.setup, config.lr * config.rollback_factor)
        self.config, taken = self.setup.config, self.engine.taken
        self.engine = Engine(self.setup, self.meter)
        self.engine.taken = taken
        if self.saved_step > 0:
            self._restore(sharded.whole_shapes(self.setup.layout))
        else:
            self.step, self.best, self.skipped = 0, {}, 0
            self._begin()
        count = f"{self.rollbacks} of {config.max_rollbacks}"
        self.report.event("rollback", step=bad, to=self.step, lr=self.config.lr, message=said, **fields)
        self.report.line(
            f"note: {said}; going back to step {self.step}, lr: was {config.lr}, now {self.config.lr} ({count})"
        )

    def finish(self) -> dict[str, Any]:
        """The test split, the summary, the page."""
        self._evaluate("test")
        self._wait_for_checkpoints()
        wall_s = time.monotonic() - self.meter.started
        summary = {
            "run_dir": str(self.setup.run.directory),
            "step": self.step,
            "best": self.best,
            **self.last,
            "time_to_first_step_s": self.time_to_first_step_s,
            **{f"{span}_s": self.meter.seconds[span] for span in ("compile", "data_wait", "evaluate", "save")},
            "wall_s": wall_s,
            "goodput": self.meter.goodput(),
            **({"trace": self.config.profile} if self.config.profile else {}),
        }
        counts = {"nonfinite_steps": self.skipped, "rollbacks": self.rollbacks}
        summary |= {name: count for name, count in counts.items() if count}
        if bad := {split: len(source.bad) for split, source in self.setup.sources.items() if source.bad}:
            summary["bad_examples"] = bad
        memory = par.memory_bytes(self.setup.devices)
        if in_use := memory["in_use"]:
            summary |= {"peak_bytes_per_device": max(memory["peak"]), "memory_spread": 1 - min(in_use) / max(in_use)}
        self.report.event("summary", **summary)
        self._leave(f"finished after {self.step:,} steps in {clock(wall_s)}")
        return summary

    def _leave(self, ending: str) -> None:
        """What people look at, with what was answered in the last evaluation."""
        last, outline = self.answers, self.setup.outline
        examined = last.examine(self.setup.sources[last.split], outline.classes) if last else None
        self.report.leave(ending, examined)

    def _first_step(self, batch: dict[str, jax.Array]) -> None:
        with self.report.compiling("compiling the training step"):
            self.engine.take_first(batch)
        self.stop.idle = False
        if self.time_to_first_step_s is None:
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
        if totals.nonfinite:
            self._note_skipped(totals)
        else:
            self.skipped_in_a_row = 0
        finite = totals.steps - totals.nonfinite
        rates = self.meter.window(totals.steps, totals.count)
        share = self.waiting.share(totals.steps, rates, self.meter.seconds["compile"])
        note = f"{waited(share)}: {advice(applicable(self.config), os.cpu_count() or 1)}" if share else None
        self.report.event(
            "step",
            step=self.step,
            epoch=(self.step - 1) // self.setup.epoch_steps + 1,
            **totals.means,
            learning_rate=self._learning_rate(),
            grad_norm=totals.grad_norm / finite if finite else math.nan,
            **rates,
            **({"nonfinite": totals.nonfinite} if totals.nonfinite else {}),
            **({"note": note} if note else {}),
        )
        if note:
            self.report.line(f"note: {note}")
        self.report.update(self.step, **totals.means, images_per_s=rates["images_per_s"])

    def _log_rest(self) -> None:
        """What no log line has told yet, before the run ends early: a resumed one does not know it."""
        if self.step % self.config.log_every:
            self._log()

    def _note_skipped(self, totals: Totals) -> None:
        """Count the steps that were left out; UserError where it is one after another for too long."""
        self.skipped += totals.nonfinite
        self.skipped_in_a_row = self.skipped_in_a_row + totals.steps if totals.nonfinite == totals.steps else 0
        self.report.line(
            f"note: left out {totals.nonfinite} of the steps to {self.step}, which were not finite, the first of them "
            f"step {totals.first_nonfinite}; {self.skipped} so far"
        )
        if self.skipped_in_a_row >= IN_A_ROW:
            raise NonFiniteError(totals)

    def _learning_rate(self) -> float:
        """Of the step just taken; the schedule of the optimizer counts those that were not left out."""
        rate: Any = self.setup.schedule(max(0, self.step - 1 - self.skipped))
        return float(rate)

    def _checked_window(self) -> Totals:
        """The totals since the last log line; NonFiniteError if steps were not finite that are not to be left out."""
        totals = Totals.of(self.engine.window, self.setup.devices)
        if totals.nonfinite and self.config.nonfinite != "skip":
            raise NonFiniteError(totals)
        return totals

    def _awaited(self) -> str:
        """For what the program waits at this moment."""
        devices = self.setup.devices
        # One process that drives several GPUs can be held up in their driver.
        alone = len(devices) > 1 and devices[0].platform == "gpu" and jax.process_count() == 1
        apart = f" (--nproc_per_node {len(devices)} gives each GPU a process of its own, which may get past that)"
        spans = {
            "data_wait": f"the batch of training data of step {self.step}",
            "compile": FIRST_STEP + apart * alone,
            "evaluate": "an evaluation",
            "save": "a checkpoint to be written",
        }
        return spans.get(self.meter.now, f"the devices, which take step {self.step} or one before")

    def _tell_error(self, message: str) -> None:
        self.report.event("error", step=self.step, message=message, exit_code=STALLED)

    def _evaluate(self, split: str) -> None:
        """Every example of the split once, whatever the number of devices; with the averaged parameters if any."""
        self.engine.wait()
        self._checked_window()  # what follows from a step that is not finite is not evaluated, and cannot be the best
        state = self.engine.state
        params = state.ema_params if self.config.ema_decay else state.params
        with self.report.busy(f"evaluating {split}"), self.meter.span("evaluate"):
            totals, answers = self.evaluation.run(split, params, state.batch_stats, self.step)
        result = {"step": self.step, **totals.means, "count": totals.count}
        best = split == "val" and result["accuracy"] >= self.best.get("accuracy", -1.0)
        if best:
            self.best = result
        self.last[split], self.answers = result, answers
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
                "skipped": self.skipped,
                "config": resume_record(self.config, self.setup.batching.effective, self.setup.batching.grad_accum),
                "data": data_record(self.setup.outline),
            }
            metric = val["accuracy"] if val.get("step") == self.step else None
            self.checkpoints.save(self.step, sharded.fetch(self.engine.state, self.setup.devices), meta, metric)
        self.saved_step = self.step

    def _wait_for_checkpoints(self) -> None:
        with self.report.busy("writing the checkpoint"), self.meter.span("save"):
            self.checkpoints.wait()
        self.watchdog.beat()
        self._report_commits()

    def _report_commits(self) -> None:
        for step in self.checkpoints.drain():
            self.report.event("checkpoint", step=step, path=str(self.setup.run.checkpoints / str(step)))
