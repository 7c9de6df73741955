"""Norms of rows against their formula: values, and derivatives in both directions, of which one is written by hand."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cssm.rows import activated_norm_rows, layer_norm_rows

EPSILON = 1e-3


def plain(x, scale, bias):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + EPSILON) * scale + bias


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def test_derivatives_are_those_of_the_formula():
    arguments = draw(4, 6), draw(6), draw(6, seed=1)
    tangents = draw(4, 6, seed=2), draw(6, seed=3), draw(6, seed=4)
    with jax.enable_x64(True):
        rows = lambda x, scale, bias: layer_norm_rows(x, jnp.ones(6), scale, bias, EPSILON)
        for direction in (lambda f: jax.jvp(f, arguments, tangents), lambda f: jax.vjp(f, *arguments)[1](draw(4, 6))):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-11, atol=1e-13), direction(plain), direction(rows)
            )


def test_columns_that_are_not_there_change_nothing():
    """Also where an activation makes something of their zeros."""
    x, scale, bias, offset = draw(4, 6), draw(6), draw(6, seed=1), draw(6, seed=2)
    wider = lambda a: jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 2)])
    with jax.enable_x64(True):
        norm = functools.partial(activated_norm_rows, epsilon=EPSILON, before=nn.softplus, after=nn.silu)
        want = nn.silu(plain(nn.softplus(x + offset), scale, bias))
        got = norm(wider(x), wider(jnp.ones(6)), *map(wider, (scale, bias, offset)))
        np.testing.assert_allclose(got[:, :6], want, rtol=1e-11)
        gradient = jax.grad(lambda x: norm(wider(x), wider(jnp.ones(6)), *map(wider, (scale, bias, offset))).sum())
        np.testing.assert_allclose(
            gradient(x), jax.grad(lambda x: nn.silu(plain(nn.softplus(x + offset), scale, bias)).sum())(x), rtol=1e-9
        )
