"""--dry_run: what a run would be and need, worked out from shapes: no step is taken, nothing is compiled or written."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm.checkpoint import saved_meta
from cssm.report import Reporter
from cssm.setup import Setup, describe
from parallel import sharded

Tree = Any


def dry_run(setup: Setup, report: Reporter) -> dict[str, Any]:
    """Tell what the run is put together from, as `describe` does, and in addition, bytes being those of each device:

    modules: see `modules_of`. num_complex_params: those among num_params that are complex. train_flops_per_image: of
    the forward and the backward pass. parameter_bytes, gradient_bytes, optimizer_bytes, average_bytes (of parameters,
    with --ema_decay), activation_bytes (estimated), batch_bytes (made ahead), and their sum, total_bytes.
    step: where a run that is resumed goes on.
    """
    layout = setup.layout
    facts = describe(setup, sharded.whole_shapes(layout)) | {"dry_run": True, "run_dir": _directory(setup)}
    if setup.run.resumed:
        facts["step"] = saved_meta(setup.run.checkpoints)["step"]
    with report.busy("tracing the training step"):
        modules = modules_of(setup.model, setup.outline.image_shape)
        facts |= {"modules": modules, "num_complex_params": sum(row["complex_params"] for row in modules)}
        facts |= setup.costs(layout)
    report.rehearsal(facts)
    report.event("config", **facts)
    return facts


def modules_of(model: nn.Module, image_shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each module that has parameters, in the order in which the model makes them: module (its path), shapes
    by array (that of a complex one ends in "complex"), params and complex_params, how many numbers they hold; a complex
    one counts once.
    """
    rows: list[dict[str, Any]] = []

    def init() -> None:
        # Read here, since what jax returns has its names sorted.
        rows.extend(_rows(model.init(jax.random.key(0), jnp.zeros((1, *image_shape)))["params"], ""))

    jax.eval_shape(init)
    return rows


def _rows(params: Tree, module: str) -> Iterator[dict[str, Any]]:
    arrays = {name: leaf for name, leaf in params.items() if not isinstance(leaf, Mapping)}
    if arrays:
        sizes = {name: math.prod(leaf.shape) for name, leaf in arrays.items()}
        complex_ones = [name for name, leaf in arrays.items() if jnp.iscomplexobj(leaf)]
        shapes = {name: [*leaf.shape, *["complex"] * (name in complex_ones)] for name, leaf in arrays.items()}
        counts = {"params": sum(sizes.values()), "complex_params": sum(sizes[name] for name in complex_ones)}
        yield {"module": module, "shapes": shapes, **counts}
    for name, inside in params.items():
        if isinstance(inside, Mapping):
            yield from _rows(inside, f"{module}/{name}".removeprefix("/"))


def _directory(setup: Setup) -> str | None:
    """Of the run; a new one without --run_name gets its name when it starts."""
    named = setup.run.resumed or setup.config.run_name
    return str(setup.run.directory) if named else None
