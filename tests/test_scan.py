"""All scans against a plain loop over explicit complex matrices in float64: values, gradients, memory and range."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm import fused, jaxprs
from cssm.goom import ceiling
from cssm.scan import choose_method, linear_scan
from cssm.spectral import Spectrum, add, multiply, pack, scale, unpack

B, T, F, C = 2, 7, 3, 4  # 7 = 3 chunks of 2 steps and one that is left
METHODS = ("reference", "chunked", "associative", "goom", "fused")


def problem(seed=0, still=False, T=T):
    """A coupled pair of states with real gates a, b and a complex coefficient k [F, C]."""
    rng = np.random.default_rng(seed)
    k = 0.5 * (rng.standard_normal((F, C)) + 1j * rng.standard_normal((F, C)))
    gates = {name: rng.uniform(0.1, 0.9, (B, T, F, 1)) for name in "ab"}
    shape = (B, 1 if still else T, F, C)
    inputs = [rng.standard_normal(shape) + 1j * rng.standard_normal(shape) for _ in range(2)]
    return k, gates, inputs


def planes(z):
    return Spectrum(jnp.asarray(z.real), jnp.asarray(z.imag))


def on_device(k, gates, inputs):
    return planes(k), jax.tree.map(jnp.asarray, gates), tuple(map(planes, inputs))


def number(state):
    return np.asarray(state.re) + 1j * np.asarray(state.im)


@functools.partial(jax.jit, static_argnames=("method", "last_only", "stable"))
def run(k, gates, inputs, method, last_only=False, stable=False):
    """The two states; read as their sum and a gate's part of the second, and taken apart again."""
    read = lambda h, g: (add(*h), scale(g["a"], h[1]))
    packed = linear_scan(
        coupled, (k,), (2, 2), gates, pack(*inputs, axis=-3), method, last_only, stable, read, {"a": 1 + gates["a"]}
    )
    both, part = unpack(packed, 2, axis=-3)
    y = scale(1 / (1 + gates["a"][:, -1:] if last_only else 1 + gates["a"]), part)
    return add(both, scale(-1.0, y)), y


def coupled(k):
    def step(h, g, u):
        x, y = h
        return (
            add(scale(g["a"], x), scale(-1.0, multiply(k, scale(g["b"], y))), u[0]),
            add(multiply(k, x), scale(g["b"], y), scale(g["a"], u[1])),
        )

    return step


def loop(k, gates, inputs, stable=False):
    """Explicit 2 x 2 matrices, numpy complex128: [B, T, F, C, 2]."""
    state, states = np.zeros((B, F, C, 2), complex), []
    for t in range(gates["a"].shape[1]):
        a, b = gates["a"][:, t], gates["b"][:, t]
        ones = np.ones((B, F, C))
        matrix = np.stack([np.stack([a * ones, -k * b], -1), np.stack([k * ones, b * ones], -1)], -2)
        if stable:
            matrix /= np.maximum(np.abs(matrix).sum(-1, keepdims=True), 1)
        now = [u[:, t if u.shape[1] > 1 else 0] for u in inputs]
        state = np.einsum("...ij,...j->...i", matrix, state) + np.stack([now[0], a * now[1]], -1)
        states.append(state)
    return np.stack(states, 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("still,stable", [(False, False), (True, True)])
def test_values_are_those_of_explicit_matrices(method, still, stable):
    k, gates, inputs = problem(still=still)
    want = loop(k, gates, inputs, stable)
    with jax.enable_x64(True):
        got = run(*on_device(k, gates, inputs), method, stable=stable)
        for i, state in enumerate(got):
            np.testing.assert_allclose(number(state), want[..., i], atol=1e-12)
    assert not stable or np.abs(want - loop(k, gates, inputs)).max() > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_later_inputs_never_change_earlier_states(method):
    k, gates, inputs = problem()
    later = (np.arange(T) >= 4)[:, None, None]
    with jax.enable_x64(True):
        want = run(*on_device(k, gates, inputs), method)
        other = {name: np.where(later, 0.5 * g, g) for name, g in gates.items()}
        got = run(*on_device(k, other, [np.where(later, -u, u) for u in inputs]), method)
        for a, b in zip(want, got, strict=True):
            np.testing.assert_allclose(number(b)[:, :4], number(a)[:, :4], atol=1e-14)
            assert np.abs(number(b) - number(a))[:, 4:].min() > 1e-3


def test_auto_is_the_kernel_where_there_is_a_gpu_for_it(monkeypatch):
    assert [choose_method("auto", steps, 3, jnp.float32) for steps in (64, 65)] == ["reference", "chunked"]
    monkeypatch.setattr(fused, "available", lambda: True)
    assert choose_method("auto", 65, 4, jnp.bfloat16) == "fused"
    assert choose_method("auto", 8, 5, jnp.float32) == choose_method("auto", 8, 3, jnp.float64) == "reference"
    assert choose_method("goom", 8, 3, jnp.float32) == "goom"


def test_last_only_is_the_last_step():
    args = on_device(*problem())
    whole, last = run(*args, "reference"), run(*args, "reference", last_only=True)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, -1:], b), whole, last)


@functools.partial(jax.jit, static_argnames=("method", "last_only", "stable"))
@functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
def gradients(k, gates, inputs, method, last_only=False, stable=False):
    return sum(jnp.sum(jnp.sin(p)) for s in run(k, gates, inputs, method, last_only, stable) for p in s)


@pytest.mark.parametrize("stable", [False, True])
def test_gradients_match_finite_differences(stable):
    args = problem(seed=3)
    with jax.enable_x64(True):
        value, (of_k, _, _) = gradients(*on_device(*args), "reference", stable=stable)
        small = 1e-6
        for at in [(0, 0), (2, 3)]:
            moved = args[0].copy()
            moved[at] += small
            slope = (gradients(*on_device(moved, *args[1:]), "reference", stable=stable)[0] - value) / small
            np.testing.assert_allclose(of_k.re[at], slope, rtol=1e-4)


@pytest.mark.parametrize(
    "methods,steps,still,last_only,stable",
    [
        (("chunked", "goom"), T, False, False, False),
        (("associative",), 3, False, False, False),  # an odd number: a level with one that is left
        pytest.param(("chunked", "goom"), T, True, True, True, marks=pytest.mark.slow),
        (("chunked",), 1, False, False, False),
        pytest.param(("associative",), 19, True, False, True, marks=pytest.mark.slow),  # two blocks and a part of one
    ],
)
def test_gradients_of_all_methods_agree(methods, steps, still, last_only, stable):
    with jax.enable_x64(True):
        args = on_device(*problem(3, still, steps))
        want = gradients(*args, "reference", last_only, stable)
        for method in methods:
            got = gradients(*args, method, last_only, stable)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11, rtol=1e-11), want, got)


def test_exact_zeros_keep_their_gradients_in_log_space():
    """Inputs and couplings of zero: the published floor loses their gradients."""
    k, gates, inputs = problem(seed=4)
    with jax.enable_x64(True):
        args = on_device(0 * k, gates, [inputs[0], 0 * inputs[1]])
        want, got = gradients(*args, "reference"), gradients(*args, "goom")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), want, got)
        assert np.abs(want[1][0].re).min() > 1e-3


def test_a_stable_step_has_gradients_where_couplings_are_zero():
    k, gates, inputs = problem(seed=4)
    with jax.enable_x64(True):
        _, grads = gradients(*on_device(0 * k, {n: 2 * g for n, g in gates.items()}, inputs), "reference", stable=True)
        assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def driven():
    return lambda h, g, u: (add(scale(g["a"], multiply(u[0], h[0])), u[0]),)


def residual_bytes(method, steps, last_only=True, wide=64):
    """What the forward pass keeps for the backward pass, of a still image whose states have `wide` channels."""

    def keep(gates, u):
        return jax.vjp(lambda g, u: linear_scan(driven, (), (1, 1), g, u, method, last_only), gates, u)[1]

    kept = jax.eval_shape(keep, {"a": jnp.zeros((1, steps, 1, 1))}, jnp.zeros((1, 1, 2, 1, wide)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept) if leaf.size > steps)


def test_chunked_keeps_sqrt_t_states_and_reference_t():
    state = 2 * 64 * 4
    for steps in (64, 256, 1024):
        assert steps * state <= residual_bytes("reference", steps) <= (steps + 4) * state
        assert residual_bytes("chunked", steps) <= (steps**0.5 + 4) * state
        assert residual_bytes("auto", steps) == residual_bytes("chunked" if steps > 64 else "reference", steps)


def operations(jaxpr):
    return sum(1 + sum(map(operations, jaxprs.inner(equation))) for equation in jaxpr.eqns)


@pytest.mark.parametrize("method", METHODS)
def test_a_longer_sequence_takes_no_longer_to_compile(method):
    """All of them loop, prefix products over blocks: from a block on the program is the same."""

    def program(steps):
        shapes = jax.eval_shape(lambda: on_device(*problem(T=steps)))
        return operations(jaxprs.trace(lambda *args: run(*args, method), *shapes))

    assert program(512) == program(128)


@pytest.mark.parametrize("method,growth", [("reference", 16), ("chunked", 4)])
def test_compiled_memory_grows_as_stated(method, growth):
    """From 64 to 1024 steps, forward and backward together; states dwarf the gates."""

    def temporary(steps):
        def loss(gates, u):
            return jnp.sum(linear_scan(driven, (), (1, 1), gates, u, method, last_only=True)[:, :, 0])

        args = {"a": jnp.ones((1, steps, 1, 1))}, jnp.ones((1, 1, 2, 1, 4096))
        return jax.jit(jax.grad(loss)).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert 0.5 * growth < temporary(1024) / temporary(64) < 1.25 * growth


def test_log_space_stays_finite_where_the_plain_recurrence_overflows():
    """1024 float32 steps of matrices, most of spectral radius above 1; float64 (to 1e308) knows what is right."""
    k, gates, inputs = problem(6, still=True, T=1024)
    k = 1.1 * np.exp(1j * np.angle(k))
    want = loop(k, gates, inputs)[:, -1]
    args = on_device(k, gates, inputs)
    plain, got = (run(*args, method, last_only=True) for method in ("reference", "goom"))
    for i, (overflown, state) in enumerate(zip(plain, got, strict=True)):
        state = number(state)[:, 0]
        far, near = np.abs(want[..., i]) > 1e39, np.abs(want[..., i]) < 1e17
        assert far.sum() > 10 and near.sum() > 3
        assert not np.isfinite(overflown.re[:, 0][far]).any()
        np.testing.assert_allclose(np.abs(state[far]), np.exp(ceiling(np.float32)), rtol=1e-5)
        np.testing.assert_allclose(state[far] / np.abs(state[far]), (want / np.abs(want))[..., i][far], atol=1e-3)
        np.testing.assert_allclose(state[near], want[..., i][near], rtol=1e-3)
    _, grads = gradients(*args, "goom", last_only=True)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("method", METHODS)
def test_the_carry_is_float32_for_bf16_inputs_and_states_are_bf16(method):
    """A long sum of equal small terms stalls in bf16 (8 bits) and must not here."""
    steps = 1000
    u = jnp.full((1, 1, 2, 1, 1), 0.01, jnp.bfloat16)
    gates = {"one": jnp.ones((1, steps, 1, 1), jnp.bfloat16)}
    summed = lambda: lambda h, g, u: (add(scale(g["one"], h[0]), u[0]),)
    h = linear_scan(summed, (), (1, 1), gates, u, method, last_only=True)
    assert h.dtype == jnp.bfloat16
    np.testing.assert_allclose(h.astype(jnp.float32), steps * float(u[0, 0, 0, 0, 0]), rtol=4e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("last_only", [False, True])
def test_real_numbers_have_one_plane(method, last_only):
    rng = np.random.default_rng(0)
    u, gate = rng.standard_normal((B, T, 1, F, C)), {"a": rng.uniform(0.1, 0.9, (B, T, F, 1))}
    make_step = lambda k: lambda h, g, u: (add(scale(k, scale(g["a"], h[0])), u[0]),)
    k = rng.uniform(0.5, 1, (F, C))
    state, states = np.zeros((B, F, C)), []
    for t in range(T):
        state = k * gate["a"][:, t] * state + u[:, t, 0]
        states.append(state)
    want = np.stack(states, 1)[:, :, None]
    with jax.enable_x64(True):
        got = linear_scan(make_step, (k,), (1, 1), gate, u, method, last_only)
        np.testing.assert_allclose(got, want[:, -1:] if last_only else want, atol=1e-12)
