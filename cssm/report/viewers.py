"""What other programs show of a run: TensorBoard and W&B, with one interface."""

import io
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

from cssm.config import UserError

SPLITS = ("val", "test")
NOT_SCALARS = ("step", "epoch", "count")


def scalars(prefix: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """`<prefix>/<name>` for each number of an event's fields."""
    return {
        f"{prefix}/{name}": float(value)
        for name, value in fields.items()
        if name not in NOT_SCALARS and value is not None and not isinstance(value, str | bool)
    }


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
        self._settings: dict[str, Any] = {}

    def write(self, prefix: str, fields: dict[str, Any]) -> None:
        """The `scalars` of the fields at fields["step"]; OSError where they cannot be written."""
        value = self._summary.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in scalars(prefix, fields).items()]
        self._write(int(fields["step"]), self._summary.Summary(value=values))

    def write_images(self, step: int, pictures: Mapping[str, bytes]) -> None:
        """Each PNG under its name."""
        image = lambda png: self._summary.Summary.Image(encoded_image_string=png)
        values = [self._summary.Summary.Value(tag=name, image=image(png)) for name, png in pictures.items()]
        self._write(step, self._summary.Summary(value=values))

    def begin(self, settings: Mapping[str, Any]) -> None:
        """The settings of the run, kept for `write_summary`."""
        self._settings = {name: "" if value is None else value for name, value in settings.items()}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """For the table of hyperparameters: what was set, beside the loss and the accuracy of each evaluation."""
        from tensorboardX.summary import hparams

        splits = {name: fields for name, fields in summary.items() if name in SPLITS}
        metrics = {f"{split}/{name}": fields[name] for split, fields in splits.items() for name in ("loss", "accuracy")}
        for part in hparams(self._settings, metrics):
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

    def close(self, failed: bool = False) -> None:
        """Write what is pending."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A run of Weights & Biases. Its id is kept in the run's directory, so that a resumed run goes on in the same one.

    What W&B reads from the environment holds here: WANDB_PROJECT (otherwise cssm), WANDB_ENTITY, WANDB_MODE=offline.
    Steps are a metric of their own: where a run went back, W&B would drop what its own counter has passed. Raises
    UserError where wandb is not installed, or refuses to begin.
    """

    ID = "wandb_run_id"

    def __init__(self, run_dir: Path):
        try:
            wandb = import_module("wandb")
        except ModuleNotFoundError as error:
            raise UserError("--wandb needs the package wandb: type pip install wandb, or leave it out") from error
        self._wandb, id_file = wandb, run_dir / self.ID
        known = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else None
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "cssm"),
                name=run_dir.name,
                dir=str(run_dir),
                id=known,
                resume="allow",
                settings=wandb.Settings(
                    console="off"
                ),  # a live display and its copy of the terminal disturb each other
            )
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            ways = "type wandb login, or set WANDB_MODE=offline to send it later with wandb sync"
            raise UserError(f"--wandb: W&B does not begin a run ({reason}): {ways}") from error
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def begin(self, settings: Mapping[str, Any]) -> None:
        """The settings of the run; those of a resumed one may have changed."""
        self._run.config.update(dict(settings), allow_val_change=True)

    def write(self, prefix: str, fields: dict[str, Any]) -> None:
        """The `scalars` of the fields at fields["step"]."""
        self._run.log({"step": int(fields["step"]), **scalars(prefix, fields)})

    def write_images(self, step: int, pictures: Mapping[str, bytes]) -> None:
        """Each PNG under its name."""
        images = {name: self._wandb.Image(Image.open(io.BytesIO(png))) for name, png in pictures.items()}
        self._run.log({"step": step, **images})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """What a run reached, in the table of runs."""
        for name in ("best", *SPLITS):
            self._run.summary.update(scalars(name, summary.get(name, {})))
        self._run.summary.update(scalars("run", {k: v for k, v in summary.items() if not isinstance(v, Mapping)}))

    def close(self, failed: bool = False) -> None:
        """Send what is pending."""
        self._run.finish(exit_code=int(failed))
