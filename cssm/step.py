"""What happens on one device: the train state, the optimizer, the loss, one training step, one evaluation step.

All functions are pure and run inside `parallel.devices.spmd`, where AXIS names the device axis; a batch holds this
device's share.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from cssm.config import Config
from parallel.devices import AXIS
from parallel.sync import Replicated, pmean_complex_safe

Tree = Any

# Parameters that weight decay would only pull away from their meaning: offsets, scales, position tables.
NO_DECAY = ("bias", "scale", "gamma", "pos_embed", "short_conv_temporal_bias")


class TrainState(struct.PyTreeNode):
    """Everything that one step hands to the next. rng: raw uint32 key of the run, constant; steps fold into it."""

    step: jax.Array
    params: Tree
    batch_stats: Tree
    opt_state: Tree
    ema_params: Tree
    rng: jax.Array


class Sums(struct.PyTreeNode):
    """Totals over examples (loss, correct, count) and over steps (grad_norm, steps), the same on every device."""

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


def normalise(images: jax.Array) -> jax.Array:
    """uint8 0..255 -> float32 -1..1."""
    return images.astype(jnp.float32) / 127.5 - 1.0


def make_schedule(config: Config, total_steps: int, warmup_steps: int) -> optax.Schedule:
    """Learning rate at a number of finished updates: linear warm-up from 0, then cosine to 1 % of lr, or constant."""
    lr = config.lr
    assert lr is not None, "a complete configuration has one"
    after = (
        optax.cosine_decay_schedule(lr, max(total_steps - warmup_steps, 1), alpha=0.01)
        if config.schedule == "cosine"
        else optax.constant_schedule(lr)
    )
    if warmup_steps == 0:
        return after
    # Step 1 already learns: the ramp starts at lr / warmup_steps, not at 0.
    ramp = optax.linear_schedule(lr / warmup_steps, lr, max(warmup_steps - 1, 1))
    return optax.join_schedules([ramp, after], [warmup_steps])


def make_optimizer(config: Config, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW, or SGD with momentum 0.9 and the same decoupled decay.

    Complex leaves are right as they are: their moments use |g|^2 and gradients arrive conjugated.
    """
    rule = optax.scale_by_adam() if config.optimizer == "adamw" else optax.trace(decay=0.9)
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip) if config.grad_clip else optax.identity(),
        rule,
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.scale_by_learning_rate(schedule),
    )


def decays(params: Tree) -> Tree:
    """True for the leaves that weight decay applies to: not biases, norms, layer scale, position tables."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NO_DECAY, params)


def init_state(model: nn.Module, tx, strategy: Replicated, config: Config, image_shape: tuple[int, ...]) -> TrainState:
    """A fresh state from config.seed; jit it, or take its shapes with jax.eval_shape."""
    key = jax.random.key(config.seed)
    images = jnp.zeros((1, *image_shape), jnp.float32)
    variables = model.init(jax.random.fold_in(key, 0), images)
    params = variables["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        batch_stats=variables.get("batch_stats", {}),
        opt_state=strategy.init(tx, params),
        ema_params=params if config.ema_decay else {},
        rng=jax.random.key_data(jax.random.fold_in(key, 1)),
    )


def make_train_step(model: nn.Module, tx, strategy: Replicated, config: Config, grad_accum: int) -> Callable:
    """(state, sums, batch) -> (state, sums): one optimizer step from `grad_accum` micro-batches.

    batch: {image uint8 [grad_accum * b, H, W, C], label int32 [grad_accum * b]}, of which each micro-batch of b rows
    has its own forward and backward pass; gradients are reduced over devices once.
    """

    def loss_fn(params, batch_stats, images, labels, key):
        logits, updates = model.apply(
            {"params": params, "batch_stats": batch_stats},
            normalise(images),
            train=True,
            rngs={"drop_path": key},
            mutable=["batch_stats"],
        )
        losses = cross_entropy(logits, labels, config.label_smoothing)
        correct = jnp.sum(jnp.argmax(logits, axis=-1) == labels, dtype=jnp.int32)
        return losses.mean(), (losses.sum(), correct, updates.get("batch_stats", {}))

    grad_fn = jax.grad(loss_fn, has_aux=True)

    def train_step(state: TrainState, sums: Sums, batch: dict[str, jax.Array]) -> tuple[TrainState, Sums]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))

        def micro_step(carry, micro):
            grads, batch_stats, loss, correct = carry
            new_grads, (new_loss, new_correct, batch_stats) = grad_fn(
                state.params,
                batch_stats,
                micro["image"],
                micro["label"],
                jax.random.fold_in(key, micro["index"]),
            )
            grads = jax.tree.map(lambda total, g: total + g / grad_accum, grads, new_grads)
            return (grads, batch_stats, loss + new_loss, correct + new_correct), None

        micros = jax.tree.map(lambda x: x.reshape(grad_accum, -1, *x.shape[1:]), batch)
        micros["index"] = jnp.arange(grad_accum)
        zero = (
            jax.tree.map(jnp.zeros_like, state.params),
            state.batch_stats,
            jnp.zeros(()),
            jnp.zeros((), jnp.int32),
        )
        if grad_accum == 1:
            (grads, batch_stats, loss, correct), _ = micro_step(zero, jax.tree.map(lambda x: x[0], micros))
        else:
            (grads, batch_stats, loss, correct), _ = jax.lax.scan(micro_step, zero, micros)

        params, opt_state, grad_norm = strategy.apply(tx, grads, state.params, state.opt_state)
        state = state.replace(
            step=state.step + 1,
            params=params,
            # Running statistics only: each device normalised its own share in the forward pass.
            batch_stats=pmean_complex_safe(batch_stats),
            opt_state=opt_state,
            ema_params=_ema(state, params, config.ema_decay),
        )
        totals = jax.lax.psum((loss, correct, jnp.asarray(batch["label"].size, jnp.int32)), AXIS)
        return state, sums + Sums(*totals, grad_norm=grad_norm, steps=jnp.ones((), jnp.int32))

    return train_step


def make_eval_step(model: nn.Module) -> Callable:
    """(params, batch_stats, sums, batch) -> sums with this batch's unmasked examples added, over all devices."""

    def eval_step(params: Tree, batch_stats: Tree, sums: Sums, batch: dict[str, jax.Array]) -> Sums:
        variables = {"params": params, "batch_stats": batch_stats}
        logits: Any = model.apply(variables, normalise(batch["image"]), train=False)
        mask, labels = batch["mask"], batch["label"]
        losses = jnp.where(mask > 0, cross_entropy(logits, labels, 0.0), 0.0)
        correct = jnp.sum((jnp.argmax(logits, axis=-1) == labels) & (mask > 0), dtype=jnp.int32)
        loss, correct, count = jax.lax.psum((losses.sum(), correct, jnp.sum(mask > 0, dtype=jnp.int32)), AXIS)
        return sums + Sums(loss, correct, count, grad_norm=jnp.zeros(()), steps=jnp.ones((), jnp.int32))

    return eval_step


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
