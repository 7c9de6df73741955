"""The count against hand-made sums, and against XLA's own where that one is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm import models
from cssm.config import Config
from cssm.flops import count_flops

X = jax.ShapeDtypeStruct((4, 6), jnp.float32)


def test_a_product_is_two_operations_a_multiply_add():
    assert count_flops(lambda a, b: a @ b, X, jax.ShapeDtypeStruct((6, 5), jnp.float32)) == 2 * 4 * 6 * 5


def test_a_convolution_counts_its_taps():
    image, kernel = (
        jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32),
        jax.ShapeDtypeStruct((3, 3, 3, 5), jnp.float32),
    )
    conv = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert count_flops(conv, image, kernel) == 2 * (2 * 8 * 8 * 5) * (3 * 3 * 3)


def test_a_loop_counts_as_often_as_it_runs():
    def loop(x):
        return jax.lax.scan(lambda h, _: (h * 2.0, None), x, None, length=7)[0]

    assert count_flops(loop, X) == 7 * 24
    assert count_flops(jax.jit(loop), X) == 7 * 24


def test_transforms_and_complex_products():
    real = jax.ShapeDtypeStruct((3, 8, 16), jnp.float32)
    assert count_flops(lambda x: jnp.fft.rfft2(x), real) == 2.5 * 3 * 128 * 7
    z = jax.ShapeDtypeStruct((10,), jnp.complex64)
    assert count_flops(lambda a, b: a * b, z, z) == 60


@pytest.mark.parametrize(
    "settings",
    [{"arch": "vit", "kernel_size": 3, "spectral_backend": "dft", "seq_len": 1}, {"arch": "baseline"}],
)
def test_a_model_without_loops_agrees_with_xla(settings):
    """XLA counts some elementwise operations differently, and has no loop to miss here."""
    config = Config(embed_dim=64, image_size=16, **settings)
    model = models.build(config, 10)
    image = jax.ShapeDtypeStruct((1, 16, 16, 1), jnp.float32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 1))))
    ours = count_flops(model.apply, params, image)
    cost = jax.jit(model.apply).lower(params, image).cost_analysis()
    np.testing.assert_allclose(ours, cost["flops"], rtol=0.08)
