"""What happens on one device: the train state, the loss, the two halves of a step, evaluation.

All functions are pure and run inside `parallel.devices.spmd`, where AXIS names the device axis; a batch holds this
device's share. Between the halves of a step the strategy (parallel.sync) makes one gradient of all devices'.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from cssm.augment import make_augment, mixed_with
from cssm.config import Config
from cssm.models import in_block
from cssm.parts import frozen
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
    """Totals over a device's own examples (loss, correct, count), and over steps (grad_norm, steps) of all devices.

    nonfinite: how many of the steps changed nothing because of a loss or gradient that was not finite; they add to no
    other total but steps. first_nonfinite: the number of the first of them, 0 if there is none.
    """

    loss: jax.Array
    correct: jax.Array
    count: jax.Array
    grad_norm: jax.Array
    steps: jax.Array
    nonfinite: jax.Array
    first_nonfinite: jax.Array

    @classmethod
    def zeros(cls) -> "Sums":
        """No example seen yet; numpy-compatible scalars."""
        f, i = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        return cls(loss=f, correct=i, count=i, grad_norm=f, steps=i, nonfinite=i, first_nonfinite=i)

    def counted(self, loss: jax.Array, correct: jax.Array, count: jax.Array) -> "Sums":
        """With one batch of evaluation more."""
        return self.replace(loss=self.loss + loss, correct=self.correct + correct, count=self.count + count)

    def stepped(self, own: Tree, grad_norm: jax.Array, held: jax.Array, step: jax.Array) -> "Sums":
        """With one step more, of number `step`; own: (loss, correct, count); held: whether it changed nothing."""
        loss, correct, count, norm = jax.tree.map(lambda x: jnp.where(held, jnp.zeros_like(x), x), (*own, grad_norm))
        first = jnp.where(held & (self.nonfinite == 0), step, self.first_nonfinite)
        return self.counted(loss, correct, count).replace(
            grad_norm=self.grad_norm + norm,
            steps=self.steps + 1,
            nonfinite=self.nonfinite + held.astype(jnp.int32),
            first_nonfinite=first,
        )


@dataclass(frozen=True)
class Totals:
    """`Sums` of all devices as plain Python numbers on the host."""

    loss: float
    correct: int
    count: int
    grad_norm: float
    steps: int
    nonfinite: int = 0
    first_nonfinite: int = 0

    @classmethod
    def of(cls, sums: Sums, devices: Sequence[jax.Device]) -> "Totals":
        """Wait for the devices, and add up what each has seen; all processes must call it."""
        loss, correct, count = sum_over_devices((sums.loss, sums.correct, sums.count), devices)
        grad_norm, *counts = unreplicate((sums.grad_norm, sums.steps, sums.nonfinite, sums.first_nonfinite))
        return cls(float(loss), int(correct), int(count), float(grad_norm), *map(int, counts))

    @property
    def means(self) -> dict[str, float]:
        """Loss and accuracy of an example, nan where there was none."""
        if not self.count:
            return {"loss": math.nan, "accuracy": math.nan}
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
        if config.freeze:  # so that they take no part in the gradient's norm, and cost no backward pass
            fixed = frozen(params, config.freeze)
            params = jax.tree.map(lambda x, is_fixed: jax.lax.stop_gradient(x) if is_fixed else x, params, fixed)
        logits, updates = model.apply(
            {"params": strategy.whole(params, spared=in_block), "batch_stats": batch_stats},
            normalise(micro["image"], config.pixel_statistics),
            train=True,
            rngs={"drop_path": key},
            mutable=["batch_stats"],
        )
        own = score(logits, micro["label"], micro.get("mask"), config.label_smoothing, mixed_with(micro))
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
        return _spoilt(grads, own[0]), shared, own

    return backward


def make_finish(tx: optax.GradientTransformation, strategy: Replicated, config: Config) -> Callable:
    """(state, sums, grads, shared, own) -> (state, sums): the second half of a step, the update.

    A step whose gradient or loss is not finite changes nothing but the number of steps, and with --nonfinite stop or
    rollback not even that; nor do the steps after it, until the sums begin anew: the state stays as that step found it.

    grads and shared are averaged over devices. The mean over devices of gradients of means, divided by the share of
    examples that count, is the gradient of the mean over all examples that count, however they are spread.
    """
    skips = config.nonfinite == "skip"

    def finish(state: TrainState, sums: Sums, grads: Tree, shared: Tree, own: Tree) -> tuple[TrainState, Sums]:
        if "share" in shared:
            grads = jax.tree.map(lambda g: g / shared["share"], grads)
        params, opt_state, grad_norm = strategy.apply(tx, grads, state.params, state.opt_state)
        new = state.replace(
            step=state.step + 1,
            params=params,
            batch_stats=shared["batch_stats"],
            opt_state=opt_state,
            ema_params=_ema(state, params, config.ema_decay),
        )
        # The norm is that of all devices' gradients, so that all decide alike.
        bad = ~jnp.isfinite(grad_norm)
        held = bad if skips else bad | (sums.nonfinite > 0)
        kept = jax.tree.map(lambda a, b: jnp.where(held, a, b), state, new)
        return kept.replace(step=new.step) if skips else kept, sums.stepped(own, grad_norm, held, state.step + 1)

    return finish


def make_eval_step(model: nn.Module, strategy: Replicated, config: Config) -> Callable:
    """(params, batch_stats, sums, batch) -> (sums with this batch's unmasked examples added, answers).

    answers: of each example, masked or not, {answer int32 [b], confidence float32 [b]}: the class that the model holds
    most likely, and its probability.
    """

    def eval_step(
        params: Tree, batch_stats: Tree, sums: Sums, batch: dict[str, jax.Array]
    ) -> tuple[Sums, dict[str, jax.Array]]:
        variables = {"params": strategy.whole(params, spared=in_block), "batch_stats": batch_stats}
        logits: Any = model.apply(variables, normalise(batch["image"], config.pixel_statistics), train=False)
        answers = {
            "answer": jnp.argmax(logits, axis=-1).astype(jnp.int32),
            "confidence": jnp.exp(jnp.max(jax.nn.log_softmax(logits), axis=-1)),
        }
        return sums.counted(*score(logits, batch["label"], batch["mask"], 0.0)), answers

    return eval_step


def _spoilt(grads: Tree, loss: jax.Array) -> Tree:
    """The gradients as they are, or not finite where the loss is not: their reduction then tells all devices."""
    leaves, treedef = jax.tree.flatten(grads)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[smallest] = jnp.where(jnp.isfinite(loss), leaves[smallest], jnp.nan)
    return treedef.unflatten(leaves)


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
