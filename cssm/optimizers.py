"""The optimizers, and the learning rate: from gradients to the step that is taken.

Gradients come clipped and, where complex, conjugated, so that they point uphill (parallel.sync). A complex number is
one quantity with one step size: every rule here depends on |g| and turns with the phase (docs/math.md, section 3).
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from cssm.config import Config
from cssm.parts import frozen, layer_scales

Tree = Any

# Parameters that weight decay would only pull away from their meaning: offsets, scales, position tables, register
# tokens, decays, time scales and frequencies of states.
NO_DECAY = ("bias", "scale", "gamma", "pos_embed", "tokens", "A_logit", "decay", "log_dt", "log_rate", "frequency", "D")

# Root mean square of Muon's step over lr: about that of AdamW's (Liu et al. 2025), so that one rate serves both.
MUON_RMS = 0.2
# Names of the first and the last layer, and of what reads several states.
_ENDS, _READOUT = ("stem", "head"), "output_proj"


def make_schedule(config: Config, total_steps: int, warmup_steps: int) -> optax.Schedule:
    """Learning rate at a number of finished updates: linear warm-up from 0, then cosine to 1 % of lr, or constant."""
    lr = _known(config.lr)
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
    """The rule of --optimizer, then decoupled weight decay of the leaves that `decays` names, times the rate.

    Of LAMB the decay is a part of the step whose length the trust ratio sets; leaves without decay have no such ratio.
    With --layer_decay the step of each layer is scaled, decay included. Leaves that --freeze names have no step and no
    state here.
    """
    rule = optax.chain(
        RULES[config.optimizer](config),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        *([optax.masked(optax.scale_by_trust_ratio(), decays)] if config.optimizer == "lamb" else []),
        optax.scale_by_learning_rate(schedule),
    )
    if config.freeze:
        label = {True: "frozen", False: "free"}
        rule = optax.partition(
            {"free": rule, "frozen": optax.set_to_zero()},
            lambda params: jax.tree.map(label.__getitem__, frozen(params, config.freeze)),
        )
    return rule if config.layer_decay == 1.0 else optax.chain(rule, _by_layer(config))


def _by_layer(config: Config) -> optax.GradientTransformation:
    def scaled(updates: Tree, params: Tree) -> Tree:
        return jax.tree.map(lambda u, scale: u * scale, updates, layer_scales(params, config))

    return optax.stateless(scaled)


def decays(params: Tree) -> Tree:
    """True for the leaves that weight decay applies to: not biases, norms, layer scale, position tables, tokens."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _names(path)[-1] not in NO_DECAY, params)


def matrices(params: Tree) -> Tree:
    """True for the leaves that Muon makes orthogonal, matrices [..., out] from all axes but the last to the last.

    They are the kernels of dense layers [in, out], also of fused ones, of convolutions [h, w, in, out], and of readouts
    of several states [n, C, out]. Not: the first and the last layer, depthwise kernels (each channel by itself),
    biases, scales and tables, and spectra, which are diagonal operators and the only complex leaves.
    """

    def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
        names = _names(path)
        if names[-1] != "kernel" or names[0] in _ENDS:
            return False
        mixes = {2: True, 3: names[-2:-1] == [_READOUT], 4: leaf.ndim == 4 and leaf.shape[2] > 1}
        return mixes.get(leaf.ndim, False)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _names(path: tuple[Any, ...]) -> list[str]:
    """Keys from the top to a leaf; a slice of an array has the name of the array."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def _adam(config: Config) -> optax.GradientTransformation:
    return optax.scale_by_adam(_known(config.beta1), _known(config.beta2))


def _sgd(config: Config) -> optax.GradientTransformation:
    return optax.trace(_known(config.momentum))


def _lion(config: Config) -> optax.GradientTransformation:
    """The sign of an average of gradients: z / |z| where they are complex."""
    return optax.scale_by_lion(_known(config.beta1), _known(config.beta2))


def _muon(config: Config) -> optax.GradientTransformation:
    """Nesterov momentum of each of `matrices`, made orthogonal and MUON_RMS long; AdamW for the other leaves."""

    def axes(params: Tree) -> Tree:
        return jax.tree.map(lambda x: MuonDimensionNumbers(tuple(range(x.ndim - 1)), x.ndim - 1), params)

    def lengthened(x: jax.Array) -> jax.Array:
        """An orthogonal [m, n] has the root mean square max(m, n)^-0.5."""
        return x * (MUON_RMS * max(x.size // x.shape[-1], x.shape[-1]) ** 0.5)

    momentum = scale_by_muon(beta=_known(config.momentum), weight_dimension_numbers=axes)
    lengthen = optax.stateless(lambda updates, _: jax.tree.map(lengthened, updates))
    return optax.partition(
        {"muon": optax.chain(momentum, lengthen), "adam": _adam(config)},
        lambda params: jax.tree.map(lambda chosen: "muon" if chosen else "adam", matrices(params)),
    )


def _known(value: float | None) -> float:
    """A setting that a complete configuration has wherever it applies."""
    assert value is not None
    return value


# LAMB is Adam's step with a trust ratio behind its decay.
RULES: dict[str, Callable[[Config], optax.GradientTransformation]] = {
    "adamw": _adam,
    "sgd": _sgd,
    "lion": _lion,
    "lamb": _adam,
    "muon": _muon,
}
