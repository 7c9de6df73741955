"""A trained model: its configuration, its parameters, what it was trained on; read from a run or an exported folder.

Of a run the averaged parameters are taken, if it has them (--ema_decay): they are what was evaluated.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from cssm import data, fused, models, rules
from cssm.checkpoint import Checkpoints
from cssm.checkpoint.step_folder import by_path
from cssm.config import KNOBS, Config, UserError, known, resolve
from cssm.inference.exported import TENSORS, nested, read_folder
from cssm.runs import CHECKPOINTS, checked
from cssm.step import normalise

STORAGE = 6
PARAMS, AVERAGED, STATISTICS = "params", "ema_params", "batch_stats"
# The batch is not the run's, which was for all of its devices; the others may be typed anew for a model that is there.
_BATCH = ("batch_size", "global_batch_size", "grad_accum")
_TYPED = ("scan", "spectral_backend", "batch_size", "seed")


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model that can be asked.

    config: the run's; variables: {params, batch_stats} of numpy arrays; image_shape: (H, W, C), or of clips
    (T, H, W, C); classes: their names in the order of the labels, or none; step: at which it was saved; averaged:
    whether the parameters are the run's moving average; best: {step, loss, accuracy, count} of the best evaluation so
    far, if there was one. folder: where it was read from. effective_batch: images of a training step.
    """

    config: Config
    variables: dict[str, Any]
    image_shape: tuple[int, ...]
    num_classes: int
    classes: tuple[str, ...]
    step: int
    averaged: bool
    best: dict[str, Any]
    folder: Path
    effective_batch: int | None

    @property
    def exported(self) -> bool:
        """Whether it was read from an exported folder."""
        return (self.folder / TENSORS).is_file()

    @property
    def class_names(self) -> tuple[str, ...]:
        """A name for every label: its number where the data had no names."""
        return self.classes or tuple(map(str, range(self.num_classes)))

    @functools.cached_property
    def model(self) -> nn.Module:
        """The plain module; call it with train=False."""
        return models.build(self.config, self.num_classes)

    def apply(self, variables: Any, images: jax.Array) -> jax.Array:
        """Logits float32 [B, num_classes] of images uint8 [B, *image_shape]; pure."""
        logits: Any = self.model.apply(variables, normalise(images, self.config.pixel_statistics), train=False)
        return logits

    def logits(self, images: np.ndarray) -> np.ndarray:
        """As `apply` with the model's own variables, compiled, on the first device."""
        return np.asarray(self._compiled(self.variables, images))

    @functools.cached_property
    def _compiled(self) -> Any:
        return jax.jit(self.apply)


def load_trained(
    checkpoint: str | Path, step: str = "best", typed: Mapping[str, Any] | None = None, flag: str = "--checkpoint"
) -> Trained:
    """The model in a run's folder, in its checkpoints, in one of them, or in an exported folder.

    step: best, latest, or a number. typed: settings that are given anew, of how it is computed (scan,
    spectral_backend, batch_size, seed). flag: what an error calls the path. UserError for a path that holds none, or
    with exit code 6 for one that is damaged.
    """
    path, typed = Path(checkpoint), typed or {}
    if not path.exists():
        raise UserError(f"{flag} {path}: there is no such path; type the folder of a run, or an exported one")
    if (path / TENSORS).is_file():
        if step != "best":
            raise UserError(f"--checkpoint_step {step}: the exported folder {path} holds one step, leave it out")
        return _of_folder(path, typed)
    run, step = _run_of(path, step, flag)
    return _of_run(run, step, typed)


def _run_of(path: Path, step: str, flag: str) -> tuple[Path, str]:
    """(directory of the run, which step)."""
    if path.parent.name == CHECKPOINTS and path.name.isdecimal():
        if step not in ("best", path.name):
            raise UserError(f"--checkpoint {path} is step {path.name}, and --checkpoint_step {step} another: type one")
        return path.parent.parent, path.name
    run = path.parent if path.name == CHECKPOINTS else path
    if not Checkpoints(run / CHECKPOINTS, primary=False).steps():
        raise UserError(
            f"{flag} {path}: there is no checkpoint in it; type the folder of a run that has saved one, or an "
            "exported one"
        )
    return run, step


def _of_run(run: Path, step: str, typed: Mapping[str, Any]) -> Trained:
    with Checkpoints(run / CHECKPOINTS, primary=False) as checkpoints:
        steps = checkpoints.steps()
        if step == "best":
            number = checkpoints.best() or steps[-1]
        elif step == "latest":
            number = steps[-1]
        elif step.isdecimal() and int(step) in steps:
            number = int(step)
        else:
            raise UserError(
                f"--checkpoint_step {step}: {run} holds steps {', '.join(map(str, steps))}; type one of them, best or "
                "latest"
            )
        leaves, meta = checkpoints.read(number, (PARAMS, AVERAGED, STATISTICS))
    meta = checked(meta, run / CHECKPOINTS)
    config = _resolved(meta["config"], typed)
    image_shape, num_classes, classes = _data_facts(meta.get("data", {}), config)
    averaged = bool(config.ema_decay)
    tree = nested(leaves)
    variables = {PARAMS: tree[AVERAGED if averaged else PARAMS], STATISTICS: tree.get(STATISTICS, {})}
    batch = meta["config"].get("global_batch_size")
    return _fitting(
        Trained(config, variables, image_shape, num_classes, classes, number, averaged, meta["best"], run, batch)
    )


def _of_folder(folder: Path, typed: Mapping[str, Any]) -> Trained:
    found = read_folder(folder)
    facts, settings = found.facts, dict(found.settings)
    settings.pop("data_dir", None)
    if facts["from_files"]:  # where they lie it does not tell: eval asks, and the configuration wants some place
        settings["data_dir"] = "."
    config = _resolved(settings, typed)
    shape, classes = tuple(facts["image_shape"]), tuple(facts["classes"])
    return _fitting(
        Trained(
            config, found.variables, shape, facts["num_classes"], classes, facts["step"], facts["averaged"],
            facts["best"], folder, settings.get("global_batch_size"),
        )
    )  # fmt: skip


def _resolved(record: Mapping[str, Any], typed: Mapping[str, Any]) -> Config:
    """The run's configuration, less what belonged to its invocation, plus what is typed of how it is computed."""
    kept = {name: value for name, value in known(record, "").items() if KNOBS[name].resume != "fresh"}
    anew = {name: typed[name] for name in _TYPED if name in typed}
    config = resolve(anew, {name: value for name, value in kept.items() if name not in _BATCH})
    rules.check_applies(config, KNOBS, anew)
    if config.scan == "fused" and not fused.available():
        raise UserError(
            "the run was trained with --scan fused, which needs an NVIDIA GPU, and there is none here: type --scan auto"
        )
    return config


def _data_facts(record: Mapping[str, Any], config: Config) -> tuple[tuple[int, ...], int, tuple[str, ...]]:
    """(image_shape, num_classes, classes) as the checkpoint keeps them, or else, of an older one, as the data has."""
    if "image_shape" in record:
        return tuple(record["image_shape"]), record["num_classes"], tuple(record["classes"])
    outline = data.outline(config)
    return outline.image_shape, outline.num_classes, outline.classes


def _fitting(trained: Trained) -> Trained:
    """UserError unless the parameters are those of the model that the configuration describes."""
    image = jax.ShapeDtypeStruct((1, *trained.image_shape), np.float32)
    wanted = jax.eval_shape(trained.model.init, jax.random.key(0), image)
    form = lambda tree: {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in by_path(tree).items()}
    here, there = form({STATISTICS: {}, **wanted}), form(trained.variables)
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            raise UserError(
                f"{trained.folder} does not fit its configuration: {name} is {there.get(name, 'missing')} there, and "
                f"the model has {here.get(name, 'none')}",
                STORAGE,
            )
    return trained
