"""One step: the same on any number of devices, exact in what it counts, and broken by the two classic mistakes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import parallel.sync
from cssm import models
from cssm.config import Config
from cssm.data.pipeline import eval_batches
from cssm.data.records import ArraySource
from cssm.optimizers import make_optimizer, make_schedule
from cssm.step import (
    Sums,
    cross_entropy,
    init_state,
    make_backward,
    make_eval_step,
    make_finish,
    normalise,
)
from parallel import devices as par
from parallel.sync import Replicated

SMALL = {"embed_dim": 4, "image_size": 8, "kernel_size": 3, "seq_len": 2, "warmup_steps": 0}
SGD = {"optimizer": "sgd", "lr": 0.01, "weight_decay": 0.0, "grad_clip": 0.0}
SIMPLE = Config(arch="simple", **SGD, **SMALL)
VIT = Config(arch="vit", cssm="gated", depth=2, mlp_ratio=1.0, **SGD, **SMALL)


def global_batch(n=16, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 8, 8, 1), dtype=np.uint8)
    return {"image": images, "label": rng.integers(0, 10, n).astype(np.int32)}


@functools.cache
def fresh_state(config):
    model, tx = models.build(config, 10), make_optimizer(config, make_schedule(config, 100, 0))
    return jax.device_get(jax.jit(lambda: init_state(model, tx, Replicated(), config, (8, 8, 1), 0))())


def program(config, devices, grad_accum=1, dtype=None, strategy=None):
    """The compiled step (state, sums, batch) -> (state, sums)."""
    model, tx = models.build(config, 10, dtype=dtype), make_optimizer(config, make_schedule(config, 100, 0))
    strategy = strategy or Replicated(config.grad_clip)
    backward = make_backward(model, strategy, config, grad_accum)
    return strategy.program(backward, make_finish(tx, strategy, config), devices)


@functools.cache
def reference_run(config, num_devices, **changes):
    """`run_steps`, once for several tests."""
    return run_steps(config, num_devices, **changes)


def total(sums, devices):
    """Sums of each device -> (loss, correct, count) of all, and (grad_norm, steps)."""
    own = par.sum_over_devices((sums.loss, sums.correct, sums.count), devices)
    return (*own, *par.unreplicate((sums.grad_norm, sums.steps)))


def run_steps(config, num_devices, steps=3, batch_of=global_batch, dtype=None, watched=lambda step: step, **options):
    """States after each of `steps` steps on one fixed sequence of global batches, and the totals."""
    devices = jax.devices()[:num_devices]
    state = fresh_state(config)
    if dtype == jnp.float64:
        wide = {jnp.float32: jnp.float64, jnp.complex64: jnp.complex128}
        state = jax.tree.map(lambda leaf: leaf.astype(wide.get(leaf.dtype.type, leaf.dtype)), state)
    step_fn = watched(program(config, devices, dtype=dtype, **options))
    state, sums = par.replicate(state, devices), par.replicate(Sums.zeros(), devices)
    history = []
    for step in range(steps):
        state, sums = step_fn(state, sums, par.shard_batch(batch_of(seed=step), devices))
        history.append(par.unreplicate(state))
    par.assert_replicated(state)
    return history, total(sums, devices)


def close(a, b, tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


@pytest.fixture(scope="module")
def eight():
    """(`run_steps` of SIMPLE on eight devices, how many programs each step compiled); a fourth begins a new window."""
    compiled, counts, last = [], [], []

    def listen(name, duration, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    def watched(step):
        def call(state, sums, batch):
            before = len(compiled)
            state, sums = jax.block_until_ready(step(state, sums, batch))
            counts.append(len(compiled) - before)
            last[:] = call, state, batch
            return state, sums

        return call

    jax.monitoring.register_event_duration_secs_listener(listen)
    run = run_steps(SIMPLE, 8, watched=watched)
    call, state, batch = last
    call(state, par.replicate(Sums.zeros(), jax.devices()), batch)
    jax.monitoring.unregister_event_duration_listener(listen)
    return run, counts


@pytest.mark.parametrize(
    "config", [SIMPLE, pytest.param(VIT, marks=pytest.mark.slow)], ids=["simple_hgru_bi", "vit_gated"]
)
def test_one_device_equals_eight(config, eight):
    (one, sums_one), (many, sums_eight) = (
        reference_run(config, 1),
        eight[0] if config is SIMPLE else run_steps(config, 8),
    )
    for a, b in zip(one, many, strict=True):
        close(a.params, b.params, 1e-5)
    close(sums_one, sums_eight, 1e-5)
    assert sums_eight[2] == 48 and sums_eight[4] == 3


IN_FLOAT64 = [("adamw", "spatial"), *((name, "spectral") for name in ("adamw", "lion", "lamb", "muon"))]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer,domain", IN_FLOAT64)
def test_one_device_equals_two_in_float64(optimizer, domain):
    """What divides by the gradient makes much of its rounding, of which there is little here."""
    changes = {"optimizer": optimizer, "weight_decay": 1e-2, "grad_clip": 1.0, "momentum": None}
    config = dataclasses.replace(SIMPLE, cssm="gated", kernel_domain=domain, **changes)
    with jax.enable_x64(True):
        one, two = run_steps(config, 1, dtype=jnp.float64)[0], run_steps(config, 2, dtype=jnp.float64)[0]
        wide = {"spatial": np.float64, "spectral": np.complex128}[domain]
        assert jax.tree.leaves(one[-1].params["cell_0"]["kernel"])[0].dtype == wide
        close(one[-1].params, two[-1].params, 1e-9)


def test_accumulated_micro_batches_equal_one_batch():
    whole, sums_whole = reference_run(SIMPLE, 1)
    parts, sums_parts = run_steps(SIMPLE, 2, grad_accum=4)
    close(whole[-1].params, parts[-1].params, 1e-5)
    close(sums_whole, sums_parts, 1e-5)


def masked_batch(n=16, seed=0):
    """Of eight devices two see no example at all, and others one of two."""
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1], np.float32)
    return {**global_batch(n, seed), "mask": mask}


def only_unmasked(seed=0):
    batch = masked_batch(seed=seed)
    return {name: array[batch["mask"] > 0] for name, array in batch.items() if name != "mask"}


@pytest.mark.slow
def test_examples_left_out_leave_the_mean_of_the_others():
    """However unequally they are spread over devices and micro-batches. A mean of the devices' means is another."""
    one, sums_one = run_steps(SIMPLE, 1, batch_of=only_unmasked)
    for num_devices, grad_accum in ((8, 1), (2, 4)):
        masked, sums = run_steps(SIMPLE, num_devices, batch_of=masked_batch, grad_accum=grad_accum)
        close(one[-1].params, masked[-1].params, 1e-5)
        close(sums_one, sums, 1e-5)

    mistaken, _ = run_steps(SIMPLE, 8, steps=1, batch_of=masked_batch, strategy=MeanOfMeans())
    with pytest.raises(AssertionError):
        close(one[0].params, mistaken[0].params, 1e-5)


@dataclasses.dataclass(frozen=True)
class MeanOfMeans(Replicated):
    """The mistake of giving each device's mean the same weight, however many examples it saw."""

    def program(self, backward, finish, devices):
        def step(state, sums, batch):
            grads, shared, own = backward(state, batch)
            share = jnp.maximum(shared["share"], 1e-9)
            grads, shared = jax.tree.map(lambda g: g / share, grads), {**shared, "share": jnp.ones(())}
            return finish(state, sums, self.reduce(grads), self.mean(shared), own)

        return par.spmd(step, devices)


def test_without_the_gradient_mean_devices_drift_apart(monkeypatch):
    monkeypatch.setattr(parallel.sync, "pmean_complex_safe", lambda tree: tree)
    with pytest.raises(AssertionError, match="differs between device"):
        run_steps(SIMPLE, 2, steps=1)


@dataclasses.dataclass(frozen=True)
class SumInsteadOfMean(Replicated):
    """The other classic mistake: replicas agree, but the step is D times too long."""

    def reduce(self, grads):
        return jax.tree.map(lambda g: g * jax.lax.axis_size(par.AXIS), super().reduce(grads))


@pytest.mark.slow
def test_a_sum_in_place_of_the_mean_breaks_parity():
    one, two = reference_run(SIMPLE, 1)[0], run_steps(SIMPLE, 2, steps=1, strategy=SumInsteadOfMean())[0]
    with pytest.raises(AssertionError):
        close(one[0].params, two[0].params, 1e-5)


@pytest.mark.slow
def test_complex_parameters_train_alike_on_one_device_and_two(monkeypatch):
    config = dataclasses.replace(SIMPLE, kernel_domain="spectral")
    one, two = reference_run(config, 1)[0], run_steps(config, 2)[0]
    spectrum = one[-1].params["cell_0"]["k_exc"]["spectrum"]
    assert spectrum.dtype == np.complex64
    close(one[-1].params, two[-1].params, 1e-5)
    # Dropping the conjugate turns the step along the imaginary axis round.
    monkeypatch.setattr(parallel.sync, "conjugate", lambda tree: tree)
    wrong = run_steps(config, 1, steps=1)[0][0].params["cell_0"]["k_exc"]["spectrum"]
    right = one[0].params["cell_0"]["k_exc"]["spectrum"]
    start = fresh_state(config).params["cell_0"]["k_exc"]["spectrum"]
    assert np.abs((right - start).imag).max() > 1e-5
    np.testing.assert_allclose(wrong - start, np.conj(right - start), atol=1e-6)


def test_evaluation_counts_each_example_once_on_any_number_of_devices():
    """103 examples in batches of 16 (24 on 3 devices), against a plain sum."""
    images, labels = global_batch(103, seed=5).values()
    model = models.build(SIMPLE, 10)
    variables = {"params": fresh_state(SIMPLE).params}
    logits = jax.jit(model.apply)(variables, jnp.asarray(images, jnp.float32) / 127.5 - 1)
    want_loss = float(np.sum(np.asarray(cross_entropy(logits, labels, 0.0)), dtype=np.float64))
    losses = []
    for num_devices in (1, 3, 8):
        devices = jax.devices()[:num_devices]
        eval_fn = par.spmd(make_eval_step(model, Replicated(), SIMPLE), devices)
        params, sums = par.replicate(variables["params"], devices), par.replicate(Sums.zeros(), devices)
        size = 16 if 16 % num_devices == 0 else 8 * num_devices
        answers = []
        for batch in eval_batches(ArraySource(images, labels, 10), size):
            padded = par.pad_and_mask(batch, size)
            sums, given = eval_fn(params, {}, sums, par.shard_batch(padded, devices))
            answers.append({name: np.ravel(value)[padded["mask"] > 0] for name, value in given.items()})
        loss, correct, count, *_ = total(sums, devices)
        assert (int(count), int(correct)) == (103, int((np.argmax(logits, -1) == labels).sum()))
        np.testing.assert_array_equal(np.concatenate([a["answer"] for a in answers]), np.argmax(logits, -1))
        shares = jax.nn.softmax(logits).max(-1)
        np.testing.assert_allclose(np.concatenate([a["confidence"] for a in answers]), shares, rtol=1e-4)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    np.testing.assert_allclose(losses[0], want_loss, rtol=1e-5)


def test_the_step_compiles_once(eight):
    assert eight[1] == [1, 0, 0, 0]


@pytest.mark.slow
def test_drop_path_masks_differ_between_devices_and_between_steps():
    """One image everywhere: then the loss moves with the masks alone."""
    config = dataclasses.replace(VIT, drop_path_rate=0.9)
    devices, model = jax.devices()[:2], models.build(config, 10)
    image = np.repeat(global_batch(1)["image"], 16, axis=0)
    batch = par.shard_batch({"image": image, "label": np.zeros(16, np.int32)}, devices)
    backward, state = par.spmd(make_backward(model, Replicated(), config, 1), devices), fresh_state(config)
    first, again, second = (
        np.asarray(backward(par.replicate(state.replace(step=np.int32(step)), devices), batch)[2][0])
        for step in (0, 0, 1)
    )
    assert first[0] != first[1]
    assert (first != second).all()
    np.testing.assert_array_equal(first, again)


def test_ema_and_batch_statistics_follow_the_steps():
    """The average starts with the first parameters; running statistics are one and the same on both devices."""
    config = dataclasses.replace(SIMPLE, cssm="gated", ema_decay=0.5, norm_type="batch")
    history, _ = run_steps(config, 2, steps=2)
    average = fresh_state(config).params["head"]["kernel"]
    for state, decay in zip(history, (1 / 10, 2 / 11), strict=True):
        average = decay * average + (1 - decay) * state.params["head"]["kernel"]
        np.testing.assert_allclose(state.ema_params["head"]["kernel"], average, atol=1e-6)
    stats = history[0].batch_stats["stem"]["norm_0"]
    assert np.isfinite(stats["mean"]).all() and (stats["mean"] != 0).all()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_is_frozen_keeps_its_bits_and_has_no_part_in_the_norm(num_devices):
    config = dataclasses.replace(SIMPLE, freeze="cell_0/*,stem/*", weight_decay=0.1, momentum=0.0)
    (after, *_), sums = run_steps(config, num_devices, steps=1)
    before, moved = fresh_state(config).params, []
    for path, leaf in jax.tree_util.tree_leaves_with_path(before):
        step = functools.reduce(lambda node, key: node[key.key], path, after.params) - leaf
        assert np.any(step) or path[0].key in ("cell_0", "stem", "readout_norm", "norm_post")
        assert not (np.any(step) and path[0].key in ("cell_0", "stem"))
        decay = 0.1 * leaf if path[-1].key == "kernel" and np.any(step) else 0.0
        moved.append(step / -config.lr - decay)
    norm = np.sqrt(sum(np.sum(np.abs(step) ** 2) for step in moved))
    np.testing.assert_allclose(float(sums[3]), norm, rtol=1e-3)


def test_label_smoothing_is_cross_entropy_with_softened_targets():
    logits = jnp.asarray([[2.0, 0.0, -1.0]])
    log_p = jax.nn.log_softmax(logits)[0]
    want = -(0.9 + 0.1 / 3) * log_p[0] - (0.1 / 3) * (log_p[1] + log_p[2])
    np.testing.assert_allclose(cross_entropy(logits, jnp.asarray([0]), 0.1)[0], want, rtol=1e-6)


@pytest.mark.parametrize("dataset", ["imagenet", "imagenette"])
def test_pixels_have_the_statistics_of_their_data_set(dataset):
    """Mean and deviation of each channel become 0 and 1; elsewhere 0 .. 255 becomes -1 .. 1."""
    images = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    statistics = Config(dataset=dataset, data_dir="x").pixel_statistics
    mean, std = np.array(statistics)
    expected = (images / 255 - mean) / std
    np.testing.assert_allclose(normalise(images, statistics), expected, atol=1e-5)
    assert Config().pixel_statistics is None
    np.testing.assert_allclose(normalise(images), images / 127.5 - 1, atol=1e-6)


def test_both_steps_look_at_the_statistics(monkeypatch):
    seen = []
    noted = lambda images, statistics=None: seen.append(statistics) or normalise(images)
    monkeypatch.setattr("cssm.step.normalise", noted)
    monkeypatch.setattr(Config, "pixel_statistics", "those")
    model, devices = models.build(SIMPLE, 10), jax.devices()[:1]
    batch = par.shard_batch(par.pad_and_mask(global_batch(4), 4), devices)
    state = fresh_state(SIMPLE)
    evaluate = par.spmd(make_eval_step(model, Replicated(), SIMPLE), devices)
    evaluate(*par.replicate((state.params, {}, Sums.zeros()), devices), batch)
    assert seen == ["those"]
    run_steps(SIMPLE, 1, steps=1)
    assert seen[1:] and set(seen) == {"those"}
