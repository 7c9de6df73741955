"""What a run records: one JSON object a line, and the same scalars for TensorBoard."""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

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
        self._file = None if run_dir is None else _open_after_whole_line(run_dir / "metrics.jsonl")
        self._outputs = [output for output in (self._file, stream) if output is not None]
        self._logs = run_dir / "logs" if run_dir is not None and tensorboard else None
        self._writer_class = _summary_writer() if self._logs else None
        self._writer: Any = None
        self._schema: dict[str, int] = {"schema": SCHEMA}

    def write(self, kind: str, fields: dict[str, Any]) -> None:
        """One event; `event` comes first, and the first event of all names the schema."""
        record = {"event": kind, **self._schema, **jsonable(fields)}
        self._schema = {}
        text = json.dumps(record, allow_nan=False) + "\n"
        for output in self._outputs:
            output.write(text)
            output.flush()
        if self._logs and kind in ("step", "eval"):
            self._scalars("train" if kind == "step" else fields["split"], fields)

    def _scalars(self, prefix: str, fields: dict[str, Any]) -> None:
        step = int(fields["step"])
        if self._writer is None:  # a resumed run replaces what was recorded from this step on
            self._writer = self._writer_class(str(self._logs), purge_step=step)
        for name, value in fields.items():
            if name not in NOT_SCALARS and not isinstance(value, str | bool):
                self._writer.add_scalar(f"{prefix}/{name}", float(value), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path | str) -> list[dict[str, Any]]:
    """The events of one run, killed and resumed as often as it may have been, as if it had run through.

    A line torn by a kill is skipped. Where a resumed run went back to an earlier step, the events it overtook
    (from that step on) are left out; an evaluation repeated at the same step replaces the earlier one.
    """
    events: list[dict[str, Any]] = []
    last_step, evaluated = 0, set()
    for line in Path(path).read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(event, dict) or "event" not in event:
            continue
        kind, split, step = event["event"], event.get("split"), event.get("step")
        if kind == "step":
            if step < last_step:
                events = [old for old in events if old["event"] not in OF_A_STEP or old["step"] < step]
            elif step == last_step:
                events = [old for old in events if (old["event"], old.get("step")) != (kind, step)]
            last_step = step
        elif kind == "eval" and (split, step) in evaluated:
            same = (kind, split, step)
            events = [old for old in events if (old["event"], old.get("split"), old.get("step")) != same]
        if kind == "eval":
            evaluated.add((split, step))
        events.append(event)
    return events


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


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError(
            "--tensorboard needs the package tensorboardX: type pip install tensorboardX"
        ) from error
    return SummaryWriter
