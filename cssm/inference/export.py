"""The verb export: a trained model as a folder that can be handed to others."""

from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from cssm.config import KNOBS, Config, UserError, applicable
from cssm.inference.card import card
from cssm.inference.exported import CARD, FACTS, SETTINGS, TENSORS, write_folder
from cssm.inference.output import make_folder, put_json
from cssm.inference.stablehlo import PROGRAM, write_program
from cssm.inference.weights import Trained, load_trained
from cssm.report import Reporter
from cssm.settings.inference import FORMATS

STORAGE = 6
ONNX = (
    "--format onnx is not written: jax2onnx, which makes ONNX of JAX programs, has no 2-D FFT, fails with jax 0.12 "
    "and wants an older orbax-checkpoint than this program; type --format stablehlo"
)
# What makes up a description of the training, less what names a place.
_GROUPS = ("model", "data", "optimisation", "precision and memory")
_PLACES = ("data_dir",)


def export(config: Config, stream: IO[str] | None = None) -> Path:
    """Write the folder that the settings ask for; returns it. UserError for a format that is not written, a checkpoint
    that cannot be read, a folder that holds other files.
    """
    assert config.checkpoint is not None, "the command line wants one"
    kind = config.format or FORMATS["export"][0]
    if kind == "onnx":
        raise UserError(ONNX)
    trained = load_trained(config.checkpoint, config.checkpoint_step)
    write = {"safetensors": export_parameters, "stablehlo": export_program}[kind]
    with Reporter(None, headless_stream=stream, quiet=config.quiet) as report:
        folder = Path(config.output or trained.folder / f"export_{kind}")
        with report.busy(f"writing {folder}"):
            write(trained, folder)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
        report.event("export", format=kind, folder=str(folder), step=trained.step, files=sizes)
        of = f"step {trained.step}{', averaged parameters' if trained.averaged else ''}"
        report.line(f"exported {of}, to {folder}:")
        for name, size in sizes.items():
            report.line(f"  {name:<18} {size:>13,} bytes")
    return folder


def export_parameters(trained: Trained, folder: Path) -> None:
    """The folder of cssm.inference.exported, read back and compared bit for bit."""
    make_folder(folder, replaces=(TENSORS, SETTINGS, FACTS, CARD))
    settings = described(trained)
    write_folder(folder, trained.variables, settings, facts(trained), card(trained, settings, program=False))
    again = load_trained(folder)
    before, after = (jax.tree_util.tree_leaves_with_path(each.variables) for each in (trained, again))
    same = [path for path, _ in before] == [path for path, _ in after]
    if not same or any(not _equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True)):
        raise UserError(f"{folder} does not hold what was written to it: export again, to another disk", STORAGE)


def export_program(trained: Trained, folder: Path) -> None:
    """The folder of a program that JAX runs without this package."""
    make_folder(folder, replaces=(PROGRAM, FACTS, CARD))
    settings = described(trained)
    write_program(trained, folder / PROGRAM)
    put_json(folder / FACTS, {**facts(trained), "settings": settings})
    (folder / CARD).write_text(card(trained, settings, program=True), encoding="utf-8")


def facts(trained: Trained) -> dict[str, Any]:
    """What model.json tells besides digests."""
    return {
        "classes": list(trained.classes),
        "num_classes": trained.num_classes,
        "image_shape": list(trained.image_shape),
        "step": trained.step,
        "averaged": trained.averaged,
        "best": trained.best,
        "from_files": trained.config.data_dir is not None,
    }


def described(trained: Trained) -> dict[str, Any]:
    """The settings that describe the training; no place on a machine is among them. The batch is the total."""
    batch = {"batch_size": None, "grad_accum": None, "global_batch_size": trained.effective_batch}
    values = applicable(trained.config) | batch
    return {
        name: value
        for name, value in values.items()
        if KNOBS[name].group in _GROUPS and KNOBS[name].resume != "fresh" and name not in _PLACES and value is not None
    }


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
