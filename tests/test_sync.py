"""Gradients of many devices become one update, the same everywhere, for real and complex parameters."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parallel import sync
from parallel.devices import assert_replicated, per_device, replicate, spmd, unreplicate
from parallel.sync import HostMean, Replicated, clip_by_norm, conjugate, global_norm, host_mean, pmean_complex_safe

# bfloat16 has 8 bits of precision; the sum of 8 values loses at most 3 of them.
TOLERANCE = {"float32": 1e-6, "bfloat16": 3e-2, "complex64": 1e-6, "float64": 1e-14, "complex128": 1e-14}


def values(dtype, devices, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(devices, 5, 2))
    if dtype.startswith("complex"):
        x = x + 1j * rng.normal(size=x.shape)
    return x.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_the_mean_of_a_mixed_tree_is_that_of_numpy(devices):
    tree = {name: values(name, devices) for name in ("float32", "bfloat16", "complex64")}
    tree["nested"] = [values("complex64", devices, seed=1)[:, 0, 0], {}]
    chosen = jax.devices()[:devices]
    out = spmd(pmean_complex_safe, chosen)(per_device(tree, chosen))
    check(tree, out)


def test_the_mean_in_double_precision():
    with jax.enable_x64(True):
        tree = {name: values(name, 8) for name in TOLERANCE}
        check(tree, spmd(pmean_complex_safe, jax.devices())(per_device(tree, jax.devices())))


def check(tree, out):
    assert_replicated(out)
    out = unreplicate(out)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(out), strict=True):
        assert after.dtype == before.dtype
        wide = np.complex128 if np.iscomplexobj(before) else np.float64
        expected = before.astype(wide).mean(axis=0)
        tolerance = TOLERANCE[str(before.dtype)]
        np.testing.assert_allclose(after.astype(wide), expected, rtol=tolerance, atol=tolerance)


def test_no_collective_is_complex():
    """Not every backend has one: the parts must cross apart."""
    devices = jax.devices()
    tree = {"z": values("complex64", 8), "w": values("float32", 8)}
    text = spmd(pmean_complex_safe, devices).lower(per_device(tree, devices)).as_text()
    assert reduced(text) == ["tensor<30xf32>"]


def test_leaves_cross_together_up_to_so_many_bytes(monkeypatch):
    monkeypatch.setattr(sync, "BUCKET", 80)  # two parts of 5 x 2 numbers of four bytes
    devices = jax.devices()
    tree = [values("float32", 8, seed) for seed in range(3)] + [values("bfloat16", 8), values("complex64", 8)]
    placed = per_device(tree, devices)
    program = spmd(pmean_complex_safe, devices)
    kinds = reduced(program.lower(placed).as_text())
    assert sorted(kinds) == ["tensor<10xbf16>", "tensor<10xf32>", "tensor<20xf32>", "tensor<20xf32>"]
    check(tree, program(placed))


def test_one_device_moves_nothing():
    text = spmd(pmean_complex_safe, jax.devices()[:1]).lower(per_device(values("complex64", 1), jax.devices()[:1]))
    assert "concatenate" not in text.as_text() and reduced(text.as_text()) == []


def reduced(text):
    return re.findall(r"all_reduce.*?\}\) : \((.*?)\)", text, re.DOTALL)


def test_a_mean_that_could_not_keep_its_dtype_is_refused():
    with pytest.raises(TypeError, match="int32"):
        spmd(pmean_complex_safe, jax.devices())(np.arange(8, dtype=np.int32))


def test_conjugation_and_norm():
    tree = {"z": jnp.array([3 + 4j], jnp.complex64), "w": jnp.array([12.0])}
    assert conjugate(tree)["z"][0] == 3 - 4j
    assert conjugate(tree)["w"] is tree["w"]
    norm = global_norm(tree)
    assert norm.dtype == jnp.float32
    assert float(norm) == pytest.approx(13)


TARGET = {"z": np.array([1 - 2j, -0.5 + 1j], np.complex64), "w": np.array([2.0, -1], np.float32)}


def fit(strategy, devices, steps=200, tx=None):
    """Descend the mean over devices of |p - (TARGET + noise)|^2; returns the distance to TARGET at each step.

    The noise differs between devices and its mean is zero: only the averaged gradient leads to TARGET.
    """
    tx = tx or optax.sgd(0.1)
    noise = np.random.default_rng(0).normal(size=(len(devices), 2)).astype(np.float32)
    noise -= noise.mean(axis=0)
    params = jax.tree.map(np.zeros_like, TARGET)

    def step(params, opt, noise):
        def loss(params):
            return sum(jnp.sum(jnp.abs(params[k] - TARGET[k] - noise) ** 2) for k in params)

        grads = jax.grad(loss)(params)
        params, opt, norm = strategy.apply(tx, strategy.reduce(grads), params, opt)
        distance = sum(jnp.sum(jnp.abs(params[k] - TARGET[k]) ** 2) for k in params)
        return params, opt, distance, norm

    run = spmd(step, devices)
    params, opt = replicate(strategy.init(tx, params, 0), devices)
    noise, distances = per_device(noise, devices), []
    for _ in range(steps):
        params, opt, distance, norm = run(params, opt, noise)
        distances.append(float(unreplicate(distance)))
    return params, opt, distances, norm


@pytest.mark.parametrize("devices", [1, 8])
def test_a_complex_parameter_is_fitted(devices):
    params, opt, distances, norm = fit(Replicated(), jax.devices()[:devices])
    assert distances[-1] < 1e-9
    assert_replicated((params, opt, norm))


def test_every_step_of_adamw_on_a_mixed_tree_keeps_dtypes_and_replicas():
    params, opt, distances, _ = fit(Replicated(grad_clip=1.0), jax.devices(), tx=optax.adamw(0.05))
    assert distances[-1] < 1e-2 * distances[0]
    assert {k: v.dtype for k, v in params.items()} == {k: v.dtype for k, v in TARGET.items()}
    assert_replicated((params, opt))


def test_without_conjugation_the_fit_diverges(monkeypatch):
    monkeypatch.setattr(sync, "conjugate", lambda tree: tree)
    *_, distances, _ = fit(Replicated(), jax.devices(), steps=50)
    assert distances[-1] > 1e3 * distances[0]


def test_without_the_mean_the_replicas_drift_apart(monkeypatch):
    monkeypatch.setattr(sync, "pmean_complex_safe", lambda tree: tree)
    params, *_ = fit(Replicated(), jax.devices(), steps=3)
    with pytest.raises(AssertionError, match="differs between"):
        assert_replicated(params)


def test_the_norm_is_that_of_the_mean_gradient_before_clipping():
    devices = jax.devices()
    grads = {"z": values("complex64", 8), "w": values("float32", 8)}
    params = jax.tree.map(lambda g: np.zeros_like(g[0]), grads)
    strategy, tx = Replicated(grad_clip=0.01), optax.sgd(1.0)

    def step(grads, params, opt):
        return strategy.apply(tx, strategy.reduce(grads), params, opt)

    state = replicate(strategy.init(tx, params, 0), devices)
    params, _, norm = spmd(step, devices)(per_device(grads, devices), *state)
    means = [g.astype(np.complex128).mean(axis=0) for g in grads.values()]
    expected = np.sqrt(sum((np.abs(mean) ** 2).sum() for mean in means))
    assert float(unreplicate(norm)) == pytest.approx(expected, rel=1e-5)
    assert float(global_norm(unreplicate(params))) == pytest.approx(0.01, rel=1e-4)


def test_one_device_and_eight_take_the_same_step():
    """The gradient of a mean over equal slices is the mean of their gradients."""
    batch = np.random.default_rng(1).normal(size=(24, 2)).astype(np.float32)
    params = {"z": np.array([1 + 1j, 2 - 1j], np.complex64)}
    tx, strategy = optax.sgd(0.1, momentum=0.9), Replicated()

    def step(params, opt, x):
        def loss(params):
            return jnp.mean(jnp.abs(x @ params["z"] - 1j) ** 2)

        params, opt, _ = strategy.apply(tx, strategy.reduce(jax.grad(loss)(params)), params, opt)
        return params, opt

    results = []
    for count in (1, 2, 8):
        devices = jax.devices()[:count]
        state = replicate(strategy.init(tx, params, 0), devices)
        x = per_device(batch.reshape(count, -1, 2), devices)
        for _ in range(3):
            state = spmd(step, devices)(*state, x)
        results.append(unreplicate(state[0])["z"])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-5)


@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0])
def test_clipping_is_that_of_optax(limit):
    tree = {"z": jnp.array([3 + 4j], jnp.complex64), "w": jnp.array([12.0])}
    want = optax.clip_by_global_norm(limit).update(tree, optax.EmptyState())[0] if limit else tree
    got = clip_by_norm(tree, global_norm(tree), limit)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert got["z"].dtype == jnp.complex64


def test_the_mean_on_the_host_is_that_of_the_devices():
    """And no program of it holds a collective."""
    devices = jax.devices()
    grads = {name: values(name, 8) for name in ("float32", "bfloat16", "complex64")}
    check(grads, replicate(host_mean(per_device(grads, devices)), devices))

    def backward(state, batch):
        return batch, {"batch_stats": state}, batch["float32"].sum()

    def finish(state, sums, grads, shared, own):
        return (grads, shared), sums + own

    results = []
    for strategy in (Replicated(), HostMean()):
        state, sums = per_device((grads["float32"], values("float32", 8, seed=1)[:, 0, 0]), devices)
        results.append(strategy.program(backward, finish, devices)(state, sums, per_device(grads, devices)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert a.dtype == b.dtype
        tolerance = TOLERANCE[str(a.dtype)]
        np.testing.assert_allclose(a.astype(complex), b.astype(complex), rtol=tolerance, atol=tolerance)


def test_the_mean_on_the_host_holds_no_collective(monkeypatch):
    """Each program that it compiles is looked through."""
    programs = []

    def listed(fn, devices, **options):
        compiled = spmd(fn, devices, **options)

        def call(*args):
            programs.append(compiled.lower(*args).as_text())
            return compiled(*args)

        return call

    monkeypatch.setattr(sync, "spmd", listed)
    devices = jax.devices()
    for strategy in (HostMean(), Replicated()):
        programs.clear()
        step = strategy.program(lambda s, b: (b, {}, b.sum()), lambda s, t, g, shared, own: (g, t + own), devices)
        step(*per_device((values("float32", 8), np.zeros(8, np.float32), values("float32", 8)), devices))
        found = [name for text in programs for name in ("all_reduce", "all_gather", "reduce_scatter") if name in text]
        assert found == ([] if isinstance(strategy, HostMean) else ["all_reduce"])
