"""Runs side by side: what they cost and what they reached, read from the events that they left."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from cssm import markdown
from cssm.config import KNOBS, UserError
from cssm.waiting import MUCH, waited

EVENTS = "metrics.jsonl"
_OF_A_STEP = ("step", "eval", "checkpoint")
SCHEMA = 1
# Field: its heading, and how it is written.
COLUMNS = {
    "num_params": ("parameters", "{:,}"),
    "flops_per_image": ("FLOPs per image", "{:.3g}"),
    "steps": ("steps", "{:,}"),
    "step_ms": ("step ms", "{:.1f}"),
    "ratio": ("ratio", "{:.2f}"),
    "best_val": ("best val", "{:.3f}"),
    "test": ("test", "{:.3f}"),
}
# Settings that say where a run was computed and what it told of itself, not what was trained; and those that make up
# the batch, which are others after a run went on.
_ASIDE = {n for n, knob in KNOBS.items() if knob.resume == "fresh" or knob.group in ("checkpoints", "reporting")}
_ASIDE |= {"batch_size", "global_batch_size", "grad_accum"}
# What must agree for times to be comparable: fields of the config event.
_CONDITIONS = ("platform", "devices", "effective_batch", "dataset", "image_shape")


@dataclass
class Record:
    """What a run's events tell; None where they do not. Times in milliseconds, accuracies in 0 .. 1.

    step_ms: wall time of a step, median over the logged intervals but each start's first, which holds the loading of
    programs. What was waited for data is part of it: most of that passes while the devices still compute.
    """

    name: str
    facts: dict[str, Any]
    steps: int | None = None
    step_ms: float | None = None
    best_val: float | None = None
    test: float | None = None
    notes: list[str] = field(default_factory=list)
    directory: Path = Path()

    @property
    def settings(self) -> dict[str, Any]:
        """Those that tell runs apart."""
        found = {name: value for name, value in self.facts["config"].items() if name not in _ASIDE}
        return found | {"effective_batch": self.facts.get("effective_batch")}


def compare(paths: Sequence[str], stream: IO[str] | None = None, output: str | None = None) -> None:
    """Print a Markdown table of the runs, in the order given; with a stream, one JSON object a run on it instead. With
    output, write a page there too: the table, and the curves over each other; it replaces an earlier one.

    A path is a run's directory or a folder of runs. The first run is the one that `ratio` refers to. Raises UserError
    for a path without runs, for events that cannot be read, and for a file at output that is no such page.
    """
    if not paths:
        raise UserError("compare needs the directories of runs: type compare RUN RUN, or a folder of runs")
    records = [read_run(directory) for path in paths for directory in _directories(Path(path))]
    if output is not None:
        _write_page(Path(output), records)
    if stream is not None:
        for record in records:
            conditions = {name: record.facts.get(name) for name in _CONDITIONS}
            values = {"run": record.name, **_values(record, records[0]), **conditions}
            values |= {"settings": record.settings, "notes": record.notes}
            stream.write(json.dumps(values) + "\n")
        return
    print(table(records))
    for note in _notes(records):
        print(f"\nnote: {note}")
    if output is not None:
        print(f"\npage: {output}")


def _notes(records: "Sequence[Record]") -> list[str]:
    return [*differences(records), *(note for record in records for note in record.notes)]


def _write_page(path: Path, records: "Sequence[Record]") -> None:
    if path.is_dir() or path.suffix not in (".html", ".htm"):
        name = path / "compare.html" if path.is_dir() else path.with_suffix(".html")
        raise UserError(f"--output {path}: must be the name of an HTML file, type --output {name}")
    from cssm.report import read_events
    from cssm.report.comparison import TITLE, comparison_page
    from cssm.report.replaced import check_replaced

    check_replaced(path, f"<title>{TITLE}</title>")

    curves = {
        name: read_events(record.directory / EVENTS) for name, record in zip(labels(records), records, strict=True)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(comparison_page(_rows(records), curves, _notes(records)), encoding="utf-8")


def read_run(directory: Path) -> Record:
    """The record of one run. Of a run that was resumed, the last configuration holds. Raises UserError."""
    events, notes = _events(directory / EVENTS)
    configs = [event for event in events if event["event"] == "config"]
    if not configs:
        raise UserError(f"{directory / EVENTS} holds no config event: the run ended before it began, leave it out")
    numbers = [event["step"] for event in events if event["event"] in _OF_A_STEP and "step" in event]
    step_ms, share = _pace(events)
    if share > MUCH:
        notes.append(f"{directory.name}: {waited(share)}, its computing takes less than step ms")
    if events[-1]["event"] == "error":
        notes.append(f"{directory.name} ended in an error: {events[-1].get('message')}")
    vals, tests = _accuracies(events, "val"), _accuracies(events, "test")
    return Record(
        name=directory.name,
        facts={"config": {}} | configs[-1],
        steps=max(numbers, default=None),
        step_ms=step_ms,
        best_val=max(vals, default=None),
        test=tests[-1] if tests else None,
        notes=notes,
        directory=directory,
    )


def _pace(events: Sequence[dict[str, Any]]) -> tuple[float | None, float]:
    """(milliseconds of a step, share of them spent waiting for data), see Record.step_ms."""
    steady, starting = [], True
    for event in events:
        if event["event"] == "config":
            starting = True
        elif event["event"] == "step" and "step_ms" in event:
            steady += [] if starting else [event]
            starting = False
    if not steady:
        return None, 0.0
    step_ms = median(event["step_ms"] for event in steady)
    return step_ms, median(event.get("data_wait_ms", 0.0) for event in steady) / step_ms


def _accuracies(events: Sequence[dict[str, Any]], split: str) -> list[float]:
    chosen = (event for event in events if event["event"] == "eval" and event.get("split") == split)
    return [event["accuracy"] for event in chosen if isinstance(event.get("accuracy"), float | int)]


def table(records: Sequence[Record]) -> str:
    """In Markdown, padded so that it reads well as it is; a dash where a run does not tell."""
    return markdown.table(_rows(records))


def _rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    rows = [("run", *(heading for heading, _ in COLUMNS.values()))]
    for name, record in zip(labels(records), records, strict=True):
        values = _values(record, records[0])
        shown = ("-" if values[key] is None else form.format(values[key]) for key, (_, form) in COLUMNS.items())
        rows.append((name, *shown))
    return rows


def labels(records: Sequence[Record]) -> list[str]:
    """The settings in which the runs differ; the run's name where they tell nothing, or too little."""
    shared = set.intersection(*(set(record.settings) for record in records))
    telling = [n for n in records[0].settings if n in shared and len({repr(r.settings[n]) for r in records}) > 1]
    if telling == ["cssm"]:
        texts = [str(record.settings["cssm"]) for record in records]
    else:
        texts = [" ".join(f"{name}={record.settings[name]}" for name in telling) for record in records]
    return texts if len(set(texts)) == len(texts) and all(texts) else [record.name for record in records]


def differences(records: Sequence[Record]) -> list[str]:
    """What makes times across the runs mean little, a sentence each."""
    found = []
    for name in _CONDITIONS:
        values = {json.dumps(record.facts.get(name)): None for record in records}
        if len(values) > 1:
            found.append(f"the runs differ in {name} ({', '.join(values)}): ratios across them mean little")
    return found


def _values(record: Record, baseline: Record) -> dict[str, Any]:
    return {
        "num_params": record.facts.get("num_params"),
        "flops_per_image": record.facts.get("flops_per_image"),
        "steps": record.steps,
        "step_ms": record.step_ms,
        "ratio": record.step_ms / baseline.step_ms if record.step_ms and baseline.step_ms else None,
        "best_val": record.best_val,
        "test": record.test,
    }


def _directories(path: Path) -> list[Path]:
    if (path / EVENTS).is_file():
        return [path]
    found = sorted(directory.parent for directory in path.glob(f"*/{EVENTS}"))
    if not found:
        what = "holds no run" if path.is_dir() else "is no directory"
        raise UserError(f"{path} {what}: type the directory of a run, which has a {EVENTS}, or a folder of runs")
    return found


def _events(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """(events, notes). Where a run was killed, a line may be half written, and the run gone on after it."""
    events, torn = [], 0
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            torn += 1
            continue
        if not isinstance(event, dict) or "event" not in event or event.get("schema", SCHEMA) != SCHEMA:
            raise UserError(f"{path} line {number} is no event of schema {SCHEMA}: another version wrote this run")
        events.append(event)
    return events, [f"{path}: lines left out because they are half written: {torn}"] if torn else []
