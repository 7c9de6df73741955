"""Rematerialisation: the same gradients whatever is kept, and what is run again."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from cssm import fused, models
from cssm.config import Config
from cssm.jaxprs import inner, trace
from cssm.remat import KEPT, choices, wrapper
from parallel.sharded import make_strategy

SMALL = {"arch": "vit", "cssm": "gated", "depth": 1, "embed_dim": 8, "image_size": 8, "kernel_size": 3, "seq_len": 4}


@pytest.mark.parametrize(
    "settings,open_",
    [
        ({}, [None, "costly", "nothing"]),
        ({"remat_keep": "nothing"}, [None, "nothing"]),
        ({"remat": True}, ["nothing"]),
        ({"remat": True, "remat_keep": "costly"}, ["costly"]),
        ({"remat": False}, [None]),
    ],
)
def test_what_the_settings_leave_open(settings, open_):
    assert choices(Config(arch="vit", **settings)) == open_


@pytest.fixture
def loss(monkeypatch):
    """By what is kept: the loss of a model whose recurrence is one kernel, interpreted here, and its parameters."""
    monkeypatch.setattr(fused, "available", lambda: True)
    strategy = make_strategy("none", "auto", jax.devices()[:1], 0.0)
    images = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 8, 8, 3)), jnp.float32)

    def of(kept):
        model = models.build(Config(**SMALL, scan="fused"), 3, wrapper(strategy, kept))
        params = {"params": laws.init(model, jax.random.key(0), images)}
        return lambda params: jnp.sum(jnp.sin(model.apply(params, images))), params

    return of


def test_gradients_are_those_of_the_plain_model(loss):
    gradients = lambda function, params: jax.jit(jax.grad(function))(params)
    want = gradients(*loss(None))
    for kept in KEPT:
        got = gradients(*loss(kept))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6), want, got)


def run(jaxpr, counts):
    """How many equations that count run, in a function and all that it calls, and give what is used."""
    used = {id(v) for equation in jaxpr.eqns for v in equation.invars} | {id(v) for v in jaxpr.outvars}
    alive = [e for e in jaxpr.eqns if any(id(v) in used for v in e.outvars)]
    inside = [e for e in alive if e.primitive.name != "pallas_call"]
    return sum(map(counts, alive)) + sum(run(part, counts) for e in inside for part in inner(e))


@pytest.mark.parametrize("kept,times", [(None, 2), ("costly", 3), ("nothing", 3)])
def test_the_recurrence_is_run_again(loss, kept, times):
    """Its kernel forward and backward; a third one is forward again."""
    function, params = loss(kept)
    assert run(trace(jax.grad(function), params), lambda e: e.primitive.name == "pallas_call") == times


def test_of_products_and_transforms_only_the_forward_ones_are_run_again_where_what_is_costly_is_kept(loss):
    maps = 2 * 4 * 2 * 2 * 8  # B T H W C after the stem; the gates' products are smaller
    product = lambda e: e.primitive.name == "dot_general" and e.outvars[0].aval.size >= maps
    forward, inverse = (
        lambda e, kind=kind, size=size: e.params.get("fft_type") == kind and e.outvars[0].aval.size >= size
        for kind, size in ((jax.lax.FftType.RFFT, 1), (jax.lax.FftType.IRFFT, maps))
    )
    traced = {kept: trace(jax.grad(function), params) for kept in (None, *KEPT) for function, params in [loss(kept)]}
    count = lambda counts: [run(traced[kept], counts) for kept in (None, "costly", "nothing")]
    for kept in (product, inverse):
        plain, costly, nothing = count(kept)
        assert plain == costly < nothing
    plain, costly, nothing = count(forward)
    assert plain < costly <= nothing
