"""The count against hand-made sums, and against XLA's own where that one is right."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from cssm import flops, models
from cssm.config import ARCHS, CELLS_NAMES, KNOBS, Config
from cssm.flops import UncountedError, count_flops

X = jax.ShapeDtypeStruct((4, 6), jnp.float32)


def test_a_product_is_two_operations_a_multiply_add():
    assert count_flops(lambda a, b: a @ b, X, jax.ShapeDtypeStruct((6, 5), jnp.float32)) == 2 * 4 * 6 * 5


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (1, 1), "padding": "VALID"},
        {"window_strides": (1, 1), "padding": "SAME"},
        {"window_strides": (2, 1), "padding": "SAME"},
        {"window_strides": (1, 1), "padding": [(2, 1), (0, 3)], "lhs_dilation": (2, 3)},
        {"window_strides": (2, 1), "padding": "SAME", "rhs_dilation": (1, 2)},
        {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 3},
        {"window_strides": (1, 1), "padding": "SAME", "batch_group_count": 2},
    ],
)
def test_a_convolution_counts_the_products_with_its_image(options):
    """A convolution of ones with ones adds up to their number: padding and gaps are zeros."""
    channels, groups = 6, options.get("feature_group_count", 1)
    image, kernel = jnp.ones((2, 8, 7, channels)), jnp.ones((3, 3, channels // groups, 12))

    def conv(x, k):
        return jax.lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    assert count_flops(conv, image, kernel) == 2 * conv(image, kernel).sum()


def test_a_loop_counts_as_often_as_it_runs():
    def loop(x):
        return jax.lax.scan(lambda h, _: (h * 2.0, None), x, None, length=7)[0]

    assert count_flops(loop, X) == 7 * 24
    assert count_flops(jax.jit(loop), X) == 7 * 24


@pytest.mark.parametrize("name,products", [("dot_product_attention_fwd", 2), ("dot_product_attention_bwd", 4)])
def test_attention_by_cudnn_counts_its_products(name, products):
    """Batch 2, 3 queries, 5 keys, 4 heads of 8 channels."""
    kernel = Primitive(f"{name}_wrapper")
    kernel.def_abstract_eval(lambda q, k, v: q)
    q, k = (jax.ShapeDtypeStruct((2, tokens, 4, 8), jnp.bfloat16) for tokens in (3, 5))
    assert count_flops(kernel.bind, q, k, k) == products * 2 * 2 * 4 * 3 * 5 * 8


def test_transforms_and_complex_products():
    real = jax.ShapeDtypeStruct((3, 8, 16), jnp.float32)
    assert count_flops(lambda x: jnp.fft.rfft2(x), real) == 2.5 * 3 * 128 * 7
    z = jax.ShapeDtypeStruct((10,), jnp.complex64)
    assert count_flops(lambda a, b: a * b, z, z) == 60


def test_complex_numbers_count_by_their_parts():
    z, x = jax.ShapeDtypeStruct((4, 6), jnp.complex64), jax.ShapeDtypeStruct((4, 6), jnp.float32)
    assert count_flops(jnp.add, z, z) == 2 * 24
    assert count_flops(jnp.add, x, x) == 24
    assert count_flops(jnp.abs, z) == 4 * 24
    assert count_flops(lambda a: a.sum(), z) == 2 * 24
    assert count_flops(lambda a, b: a @ b.T, z, z) == 4 * count_flops(lambda a, b: a @ b.T, x, x)


def test_whole_numbers_and_what_moves_numbers_cost_nothing():
    n = jax.ShapeDtypeStruct((4, 6), jnp.int32)
    assert count_flops(lambda n: jnp.where(n > 2, n + 1, n * 3).sum(), n) == 0
    assert count_flops(lambda x: jnp.concatenate([x.T[::-1], jnp.pad(x.T, 1)[1:-1, :4]]).reshape(-1)[3:], X) == 0
    assert count_flops(lambda x: x.at[n_indices()].add(1.0), X) == 3 * 6


def n_indices():
    return jnp.array([0, 2, 2])


def test_a_window_counts_what_is_in_it():
    image = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
    assert count_flops(lambda x: nn.max_pool(x, (2, 2), (2, 2)), image) == 4 * 4 * 3 * 4


def test_functions_within_count_as_what_they_do():
    @jax.custom_vjp
    def own(x):
        return jnp.sin(x)

    own.defvjp(lambda x: (own(x), x), lambda x, g: (g * jnp.cos(x) * 2.0,))
    assert count_flops(own, X) == 24
    assert count_flops(lambda x: jax.vjp(own, x)[1](x), X) == (1 + 3) * 24
    again = jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))
    kept = count_flops(lambda x: jax.vjp(lambda x: jnp.sin(jnp.cos(x)), x)[1](x), X)
    assert count_flops(lambda x: jax.vjp(again, x)[1](x), X) > kept
    assert count_flops(lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y + y * y, lambda y: y, x), X) == 2 * 24 + 1
    assert count_flops(lambda x: jnp.cumsum(jnp.arctan2(x, x)), X) == 2 * 24


@pytest.mark.parametrize(
    "fn, word",
    [
        (lambda x: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x), "while is a loop"),
        (lambda x: jnp.linalg.cholesky(x @ x.T), "cholesky is an operation"),
        (lambda x: jax.lax.scan(lambda h, _: (jnp.linalg.cholesky(h), None), x @ x.T, None, length=3)[0], "cholesky"),
    ],
)
def test_what_is_not_known_is_an_error(fn, word):
    with pytest.raises(UncountedError, match=word):
        count_flops(fn, X)


def test_an_operation_is_in_one_list():
    lists = (flops.ELEMENTWISE, flops.REDUCTIONS, flops.WINDOWS, flops.SCATTERS, flops.FREE, flops.CALLS)
    assert sum(map(len, lists)) == len(frozenset().union(*lists))
    assert flops.COMPLEX.keys() <= flops.ELEMENTWISE


def forward_and_both(**settings):
    """FLOPs of the forward pass, and of it and the backward pass, of a tiny model."""
    config = Config(**{"image_size": 8, **settings})
    model = models.build(config, 10)
    image = jax.ShapeDtypeStruct((1, config.image_size, config.image_size, 1), jnp.float32)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(image.shape)))

    def loss(params, x):
        rngs = {"drop_path": jax.random.key(0)}
        return model.apply({**variables_of(variables), "params": params}, x, True, rngs=rngs, mutable=True)[0].sum()

    return (count_flops(fn, variables["params"], image) for fn in (loss, jax.grad(loss)))


def variables_of(shapes):
    """Batch statistics, if any."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), {k: v for k, v in shapes.items() if k != "params"})


@pytest.mark.parametrize("cell", CELLS_NAMES)
def test_every_operation_of_every_cell_is_counted(cell):
    forward, both = forward_and_both(cssm=cell, embed_dim=8)
    assert 2 < both / forward < 5


OTHERS = [{"scan": method} for method in KNOBS["scan"].choices]
OTHERS += [{name: choice} for name in ("norm_type", "pool_type") for choice in KNOBS[name].choices]
OTHERS += [{"kernel_domain": "spectral"}, {"dtype": "bf16"}, {"gate_type": "dense"}, {"spectral_backend": "fft"}]
OTHERS += [{"pos_embed": choice} for choice in KNOBS["pos_embed"].choices]
OTHERS += [{"arch": arch} for arch in ARCHS]
OTHERS += [{"arch": "vit", "cssm": cell, "drop_path_rate": 0.1, "depth": 1} for cell in CELLS_NAMES]


@pytest.mark.slow
@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_every_operation_of_other_settings_is_counted(settings):
    forward, both = forward_and_both(**settings)
    assert forward < both


FFT = 0.15  # XLA counts 8 n log2 n for a transform of n real numbers, of which a kernel's spectrum has some
ONE_STEP = {"arch": "vit", "seq_len": 1, "kernel_size": 3}


def case(tolerance, *marks, **settings):
    return pytest.param(settings, tolerance, marks=marks, id=settings.get("cssm", settings["arch"]))


@pytest.mark.parametrize(
    "settings, tolerance",
    [
        case(0.03, arch="baseline"),
        case(0.03, arch="vit", cssm="s4nd", seq_len=4, spectral_backend="dft"),
        case(0.03, cssm="conv_ssm", **ONE_STEP),
        case(FFT, cssm="hgru_bi", spectral_backend="dft", **ONE_STEP),
        case(FFT, pytest.mark.slow, cssm="gdn", spectral_backend="dft", **ONE_STEP),
        case(FFT, pytest.mark.slow, cssm="opponent", spectral_backend="dft", **ONE_STEP),
        case(FFT, pytest.mark.slow, cssm="mult_transformer", spectral_backend="dft", **ONE_STEP),
        case(0.03, pytest.mark.slow, arch="vit", cssm="spatiotemporal_attn", seq_len=4),
    ],
)
def test_a_model_without_loops_agrees_with_xla(settings, tolerance):
    """Of a loop XLA counts one run of the body, so these have none, or a single step."""
    config = Config(embed_dim=64, image_size=16, **settings)
    model = models.build(config, 10)
    image = jax.ShapeDtypeStruct((1, 16, 16, 1), jnp.float32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 1))))
    ours = count_flops(model.apply, params, image)
    cost = jax.jit(model.apply).lower(params, image).compile().cost_analysis()
    np.testing.assert_allclose(ours, cost["flops"], rtol=tolerance)
