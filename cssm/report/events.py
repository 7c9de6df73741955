"""What a run records: one JSON object a line, and the same scalars for TensorBoard."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from cssm.config import UserError

SCHEMA = 1
METRICS = "metrics.jsonl"
STORAGE = 6
BLOCK = 2**16
OF_A_STEP = ("step", "eval", "checkpoint")
SPLITS = ("val", "test")
NOT_SCALARS = ("step", "epoch", "count")


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
    """Writes events to <run_dir>/metrics.jsonl (appended whole), to a stream, and to TensorBoard (logs/).

    Any of the three may be absent. cut_bytes: the length of a line torn by a kill that was cut from the file's end.
    Raises UserError where TensorBoard is asked for and its writer is not installed; OSError where the disk refuses.
    """

    def __init__(self, run_dir: Path | None, stream: IO[str] | None = None, tensorboard: bool = False):
        self._tensorboard = TensorBoard(run_dir / "logs") if run_dir is not None and tensorboard else None
        self._file, self.cut_bytes = (None, 0) if run_dir is None else _open_after_whole_line(run_dir / METRICS)
        self._path, self._stream = run_dir and run_dir / METRICS, stream
        self._schema: dict[str, int] = {"schema": SCHEMA}
        self._settings: dict[str, Any] = {}

    def write(self, kind: str, fields: dict[str, Any]) -> None:
        """One event; `event` comes first, and the first event of all names the schema."""
        record = {"event": kind, **self._schema, **jsonable(fields)}
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
        if self._tensorboard and kind in ("step", "eval"):
            self._tensorboard.write("train" if kind == "step" else fields["split"], fields)
        if self._tensorboard and kind == "config":
            self._settings = fields.get("config", {})
        if self._tensorboard and kind == "summary":
            self._tensorboard.write_settings(self._settings, fields)

    def show(self, step: int, pictures: Mapping[str, bytes]) -> None:
        """PNG images by name, where there is something that shows them."""
        if self._tensorboard:
            self._tensorboard.write_images(step, pictures)

    def close(self) -> None:
        """End both files; the stream stays open."""
        if self._tensorboard:
            self._tensorboard.close()
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """Scalars, images and settings as TensorBoard event files in a directory; UserError where there is no writer.

    Written by the caller's thread: tensorboardX's SummaryWriter has one of its own, and hangs when that meets a full
    disk.
    """

    def __init__(self, directory: Path):
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except ModuleNotFoundError as error:
            raise UserError("--tensorboard needs the package tensorboardX: type pip install tensorboardX") from error
        self._directory, self._open, self._event, self._summary = directory, EventsWriter, event_pb2, summary_pb2
        self._writer: EventsWriter | None = None

    def write(self, prefix: str, fields: dict[str, Any]) -> None:
        """One scalar `<prefix>/<name>` for each number of the fields, at fields["step"]; OSError where it cannot be."""
        values = [
            self._summary.Summary.Value(tag=f"{prefix}/{name}", simple_value=float(value))
            for name, value in fields.items()
            if name not in NOT_SCALARS and value is not None and not isinstance(value, str | bool)
        ]
        self._write(int(fields["step"]), self._summary.Summary(value=values))

    def write_images(self, step: int, pictures: Mapping[str, bytes]) -> None:
        """Each PNG under its name."""
        image = lambda png: self._summary.Summary.Image(encoded_image_string=png)
        values = [self._summary.Summary.Value(tag=name, image=image(png)) for name, png in pictures.items()]
        self._write(step, self._summary.Summary(value=values))

    def write_settings(self, settings: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        """For the table of hyperparameters: what was set, beside the loss and the accuracy of each evaluation."""
        from tensorboardX.summary import hparams

        splits = {name: fields for name, fields in summary.items() if name in SPLITS}
        metrics = {f"{split}/{name}": fields[name] for split, fields in splits.items() for name in ("loss", "accuracy")}
        texts = {name: "" if value is None else value for name, value in settings.items()}
        for part in hparams(texts, metrics):
            self._write(int(summary["step"]), part)

    def _write(self, step: int, summary: Any) -> None:
        event = self._event
        if self._writer is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._writer = self._open(str(self._directory / "events"))
            # From here on a resumed run replaces what was recorded before.
            start = event.SessionLog(status=event.SessionLog.START)
            self._writer.write_event(event.Event(step=step, wall_time=time.time(), session_log=start))
        self._writer.write_event(event.Event(step=step, wall_time=time.time(), summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Write what is pending."""
        if self._writer is not None:
            self._writer.close()


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
