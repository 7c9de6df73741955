"""Every cell in every trunk that takes one: it builds, learns on two devices, and no parameter is dead."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cssm import models
from cssm.cells import CELLS
from cssm.config import Config, parse_args
from cssm.optimizers import make_optimizer, make_schedule
from cssm.step import Sums, init_state, make_backward, make_finish
from parallel import devices as par
from parallel.sync import Replicated

TINY = {"image_size": 8, "kernel_size": 3, "seq_len": 4, "optimizer": "sgd", "lr": 0.01}
BLOCKS = {"mlp_ratio": 1.0, "stem_stride": 2}
# Two stages, the second of a map of 2x2; in shvit the cells of both are late, so that one of convolutions comes before.
STAGES = {**BLOCKS, "arch": "convnext", "dims": "4,8", "depths": "1,1"}
TRUNKS = {
    "simple": {"arch": "simple", "embed_dim": 4, "depth": 2},
    "vit": {**BLOCKS, "arch": "vit", "embed_dim": 4, "depth": 2},
    "convnext pure": STAGES,
    "convnext hybrid": {**STAGES, "convnext_block": "hybrid"},
    "shvit": {**BLOCKS, "arch": "shvit", "stem_stride": 1, "dims": "2,4,8", "depths": "1,1,1"},
}
OWN = {"spatial_attn": {"num_heads": 2}, "spatiotemporal_attn": {"num_heads": 2}, "s4nd": {"s4nd_d_state": 4}}


def config_of(cell, trunk, **settings):
    given = {**TINY, **TRUNKS[trunk], **OWN.get(cell, {}), "cssm": cell, **settings}
    if cell in ("no_fft", "s4nd", "spatial_attn", "spatiotemporal_attn"):
        del given["kernel_size"]
    if cell == "spatial_attn":  # takes frames as they are
        del given["seq_len"]
    return Config(**given)


def images_of(seed, n=4):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (n, 8, 8, 1), dtype=np.uint8))


@functools.cache
def one_step(cell, trunk):
    """(gradients, losses of two batches of the same labels) on two devices; momentum starts as the gradient."""
    config, devices = config_of(cell, trunk), jax.devices()[:2]
    model, tx = models.build(config, 10), make_optimizer(config, make_schedule(config, 10, 0))
    init = lambda index: init_state(model, tx, Replicated(), config, (8, 8, 1), index)
    state = par.spmd(init, devices)(par.device_indices(devices))
    backward, finish = make_backward(model, Replicated(), config, 1), make_finish(tx, Replicated(), config)
    program = Replicated().program(backward, finish, devices)
    start, losses = par.unreplicate(state), []
    for seed in (1, 0):
        images = {"image": np.asarray(images_of(seed)), "label": np.arange(4, dtype=np.int32)}
        batch, zeros = par.shard_batch(images, devices), par.replicate(Sums.zeros(), devices)
        state, sums = program(par.replicate(start, devices), zeros, batch)
        par.assert_replicated(state)
        losses.append(float(par.unreplicate(sums.loss)))
    return par.unreplicate(optax.tree.get(state.opt_state, "trace")), losses


TABLE = [pytest.param(cell, trunk, marks=pytest.mark.slow) for cell in CELLS for trunk in TRUNKS]


@pytest.mark.parametrize("cell,trunk", TABLE)
def test_a_cell_learns_in_a_trunk_and_has_no_dead_parameter(cell, trunk):
    grads, losses = one_step(cell, trunk)
    assert np.isfinite(losses).all()
    assert abs(losses[0] - losses[1]) > 1e-6, "the output does not depend on the input"
    dead = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if not np.abs(leaf).max() > 0
    ]
    assert not dead


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("trunk", [trunk for trunk in TRUNKS if trunk != "convnext hybrid"])
def test_a_cell_takes_images_to_logits(cell, trunk):
    """Shapes alone; in one trunk with each gate type and both domains of kernels that it has, in some of clips only."""
    config = config_of(cell, trunk)
    variants = [config]
    if config.gate_type and trunk == "simple":
        variants.append(dataclasses.replace(config, gate_type="dense"))
    if trunk == "simple" and cell not in ("no_fft", "conv_ssm", "s4nd", "spatial_attn", "spatiotemporal_attn"):
        variants.append(dataclasses.replace(config, kernel_domain="spectral"))
    for variant in variants:
        model = models.build(variant, 10)
        for shape in ((2, 8, 8, 1), (2, 3, 8, 8, 1))[trunk in ("convnext pure", "shvit") :]:
            out = jax.eval_shape(lambda x, m=model: m.init_with_output(jax.random.key(0), x)[0], jnp.zeros(shape))
            assert out.shape == (2, 10) and out.dtype == jnp.float32


@pytest.mark.parametrize(
    "name,settings",
    [
        ("kqv", {"cssm": "transformer"}),
        ("gdn_d2", {"cssm": "gdn", "delta_key_dim": 2}),
        ("gdn_d3", {"cssm": "gdn", "delta_key_dim": 3}),
        ("add_kqv_1", {"cssm": "add_kqv", "chain": "q"}),
        ("add_kqv_2", {"cssm": "add_kqv", "chain": "qv"}),
    ],
)
def test_other_names_of_cells(name, settings):
    assert parse_args(["--cssm", name, "--embed_dim", "6"]).typed == {**settings, "embed_dim": 6}
