"""--init_from: parameters to begin with, from another run or an exported folder, as far as they fit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cssm.checkpoint import step_folder
from cssm.config import UserError

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
    from cssm.inference.weights import load_trained  # and safetensors with it, which other runs do without

    trained = load_trained(path, flag="--init_from")
    facts = "" if trained.exported else f" (step {trained.step}{', averaged' if trained.averaged else ''})"
    return step_folder.by_path(trained.variables), f"{path}{facts}"


def _short(name: str) -> str:
    return name.removeprefix("params/")


def _shape(leaf: Any) -> str:
    sides = "x".join(map(str, leaf.shape)) or "scalar"
    return f"{sides} {leaf.dtype}" if str(leaf.dtype) != "float32" else sides
