"""Both scans against a plain loop over explicit complex matrices in float64: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm.scan import linear_scan
from cssm.spectral import Spectrum, add, multiply, scale

B, T, F, C = 2, 5, 3, 4


def problem(seed=0, still=False):
    """A coupled pair of states with real gates a, b and a complex coefficient k [F, C]."""
    rng = np.random.default_rng(seed)
    k = 0.5 * (rng.standard_normal((F, C)) + 1j * rng.standard_normal((F, C)))
    gates = {name: rng.uniform(0.1, 0.9, (B, T, F, 1)) for name in "ab"}
    shape = (B, 1 if still else T, F, C)
    inputs = [rng.standard_normal(shape) + 1j * rng.standard_normal(shape) for _ in range(2)]
    return k, gates, inputs


def planes(z):
    return Spectrum(jnp.asarray(z.real), jnp.asarray(z.imag))


def run(k, gates, inputs, method, last_only=False):
    def step(h, g, u):
        x, y = h
        return (
            add(scale(g["a"], x), scale(-1.0, multiply(k, scale(g["b"], y))), u[0]),
            add(multiply(k, x), scale(g["b"], y), scale(g["a"], u[1])),
        )

    return linear_scan(step, 2, gates, inputs, method, last_only)


def loop(k, gates, inputs):
    """Explicit 2 x 2 matrices, numpy complex128: [B, T, F, C, 2]."""
    state, states = np.zeros((B, F, C, 2), complex), []
    for t in range(T):
        a, b = gates["a"][:, t], gates["b"][:, t]
        ones = np.ones((B, F, C))
        matrix = np.stack([np.stack([a * ones, -k * b], -1), np.stack([k * ones, b * ones], -1)], -2)
        now = [u[:, t if u.shape[1] > 1 else 0] for u in inputs]
        state = np.einsum("...ij,...j->...i", matrix, state) + np.stack([now[0], a * now[1]], -1)
        states.append(state)
    return np.stack(states, 1)


@pytest.mark.parametrize("method", ["reference", "associative"])
@pytest.mark.parametrize("still", [False, True])
def test_values_are_those_of_explicit_matrices(method, still):
    k, gates, inputs = problem(still=still)
    want = loop(k, gates, inputs)
    with jax.enable_x64(True):
        got = run(planes(k), jax.tree.map(jnp.asarray, gates), tuple(map(planes, inputs)), method)
        for i, state in enumerate(got):
            np.testing.assert_allclose(np.asarray(state.re) + 1j * np.asarray(state.im), want[..., i], atol=1e-12)


@pytest.mark.parametrize("method", ["reference", "associative"])
def test_last_only_is_the_last_step(method):
    k, gates, inputs = problem()
    args = (planes(k), jax.tree.map(jnp.asarray, gates), tuple(map(planes, inputs)), method)
    whole, last = run(*args), run(*args, last_only=True)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, -1:], b), whole, last)


def test_gradients_agree_and_match_finite_differences():
    k, gates, inputs = problem(seed=3)
    with jax.enable_x64(True):
        args = (planes(k), jax.tree.map(jnp.asarray, gates), tuple(map(planes, inputs)))

        def loss(k, gates, inputs, method):
            return sum(jnp.sum(jnp.sin(p)) for s in run(k, gates, inputs, method) for p in s)

        reference = jax.grad(loss, argnums=(0, 1, 2))(*args, "reference")
        associative = jax.grad(loss, argnums=(0, 1, 2))(*args, "associative")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), reference, associative)

        small = 1e-6
        for at in [(0, 0), (2, 3)]:
            bumped = Spectrum(args[0].re.at[at].add(small), args[0].im)
            numeric = (loss(bumped, *args[1:], "reference") - loss(*args, "reference")) / small
            np.testing.assert_allclose(reference[0].re[at], numeric, rtol=1e-4)


def test_the_carry_is_float32_for_bf16_inputs():
    """A long sum of equal small terms stalls in bf16 (8 bits) and must not here."""
    steps = 1000
    gates = {"one": jnp.ones((1, steps, 1, 1), jnp.bfloat16)}
    u = (Spectrum(jnp.full((1, 1, 1, 1), 0.01, jnp.bfloat16), jnp.zeros((1, 1, 1, 1), jnp.bfloat16)),)
    (h,) = linear_scan(lambda h, g, u: (add(scale(g["one"], h[0]), u[0]),), 1, gates, u, "reference", last_only=True)
    assert h.re.dtype == jnp.float32
    np.testing.assert_allclose(float(h.re[0, 0, 0, 0]), steps * float(u[0].re[0, 0, 0, 0]), rtol=1e-3)
