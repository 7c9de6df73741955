"""What a run records: one JSON object a line, and the same scalars for TensorBoard."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from cssm.config import UserError
from cssm.report.viewers import TensorBoard, WandB

SCHEMA = 1
METRICS = "metrics.jsonl"
STORAGE = 6
BLOCK = 2**16
OF_A_STEP = ("step", "eval", "checkpoint")


def jsonable(value: Any) -> Any:
    """In JSON's types: arrays of one element become numbers, non-finite floats "nan", "inf", "-inf"."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, Path):
        return str(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class EventLog:
    """Writes events to <run_dir>/metrics.jsonl (appended whole), to a stream, to TensorBoard (logs/) and to W&B.

    Any of these may be absent. cut_bytes: the length of a line torn by a kill that was cut from the file's end.
    Raises UserError where TensorBoard or W&B is asked for and not installed; OSError where the disk refuses.
    """

    def __init__(
        self, run_dir: Path | None, stream: IO[str] | None = None, tensorboard: bool = False, wandb: bool = False
    ):
        self._viewers: list[TensorBoard | WandB] = []
        if run_dir is not None:
            self._viewers += [TensorBoard(run_dir / "logs")] if tensorboard else []
            self._viewers += [WandB(run_dir)] if wandb else []
        self._file, self.cut_bytes = (None, 0) if run_dir is None else _open_after_whole_line(run_dir / METRICS)
        self._path, self._stream = run_dir and run_dir / METRICS, stream
        self._schema: dict[str, int] = {"schema": SCHEMA}

    def write(self, kind: str, fields: dict[str, Any]) -> None:
        """One event; `event` comes first, `time` last (seconds since 1970), and the first of all names the schema."""
        record = {"event": kind, **self._schema, **jsonable(fields), "time": round(time.time(), 3)}
        self._schema = {}
        text = json.dumps(record, allow_nan=False) + "\n"
        if self._file is not None:
            _append_whole(self._file, text.encode())
            if kind == "checkpoint":  # what led to it outlives the machine, as it does
                os.fsync(self._file.fileno())
            if not os.fstat(self._file.fileno()).st_nlink:  # it is written to still, and no one would read it
                raise UserError(f"{self._path} was deleted while the run wrote to it: what it told is lost", STORAGE)
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
        for viewer in self._viewers:
            if kind in ("step", "eval"):
                viewer.write("train" if kind == "step" else fields["split"], fields)
            elif kind == "config":
                viewer.begin(fields.get("config", {}))
            elif kind == "summary":
                viewer.write_summary(fields)

    def show(self, step: int, pictures: Mapping[str, bytes]) -> None:
        """PNG images by name, where there is something that shows them."""
        for viewer in self._viewers:
            viewer.write_images(step, pictures)

    def close(self, failed: bool = False) -> None:
        """End all but the stream; failed: whether the run ended in an error."""
        for viewer in self._viewers:
            viewer.close(failed)
        if self._file is not None:
            self._file.close()


def read_events(path: Path | str) -> list[dict[str, Any]]:
    """The events of one run, killed and resumed as often as it may have been, as if it had run through.

    A line torn by a kill is skipped. Where a resumed run went back to an earlier step, the events it overtook
    (from that step on) are left out; an event repeated at the same step replaces the earlier one.
    """
    events: list[dict[str, Any]] = []
    last_step, seen = 0, set()
    for line in Path(path).read_text(errors="replace").splitlines():
        if (event := _event_of(line)) is None:
            continue
        kind, step = event["event"], event.get("step", 0)
        if kind == "step" and step < last_step:
            events = [old for old in events if old["event"] not in OF_A_STEP or old.get("step", 0) < step]
        elif kind in OF_A_STEP and _key(event) in seen:
            events = [old for old in events if _key(old) != _key(event)]
        last_step = step if kind == "step" else last_step
        seen.add(_key(event))
        events.append(event)
    return events


def _key(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["event"], event.get("split"), event.get("step")


def _open_after_whole_line(path: Path) -> tuple[BinaryIO, int]:
    """(the file, open for appending, how many bytes were cut): what follows its last whole line is cut off, unless it
    is an event that lacks but the end of its line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b", buffering=0)
    start = size = file.seek(0, os.SEEK_END)
    tail = b""
    while start and b"\n" not in tail:
        start = max(0, start - BLOCK)
        file.seek(start)
        tail = file.read(size - start)
    torn = tail.rpartition(b"\n")[2]
    if not torn:
        return file, 0
    if _event_of(torn) is not None:
        file.write(b"\n")
        return file, 0
    file.truncate(size - len(torn))
    return file, len(torn)


def _event_of(line: str | bytes) -> dict[str, Any] | None:
    """The event that a line holds; None for anything else."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    step, split = event.get("step", 0), event.get("split")
    return event if type(step) in (int, float) and isinstance(split, str | None) else None


def _append_whole(file: BinaryIO, line: bytes) -> None:
    """All of the line or nothing, also where the disk is full; OSError then."""
    size, written = file.seek(0, os.SEEK_END), 0
    try:
        while written < len(line):
            written += file.write(line[written:])
    except OSError:
        file.truncate(size)
        raise
