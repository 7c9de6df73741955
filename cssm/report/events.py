"""What a run records: one JSON object a line, and the same scalars for TensorBoard."""

import json
import math
from functools import partial
from pathlib import Path
from typing import IO, Any

from cssm.config import UserError

SCHEMA = 1
OF_A_STEP = ("step", "eval", "checkpoint")
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
    """Writes events to <run_dir>/metrics.jsonl (appended, flushed), to a stream, and to TensorBoard (logs/).

    Any of the three may be absent. Raises UserError where TensorBoard is asked for and its writer is not
    installed; OSError where the disk refuses.
    """

    def __init__(self, run_dir: Path | None, stream: IO[str] | None = None, tensorboard: bool = False):
        self._tensorboard = TensorBoard(run_dir / "logs") if run_dir is not None and tensorboard else None
        self._file = None if run_dir is None else _open_after_whole_line(run_dir / "metrics.jsonl")
        self._outputs = [output for output in (self._file, stream) if output is not None]
        self._schema: dict[str, int] = {"schema": SCHEMA}

    def write(self, kind: str, fields: dict[str, Any]) -> None:
        """One event; `event` comes first, and the first event of all names the schema."""
        record = {"event": kind, **self._schema, **jsonable(fields)}
        self._schema = {}
        text = json.dumps(record, allow_nan=False) + "\n"
        for output in self._outputs:
            output.write(text)
            output.flush()
        if self._tensorboard and kind in ("step", "eval"):
            self._tensorboard.write("train" if kind == "step" else fields["split"], fields)

    def close(self) -> None:
        """End both files; the stream stays open."""
        if self._tensorboard:
            self._tensorboard.close()
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """Scalars as TensorBoard event files in a directory; UserError where the writer is not installed."""

    def __init__(self, directory: Path):
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise UserError("--tensorboard needs the package tensorboardX: type pip install tensorboardX") from error
        self._open = partial(SummaryWriter, str(directory))
        self._writer: SummaryWriter | None = None

    def write(self, prefix: str, fields: dict[str, Any]) -> None:
        """One scalar `<prefix>/<name>` for each number of the fields, at fields["step"]."""
        step = int(fields["step"])
        if self._writer is None:  # from here on a resumed run replaces what was recorded before
            self._writer = self._open(purge_step=step)
        for name, value in fields.items():
            if name not in NOT_SCALARS and value is not None and not isinstance(value, str | bool):
                self._writer.add_scalar(f"{prefix}/{name}", float(value), step)

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
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(event, dict) or "event" not in event:
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


def _open_after_whole_line(path: Path) -> IO[str]:
    """Open for appending, after ending the line that a kill may have torn: the next event stands alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b")
    if file.tell():
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    file.close()
    return path.open("a", encoding="utf-8")
