"""The kernels of rows, interpreted, against formulas in float64: values and gradients; and their form for a GPU."""

import functools
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fused import on_a_gpu, written_over

from cssm import fused_rows
from cssm.fused_rows import Share, by_rows, max_pool_2x2, pooled_rows
from cssm.rows import activated_norm_rows, activated_rows, layer_norm_rows

NORM = functools.partial(layer_norm_rows, epsilon=1e-6)
STEM = functools.partial(activated_norm_rows, epsilon=1e-6, before=nn.softplus, after=nn.silu)
GELU = functools.partial(activated_rows, act=nn.gelu)


def norm(x, scale, bias):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias


def stem(x, scale, bias, offset):
    return nn.silu(norm(jnp.logaddexp(x + offset, 0.0), scale, bias))


CASES = {
    "norm": (NORM, norm, 2, True),
    "gelu": (GELU, lambda x, bias: nn.gelu(x + bias), 1, False),
    "stem": (STEM, stem, 3, True),
}


def arrays(shape, count, seed=0):
    draw = np.random.default_rng(seed)
    return draw.standard_normal(shape), tuple(draw.standard_normal(shape[-1]) for _ in range(count))


def shared_as(monkeypatch, share):
    for name in ("WHOLE", "CUT", "OTHER"):
        monkeypatch.setattr(fused_rows, name, (share, share))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape,ahead", [((3, 5, 24), True), ((2, 9, 64), False), ((5, 300), True)])
def test_values_and_gradients_are_those_of_the_formula(monkeypatch, name, shape, ahead):
    """Rows and columns that a tile does not fill, several tiles a program, several programs."""
    shared_as(monkeypatch, Share(128, 4, 2, ahead))
    monkeypatch.setattr(fused_rows, "COLUMNS", 32)
    function, formula, count, whole = CASES[name]
    with jax.enable_x64(True):
        x, parameters = arrays(shape, count)
        weights = arrays(shape, 0, seed=1)[0]

        def gradients(apply):
            loss = lambda x, parameters: jnp.sum(weights * apply(x, parameters))
            return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, parameters)

        want = gradients(lambda x, parameters: formula(x, *parameters))
        for rows in (fused_rows.fused_rows, by_rows):
            got = gradients(lambda x, parameters, rows=rows: rows(function, x, parameters, whole))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-11), want, got)
        # A residual sum: x once more, by another way than through the rows.
        want = gradients(lambda x, parameters: jnp.sin(x) + formula(x, *parameters))
        for interpret in (True, None):
            both = lambda x, parameters, i=interpret: fused_rows.beside_rows(function, x, parameters, whole, i)
            got = gradients(lambda x, parameters, both=both: jnp.sin(both(x, parameters)[0]) + both(x, parameters)[1])
            jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-11), want, got)


@pytest.mark.parametrize("shape,ahead", [((2, 1, 4, 6, 24), True), ((1, 6, 14, 5), False), ((5, 7, 4), True)])
def test_the_maximum_of_windows_is_that_of_the_formula(monkeypatch, shape, ahead):
    """Several windows a tile, several tiles a program; odd sizes, and the largest of four pixels at each place."""
    shared_as(monkeypatch, Share(128, 4, 2, ahead))
    with jax.enable_x64(True):
        x, parameters = arrays(shape, 3)

        def gradients(apply):
            def loss(x, parameters):
                y = apply(x, parameters)
                return jnp.sum(arrays(y.shape, 0, seed=1)[0] * y), y

            return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, parameters)

        want = gradients(lambda x, parameters: max_pool_2x2(stem(x, *parameters)))
        for interpret in (True, None):
            got = gradients(lambda x, parameters, i=interpret: pooled_rows(STEM, x, parameters, True, i))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-11), want, got)


def test_a_map_and_its_maximum_are_one_kernel_each_way():
    x, parameters = jnp.ones((2, 4, 4, 8)), (jnp.ones(8),) * 3
    loss = lambda x, parameters: jnp.sum(jnp.sin(pooled_rows(STEM, x, parameters, True, interpret=True)))
    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, parameters))
    assert program.count("pallas_call[") == 2


def test_both_gradients_of_a_residual_sum_are_added_in_the_kernel():
    """Otherwise they are two maps, and a third is their sum."""
    x, parameters = jnp.ones((4, 24)), (jnp.ones(24), jnp.zeros(24))

    def sums(both):
        def loss(x):
            x, y = both(x)
            return jnp.sum(jnp.sin(x) + jnp.cos(y))

        return [e.primitive.name for e in jax.make_jaxpr(jax.grad(loss))(x).eqns].count("add_any")

    assert sums(lambda x: fused_rows.beside_rows(NORM, x, parameters, True, interpret=True)) == 0
    assert sums(lambda x: (x, fused_rows.fused_rows(NORM, x, parameters, True, interpret=True))) == 1


@pytest.mark.parametrize("warps,over", [(4, True), (32, False)])
def test_the_gradient_is_written_over_the_given_one_where_no_two_threads_read_a_number(monkeypatch, warps, over):
    shared_as(monkeypatch, Share(512, warps, 2048))
    x, parameters = jnp.ones((300, 64)), (jnp.ones(64), jnp.zeros(64))
    loss = lambda x: jnp.sum(jnp.sin(fused_rows.fused_rows(NORM, x, parameters, True, interpret=True)))
    assert written_over(jax.grad(loss), x) == [(1, 1, 300, 1, 64)] * over


def test_bf16_is_rounded_on_the_way_in_and_out_alone():
    x, parameters = arrays((4, 24), 2)
    x = jnp.asarray(x, jnp.bfloat16)
    got = fused_rows.fused_rows(NORM, x, tuple(map(jnp.float32, parameters)), whole=True)
    want = norm(x.astype(jnp.float32), *map(jnp.float32, parameters)).astype(jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7)


@pytest.mark.parametrize(
    "name,channels,warps",
    [
        ("norm", 64, (1, 1)),
        ("norm", 384, (1, 1)),
        ("gelu", 1536, (1, 2)),
        ("norm", 3000, (4, 4)),
        ("stem", 384, (1, 1)),
        ("pooled", 64, (1, 1)),
    ],
)
def test_they_lower_for_a_gpu(name, channels, warps):
    """No two warps share a row, where one can hold it."""
    function, _, count, whole = CASES["stem" if name == "pooled" else name]
    apply = pooled_rows if name == "pooled" else fused_rows.fused_rows

    def loss(x, parameters):
        return jnp.sum(jnp.sin(apply(function, x, parameters, whole, interpret=False)))

    x = jax.ShapeDtypeStruct((2, 10, 50, channels), jnp.bfloat16)
    parameters = (jax.ShapeDtypeStruct((channels,), jnp.float32),) * count
    with on_a_gpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton", DeprecationWarning)
        program = jax.jit(jax.grad(loss, (0, 1))).trace(x, parameters).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2
    assert tuple(map(int, re.findall(r"num_warps = (\d+) : i32", program))) == warps
