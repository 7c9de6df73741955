"""Convolutions of each channel by itself, over space and over time: values, gradients in float64, and their kernels."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fused import on_a_gpu

from cssm import depthwise, fused_rows
from cssm.depthwise import (
    CausalConv,
    DepthwiseConv,
    causal_conv,
    causal_steps,
    depthwise_conv,
    fused_kernel_gradient,
    kernel_gradient,
)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def slid(x, kernel):
    """Over space, tap by tap."""
    size, (height, width) = len(kernel), x.shape[1:3]
    before = (size - 1) // 2
    y = np.zeros_like(x)
    for i, j in np.ndindex(size, size):
        for h, w in np.ndindex(height, width):
            if 0 <= h + i - before < height and 0 <= w + j - before < width:
                y[:, h, w] += kernel[i, j] * x[:, h + i - before, w + j - before]
    return y


def remembered(x, kernel):
    """Over time, tap by tap."""
    y = np.zeros_like(x)
    for t, back in np.ndindex(x.shape[1], len(kernel)):
        if back <= t:
            y[:, t] += kernel[len(kernel) - 1 - back] * x[:, t - back]
    return y


def check_linear(conv, formula, x, kernel):
    """Both arguments enter linearly, so that <dx, v> = <dy, conv(v, kernel)> and the same of the kernel."""
    with jax.enable_x64(True):
        dy, dx_way, kernel_way = draw(*x.shape, seed=1), draw(*x.shape, seed=2), draw(*kernel.shape, seed=3)
        y, pull = jax.vjp(conv, jnp.asarray(x), jnp.asarray(kernel))
        dx, d_kernel = pull(jnp.asarray(dy))
        np.testing.assert_allclose(y, formula(x, kernel), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(np.vdot(dx, dx_way), np.vdot(dy, formula(dx_way, kernel)), rtol=1e-10)
        np.testing.assert_allclose(np.vdot(d_kernel, kernel_way), np.vdot(dy, formula(x, kernel_way)), rtol=1e-10)


@pytest.mark.parametrize("size,height,width", [(3, 6, 7), (4, 5, 6), (5, 3, 9), (7, 4, 4)])
def test_space(size, height, width):
    check_linear(depthwise_conv, slid, draw(2, height, width, 3), draw(size, size, 3, seed=4))


@pytest.mark.parametrize("steps,taps", [(8, 4), (3, 4), (2, 5), (5, 1)])
def test_time(steps, taps):
    check_linear(causal_conv, remembered, draw(2, steps, 3, 2, 3), draw(taps, 3, seed=4))


def test_the_modules_have_the_parameters_and_values_of_flax():
    x, key = jnp.asarray(draw(2, 3, 6, 5, 4), jnp.float32), jax.random.key(0)
    ours, theirs = DepthwiseConv(3), nn.Conv(4, (3, 3), feature_group_count=4)
    params = theirs.init(key, x)
    jax.tree.map(np.testing.assert_array_equal, params, ours.init(key, x))
    np.testing.assert_allclose(ours.apply(params, x), theirs.apply(params, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "shape,size,sums,written,programs",
    [
        ((3, 5, 9, 6), 3, 9, 36, 4),  # several maps a program, the last of which are not there; 9 columns in 3 chunks
        ((1, 4, 5, 70), 4, 8, 16, 18),  # blocks of channels, the last one not full; a program for two rows of taps
        ((2, 6, 6, 48), 9, 20, 64, 40),  # rows of taps that no program fills; chunks that end beyond the map
        ((2, 3, 4, 32), 1, 49, 200, 2),
    ],
)
def test_the_kernel_of_the_gradient_is_its_formula(monkeypatch, shape, size, sums, written, programs):
    monkeypatch.setattr(depthwise, "SUMS", sums)
    monkeypatch.setattr(depthwise, "WRITTEN", written)
    monkeypatch.setattr(depthwise, "PROGRAMS", programs)
    number, height, width, channels = shape
    with jax.enable_x64(True):
        padded = jnp.asarray(draw(number, height + size - 1, width + size - 1, channels))
        dy = jnp.asarray(draw(*shape, seed=1))
        want, got = kernel_gradient(padded, dy), fused_kernel_gradient(padded, dy)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("channels,steps", [(6, 5), (40, 3)])
def test_the_kernel_over_time_is_its_formula(monkeypatch, channels, steps):
    monkeypatch.setattr(fused_rows, "OTHER", (fused_rows.Share(256, 4, 2),) * 2)
    monkeypatch.setattr(fused_rows, "COLUMNS", 16)
    with jax.enable_x64(True):
        x, kernel, bias = map(jnp.asarray, (draw(3, steps, 5, channels), draw(4, channels), draw(channels)))
        weights = draw(*x.shape, seed=1)
        function = functools.partial(causal_steps, act=nn.silu)

        def gradients(apply):
            loss = lambda *a: jnp.sum(weights * apply(*a))
            return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, kernel, bias)

        want = gradients(lambda x, kernel, bias: nn.silu(causal_conv(x, kernel) + bias))
        got = gradients(lambda x, k, b: fused_rows.fused_steps(function, x, (*k, b), whole=False))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-11), want, got)


def test_a_gpu_gets_the_kernels(monkeypatch):
    """Forced here, where they are interpreted: the modules give what they give without, and in bf16 what is near."""
    x = jnp.asarray(draw(2, 4, 5, 5, 3), jnp.float32)
    params = {"kernel": jnp.asarray(draw(4, 1, 3), jnp.float32), "bias": jnp.asarray(draw(3), jnp.float32)}
    conv, space = CausalConv(4, nn.silu), jnp.asarray(draw(3, 3, 3), jnp.float32)
    losses = (
        lambda x: jnp.sum(jnp.sin(conv.apply({"params": params}, [x], 4)[0])),
        lambda x: jnp.sum(jnp.sin(depthwise_conv(x[0], space * x[0, 0, 0, 0]))),
    )
    calls = []
    for name in ("fused_steps", "fused_kernel_gradient"):
        original = getattr(depthwise, name)
        note = lambda *a, original=original, name=name, **k: (calls.append(name), original(*a, **k))[1]
        monkeypatch.setattr(depthwise, name, note)
    want = [jax.value_and_grad(loss)(x) for loss in losses]
    assert not calls
    monkeypatch.setattr(depthwise, "available", lambda: True)
    got = [jax.value_and_grad(loss)(x) for loss in losses]
    assert set(calls) == {"fused_steps", "fused_kernel_gradient"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5), want, got)


@pytest.mark.parametrize("shape,size", [((64, 32, 32, 64), 5), ((8, 14, 14, 96), 7), ((2, 56, 56, 100), 11)])
def test_the_kernel_of_the_gradient_lowers_for_a_gpu(shape, size):
    number, height, width, channels = shape
    padded = jax.ShapeDtypeStruct((number, height + size - 1, width + size - 1, channels), jnp.bfloat16)
    lowered(
        lambda p, d: fused_kernel_gradient(p, d, interpret=False), padded, jax.ShapeDtypeStruct(shape, padded.dtype)
    )


@pytest.mark.parametrize("steps,channels", [(8, 192), (16, 100)])
def test_the_kernel_over_time_lowers_for_a_gpu(steps, channels):
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    function = functools.partial(causal_steps, act=nn.silu)

    def loss(x, parameters):
        return jnp.sum(jnp.sin(fused_rows.fused_steps(function, x, parameters, whole=False, interpret=False)))

    lowered(jax.grad(loss, (0, 1)), half(2, steps, 32, 32, channels), (half(channels),) * 5, kernels=2)


def lowered(function, *shapes, kernels=1):
    with on_a_gpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton", DeprecationWarning)
        program = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == kernels
