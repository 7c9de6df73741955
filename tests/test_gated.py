"""gated: published fingerprints, the float64 oracle (values and gradients), causality, and its shortcuts."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest

from cssm.cells.core import CellOptions
from cssm.cells.gated import Gated

FINGERPRINTS = [  # gates, kernel, spatial, temporal, sum, sum of squares, y[0, 3, 2, 5, :3]
    ("dense", 3, 3, 4, 59.557515, 651.273368, [-0.247120, -0.005397, 0.318983]),
    ("factored", 3, 3, 4, 71.957353, 653.095460, [0.372441, 0.506259, 0.380089]),
    ("factored", 1, 0, 4, 72.996846, 653.065406, [0.389983, 0.512296, 0.350483]),
]


def make(gates="factored", kernel=3, spatial=3, temporal=4, **changes):
    defaults = {"channels": 8, "kernel_size": kernel, "kernel_origin": "image_center", "gate_type": gates}
    return Gated(CellOptions(**{**defaults, "scan": "reference", "backend": "fft", **changes}), temporal, spatial)


def published(gates, kernel, spatial, temporal):
    return oracle.wave_parameters(oracle.gated_shapes(8, kernel, 8, 10, gates, spatial, temporal))


def cast(tree, dtype=jnp.float32):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


@pytest.mark.parametrize("gates,kernel,spatial,temporal,total,squares,values", FINGERPRINTS)
def test_published_fingerprints(gates, kernel, spatial, temporal, total, squares, values):
    p = published(gates, kernel, spatial, temporal)
    cell = make(gates, kernel, spatial, temporal)
    y = np.asarray(cell.apply({"params": cast(oracle.gated_tree(p, gates))}, oracle.wave_input()), np.float64)
    np.testing.assert_allclose(y.sum(), total, rtol=1e-5)
    np.testing.assert_allclose((y**2).sum(), squares, rtol=1e-5)
    np.testing.assert_allclose(y[0, 3, 2, 5, :3], values, rtol=1e-5, atol=5e-7)


@pytest.mark.parametrize("scan", ["reference", "associative"])
@pytest.mark.parametrize("backend", ["fft", "dft"])
@pytest.mark.parametrize("gates", ["dense", "factored"])
@pytest.mark.parametrize("spatial,temporal", [(3, 4), (4, 0), (0, 2)])
def test_values_are_those_of_the_float64_oracle(scan, backend, gates, spatial, temporal):
    p, x = published(gates, 3, spatial, temporal), oracle.wave_input()
    with jax.enable_x64(True):
        cell = make(gates, 3, spatial, temporal, scan=scan, backend=backend, kernel_origin="origin")
        y = cell.apply({"params": cast(oracle.gated_tree(p, gates), jnp.float64)}, jnp.asarray(x, jnp.float64))
        np.testing.assert_allclose(y, oracle.gated(x, p, gates, spatial, temporal, "origin"), atol=1e-10)


def test_gradients_of_all_paths_agree_in_float64():
    p = published("factored", 3, 3, 4)
    with jax.enable_x64(True):
        x = jnp.asarray(oracle.wave_input(), jnp.float64)
        params = cast(oracle.gated_tree(p, "factored"), jnp.float64)

        def gradient(scan, backend):
            cell = make(scan=scan, backend=backend)
            loss = lambda p, x: jnp.sum(jnp.sin(cell.apply({"params": p}, x)))
            return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)

        want = gradient("reference", "fft")
        for other in (gradient("associative", "fft"), gradient("reference", "dft")):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), want, other)


def test_later_frames_never_change_earlier_outputs(key):
    cell, x = make(), jnp.asarray(oracle.wave_input())
    params = {"params": laws.init(cell, key, x)}
    changed = cell.apply(params, x.at[:, 2:].add(1.0))
    want = cell.apply(params, x)
    np.testing.assert_array_equal(changed[:, :2], want[:, :2])
    assert np.abs(changed[:, 2:] - want[:, 2:]).max() > 1e-6


@pytest.mark.parametrize("temporal", [0, 4])
@pytest.mark.parametrize("rope_mode", ["none", "mrope", "spatial_only"])
def test_a_still_image_is_the_clip_of_its_copies(temporal, rope_mode, key):
    cell = make(temporal=temporal, rope_mode=rope_mode)
    x = jnp.asarray(oracle.wave_input((2, 1, 8, 10, 8)))
    clip = jnp.repeat(x, 4, axis=1)
    params = {"params": laws.init(cell, key, clip)}
    whole = cell.apply(params, clip)
    np.testing.assert_allclose(cell.apply(params, x, num_steps=4), whole, atol=1e-5)
    np.testing.assert_allclose(cell.apply(params, x, num_steps=4, last_only=True), whole[:, -1:], atol=1e-5)


def test_with_a_single_step_the_kernel_has_no_effect(key):
    cell, x = make(), jnp.asarray(oracle.wave_input((2, 1, 8, 10, 8)))
    params = {"params": laws.init(cell, key, x)}
    grads = jax.jit(jax.grad(lambda p: jnp.sum(cell.apply(p, x) ** 2)))(params)
    np.testing.assert_array_equal(grads["params"]["kernel"]["kernel"], 0.0)


def test_bf16_is_near_float32(key):
    laws.bf16_is_near(lambda **changes: make(**changes), key)
