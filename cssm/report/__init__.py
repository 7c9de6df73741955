"""What a run says: banner, running clock, progress bar, a line an evaluation; its events; its curves."""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cssm.report.costs import cost_lines, memory_lines, parameter_table, totals_line
from cssm.report.events import METRICS, EventLog, read_events
from cssm.report.examined import Examined
from cssm.report.metrics_csv import save_csv
from cssm.report.terminal import Bar, Task, device_lines, in_words, run_lines

__all__ = ["RULE", "Reporter", "read_events"]

RULE = "=" * 80
PAGE = "report.html"


class Reporter:
    """Everything a run shows and records; a context manager.

    On a terminal the bar and the clock move; piped output gets plain lines, flushed at once; with
    `headless_stream` the events go to that stream as JSON and nothing else is printed. `quiet` leaves only
    `line`, evaluations and the summary. `run_dir` receives metrics.jsonl, logs/ (with `tensorboard`) and
    what `leave` writes, unless it is None. With primary=False (any process but the first) nothing is printed or
    written.
    """

    def __init__(
        self,
        run_dir: Path | str | None,
        *,
        headless_stream: IO[str] | None = None,
        quiet: bool = False,
        tensorboard: bool = False,
        wandb: bool = False,
        primary: bool = True,
    ):
        self.run_dir = Path(run_dir) if run_dir is not None and primary else None
        self._speaks = primary and headless_stream is None
        self._chatty = self._speaks and not quiet
        animated = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._console = Console(file=sys.stdout, force_terminal=animated, highlight=False, markup=False, emoji=False)
        self._tasks: list[Task] = []
        self._bar: Bar | None = None
        self._live = None
        if animated and self._chatty:
            self._live = Live(console=self._console, get_renderable=self._view, refresh_per_second=8, transient=True)
        self._events = EventLog(self.run_dir, headless_stream if primary else None, tensorboard, wandb)

    def __enter__(self) -> Self:
        if self._events.cut_bytes:
            self.line(f"note: {METRICS} ended within a line, which was cut off: the run was killed as it wrote")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        self._events.close(failed=kind is not None)

    def line(self, text: str) -> None:
        """The text alone on its line: no decoration, and no wrapping but the terminal's own."""
        if not self._speaks:
            return
        if self._live:
            self._console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=self._console.file, flush=True)

    def banner(self, info: Mapping[str, Any]) -> None:
        """The DEVICE CONFIGURATION block, batch arithmetic, model and data. Of `info` it reads:

        device_table: rows {id, kind, platform, process, memory_bytes}; devices (how many, of all processes);
        batch_size (per device), grad_accum, effective_batch, shard; arch, cssm (or None), num_params,
        flops_per_image (or None); dataset, image_shape, train_examples, val_examples, test_examples.
        """
        if self._chatty:
            self.block("DEVICE CONFIGURATION", [*device_lines(info["device_table"]), RULE, *run_lines(info)])

    def rehearsal(self, facts: Mapping[str, Any]) -> None:
        """What a dry run found: the banner, the table of parameters, FLOPs and memory; when quiet, totals on a line.

        facts: what `banner` reads, and what cssm.dry_run adds.
        """
        if not self._chatty:
            self.line(totals_line(facts))
            return
        self.banner(facts)
        table = parameter_table(facts["modules"])
        wide = self._console.options.update(width=200)
        width = None if self._live else max(len(RULE), self._console.measure(table, options=wide).maximum)
        self._console.print(table, width=width)
        self.block("COST", [*cost_lines(facts), RULE, *memory_lines(facts)])
        self.line("dry run: no step was taken, nothing was written")

    def block(self, title: str, lines: Sequence[str]) -> None:
        """A block with a title, between rules; on a terminal narrower than those, cut or wrapped to its width."""
        width = min(len(RULE), self._console.width) if self._live else None
        for text in (RULE, title, RULE, *lines, RULE):
            if text != RULE and width:
                text = textwrap.fill(text, width, subsequent_indent="    ")
            self.line(text[:width] if text == RULE else text)

    def event(self, kind: str, **fields: Any) -> None:
        """Record one event: config | step | eval | checkpoint | rollback | summary | devices | bench | evaluation |
        prediction | predictions | export | find_lr | error.

        step: step, epoch, loss, accuracy, learning_rate, grad_norm, images_per_s, step_ms, data_wait_ms; nonfinite
            where steps were left out, and once, where it waits much for data, a note.
        eval: split, step, loss, accuracy, count, and best=True where it is the best so far; it is printed.
        summary: any scalars, or groups of them; printed as a block.
        """
        self._events.write(kind, fields)
        if kind == "eval":
            best = "  best" if fields.get("best") else ""
            total = len(str(self._bar.total)) if self._bar else 0
            self.line(
                f"{fields['split']:<5} step {int(fields['step']):>{total}}  "
                f"loss {float(fields['loss']):.4f}  accuracy {float(fields['accuracy']):.4f}  "
                f"of {int(fields['count']):,}{best}"
            )
        elif kind == "summary":
            known = [in_words(name, value) for name, value in fields.items() if value is not None]
            self.block("RUN SUMMARY", known)

    @contextmanager
    def busy(self, label: str) -> Iterator[Callable[[int, int], None]]:
        """Show the label and a running clock on a terminal while the block runs.

        Yields `count(done, total)`, which turns the clock into a bar; only then is it worth a line when it
        ends, and in piped output one when it starts.
        """
        task = Task(label)

        def count(done: int, total: int) -> None:
            if not task.total:
                self._piped(f"{label} ...")
            task.count(done, total)

        self._tasks.append(task)
        self._live_while_needed()
        try:
            yield count
        finally:
            self._tasks.remove(task)
            self._live_while_needed()
        if task.total and self._chatty:
            self.line(task.closing_line())

    @contextmanager
    def compiling(self, label: str) -> Iterator[None]:
        """As `busy`, for what is always worth both lines."""
        task = Task(label)
        self._piped(f"{label} ...")
        with self.busy(label):
            yield
        if self._chatty:
            self.line(task.closing_line())

    @contextmanager
    def progress(self, total_steps: int, start: int = 0) -> Iterator[None]:
        """Show a bar of total_steps, `start` of them done, as long as the block runs; `update` moves it."""
        self._bar = bar = Bar(total_steps, start)
        self._live_while_needed()
        try:
            yield
        finally:
            self._bar = None
            self._live_while_needed()
            if self._chatty:
                self.line(bar.closing_line())

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        accuracy: float | None = None,
        images_per_s: float | None = None,
    ) -> None:
        """Step `step` is done; a figure is shown until it is given anew.

        Piped output gets a line whenever a loss is given. RuntimeError outside of `progress`.
        """
        if self._bar is None:
            raise RuntimeError("update outside of progress")
        self._bar.update(step, {"loss": loss, "accuracy": accuracy, "images_per_s": images_per_s})
        if loss is not None:
            self._piped(f"step {self._bar.count()}  {self._bar.figures()}")

    def leave(self, ending: str, examined: Examined | None = None) -> list[Path]:
        """Write what people look at, from metrics.jsonl (what came before a resume too): metrics.csv, the curves
        plots/*.png, and report.html; with TensorBoard, images too. Returns their paths.

        ending: how the run ended, in words. examined: what it answered in its last evaluation.
        """
        if self.run_dir is None:
            return []
        events = read_events(self.run_dir / METRICS)
        table = save_csv(events, self.run_dir / "metrics.csv")
        try:
            from cssm.report.plots import save_curves
            from cssm.report.run_page import pictures, run_page
        except ModuleNotFoundError as error:
            self.line(f"no curves were drawn, {error.name} is not installed: type pip install {error.name}")
            return [table]
        page = self.run_dir / PAGE
        page.write_text(run_page(self.run_dir.name, events, ending, examined), encoding="utf-8")
        if examined is not None:
            self._events.show(examined.step, pictures(examined))
        if self._chatty:
            self.line(f"report: {page}")
        return [table, *save_curves(events, self.run_dir / "plots", self.run_dir.name), page]

    def _piped(self, text: str) -> None:
        """A line where nothing moves: it stands for what a terminal shows by moving."""
        if self._chatty and not self._live:
            self.line(text)

    def _live_while_needed(self) -> None:
        if not self._live:
            return
        if self._tasks or self._bar:
            self._live.start(refresh=True)
        else:
            self._live.stop()

    def _view(self) -> RenderableType:
        bar = self._bar
        return Group(*([bar.view(self._console.width)] if bar else []), *[task.view() for task in self._tasks])
