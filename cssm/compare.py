"""Runs side by side: what they cost and what they reached, read from the events that they left."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from cssm.config import KNOBS, UserError

EVENTS = "metrics.jsonl"
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
# Settings that say where a run was computed and what it told of itself, not what was trained.
_ASIDE = {n for n, knob in KNOBS.items() if knob.resume == "fresh" or knob.group in ("checkpoints", "reporting")}
# What must agree for times to be comparable: fields of the config event.
_CONDITIONS = ("platform", "devices", "effective_batch", "dataset", "image_shape")


@dataclass
class Record:
    """What a run's events tell; None where they do not. Times in milliseconds, accuracies in 0 .. 1.

    step_ms: median over the logged intervals but the first, in which programs are loaded, without waiting for data.
    """

    name: str
    facts: dict[str, Any]
    steps: int | None = None
    step_ms: float | None = None
    best_val: float | None = None
    test: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """Those that tell runs apart."""
        return {name: value for name, value in self.facts["config"].items() if name not in _ASIDE}


def compare(paths: Sequence[str], stream: IO[str] | None = None) -> None:
    """Print a Markdown table of the runs, in the order given; with a stream, one JSON object a run on it instead.

    A path is a run's directory or a folder of runs. The first run is the one that `ratio` refers to. Raises UserError
    for a path without runs, and for events that cannot be read.
    """
    if not paths:
        raise UserError("compare needs the directories of runs: type compare RUN RUN, or a folder of runs")
    records = [read_run(directory) for path in paths for directory in _directories(Path(path))]
    if stream is not None:
        for record in records:
            values = {"run": record.name, **_values(record, records[0]), "settings": record.settings}
            stream.write(json.dumps(values) + "\n")
        return
    print(table(records))
    for note in [*differences(records), *(note for record in records for note in record.notes)]:
        print(f"\nnote: {note}")


def read_run(directory: Path) -> Record:
    """The record of one run. Of a run that was resumed, the last configuration holds."""
    events, notes = _events(directory / EVENTS)
    configs = [event for event in events if event["event"] == "config"]
    if not configs:
        raise UserError(f"{directory / EVENTS} holds no config event: the run ended before it began, leave it out")
    steps = [event for event in events if event["event"] == "step"]
    rates = [event["step_ms"] - event["data_wait_ms"] for event in steps if "step_ms" in event][1:]
    evals = {
        split: [e["accuracy"] for e in events if e["event"] == "eval" and e["split"] == split] for split in _SPLITS
    }
    return Record(
        name=directory.name,
        facts=configs[-1],
        steps=max((event["step"] for event in steps), default=None),
        step_ms=median(rates) if rates else None,
        best_val=max(evals["val"], default=None),
        test=evals["test"][-1] if evals["test"] else None,
        notes=notes,
    )


_SPLITS = ("val", "test")


def table(records: Sequence[Record]) -> str:
    """In Markdown, padded so that it reads well as it is; a dash where a run does not tell."""
    rows = [("run", *(heading for heading, _ in COLUMNS.values()))]
    for name, record in zip(labels(records), records, strict=True):
        values = _values(record, records[0])
        shown = ("-" if values[key] is None else form.format(values[key]) for key, (_, form) in COLUMNS.items())
        rows.append((name, *shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        return (
            f"| {row[0]:<{widths[0]}} | "
            + " | ".join(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
            + " |"
        )

    rule = f"|{'-' * (widths[0] + 2)}|" + "|".join(f"{'-' * (w + 1)}:" for w in widths[1:]) + "|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


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
    known = record.step_ms is not None and baseline.step_ms
    return {
        "num_params": record.facts.get("num_params"),
        "flops_per_image": record.facts.get("flops_per_image"),
        "steps": record.steps,
        "step_ms": record.step_ms,
        "ratio": record.step_ms / baseline.step_ms if known else None,
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
    """(events, notes). The last line may be half written, where a run was killed."""
    lines, notes = path.read_text(encoding="utf-8").splitlines(), []
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            if number < len(lines):
                raise UserError(f"{path} line {number} is not JSON: the file is damaged, leave this run out") from None
            notes.append(f"{path} ends in half a line, which is left out")
            continue
        if not isinstance(event, dict) or "event" not in event or event.get("schema", SCHEMA) != SCHEMA:
            raise UserError(f"{path} line {number} is no event of schema {SCHEMA}: another version wrote this run")
        events.append(event)
    return events, notes
