"""hgru_bi: published fingerprints, the float64 oracle (values and gradients), what its shortcuts must not change."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest

from cssm.cells.core import CellOptions
from cssm.cells.hgru_bi import HGRUBilinear

SHAPE = (2, 4, 8, 10, 8)
FINGERPRINTS = [  # kernel, readout, sum, sum of squares, y[0, 3, 2, 5, :3], half a unit of the last printed digit
    (3, "xyz", 51.688398, 4367.821086, [2.198773, 1.080041, -1.865581], 5e-7),
    (11, "xyz", 50.952101, 4526.216375, [2.105593, 2.002442, -2.541217], 5e-7),
    (3, "x", 12.955, 934.569, [-0.27381, 0.26887, -0.53624], 5e-4),
    (3, "y", -170.039, 1249.418, None, 5e-4),
    (3, "z", -134.138, 2041.879, None, 5e-4),
    (3, "xy", 61.02016, 3179.30622, [1.66178, -1.09137, -0.03683], 5e-6),
]


def options(**changes):
    defaults = {
        "channels": 8,
        "kernel_size": 3,
        "kernel_origin": "image_center",
        "gate_type": "dense",
        "scan": "reference",
    }
    return CellOptions(**{**defaults, "backend": "fft", **changes})


def published(kernel=3, readout="xyz"):
    return oracle.wave_parameters(oracle.hgru_bi_shapes(8, kernel, 8, 10, len(readout)))


def cast(tree, dtype=jnp.float32):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


@pytest.mark.parametrize("kernel,readout,total,squares,values,digit", FINGERPRINTS)
def test_published_fingerprints(kernel, readout, total, squares, values, digit):
    cell = HGRUBilinear(options(kernel_size=kernel), readout)
    params = cast(oracle.hgru_bi_tree(published(kernel, readout), readout))
    y = np.asarray(cell.apply({"params": params}, oracle.wave_input()), np.float64)
    np.testing.assert_allclose(y.sum(), total, rtol=1e-5, atol=digit)
    np.testing.assert_allclose((y**2).sum(), squares, rtol=1e-5, atol=digit)
    if values:
        np.testing.assert_allclose(
            y[0, 3, 2, 5, :3], values, rtol=1e-5, atol=max(digit, 5e-6 if digit > 1e-6 else 5e-7)
        )


@pytest.mark.parametrize("scan", ["reference", "associative"])
@pytest.mark.parametrize("backend", ["fft", "dft"])
@pytest.mark.parametrize("origin", ["origin", "image_center"])
def test_values_are_those_of_the_float64_oracle(scan, backend, origin):
    p, x = published(), oracle.wave_input()
    with jax.enable_x64(True):
        cell = HGRUBilinear(options(scan=scan, backend=backend, kernel_origin=origin))
        y = cell.apply({"params": cast(oracle.hgru_bi_tree(p), jnp.float64)}, jnp.asarray(x, jnp.float64))
        np.testing.assert_allclose(y, oracle.hgru_bi(x, p, origin=origin), atol=1e-11)


def test_gradients_of_all_paths_agree_in_float64():
    x = jnp.asarray(oracle.wave_input((1, 3, 4, 6, 4)))
    shapes = oracle.hgru_bi_shapes(4, 3, 4, 6)
    with jax.enable_x64(True):
        params = cast(oracle.hgru_bi_tree(oracle.wave_parameters(shapes)), jnp.float64)

        def gradient(scan, backend):
            cell = HGRUBilinear(options(channels=4, scan=scan, backend=backend))
            loss = lambda p, x: jnp.sum(jnp.sin(cell.apply({"params": p}, x)))
            return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x.astype(jnp.float64))

        want = gradient("reference", "fft")
        for other in (gradient("associative", "fft"), gradient("reference", "dft")):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), want, other)


def test_gradient_matches_finite_differences_of_the_oracle():
    p, x = oracle.wave_parameters(oracle.hgru_bi_shapes(4, 3, 4, 6)), oracle.wave_input((1, 3, 4, 6, 4))
    with jax.enable_x64(True):
        cell = HGRUBilinear(options(channels=4))
        loss = lambda tree: jnp.sum(jnp.sin(cell.apply({"params": tree}, jnp.asarray(x, jnp.float64))))
        grads = jax.jit(jax.grad(loss))(cast(oracle.hgru_bi_tree(p), jnp.float64))
    for path, at in [
        ("k_exc", (1, 0, 2)),
        ("input_proj/kernel", (2, 7)),
        ("output_proj/bias", (3,)),
        ("k_inh", (0, 1, 1)),
    ]:
        values = []
        for sign in (1, -1):
            bumped = {name: leaf.copy() for name, leaf in p.items()}
            bumped[path][at] += sign * 1e-5
            values.append(np.sin(oracle.hgru_bi(x, bumped)).sum())
        module, _, leaf = path.partition("/")
        got = np.asarray(grads[module][leaf or "kernel"])[at]
        np.testing.assert_allclose(got, (values[0] - values[1]) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rope_mode", ["none", "mrope", "spatial_only"])
@pytest.mark.parametrize("gate_type", ["dense", "factored"])
def test_a_still_image_is_the_clip_of_its_copies(rope_mode, gate_type, key):
    cell = HGRUBilinear(options(rope_mode=rope_mode, gate_type=gate_type, kernel_origin="origin"))
    x = jnp.asarray(oracle.wave_input((2, 1, 8, 10, 8)))
    clip = jnp.repeat(x, 4, axis=1)
    params = {"params": laws.init(cell, key, clip)}
    whole = cell.apply(params, clip)
    np.testing.assert_allclose(cell.apply(params, x, num_steps=4), whole, atol=2e-5)
    np.testing.assert_allclose(cell.apply(params, x, num_steps=4, last_only=True), whole[:, -1:], atol=2e-5)


def test_a_spectral_kernel_is_complex_and_starts_as_the_spatial_one_does(key):
    x = jnp.asarray(oracle.wave_input())
    spatial, spectral = (
        HGRUBilinear(options(kernel_domain=d, kernel_origin="origin")) for d in ("spatial", "spectral")
    )
    p_spatial, p_spectral = jax.jit(spatial.init)(key, x), jax.jit(spectral.init)(key, x)
    leaf = p_spectral["params"]["k_exc"]["spectrum"]
    assert leaf.dtype == jnp.complex64 and leaf.shape == (8, 8, 6)
    np.testing.assert_allclose(jax.jit(spectral.apply)(p_spectral, x), jax.jit(spatial.apply)(p_spatial, x), atol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(spectral.apply(p, x) ** 2)))
    grads = gradient(p_spectral)["params"]["k_exc"]["spectrum"]
    assert grads.dtype == jnp.complex64 and np.abs(np.asarray(grads).imag).max() > 0


def test_bf16_is_near_float32_and_keeps_its_parameters(key):
    laws.bf16_is_near(lambda **changes: HGRUBilinear(options(**changes)), key)
    params = jax.eval_shape(HGRUBilinear(options(dtype=jnp.bfloat16)).init, key, jnp.zeros(SHAPE, jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_later_frames_never_change_earlier_outputs(key):
    laws.causal(HGRUBilinear(CellOptions(channels=4, kernel_size=3)), key, (1, 3, 4, 6, 4), 1)
