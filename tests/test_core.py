"""Parts of cells: spectral projections equal spatial ones, gates have the promised shape, kernels are bounded."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from cssm import spectral
from cssm.cells import CELLS, core
from cssm.cells.core import CellOptions
from cssm.config import CELLS_NAMES
from cssm.recipes import STATES


def randn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_the_names_of_cells_are_those_of_the_command_line():
    assert tuple(CELLS) == CELLS_NAMES


def test_projecting_a_spectrum_equals_projecting_in_space():
    x, kernel, bias = randn(2, 3, 6, 7, 4), randn(4, 5, seed=1), randn(5, seed=2)
    x_hat = spectral.rfft2(x)
    got, constant = core.SpectralDense(5).apply({"params": {"kernel": kernel, "bias": bias}}, x_hat)
    np.testing.assert_allclose(spectral.irfft2(got, 7) + constant, x @ kernel + bias, atol=1e-5)
    with_it = got.at[..., 0, 0, 0, :].add(6 * 7 * constant)
    np.testing.assert_allclose(spectral.irfft2(with_it, 7), x @ kernel + bias, atol=1e-5)


def test_states_side_by_side_are_projected_as_their_concatenation():
    states = [randn(2, 1, 6, 7, 4, seed=i) for i in range(3)]
    kernel, bias = randn(3, 4, 4, seed=5), randn(4, seed=6)
    maps = jnp.concatenate(states, axis=-1)
    got, constant = core.SpectralDense(4, states=3).apply({"params": {"kernel": kernel, "bias": bias}}, maps)
    np.testing.assert_allclose(got + constant, maps @ kernel.reshape(12, 4) + bias, atol=1e-5)


TIMED = ("hgru_bi", "hgru", "opponent", "gdn", "transformer", "mult_transformer", "add_kqv")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "hgru" else pytest.mark.slow) for name in TIMED]
)
def test_without_the_time_code_a_later_start_changes_nothing(name, key):
    """Steps at which nothing is seen leave the states at zero, and gates do not know how many went before."""
    clip = randn(1, 3, 4, 6, 4)
    nothing = jnp.zeros_like(clip[:, :2])
    later, now = jnp.concatenate([nothing, clip], axis=1), jnp.concatenate([clip, nothing], axis=1)  # of one program
    for knows, equal in ((False, True), (True, False)):
        cell = CELLS[name](CellOptions(channels=4, kernel_size=3, gate_time_code=knows))
        # Without offsets nothing seen is nothing.
        params = jax.jit(cell.init)(key, clip)
        apply = jax.jit(cell.apply)
        difference = np.abs(apply(params, later)[:, 2:] - apply(params, now)[:, :3]).max()
        assert bool(difference < 1e-5) == equal, difference


@pytest.mark.parametrize("name,states", STATES.items())
def test_the_activation_before_the_projection_acts_on_each_state(name, states, key):
    x = randn(1, 2, 4, 6, 4)
    cell = lambda act, read: CELLS[name](CellOptions(4, kernel_size=3, pre_output_act=act), readout_state=read)
    params = {"params": laws.init(cell("silu", states), key, x)}
    kernel, bias = (params["params"]["output_proj"][leaf] for leaf in ("kernel", "bias"))
    alone = {"params": {leaf: value for leaf, value in params["params"].items() if leaf != "output_proj"}}
    maps = [jax.jit(cell("none", state).apply)(alone, x) for state in states]
    want = sum(nn.silu(y) @ kernel[i] for i, y in enumerate(maps)) + bias
    np.testing.assert_allclose(jax.jit(cell("silu", states).apply)(params, x), want, atol=1e-5)
    np.testing.assert_allclose(jax.jit(cell("silu", states[0]).apply)(alone, x), nn.silu(maps[0]), atol=1e-6)


@pytest.mark.parametrize("gate_type", ["dense", "factored"])
def test_gates_are_shared_by_channels_and_few_when_factored(gate_type, key):
    gates = core.FrequencyGates(("a", "b"), gate_type)
    params = gates.init(key, randn(2, 3, 4), 6, 8)
    raw = gates.apply(params, randn(2, 3, 4), 6, 8)
    assert {name: value.shape for name, value in raw.items()} == {"a": (2, 3, 30, 1), "b": (2, 3, 30, 1)}
    assert (raw["a"] != raw["b"]).any()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count == 2 * (4 + 1) * (30 if gate_type == "dense" else 6 + 5)


@pytest.mark.parametrize("combine", [jnp.add, jnp.multiply])
def test_factored_gates_combine_rows_and_columns(combine, key):
    gates, context = core.FrequencyGates(("a",), "factored", combine), randn(1, 1, 4)
    params = gates.init(key, context, 3, 4)
    both = np.asarray(context @ params["params"]["factors"]["kernel"])[0, 0]
    want = combine(both[:3, None], both[None, 3:]).reshape(9)
    np.testing.assert_allclose(gates.apply(params, context, 3, 4)["a"][0, 0, :, 0], want, atol=1e-6)


@pytest.mark.parametrize("domain", ["spatial", "spectral"])
def test_kernels_are_bounded_spectra_of_the_flattened_map(domain, key):
    options = CellOptions(channels=4, kernel_size=5, kernel_domain=domain)
    kernel = core.SpectralKernel(options, nn.initializers.normal(10.0))
    k_hat, params = kernel.init_with_output(key, 6, 8)
    assert k_hat.re.shape == (30, 4)
    assert float(jnp.hypot(*k_hat).max()) < 0.999
    assert [leaf.dtype.kind for leaf in jax.tree.leaves(params)] == ["f" if domain == "spatial" else "c"]


def test_raw_xavier_has_the_spread_of_the_raw_shape(key):
    sample = core.xavier_normal_raw(key, (64, 11, 11))
    np.testing.assert_allclose(float(sample.std()), 1 / np.sqrt(64 * 11), rtol=0.03)


@pytest.mark.parametrize("gate_type", ["dense", "factored"])
def test_memory_for_the_gradients_of_gates_does_not_grow_with_the_square_of_their_number(gate_type):
    names = tuple("abcdefgh")
    gates, context = core.FrequencyGates(names, gate_type), jnp.ones((1, 64, 4))
    loss = lambda p: sum(jnp.sum(jnp.sin(i * g)) for i, g in enumerate(gates.apply(p, context, 16, 16).values()))
    params = gates.init(jax.random.key(0), context, 16, 16)
    temporary = jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes
    assert temporary < len(names) / 2 * (4 * len(names) * 64 * 16 * 9)
