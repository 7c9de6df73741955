"""--init_from: parameters to begin with, from another run or an exported folder, as far as they fit."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cssm.checkpoint import step_folder
from cssm.config import UserError
from cssm.runs import CHECKPOINTS

TENSORS = "model.safetensors"
STORAGE = 6
# Of a list of paths, so many are told.
TOLD = 4


@dataclass(frozen=True)
class Initial:
    """values: arrays by path, "params/..." and "batch_stats/...", all of which the new model has, in its shapes.

    report: a sentence each on what matched, what was missing, what has another shape, and what was left over.
    """

    values: dict[str, np.ndarray]
    report: tuple[str, ...]

    def put(self, state: Any) -> Any:
        """The whole state of host arrays with these in it, in the moving average too."""
        average = {name.replace("params/", "ema_params/", 1): value for name, value in self.values.items()}
        known = {**average, **self.values}
        leaves = step_folder.by_path(state)
        return jax.tree.structure(state).unflatten(known.get(name, leaf) for name, leaf in leaves.items())


def read_initial(source: str, variables: Any) -> Initial:
    """What `source` (a run, one of its checkpoints, or an exported folder) has for a model.

    variables: {params, batch_stats} of the model, or their shapes. Of a run the best checkpoint is taken, and of its
    parameters the moving average, if there is one: what was evaluated. UserError where there is none, where it is
    damaged (exit code 6), and where nothing fits.
    """
    path, wanted = Path(source), step_folder.by_path(variables)
    there, what = _read(path)
    missing = [name for name in wanted if name not in there]
    other = [name for name in wanted if name in there and not _fits(wanted[name], there[name])]
    values = {name: there[name] for name in wanted if name not in {*missing, *other}}
    left = [name for name in there if name not in wanted]
    if not any(name.startswith("params/") for name in values):
        raise UserError(
            f"--init_from {path}: none of its {len(there)} arrays fits this model, which begins with "
            f"{next(iter(wanted))}: type the --arch, --cssm and sizes that it has"
        )
    report = [f"--init_from {what}: {len(values)} of {len(wanted)} arrays match"]
    shapes = [f"{_short(name)} {_shape(there[name])} there, {_shape(wanted[name])} here" for name in other]
    for label, names in (
        ("of another shape, so fresh", shapes),
        ("missing there, so fresh", list(map(_short, missing))),
        ("there and not used", list(map(_short, left))),
    ):
        if names:
            more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
            report.append(f"--init_from: {label}: {', '.join(names[:TOLD])}{more}")
    return Initial(values, tuple(report))


def _fits(here: Any, there: np.ndarray) -> bool:
    return tuple(here.shape) == there.shape and here.dtype == there.dtype


def _read(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """(arrays by path, where they are from)."""
    if (path / TENSORS).is_file():
        return _tensors(path / TENSORS), str(path)
    steps = {int(entry.name): entry for entry in (path / CHECKPOINTS).glob("*") if entry.name.isdecimal()}
    if path.name.isdecimal() and (path / step_folder.FILES).is_file():
        steps = {int(path.name): path}
    if not steps:
        what = "holds no checkpoint and no exported model" if path.exists() else "is no path"
        raise UserError(f"--init_from {path} {what}: type the folder of a run that has saved one, or an exported one")
    try:
        records = {step: step_folder.read_record(folder) for step, folder in sorted(steps.items())}
        scored = [(record["metric"], step) for step, record in records.items() if record["metric"] is not None]
        step = max(scored)[1] if scored else max(records)
        folder = steps[step].absolute()
        step_folder.check_files(folder)
        with step_folder.open_checkpointer() as checkpointer:
            arrays = step_folder.read_arrays(checkpointer, folder, records[step]["arrays"])
    except (step_folder.DamagedError, OSError) as error:
        raise UserError(
            f"--init_from {path}: the checkpoint is damaged ({error}): type another one", STORAGE
        ) from error
    averaged = any(name.startswith("ema_params/") for name in arrays)
    prefix = "ema_params/" if averaged else "params/"
    found = {f"params/{n.removeprefix(prefix)}": array for n, array in arrays.items() if n.startswith(prefix)}
    found |= {name: array for name, array in arrays.items() if name.startswith("batch_stats/")}
    return found, f"{path} (step {step}{', averaged' if averaged else ''})"


def _tensors(path: Path) -> dict[str, np.ndarray]:
    """Of an exported folder. A complex array is stored as float32 [..., 2], and named in the file's metadata."""
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise UserError(f"reading {path} needs the package safetensors: type pip install safetensors") from error
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            pairs = json.loads((file.metadata() or {}).get("complex", "[]"))
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        return {name: _complex(value) if name in pairs else value for name, value in found.items()}
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"--init_from {path}: it cannot be read ({error})", STORAGE) from error


def _complex(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).view(np.complex64)[..., 0]


def _short(name: str) -> str:
    return name.removeprefix("params/")


def _shape(leaf: Any) -> str:
    sides = "x".join(map(str, leaf.shape)) or "scalar"
    return f"{sides} {leaf.dtype}" if str(leaf.dtype) != "float32" else sides
