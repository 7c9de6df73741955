"""A loss or a gradient that is not finite: where it came from, and how that is told."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from cssm.augment import make_augment, mixed_with
from cssm.data.pipeline import step_indices, train_batches
from cssm.rules import states_may_grow
from cssm.setup import Setup
from cssm.step import Totals, TrainState, normalise, score
from parallel import devices as par
from parallel import job

NON_FINITE = 5
IN_A_ROW = 50
"""After so many steps that --nonfinite skip left out, one after another, training stops."""
_NAMED = 8
Batch = dict[str, jax.Array]
Keys = dict[str, jax.Array]


class NonFiniteError(Exception):
    """Steps since the last log line were not finite. totals: of these steps."""

    def __init__(self, totals: Totals) -> None:
        super().__init__(f"step {totals.first_nonfinite} is not finite")
        self.totals = totals


@dataclass(frozen=True)
class Origin:
    """Of what is not finite. what: "output" or "gradient"; None: on a second try all was finite. module: the first
    module with such an output, or the last parameter with such a gradient. examples: those of the training set whose
    logits were not finite.
    """

    what: str | None = None
    module: str = ""
    examples: tuple[int, ...] = ()

    def sentence(self) -> str:
        """Where it came from, in words."""
        if self.what is None:
            return "tried again on one device all is finite, so that a device or a file may be at fault"
        if self.what == "gradient":
            return f"all outputs are finite, the gradient of {self.module} is not"
        named = ", ".join(map(str, self.examples[:_NAMED])) + (", ..." if len(self.examples) > _NAMED else "")
        which = f" for {len(self.examples)} examples ({named})" if self.examples else ""
        return f"the first output that is not finite is that of {self.module}{which}"


def find_origin(setup: Setup, state: TrainState, step: int) -> Origin:
    """Take the forward pass of global step `step` again, on one device of each process, and if its outputs are finite
    the backward pass. All processes must call it.

    state: whole, on the host, as the step found it. Takes the model without rematerialisation: where that does not fit
    in memory nothing is found.
    """
    try:
        found = _search(setup, state, step)
    except jax.errors.JaxRuntimeError:
        found = Origin()
    everyones = [
        Origin(**{**said, "examples": tuple(said["examples"])}) for said in job.gather("origin", asdict(found))
    ]
    order = ("output", "gradient", None)
    return min(everyones, key=lambda origin: order.index(origin.what))


def batch_ids(setup: Setup, step: int) -> list[int]:
    """Which examples of the training set made up the step, in all processes."""
    source = setup.sources["train"]
    return step_indices(len(source), setup.batching.effective, setup.config.seed, step).tolist()


def sentence(setup: Setup, totals: Totals, origin: Origin) -> str:
    """Which step was not finite, and why as far as it is known."""
    what = "gradient" if origin.what == "gradient" else "loss"
    ids = batch_ids(setup, totals.first_nonfinite)
    shown = ", ".join(map(str, ids[:_NAMED])) + (", ..." if len(ids) > _NAMED else "")
    return (
        f"the {what} is not finite at step {totals.first_nonfinite} (learning rate "
        f"{_rate(setup, totals.first_nonfinite):.3g}, examples {shown}): {origin.sentence()}"
    )


def ways_out(setup: Setup) -> str:
    """What to type."""
    grows = ", or --stable_transition" if states_may_grow(setup.config) else ""
    ways = {"stop": "--nonfinite skip, ", "skip": "--nonfinite rollback, ", "rollback": ""}[setup.config.nonfinite]
    return f"try {ways}a smaller --lr or --grad_clip{grows}"


def _rate(setup: Setup, step: int) -> float:
    rate: Any = setup.schedule(step - 1)
    return float(rate)


def _search(setup: Setup, state: TrainState, step: int) -> Origin:
    """In this process's share of the batch, one device's micro-batch after the other."""
    here, first = par.local(setup.devices), setup.devices.index(par.local(setup.devices)[0])
    own_share = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    size, seed = setup.batching.effective, setup.config.seed
    (batch,) = train_batches(setup.sources["train"], size, seed, step, step, workers=0, **own_share)
    rows = {"id": np.asarray(batch_ids(setup, step)), "position": np.arange(size, dtype=np.int32)}
    batch |= {n: np.array_split(all_, jax.process_count())[jax.process_index()] for n, all_ in rows.items()}
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(state.rng)), step - 1)
    micros = len(here) * setup.batching.grad_accum
    cut = {name: np.split(values, micros) for name, values in batch.items()}
    watched = Watched(setup, here[0])
    for passed in (watched.outputs, watched.gradients):
        for i in range(micros):
            device, micro = divmod(i, setup.batching.grad_accum)
            micro_key = jax.random.fold_in(jax.random.fold_in(key, first + device), micro)
            part = {name: parts[i] for name, parts in cut.items()}
            keys = {"step": jax.random.key_data(key), "micro": jax.random.key_data(micro_key)}
            if found := passed(state, part, keys):
                return found
    return Origin()


class Watched:
    """The passes of one device over a micro-batch, which tell whose outputs and gradients are not finite.

    A part of a batch holds image, label, id and position (in the global batch); keys: raw, of the step and of the
    micro-batch.
    """

    def __init__(self, setup: Setup, device: jax.Device) -> None:
        self.config, self.model, self.names = setup.config, setup.model, []
        self.augment = make_augment(setup.config)
        # Under pmap, as a model that normalises over devices looks for their axis.
        self._forward = par.spmd(self.flags, [device])
        self._backward = par.spmd(self._gradient_flags, [device])

    def outputs(self, state: TrainState, part: dict[str, np.ndarray], keys: Keys) -> Origin | None:
        """The first module whose output is not finite."""
        flags, rows = self._run(self._forward, state, part, keys)
        bad = np.flatnonzero(~flags)
        if not len(bad) and rows.all():
            return None
        module = self.names[bad[0]] if len(bad) else "the loss"
        return Origin("output", module, tuple(part["id"][~rows].tolist()))

    def gradients(self, state: TrainState, part: dict[str, np.ndarray], keys: Keys) -> Origin | None:
        """The parameter next to the loss whose gradient is not finite; after `outputs`."""
        flags = self._run(self._backward, state, part, keys)
        paths = jax.tree_util.tree_leaves_with_path(flags)
        bad = [jax.tree_util.keystr(path, simple=True, separator="/") for path, finite in paths if not finite]
        if not bad:
            return None
        # Gradients flow from the last module to the first.
        order = {name: i for i, name in enumerate(self.names)}
        return Origin("gradient", max(bad, key=lambda path: order.get(path.rpartition("/")[0], -1)))

    def _run(self, program: Any, state: TrainState, part: dict[str, np.ndarray], keys: Keys) -> Any:
        batch = {name: part[name] for name in ("image", "label", "position")}
        args = (state.params, state.batch_stats, batch, keys)
        stacked = jax.tree.map(lambda x: np.asarray(x)[np.newaxis], args)
        return jax.tree.map(lambda x: np.asarray(x)[0], program(*stacked))

    def _seen(self, batch: Batch, keys: Keys) -> Batch:
        """The batch as the step sees it."""
        if self.augment is None:
            return batch
        return self.augment(jax.random.wrap_key_data(keys["step"]), batch["position"], batch)

    def _logits(self, params: Any, batch_stats: Any, seen: Batch, keys: Keys) -> Any:
        variables = {"params": params, "batch_stats": batch_stats}
        rngs = {"drop_path": jax.random.wrap_key_data(keys["micro"])}
        pixels = normalise(seen["image"], self.config.pixel_statistics)
        return self.model.apply(variables, pixels, train=True, rngs=rngs, mutable=["batch_stats"])[0]

    def flags(self, params: Any, batch_stats: Any, batch: Batch, keys: Keys) -> Any:
        """(bool [modules]: whether the output of each is finite, in the order in which they end, which is that of
        `names`; bool [B]: whether the logits of each example are).
        """
        flags, self.names = [], []

        def watch(call, args, kwargs, context):
            result = call(*args, **kwargs)
            if context.method_name == "__call__":
                self.names.append("/".join(context.module.path) or "the model")
                flags.append(_finite(result))
            return result

        with nn.intercept_methods(watch):
            logits = self._logits(params, batch_stats, self._seen(batch, keys), keys)
        return jnp.stack(flags), jnp.all(jnp.isfinite(logits), axis=-1)

    def _gradient_flags(self, params: Any, batch_stats: Any, batch: Batch, keys: Keys) -> Any:
        seen = self._seen(batch, keys)

        def loss(params: Any) -> jax.Array:
            logits, labels = self._logits(params, batch_stats, seen, keys), seen["label"]
            return score(logits, labels, None, self.config.label_smoothing, mixed_with(seen))[0] / len(labels)

        return jax.tree.map(_finite, jax.grad(loss)(params))


def _finite(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.asarray(True)
