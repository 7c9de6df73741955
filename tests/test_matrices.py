"""Which leaves Muon takes and weight decay spares, in every cell and trunk, told by the modules that own them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from cssm import models
from cssm.cells import CELLS, core
from cssm.cells.attention import ScaledDense, SplitDense
from cssm.config import ARCHS, Config
from cssm.depthwise import CausalConv, DepthwiseConv
from cssm.optimizers import decays, matrices


@functools.cache
def modules_of(config):
    """(parameters, the module that owns each, by path), by shapes alone."""
    owners = {}

    def note(call, args, kwargs, context):
        owners[context.module.path] = context.module
        return call(*args, **kwargs)

    def init():
        with nn.intercept_methods(note):
            return models.build(config, 10).init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))

    return jax.eval_shape(init)["params"], owners


def mixes(module, leaf):
    """Whether the kernel of a module takes every input channel to every output channel."""
    if isinstance(module, nn.Conv):
        return module.feature_group_count == 1 and leaf.shape[-2] > 1
    known = {
        CausalConv: False,
        DepthwiseConv: False,
        core.SpectralKernel: False,
        core.SpectralDense: True,
        core.ActivatedDense: True,
    }
    return {nn.Dense: True, ScaledDense: True, SplitDense: True, **known}[type(module)]


SPECTRAL = {"kernel_domain": "spectral", "gate_type": "dense"}
EVERYWHERE = [*({"arch": "vit", "cssm": cell} for cell in CELLS), *({"arch": arch} for arch in ARCHS)]
EVERYWHERE += [{"cssm": cell, **SPECTRAL} for cell in ("hgru_bi", "gdn")]


@pytest.mark.parametrize("settings", EVERYWHERE, ids=lambda settings: " ".join(settings.values()))
def test_muon_takes_the_matrices_between_the_first_layer_and_the_last(settings):
    """Told by the modules that own them, of every cell and trunk. No complex leaf is among them."""
    params, owners = modules_of(Config(image_size=8, **settings))
    chosen = dict(jax.tree_util.tree_leaves_with_path(matrices(params)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *names, last = (key.key for key in path)
        inner = last == "kernel" and names[0] not in ("stem", "head")
        assert chosen[path] == (inner and mixes(owners[tuple(names)], leaf)), jax.tree_util.keystr(path)
        assert not (chosen[path] and jnp.iscomplexobj(leaf))
    assert any(chosen.values())


@pytest.mark.parametrize("settings", EVERYWHERE, ids=lambda settings: " ".join(settings.values()))
def test_weight_decay_is_for_kernels_spectra_and_readouts(settings):
    """Everything else has a meaning that zero is not: offsets, scales, tables, tokens, decays and time scales."""
    tokens = {"n_register_tokens": 2} if settings == {"arch": "vit"} else {}
    params, _ = modules_of(Config(image_size=8, **settings, **tokens))
    leaves = jax.tree_util.tree_leaves_with_path(decays(params))
    kept, spared = ({path[-1].key for path, on in leaves if on is wanted} for wanted in (True, False))
    assert "kernel" in kept and {"bias", "scale"} <= spared
    assert kept <= {"kernel", "spectrum", "read"}
    assert not tokens or {"tokens", "gamma", "pos_embed"} <= spared
