"""What happens on one device: the train state, the loss, the two halves of a step, evaluation.

All functions are pure and run inside `parallel.devices.spmd`, where AXIS names the device axis; a batch holds this
device's share. Between the halves of a step the strategy (parallel.sync) makes one gradient of all devices'.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from cssm.augment import make_augment
from cssm.config import Config
from cssm.models import in_block
from parallel.devices import AXIS, sum_over_devices, unreplicate
from parallel.sync import Replicated

Tree = Any


class TrainState(struct.PyTreeNode):
    """Everything that one step hands to the next. rng: raw uint32 key of the run, constant; steps fold into it.

    params, opt_state and ema_params lie as the strategy wants them.
    """

    step: jax.Array
    params: Tree
    batch_stats: Tree
    opt_state: Tree
    ema_params: Tree
    rng: jax.Array


class Sums(struct.PyTreeNode):
    """Totals over a device's own examples (loss, correct, count), and over steps (grad_norm, steps) of all devices."""

    loss: jax.Array
    correct: jax.Array
    count: jax.Array
    grad_norm: jax.Array
    steps: jax.Array

    @classmethod
    def zeros(cls) -> "Sums":
        """No example seen yet; numpy-compatible scalars."""
        f, i = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        return cls(loss=f, correct=i, count=i, grad_norm=f, steps=i)

    def __add__(self, other: "Sums") -> "Sums":
        return jax.tree.map(jnp.add, self, other)


@dataclass(frozen=True)
class Totals:
    """`Sums` of all devices as plain Python numbers on the host."""

    loss: float
    correct: int
    count: int
    grad_norm: float
    steps: int

    @classmethod
    def of(cls, sums: Sums, devices: Sequence[jax.Device]) -> "Totals":
        """Wait for the devices, and add up what each has seen; all processes must call it."""
        loss, correct, count = sum_over_devices((sums.loss, sums.correct, sums.count), devices)
        grad_norm, steps = unreplicate((sums.grad_norm, sums.steps))
        return cls(float(loss), int(correct), int(count), float(grad_norm), int(steps))

    @property
    def means(self) -> dict[str, float]:
        """Loss and accuracy of an example."""
        return {"loss": self.loss / self.count, "accuracy": self.correct / self.count}


def normalise(images: jax.Array, statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None) -> jax.Array:
    """0..255, uint8 or float32 -> float32 -1..1, or (x / 255 - mean) / std of the channels' statistics."""
    if statistics is None:
        return images.astype(jnp.float32) / 127.5 - 1.0
    mean, std = (jnp.asarray(values, jnp.float32) for values in statistics)
    return (images.astype(jnp.float32) / 255.0 - mean) / std


def init_state(
    model: nn.Module, tx, strategy: Replicated, config: Config, image_shape: tuple[int, ...], index: int | jax.Array
) -> TrainState:
    """What device `index` holds of a fresh state from config.seed; its layout is that of jax.eval_shape at index 0."""
    key = jax.random.key(config.seed)
    images = jnp.zeros((1, *image_shape), jnp.float32)
    variables = model.init(jax.random.fold_in(key, 0), images)
    params, opt_state = strategy.init(tx, variables["params"], index)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        batch_stats=variables.get("batch_stats", {}),
        opt_state=opt_state,
        ema_params=params if config.ema_decay else {},
        rng=jax.random.key_data(jax.random.fold_in(key, 1)),
    )


def make_backward(model: nn.Module, strategy: Replicated, config: Config, grad_accum: int) -> Callable:
    """(state, batch) -> (grads, shared, own): the first half of a step, `grad_accum` passes forward and back.

    batch: {image uint8 [grad_accum * b, H, W, C], label int32 [grad_accum * b]}, of which each micro-batch of b rows
    has its own forward and backward pass, and, if some examples are to be left out, mask float32: 0 for those. Each is
    augmented before (cssm.augment).
    grads: of the device's mean loss, an example left out counting as 0; shared: to be averaged over devices; own: the
    sums (loss, correct, count) over the device's examples.
    """

    def loss_fn(params, batch_stats, micro, key):
        logits, updates = model.apply(
            {"params": strategy.whole(params, spared=in_block), "batch_stats": batch_stats},
            normalise(micro["image"], config.pixel_statistics),
            train=True,
            rngs={"drop_path": key},
            mutable=["batch_stats"],
        )
        mixed = (micro["other_label"], micro["share"]) if "share" in micro else None
        own = score(logits, micro["label"], micro.get("mask"), config.label_smoothing, mixed)
        return own[0] / micro["label"].size, (own, updates.get("batch_stats", {}))

    grad_fn, augment = jax.grad(loss_fn, has_aux=True), make_augment(config)

    def backward(state: TrainState, batch: dict[str, jax.Array]) -> tuple[Tree, Tree, Tree]:
        step_key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        key = jax.random.fold_in(step_key, jax.lax.axis_index(AXIS))

        def micro_step(carry, micro):
            grads, batch_stats, own = carry
            micro_key = jax.random.fold_in(key, micro["index"])
            if augment:
                number = jax.lax.axis_index(AXIS) * grad_accum + micro["index"]  # of this part of the global batch
                images = len(micro["label"])
                micro = augment(step_key, number * images + jnp.arange(images), micro)
            new_grads, (new_own, batch_stats) = grad_fn(state.params, batch_stats, micro, micro_key)
            grads = jax.tree.map(lambda total, g: total + g / grad_accum, grads, new_grads)
            return (grads, batch_stats, jax.tree.map(jnp.add, own, new_own)), None

        micros = jax.tree.map(lambda x: x.reshape(grad_accum, -1, *x.shape[1:]), batch)
        micros["index"] = jnp.arange(grad_accum)
        zero = (
            jax.tree.map(jnp.zeros_like, state.params),
            state.batch_stats,
            (jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)),
        )
        if grad_accum == 1:
            (grads, batch_stats, own), _ = micro_step(zero, jax.tree.map(lambda x: x[0], micros))
        else:
            (grads, batch_stats, own), _ = jax.lax.scan(micro_step, zero, micros)
        # Running statistics only: unless told otherwise each device normalised its own share in the forward pass.
        shared = {"batch_stats": batch_stats}
        if "mask" in batch:
            shared["share"] = jnp.mean(batch["mask"])
        return grads, shared, own

    return backward


def make_finish(tx: optax.GradientTransformation, strategy: Replicated, config: Config) -> Callable:
    """(state, sums, grads, shared, own) -> (state, sums): the second half of a step, the update.

    grads and shared are averaged over devices. The mean over devices of gradients of means, divided by the share of
    examples that count, is the gradient of the mean over all examples that count, however they are spread.
    """

    def finish(state: TrainState, sums: Sums, grads: Tree, shared: Tree, own: Tree) -> tuple[TrainState, Sums]:
        if "share" in shared:
            grads = jax.tree.map(lambda g: g / shared["share"], grads)
        params, opt_state, grad_norm = strategy.apply(tx, grads, state.params, state.opt_state)
        state = state.replace(
            step=state.step + 1,
            params=params,
            batch_stats=shared["batch_stats"],
            opt_state=opt_state,
            ema_params=_ema(state, params, config.ema_decay),
        )
        return state, sums + Sums(*own, grad_norm=grad_norm, steps=jnp.ones((), jnp.int32))

    return finish


def make_eval_step(model: nn.Module, strategy: Replicated, config: Config) -> Callable:
    """(params, batch_stats, sums, batch) -> sums with this batch's unmasked examples added."""

    def eval_step(params: Tree, batch_stats: Tree, sums: Sums, batch: dict[str, jax.Array]) -> Sums:
        variables = {"params": strategy.whole(params, spared=in_block), "batch_stats": batch_stats}
        logits: Any = model.apply(variables, normalise(batch["image"], config.pixel_statistics), train=False)
        own = score(logits, batch["label"], batch["mask"], 0.0)
        return sums + Sums(*own, grad_norm=jnp.zeros(()), steps=jnp.ones((), jnp.int32))

    return eval_step


def score(
    logits: jax.Array,
    labels: jax.Array,
    mask: jax.Array | None,
    smoothing: float,
    mixed: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(summed loss, correct answers, number) of the examples [B] whose mask is not 0; no mask: of all.

    mixed: of examples made of two, the other label and the share of the first, the heavier, which is the answer that
    counts as correct; the loss is the mean of both, in their shares.
    """
    losses, right = cross_entropy(logits, labels, smoothing), jnp.argmax(logits, axis=-1) == labels
    if mixed:
        others, share = mixed
        losses = share * losses + (1 - share) * cross_entropy(logits, others, smoothing)
    if mask is None:
        return losses.sum(), jnp.sum(right, dtype=jnp.int32), jnp.asarray(labels.size, jnp.int32)
    counts = mask > 0
    loss = jnp.where(counts, losses, 0.0).sum()
    return loss, jnp.sum(right & counts, dtype=jnp.int32), jnp.sum(counts, dtype=jnp.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
    """Softmax cross-entropy [B] of float32 logits [B, classes], labels smoothed by `smoothing`."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    return optax.softmax_cross_entropy(logits, targets)


def _ema(state: TrainState, params: Tree, decay: float) -> Tree:
    """Exponential moving average of parameters; the decay warms up as (1 + step) / (10 + step)."""
    if not decay:
        return {}
    step = state.step.astype(jnp.float32)
    rate = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(
        lambda average, p: (average + (1.0 - rate) * (p - average)).astype(p.dtype), state.ema_params, params
    )
