"""Settings of the optimisation."""

import dataclasses
from functools import partial

from cssm.knobs import INFERRING, TRAINING, knob
from cssm.recipes import OPTIMIZERS

_optim = partial(knob, group="optimisation", verbs=TRAINING)
_train = partial(knob, group="optimisation")


def _rule(name: str) -> dict[str, tuple[str, ...]]:
    """Where a setting of the optimizers has a meaning."""
    return {"optimizer": tuple(optimizer for optimizer, row in OPTIMIZERS.items() if name in row)}


@dataclasses.dataclass(frozen=True)
class OptimisationSettings:
    """How long, how fast, with which batch."""

    # fmt: off
    epochs: int | None = _train(None, "passes over the training data", bounds="[1,)", aliases=("num_epochs",))
    max_steps: int | None = _train(None, "optimizer steps; given with epochs, whichever ends first",
        bounds="[1,)", unset="by epochs")
    lr: float | None = _optim(None, "peak learning rate", bounds="(0,)", aliases=("learning_rate",))
    lr_scale: str = _optim("none", "multiply lr by effective batch / base_batch_size, or its square root",
        choices=("none", "linear", "sqrt"))
    base_batch_size: int | None = _optim(None, "effective batch for which lr is meant", bounds="[1,)",
        applies={"lr_scale": ("linear", "sqrt")}, unset="the recipe's batch_size")
    warmup_steps: int | None = _train(None, "steps until the learning rate is full", bounds="[0,)",
        unset="5% of the run")
    warmup_epochs: float | None = _train(None, "the same in epochs", bounds="[0,)", unset="see warmup_steps")
    schedule: str = _optim("cosine", "learning rate after the warm-up", choices=("cosine", "constant"))
    weight_decay: float = _optim(1e-4, "decoupled weight decay of the matrices", bounds="[0,)")
    grad_clip: float = _optim(1.0, "highest norm of the gradient, 0 for no limit", bounds="[0,)",
        aliases=("max_grad_norm",))
    nonfinite: str = _train("stop", "what becomes of a step whose loss or gradient is not finite: stop ends the run, "
        "skip leaves the step out, rollback goes on from the last checkpoint with a smaller lr",
        choices=("stop", "skip", "rollback"))
    rollback_factor: float = _train(0.5, "what lr is multiplied with at each rollback", bounds="(0,1)",
        applies={"nonfinite": ("rollback",)})
    max_rollbacks: int = _train(3, "rollbacks before the run ends", bounds="[1,)", applies={"nonfinite": ("rollback",)})
    optimizer: str = _optim("adamw", "the optimizer", choices=tuple(OPTIMIZERS), resume="fixed")
    momentum: float | None = _optim(None, "share of the momentum that is kept", bounds="[0,1)",
        applies=_rule("momentum"), unset="0.9, muon 0.95")
    beta1: float | None = _optim(None, "decay of the average of gradients; of muon's AdamW", bounds="[0,1)",
        applies=_rule("beta1"), unset="0.9")
    beta2: float | None = _optim(None, "decay of the average of their squares; of lion's momentum", bounds="[0,1)",
        applies=_rule("beta2"), unset="0.999, lion 0.99")
    label_smoothing: float = _optim(0.0, "share of the label spread over all classes", bounds="[0,1)",
        aliases=("smoothing",))
    layer_decay: float = _train(1.0, "what the learning rate is multiplied with from each layer to the one before it, "
        "such as 0.75 in fine-tuning: the head has lr, the stem least", bounds="(0,1]", resume="fixed")
    freeze: str | None = _train(None, "parameters that stay as they are: patterns of their paths, such as "
        "'stem/*,block_0/*', or '*,!head/*' for all but the head", resume="fixed", unset="none")
    init_from: str | None = _train(None, "parameters to begin with, where they fit: a run, one of its checkpoints, or "
        "an exported folder", resume="fixed", unset="fresh ones")
    ema_decay: float = _optim(0.0, "decay of the moving average of the parameters, 0 for none",
        bounds="[0,1)", resume="fixed")
    batch_size: int | None = _optim(None, "images per device and forward pass", bounds="[1,)",
        aliases=("per_device_train_batch_size",), verbs=(*TRAINING, *INFERRING))
    global_batch_size: int | None = _optim(None, "images per step; with batch_size it gives grad_accum",
        bounds="[1,)", unset="batch_size x devices x grad_accum")
    find_batch_size: bool = _train(False, "find the batch_size: the largest power of two with which a step fits the "
        "memory of the devices", resume="fresh", saved=False)
    find_lr: bool = _train(False, "try rising learning rates for 120 steps, draw the loss, suggest an lr, and stop "
        "before training", resume="fresh", saved=False)
    overfit_batches: int | None = _train(None, "train on so many batches of the training set, the same ones in each "
        "epoch, and evaluate on them too: a model that cannot learn these by heart has a fault", bounds="[1,)",
        resume="fixed", unset="all")
    grad_accum: int | None = _optim(None, "forward passes per optimizer step", bounds="[1,)", unset="1",
        aliases=("grad_accum_steps", "gradient_accumulation", "gradient_accumulation_steps"))
    seed: int = _optim(0, "seed of parameters, order and randomness", bounds="[0,4294967295]", resume="fixed",
        verbs=(*TRAINING, "eval"))
    # fmt: on
