"""Steps that are not finite change nothing, on all devices alike; where they come from is found and told."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import SIMPLE

import cssm.nonfinite
import cssm.step
from cssm import data, models
from cssm.augment import make_augment
from cssm.checkpoint import Checkpoints, saved_meta
from cssm.config import ARCHS, CELLS_NAMES, Config, UserError
from cssm.data.pipeline import step_indices
from cssm.nonfinite import find_origin
from cssm.optimizers import make_optimizer, make_schedule
from cssm.report import Reporter, read_events
from cssm.runs import Run
from cssm.setup import set_up
from cssm.step import Sums, Totals, init_state, make_backward, make_finish
from cssm.training import train
from parallel import devices as par
from parallel import sharded
from parallel.sharded import make_strategy

POISON = 9
TINY = {"cssm": "gated", "embed_dim": 4, "image_size": 8, "kernel_size": 3, "seq_len": 2, "max_train_examples": 40}
TINY |= {"max_eval_examples": 21, "global_batch_size": 8, "log_every": 1, "eval_every": 2, "max_steps": 6}
TINY |= {"num_devices": 1, "schedule": "constant", "warmup_steps": 0, "quiet": True}


def score_of_poison(logits, labels, mask, smoothing, mixed):
    """As cssm.step.score; the loss of an example with label POISON is inf, and its gradient finite."""
    loss, right, count = SCORE(logits, labels, mask, smoothing, mixed)
    either = labels == POISON if mixed is None else (labels == POISON) | (mixed[0] == POISON)
    return loss + jnp.where(jnp.any(either), jnp.inf, 0.0), right, count


SCORE = cssm.step.score
NORMALISE = cssm.step.normalise


@pytest.mark.parametrize(
    "nonfinite, shard, backend, passes, augmentation",
    [
        ("skip", "none", "auto", 1, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("stop", "none", "cpu", 1, {}),
                ("skip", "optimizer", "auto", 1, {}),
                ("rollback", "params", "auto", 1, {}),
                ("skip", "none", "auto", 2, {"mixup": 0.5, "random_erasing": 0.5}),
            ]
        ),
    ],
)
def test_a_step_that_is_not_finite_on_one_device_changes_nothing_on_any(
    monkeypatch, nonfinite, shard, backend, passes, augmentation
):
    monkeypatch.setattr(cssm.step, "score", score_of_poison)
    config = dataclasses.replace(SIMPLE, cssm="gated", nonfinite=nonfinite, ema_decay=0.9, **augmentation)
    devices, n = jax.devices()[:2], 4 * passes
    model, tx = models.build(config, 10), make_optimizer(config, make_schedule(config, 100, 0))
    strategy = make_strategy(shard, backend, devices, 0.0)
    program = strategy.program(
        make_backward(model, strategy, config, passes), make_finish(tx, strategy, config), devices
    )
    init = lambda index: init_state(model, tx, strategy, config, (8, 8, 1), index)
    state = par.spmd(init, devices)(par.device_indices(devices))
    before = sharded.fetch(state, devices)
    images = np.random.default_rng(0).integers(0, 256, (n, 8, 8, 1), dtype=np.uint8)
    bad, good = (
        par.shard_batch({"image": images, "label": np.array(labels, np.int32)}, devices)
        for labels in ([*range(1, n), POISON], range(n))
    )
    no_sums = par.replicate(Sums.zeros(), devices)
    state, sums = program(state, no_sums, bad)
    totals = Totals.of(sums, devices)
    assert (totals.nonfinite, totals.first_nonfinite, totals.steps, totals.count, totals.loss) == (1, 1, 1, 0, 0.0)
    after = sharded.fetch(state, devices)
    assert after.step == (1 if nonfinite == "skip" else 0)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after.replace(step=before.step)), strict=True):
        np.testing.assert_array_equal(a, b)
    par.assert_replicated(state.rng)
    state, sums = program(state, sums, good)
    totals = Totals.of(sums, devices)
    moved = any(
        not np.array_equal(a, b)
        for a, b in zip(
            jax.tree.leaves(before.params), jax.tree.leaves(sharded.fetch(state.params, devices)), strict=True
        )
    )
    if nonfinite == "skip":
        assert moved and (totals.nonfinite, totals.count) == (1, n) and math.isfinite(totals.means["loss"])
    else:
        assert not moved and (totals.nonfinite, totals.first_nonfinite) == (2, 1), "held until it was looked at"


def poison_example(monkeypatch, index, config):
    """Make the pixels of one training example nan on the device."""
    (image,), _ = data.load(config, "train").gather(np.array([index]))

    def normalise(images, statistics=None):
        pixels = NORMALISE(images, statistics)
        same = jnp.all(images == image, axis=tuple(range(1, images.ndim)), keepdims=True)
        return jnp.where(same, jnp.nan, pixels)

    monkeypatch.setattr(cssm.step, "normalise", normalise)
    monkeypatch.setattr(cssm.nonfinite, "normalise", normalise)


def start(root, **settings):
    return train(Config(**{**TINY, "checkpoint_dir": str(root), "run_name": "run", **settings}))


def events(root, kind):
    return [event for event in read_events(root / "run" / "metrics.jsonl") if event["event"] == kind]


@pytest.mark.slow
def test_training_on_after_nan_stop_names_step_module_and_examples(tmp_path, monkeypatch):
    """The default. Logged every fifth step, it is still the right step, and no evaluation or save comes in between."""
    config = Config(**TINY)
    index = int(step_indices(40, 8, 0, 4)[3])
    poison_example(monkeypatch, index, config)
    with pytest.raises(UserError, match="the loss is not finite at step 4") as caught:
        start(tmp_path, log_every=5)
    assert caught.value.exit_code == 5
    said = str(caught.value)
    assert "that of stem/" in said and f"for 1 examples ({index})" in said
    assert "the checkpoint of step 2 is good" in said and "--nonfinite skip" in said
    (error,) = events(tmp_path, "error")
    assert error["step"] == 4 and error["module"].startswith("stem/")
    assert error["batch"] == step_indices(40, 8, 0, 4).tolist() and index in error["batch"]
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2]


@pytest.mark.slow
def test_skip_leaves_the_step_out_and_says_so(tmp_path, monkeypatch, capsys):
    config = Config(**TINY)
    index = int(step_indices(40, 8, 0, 4)[3])
    poison_example(monkeypatch, index, config)
    summary = start(tmp_path, nonfinite="skip")
    assert summary["nonfinite_steps"] == 1 and summary["step"] == 6
    steps = {event["step"]: event for event in events(tmp_path, "step")}
    assert [step for step, event in steps.items() if event.get("nonfinite")] == [4]
    assert steps[4]["loss"] == "nan" and all(math.isfinite(steps[n]["loss"]) for n in (1, 2, 3, 5, 6))
    assert "left out 1 of the steps to 4" in capsys.readouterr().out
    assert saved_meta(tmp_path / "run" / "checkpoints")["skipped"] == 1


@pytest.mark.slow
def test_skip_ends_the_run_where_nothing_else_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("cssm.loop.IN_A_ROW", 3)
    monkeypatch.setattr(cssm.step, "normalise", lambda images, statistics=None: NORMALISE(images) * jnp.nan)
    with pytest.raises(UserError, match=r"not finite at step 3.*all is finite.*nothing was saved yet") as caught:
        start(tmp_path, nonfinite="skip", eval_every=6)
    assert caught.value.exit_code == 5


@pytest.mark.slow
def test_rollback_goes_on_from_the_checkpoint_with_a_smaller_rate_so_many_times(tmp_path, monkeypatch, capsys):
    config = Config(**TINY)
    index = int(step_indices(40, 8, 0, 4)[3])
    poison_example(monkeypatch, index, config)
    with pytest.raises(UserError, match="not finite at step 4") as caught:
        start(tmp_path, nonfinite="rollback", rollback_factor=0.25, max_rollbacks=2, lr=0.016)
    assert caught.value.exit_code == 5 and "--nonfinite" not in str(caught.value)
    assert [(e["step"], e["to"], e["lr"]) for e in events(tmp_path, "rollback")] == [(4, 2, 0.004), (4, 2, 0.001)]
    rates = {event["step"]: event["learning_rate"] for event in events(tmp_path, "step")}
    assert rates == pytest.approx({1: 0.016, 2: 0.016, 3: 0.001}), "the course as read has no step twice"
    assert "going back to step 2, lr: was 0.016, now 0.004 (1 of 2)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [*({"cssm": cell} for cell in CELLS_NAMES), *({"arch": arch} for arch in ARCHS)], ids=str
)
def test_every_model_can_be_looked_into(model):
    """No module is called where its outputs cannot be taken from: in a scan, or in a function that is traced apart."""
    config = Config(image_size=16, **model)
    watched = cssm.nonfinite.Watched.__new__(cssm.nonfinite.Watched)
    watched.config, watched.model, watched.augment = config, models.build(config, 10), None
    images = jnp.zeros((2, 16, 16, 1), jnp.uint8)
    variables = jax.eval_shape(watched.model.init, jax.random.key(0), images.astype(jnp.float32))
    args = (variables["params"], variables.get("batch_stats", {}), {"image": images})
    flags, _ = jax.eval_shape(watched.flags, *args, {"micro": jax.random.key_data(jax.random.key(0))})
    assert flags.shape == (len(watched.names),) and watched.names[-1] == "the model"


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_traced_to_its_parameter(monkeypatch):
    config = Config(**TINY)

    @jax.custom_vjp
    def spoil(x):
        return x

    spoil.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.nan,))

    def spoilt_score(logits, labels, mask, smoothing, mixed):
        return SCORE(spoil(logits), labels, mask, smoothing, mixed)

    with Reporter(None, primary=False) as silent:
        setup = set_up(Run(Path(), config, False), jax.devices()[:1], silent)
    state = jax.device_get(jax.jit(lambda: setup.initial_state(0))())
    assert find_origin(setup, state, 1).what is None
    monkeypatch.setattr(cssm.nonfinite, "score", spoilt_score)
    origin = find_origin(setup, state, 1)
    assert (origin.what, origin.module.split("/")[0]) == ("gradient", "head")
    assert "all outputs are finite, the gradient of head/" in origin.sentence()


@pytest.mark.slow
def test_an_augmented_image_is_found_where_the_step_met_it(monkeypatch):
    """Of 2 devices with 2 passes each, the sixth image of the batch."""
    settings = {"num_devices": 2, "grad_accum": 2, "global_batch_size": 8, "mixup": 0.5, "random_erasing": 0.5}
    with Reporter(None, primary=False) as silent:
        setup = set_up(Run(Path(), Config(**TINY | settings), False), jax.devices()[:2], silent)
    state = jax.device_get(jax.jit(lambda: setup.initial_state(0))())
    assert find_origin(setup, state, 3).what is None
    ids = step_indices(40, 8, 0, 3)
    images, labels = setup.sources["train"].gather(ids)
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(state.rng)), 2)
    augment = make_augment(setup.config)
    image = augment(key, jnp.arange(8), {"image": jnp.asarray(images), "label": jnp.asarray(labels)})["image"][5]

    def normalise(images, statistics=None):
        same = jnp.all(jnp.abs(images - image) < 0.01, axis=(1, 2, 3), keepdims=True)
        return jnp.where(same, jnp.nan, NORMALISE(images, statistics))

    monkeypatch.setattr(cssm.nonfinite, "normalise", normalise)
    origin = find_origin(setup, state, 3)
    assert (origin.what, origin.examples) == ("output", (int(ids[5]),))
