"""Cells whose gates are constant commute with circular shifts of the map."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest

from cssm.cells import CELLS
from cssm.cells.core import CellOptions

# What else would know where it is: a convolution that sees zeros beyond the border.
WITHOUT = {"gated": {"short_conv_spatial_size": 0}, "no_fft": {"short_conv_spatial_size": 0}}
# conv_ssm and s4nd see zeros beyond the border, attention has a table of positions.
PLACED = {"conv_ssm", "s4nd", "spatial_attn", "spatiotemporal_attn"}


def gates_off(path, leaf):
    """Gates that are made of the context lose their weights, and keep one offset for all frequencies or pixels."""
    names = jax.tree_util.keystr(path)
    if "gate" not in names:
        return leaf
    return jnp.zeros_like(leaf) if "kernel" in names else jnp.full_like(leaf, 0.3)


@pytest.mark.parametrize("name", sorted(set(CELLS) - PLACED))
def test_a_shifted_input_gives_the_shifted_output(name, key):
    x = jnp.asarray(oracle.wave_input((1, 3, 6, 8, 4)))
    cell = CELLS[name](CellOptions(channels=4, kernel_size=3), **WITHOUT.get(name, {}))
    params = jax.tree_util.tree_map_with_path(gates_off, laws.init(cell, key, x))
    shift = lambda y: np.roll(y, (2, 5), axis=(2, 3))
    want, got = laws.run(cell, params, x), laws.run(cell, params, shift(x))
    np.testing.assert_allclose(got, shift(want), atol=2e-5 * np.abs(want).max())
    assert np.abs(got - want).max() > 1e-2 * np.abs(want).max()


@pytest.mark.parametrize("name", sorted(PLACED))
def test_the_others_do_not(name, key):
    x = jnp.asarray(oracle.wave_input((1, 3, 6, 8, 4)))
    cell = CELLS[name](CellOptions(channels=4, kernel_size=3))
    params = laws.init(cell, key, x)
    want, got = laws.run(cell, params, x), laws.run(cell, params, np.roll(x, (2, 5), axis=(2, 3)))
    assert np.abs(got - np.roll(want, (2, 5), axis=(2, 3))).max() > 1e-3 * np.abs(want).max()
