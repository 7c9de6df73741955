"""What a run is made of, put together from its configuration before the first step."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from cssm import data, fused, models
from cssm.augment import check_pairs, unaugmented
from cssm.config import Config, UserError, applicable, warnings_for
from cssm.data.pipeline import Outline, Some, Source, steps_per_epoch
from cssm.flops import UncountedError, count_flops, flops_of
from cssm.initial import Initial, read_initial
from cssm.jaxprs import trace
from cssm.liveness import peak_bytes, size_bytes
from cssm.optimizers import make_optimizer, make_schedule
from cssm.parts import check_frozen
from cssm.recipes import scaled_lr
from cssm.remat import choices, wrapper
from cssm.report import Reporter
from cssm.runs import Run
from cssm.size import fitted
from cssm.step import TrainState, init_state, make_backward
from parallel import devices as par
from parallel import job
from parallel.selftest import collective_self_test
from parallel.sharded import ShardedParams, make_strategy, whole_shapes
from parallel.sync import Replicated

WARMUP_SHARE = 0.05
# Of a device's memory: what an estimate of the step may fill before its blocks are computed twice.
FULL = 0.85
# Maps that a parameter array gives at most, in a bound on the memory of a step.
ARRAYS = 4


@dataclass(frozen=True)
class Setup:
    """Nothing here changes from step to step. devices: of all processes.

    sources: by split; none where nothing but `outline` was asked for. model: the plain one; step_model: the same with
    its blocks wrapped as the steps need it. initial: parameters to begin with, of a run that begins with given ones.
    """

    run: Run
    devices: list[jax.Device]
    batching: par.Batching
    outline: Outline
    sources: dict[str, Source]
    model: nn.Module
    step_model: nn.Module
    tx: optax.GradientTransformation
    schedule: optax.Schedule
    strategy: Replicated
    epoch_steps: int
    total_steps: int
    initial: Initial | None = None

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return self.run.config

    def initial_state(self, index: int | jax.Array) -> TrainState:
        """What device `index` holds of a fresh state; for `spmd`."""
        image_shape = self.outline.image_shape
        return init_state(self.model, self.tx, self.strategy, self.config, image_shape, index)

    def batch_shapes(self, images: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Of a batch with so many images."""
        return {
            "image": jax.ShapeDtypeStruct((images, *self.outline.image_shape), jnp.uint8),
            "label": jax.ShapeDtypeStruct((images,), jnp.int32),
        }

    def costs(self, layout: TrainState) -> dict[str, int | None]:
        """train_flops_per_image, and the bytes on each device (see cssm.dry_run), from the backward pass as it is
        traced; layout: as of `layout`. Augmentation, which comes before it, is not in these.
        """
        images = self.batching.batch_size * self.batching.grad_accum
        batch = self.batch_shapes(images)
        backward = make_backward(self.step_model, self.strategy, unaugmented(self.config), self.batching.grad_accum)
        jaxpr = trace(backward, layout, batch, axes=[(par.AXIS, self.batching.devices)])
        try:
            flops = flops_of(jaxpr) // images
        except UncountedError:
            flops = None
        held = {
            "parameter_bytes": _bytes((layout.params, layout.batch_stats)),
            # A gradient lies as its parameter does, also where it is then reduced to slices.
            "gradient_bytes": _bytes(layout.params),
            "optimizer_bytes": _bytes(layout.opt_state),
            "average_bytes": _bytes(layout.ema_params),
            "activation_bytes": peak_bytes(jaxpr),
            "batch_bytes": _bytes(batch) * (1 + self.config.prefetch),
        }
        return {"train_flops_per_image": flops, **held, "total_bytes": sum(held.values())}

    @functools.cached_property
    def layout(self) -> TrainState:
        """Shapes of what each device holds, Slices where it is a part."""
        return jax.eval_shape(lambda: self.initial_state(0))


def set_up(run: Run, devices: list[jax.Device], report: Reporter, load: bool = True) -> Setup:
    """Build the model and load the data, unless told not to. UserError or DeviceError where the configuration does not
    fit them. All processes must call it.
    """
    outline = data.outline(run.config)
    if run.config.image_size is None:
        run = replace(run, config=replace(run.config, image_size=outline.image_shape[-2]))
    changes = job.share("data", lambda: run.data_changes(data_record(outline)))
    if run.config.target_params and not run.resumed:
        run = replace(run, config=_fitted(run.config, outline, report))
    config = run.config
    if config.scan == "fused" and not fused.available():
        raise UserError(
            "--scan fused needs an NVIDIA GPU of compute capability 8.0 or more, and this runs on "
            f"{devices[0].device_kind}: leave it out, or type --scan reference"
        )
    notes = [*run.notes, *changes, *outline.notes, *warnings_for(config)]
    if unused := len(par.select_devices(config.platform)) - len(devices):
        notes.append(f"{unused} visible {'devices are' if unused > 1 else 'device is'} left unused, as asked")
    for note in notes:
        report.line(f"note: {note}")
    sizes = (config.batch_size, config.global_batch_size, config.grad_accum)
    batching = par.resolve_batch(len(devices), *sizes, default_batch_size=config.batch_size or 1)
    check_pairs(config, batching.batch_size)
    few = (config.overfit_batches or 0) * batching.effective
    epoch_steps = config.overfit_batches or steps_per_epoch(outline.examples["train"], batching.effective)
    if few:
        _check_few(config, few, outline.examples["train"])
        report.line(f"note: --overfit_batches: trained and evaluated on {few:,} examples of the training set alone")
    limits = (config.epochs and config.epochs * epoch_steps, config.max_steps)
    total_steps = min(limit for limit in limits if limit)
    schedule, note = _schedule(config, batching, epoch_steps, total_steps)
    if note:
        report.line(f"note: {note}")
    strategy = make_strategy(config.shard, config.sync_backend, devices, config.grad_clip)
    num_classes, bn_axis = outline.num_classes, par.AXIS if config.sync_bn else None
    setup = Setup(
        run=run,
        devices=devices,
        batching=batching,
        outline=outline,
        sources=_sources(config, outline, few, report) if load else {},
        model=models.build(config, num_classes, bn_axis=bn_axis),
        step_model=models.build(config, num_classes, wrapper(strategy, choices(config)[0]), bn_axis=bn_axis),
        tx=make_optimizer(config, schedule),
        schedule=schedule,
        strategy=strategy,
        epoch_steps=epoch_steps,
        total_steps=total_steps,
    )
    setup = _with_parts(setup, report, load or config.dry_run)
    return _fitting(setup, bn_axis, report)


def _fitting(setup: Setup, bn_axis: str | None, report: Reporter) -> Setup:
    """With the first choice of rematerialisation whose step fits the devices, or the last; says that, where it is not
    the first.
    """
    open_ = choices(setup.config)

    def choose() -> tuple[int, str | None]:
        first = None
        for i, kept in enumerate(open_[:-1]):
            why = _too_large(_with_kept(setup, kept, bn_axis))
            if why is None:
                return i, first
            first = first or why
        return len(open_) - 1, first

    chosen, why = job.share("remat", choose)
    if why is None:
        return setup
    what = "part of the activations is" if open_[chosen] == "costly" else "activations are"
    report.line(f"note: {why}, so that {what} computed again in the backward pass (--no_remat to try)")
    return _with_kept(setup, open_[chosen], bn_axis)


def _with_kept(setup: Setup, kept: str | None, bn_axis: str | None) -> Setup:
    wrap = wrapper(setup.strategy, kept)
    return replace(setup, step_model=models.build(setup.config, setup.outline.num_classes, wrap, bn_axis=bn_axis))


def _with_parts(setup: Setup, report: Reporter, begins: bool) -> Setup:
    """With what --init_from gives a run that begins; says that, and what --freeze holds."""
    config, shapes = setup.config, whole_shapes(setup.layout)
    if config.freeze:
        report.line(f"note: {check_frozen(shapes.params, config.freeze)}")
    if config.init_from and begins and not setup.run.resumed:
        initial = read_initial(config.init_from, {"params": shapes.params, "batch_stats": shapes.batch_stats})
        for text in initial.report:
            report.line(f"note: {text}")
        setup = replace(setup, initial=initial)
    return setup


def _too_large(setup: Setup) -> str | None:
    """Why the step would not fit into the memory of the devices; None where it does, or where they do not tell."""
    limit = par.memory_limit(setup.devices)
    always = isinstance(setup.strategy, ShardedParams)  # see remat.wrapper
    if limit is None or always or "remat" not in applicable(setup.config):
        return None
    layout = setup.layout
    if most_bytes(setup, layout) < FULL * limit:
        return None
    need = setup.costs(layout)["total_bytes"]
    assert need is not None, "a sum"
    if need < FULL * limit:
        return None
    return f"the step would need about {need / 2**30:.0f} GiB on each device, of {limit / 2**30:.0f}"


def most_bytes(setup: Setup, layout: TrainState) -> int:
    """More than `Setup.costs` can come to, known without tracing the step, which takes seconds on a slow host.

    As if every parameter array gave ARRAYS maps as wide as the widest of them, at every pixel and step, in float32.
    """
    shape, leaves = setup.outline.image_shape, jax.tree.leaves(layout.params)
    steps = max(setup.config.seq_len or 1, shape[0] if len(shape) == 4 else 1) + setup.config.n_register_tokens
    positions = setup.batching.batch_size * setup.batching.grad_accum * steps * shape[-3] * shape[-2]
    maps = 4 * ARRAYS * positions * len(leaves) * max(leaf.shape[-1] for leaf in leaves if leaf.ndim)
    return maps + 8 * _bytes(layout) + (1 + setup.config.prefetch) * positions * shape[-1]


def with_schedule(setup: Setup, schedule: optax.Schedule) -> Setup:
    """The same run with another course of the learning rate."""
    return replace(setup, schedule=schedule, tx=make_optimizer(setup.config, schedule))


def with_lr(setup: Setup, lr: float) -> Setup:
    """The same run with another peak learning rate."""
    config = replace(setup.config, lr=lr)
    schedule, _ = _schedule(config, setup.batching, setup.epoch_steps, setup.total_steps)
    return with_schedule(replace(setup, run=replace(setup.run, config=config)), schedule)


def check_collectives(setup: Setup, shapes: TrainState) -> None:
    """One reduction as large as the gradient's: what does not work shows here, and not as a run that hangs. shapes: of
    the whole state.
    """
    timeout_s = setup.config.self_test_timeout
    if len(setup.devices) > 1 and setup.config.sync_backend != "cpu" and timeout_s:
        size_bytes = sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.params))
        collective_self_test(setup.devices, size_bytes, timeout_s)


def describe(setup: Setup, shapes: TrainState) -> dict[str, Any]:
    """The facts of a run, for its banner and its `config` event. shapes: of the whole state."""
    config, batching = setup.config, setup.batching
    image_shape = setup.outline.image_shape
    return {
        "arch": config.arch,
        "cssm": config.cell,
        "dataset": config.dataset,
        "device_table": par.describe(setup.devices),
        "platform": setup.devices[0].platform,
        "devices": batching.devices,
        "batch_size": batching.batch_size,
        "grad_accum": batching.grad_accum,
        "effective_batch": batching.effective,
        "processes": jax.process_count(),
        "sync_backend": config.sync_backend,
        "shard": config.shard,
        "num_params": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.params)),
        "target_params": config.target_params,
        **_flops(setup, shapes),
        "image_shape": list(image_shape),
        **({"classes": list(setup.outline.classes)} if setup.outline.classes else {}),
        **{f"{split}_examples": number for split, number in setup.outline.examples.items()},
        "steps_per_epoch": setup.epoch_steps,
        "total_steps": setup.total_steps,
        "run_dir": str(setup.run.directory),
        "config": applicable(config),
    }


def data_record(outline: Outline) -> dict[str, Any]:
    """What a checkpoint keeps of the data, for Run.data_changes and for whoever uses the model."""
    known = {"classes": list(outline.classes), "train_examples": outline.examples["train"]}
    return known | {"num_classes": outline.num_classes, "image_shape": list(outline.image_shape)}


def _fitted(config: Config, outline: Outline, report: Reporter) -> Config:
    """The configuration with the size that its target_params asks for; of several processes, the first decides."""
    with report.busy("looking for the size"):
        return replace(config, **job.share("size", lambda: fitted(config, outline)))


def _flops(setup: Setup, shapes: TrainState) -> dict[str, Any]:
    """flops_per_image, of the forward pass; or None and flops_uncounted, the reason."""
    variables = {"params": shapes.params, "batch_stats": shapes.batch_stats}
    image = jax.ShapeDtypeStruct((1, *setup.outline.image_shape), jnp.float32)
    try:
        return {"flops_per_image": count_flops(lambda v, x: setup.model.apply(v, x), variables, image)}
    except UncountedError as error:
        return {"flops_per_image": None, "flops_uncounted": str(error)}


def _check_few(config: Config, few: int, examples: int) -> None:
    if few > examples:
        n = config.overfit_batches or 1
        most = f"at most {examples * n // few}" if examples * n >= few else "a smaller batch"
        raise UserError(f"--overfit_batches {n} are {few} examples, the training set has {examples}: type {most}")


def _sources(config: Config, outline: Outline, few: int, report: Reporter) -> dict[str, Source]:
    """All splits; where only a few examples are to be learnt, these in the place of each."""
    if not few:
        return {split: load_split(config, split, report) for split in outline.examples}
    return dict.fromkeys(outline.examples, Some(load_split(config, "train", report), few, config.seed))


def load_split(config: Config, split: str, report: Reporter) -> Source:
    """The train, val or test split; the report shows how far it is."""
    with report.busy(f"preparing {config.dataset} {split}") as count:
        return data.load(config, split, count)


def _schedule(
    config: Config, batching: par.Batching, epoch_steps: int, total_steps: int
) -> tuple[optax.Schedule, str | None]:
    """The learning rate by step, and what is to be said of it."""
    lr, note = scaled_lr(config, batching.effective)
    warmup_steps = _warmup_steps(config, epoch_steps, total_steps)
    return make_schedule(replace(config, lr=lr), total_steps, warmup_steps), note


def _warmup_steps(config: Config, epoch_steps: int, total_steps: int) -> int:
    if config.warmup_steps is not None:
        return config.warmup_steps
    if config.warmup_epochs is not None:
        return round(config.warmup_epochs * epoch_steps)
    return round(WARMUP_SHARE * total_steps)


def _bytes(tree: Any) -> int:
    return sum(size_bytes(leaf) for leaf in jax.tree.leaves(tree))
