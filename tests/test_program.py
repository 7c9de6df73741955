"""What the step is compiled from: which collectives it has and how often, and what lies on each device."""

import re

import jax
import numpy as np
import pytest

from cssm import models
from cssm.config import Config
from cssm.optimizers import make_optimizer, make_schedule
from cssm.remat import choices, wrapper
from cssm.step import Sums, init_state, make_backward, make_finish
from parallel import devices as par
from parallel.sharded import make_strategy

SMALL = {"arch": "vit", "depth": 2, "embed_dim": 6, "mlp_ratio": 1.0, "image_size": 8, "kernel_size": 3, "seq_len": 2}
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "collective_permute")


def built(shard, grad_accum=1, run=False, **settings):
    """(state on eight devices, the lowered step) of AdamW with clipping; of the state shapes alone unless `run`."""
    config, devices = Config(**{**SMALL, **settings}), jax.devices()
    strategy, tx = make_strategy(shard, "auto", devices, 1.0), make_optimizer(config, make_schedule(config, 100, 0))
    plain, model = models.build(config, 10), models.build(config, 10, wrapper(strategy, choices(config)[0]))
    init = lambda index: init_state(plain, tx, strategy, config, (8, 8, 1), index)
    initialise, indices = par.spmd(init, devices), par.device_indices(devices)
    state = initialise(indices) if run else jax.eval_shape(initialise, indices)
    program = strategy.program(
        make_backward(model, strategy, config, grad_accum), make_finish(tx, strategy, config), devices
    )
    n = 8 * grad_accum
    batch = par.shard_batch({"image": np.zeros((n, 8, 8, 1), np.uint8), "label": np.zeros(n, np.int32)}, devices)
    return state, program.lower(state, par.replicate(Sums.zeros(), devices), batch)


def counted(text):
    """How many of each collective a program has, those it has none of left out."""
    counts = {name: len(re.findall(rf'"stablehlo\.{name}"', text)) for name in COLLECTIVES}
    return {name: n for name, n in counts.items() if n}


def loops(text):
    """The text of every loop in a program, and of every function that is called from one, directly or not."""
    functions = {match[1]: match[0] for match in re.finditer(r"func\.func \w+ @(\w+)\(.*?\n  \}", text, re.DOTALL)}
    found = [
        match[0] for match in re.finditer(r"^( *)%\S+ = stablehlo\.while.*?^\1\}$", text, re.DOTALL | re.MULTILINE)
    ]
    for part in found:  # grows as functions are found
        called = (functions[name] for name in re.findall(r"call @(\w+)\(", part) if name in functions)
        found += [function for function in called if function not in found]
    return found


def parts(tree):
    """How many arrays cross: a complex one as two."""
    return sum(2 if np.iscomplexobj(leaf) else 1 for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "model", [{"cssm": "gated"}, {"cssm": "hgru_bi", "kernel_domain": "spectral"}], ids=["real", "complex"]
)
def test_gradients_are_reduced_once_a_step(model):
    """All arrays in one all-reduce, also under accumulation, where none is in the loop over micro-batches."""
    for grad_accum in (1, 3):
        state, lowered = built("none", grad_accum, **model)
        text = lowered.as_text()
        assert counted(text) == {"all_reduce": 1}
        numbers = sum((2 if np.iscomplexobj(leaf) else 1) * leaf.size // 8 for leaf in jax.tree.leaves(state.params))
        assert re.findall(r"all_reduce.*?\}\) : \((.*?)\)", text, re.DOTALL) == [f"tensor<{numbers}xf32>"]
        inside = loops(text)
        assert inside and not [part for part in inside if counted(part)]


def test_the_search_for_loops_finds_collectives_in_them():
    """Under --shard params every micro-batch gathers, and reduces as the transpose of that."""
    inside = loops(built("params", 3, cssm="gated")[1].as_text())
    assert {"reduce_scatter", "all_gather"} <= {name for part in inside for name in counted(part)}


def test_a_sharded_optimizer_reduces_to_parts_and_gathers_the_parameters():
    """The one all-reduce is that of the gradient's norm."""
    for grad_accum in (1, 3):
        state, lowered = built("optimizer", grad_accum, cssm="hgru_bi", kernel_domain="spectral")
        n = parts(state.params)
        assert counted(lowered.as_text()) == {"reduce_scatter": n, "all_gather": n, "all_reduce": 1}
        assert not [part for part in loops(lowered.as_text()) if counted(part)]


def nbytes(tree):
    """Bytes on the first device."""
    return sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_memory_for_the_state_falls_to_an_eighth():
    """Of eight devices; padding is less than a number an array and device."""
    whole, optimizer, params = (built(shard, run=True)[0] for shard in ("none", "optimizer", "params"))
    arrays = len(jax.tree.leaves(whole.opt_state))
    padding = 4 * arrays + 8  # and the counts of steps, which are whole everywhere
    assert nbytes(whole.opt_state) / 8 <= nbytes(optimizer.opt_state) <= nbytes(whole.opt_state) / 8 + padding
    assert nbytes(optimizer.params) == nbytes(whole.params)
    assert nbytes(params.opt_state) == nbytes(optimizer.opt_state)
    assert nbytes(whole.params) / 8 <= nbytes(params.params) <= nbytes(whole.params) / 8 + padding


@pytest.mark.slow
def test_temporary_memory_falls_too():
    """Where parameters are more than activations. A CPU's compiler keeps what it has gathered, and the weights that a
    layer scale has multiplied; a GPU's frees it.
    """
    large = {"arch": "baseline", "depth": 3, "embed_dim": 128, "mlp_ratio": 4.0, "seq_len": None, "kernel_size": None}
    temporary = {}
    for shard in ("none", "optimizer", "params"):
        memory = built(shard, **large)[1].compile().memory_analysis()
        temporary[shard] = memory.temp_size_in_bytes
    assert temporary["params"] < 0.65 * temporary["none"]
    assert temporary["optimizer"] < 0.65 * temporary["none"]
