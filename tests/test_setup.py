"""What a run is put together from: how long it is, how it warms up, and the facts it states."""

import math
from contextlib import nullcontext
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm.config import UserError, resolve
from cssm.models.vit import MLP
from cssm.report import Reporter
from cssm.runs import Run
from cssm.setup import data_record, describe, most_bytes, set_up
from parallel import devices as par

# 40 examples in batches of 8: 5 steps an epoch
TINY = {"cssm": "gated", "embed_dim": 4, "image_size": 8, "kernel_size": 3, "seq_len": 2, "lr": 0.5}
TINY |= {"max_train_examples": 40, "max_eval_examples": 21, "global_batch_size": 8, "schedule": "constant"}


def made(tmp_path, devices=2, **settings):
    config = resolve({**TINY, **settings}, {})
    with Reporter(None, quiet=True) as report:
        return set_up(Run(tmp_path / "run", config, resumed=False), jax.devices()[:devices], report)


@pytest.mark.parametrize(
    "limits,steps",
    [
        ({"epochs": 3}, 15),
        ({"max_steps": 7}, 7),
        ({"epochs": 3, "max_steps": 7}, 7),
        ({"epochs": 1, "max_steps": 7}, 5),
        ({"epochs": 3, "global_batch_size": 16}, 6),
    ],
)
def test_whichever_limit_comes_first_ends_the_run(limits, steps, tmp_path):
    assert made(tmp_path, **limits).total_steps == steps


@pytest.mark.parametrize(
    "warmup,steps",
    [
        ({"warmup_steps": 4}, 4),
        ({"warmup_steps": 0}, 0),
        ({"warmup_epochs": 2.0}, 10),
        ({"warmup_epochs": 0.3}, 2),
        ({}, 3),
    ],
)
def test_warm_up_is_in_steps_or_epochs_or_a_twentieth(warmup, steps, tmp_path):
    """The rate rises by equal steps and reaches lr with the last step of the warm-up."""
    setup = made(tmp_path, epochs=12, **warmup)
    assert setup.total_steps == 60
    rates = [float(setup.schedule(step)) for step in range(15)]
    want = [0.5 * min(1.0, step / max(steps, 1)) for step in range(1, 16)]
    np.testing.assert_allclose(rates, want, rtol=1e-6)


def test_the_kernel_is_refused_where_there_is_no_gpu(tmp_path):
    with pytest.raises(UserError, match=r"--scan fused needs an NVIDIA GPU .* runs on cpu: leave it out"):
        made(tmp_path, max_steps=1, scan="fused")


def forward(setup, watch=None):
    """The forward pass of the model that takes the steps, as text."""
    variables = {"params": setup.layout.params}
    with nn.intercept_methods(watch) if watch else nullcontext():
        return str(jax.make_jaxpr(setup.step_model.apply)(variables, jnp.zeros((1, *setup.outline.image_shape))))


def runs_blocks_again(setup):
    """Beside the steps of its scans."""
    return forward(setup).count("remat2[") > forward(replace(setup, step_model=setup.model)).count("remat2[")


def test_remat_wraps_the_blocks(tmp_path):
    assert runs_blocks_again(made(tmp_path, arch="vit", remat=True, max_steps=1))
    assert not runs_blocks_again(made(tmp_path, arch="vit", max_steps=1))


@pytest.mark.slow
def test_a_step_that_would_not_fit_is_computed_with_remat(tmp_path, monkeypatch, capsys):
    """First what is cheap again, and everything where that does not fit either; what is typed stays."""
    small = {"arch": "vit", "max_steps": 1}
    need = lambda **settings: (setup := made(tmp_path, **small, **settings)).costs(setup.layout)["total_bytes"]
    plain, costly = need(), need(remat=True, remat_keep="costly")
    assert need(remat=True) < costly < plain
    monkeypatch.setattr("cssm.setup.most_bytes", lambda setup, layout: 100 * plain)
    for limit, again in ((2 * plain, plain), (1.3 * costly, costly), (costly, need(remat=True))):
        monkeypatch.setattr(par, "memory_limit", lambda devices, limit=limit: limit)
        assert need() == again
    assert need(remat_keep="costly") == costly
    assert need(remat=False) == plain


@pytest.mark.parametrize(
    "model", [{"cssm": "standard"}, {"arch": "vit", "cssm": "gdn"}, {"cssm": "gated", "seq_len": 8}]
)
def test_the_bound_on_memory_is_above_the_estimate(tmp_path, model):
    """By far: whoever is below it need not be traced."""
    setup = made(tmp_path, **model, max_steps=1)
    layout = setup.layout
    assert most_bytes(setup, layout) > 8 * setup.costs(layout)["total_bytes"]


@pytest.mark.parametrize("remat", [False, True])
def test_blocks_that_are_alike_are_traced_once(tmp_path, remat):
    """Of six the first, which may see a still image, the last, which returns one step, and one for all between them."""
    setup, traced = made(tmp_path, arch="vit", depth=6, remat=remat, max_steps=1), []

    def watch(call, args, kwargs, context):
        if context.method_name == "__call__" and isinstance(context.module, MLP):
            traced.append(context.module.name)
        return call(*args, **kwargs)

    forward(setup, watch)
    assert len(traced) == 3


def test_devices_left_unused_are_told(tmp_path, capsys):
    made(tmp_path, max_steps=1, devices=4)
    assert f"note: {len(jax.devices()) - 4} visible devices are left unused" in capsys.readouterr().out
    made(tmp_path, max_steps=1, devices=8)
    assert "unused" not in capsys.readouterr().out


def test_the_facts_add_up(tmp_path):
    setup = made(tmp_path, epochs=2, batch_size=2, global_batch_size=8)
    state = jax.jit(setup.initial_state)(0)
    facts = describe(setup, setup.layout)
    assert (facts["devices"], facts["batch_size"], facts["grad_accum"], facts["effective_batch"]) == (2, 2, 2, 8)
    assert len(facts["device_table"]) == 2
    assert facts["num_params"] == sum(leaf.size for leaf in jax.tree.leaves(state.params)) > 0
    assert facts["image_shape"] == [8, 8, 1]
    assert [facts[f"{split}_examples"] for split in ("train", "val", "test")] == [40, 21, 21]
    assert facts["total_steps"] == 2 * facts["steps_per_epoch"] == 10
    assert facts["run_dir"] == str(tmp_path / "run")
    assert facts["config"]["embed_dim"] == 4 and "patch_size" not in facts["config"]
    kernel = math.prod(state.params["cell_0"]["in_proj"]["kernel"].shape)
    assert facts["flops_per_image"] > 2 * kernel * 4 * 4, "the input projection alone, on a map of 4 x 4"


def test_twice_the_time_steps_cost_more_of_the_same_parameters(tmp_path):
    few, many = (made(tmp_path, seq_len=steps) for steps in (2, 4))
    few, many = (describe(setup, setup.layout) for setup in (few, many))
    assert few["num_params"] == many["num_params"]
    assert 1.1 < many["flops_per_image"] / few["flops_per_image"] < 2.0


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    made(tmp_path, global_batch_size=40)
    with pytest.raises(UserError, match=r"40 examples and one step takes 42"):
        made(tmp_path, global_batch_size=42)


def test_the_size_the_classes_and_the_notes_are_those_of_the_files(tmp_path, capsys):
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 10, 10, 2), np.uint8)
    np.savez(tmp_path / "a.npz", clips=images, labels=np.arange(60) % 2, classes=["no", "yes"])
    files = {"dataset": "npz", "data_dir": str(tmp_path / "a.npz"), "image_size": None, "max_eval_examples": None}
    setup = made(tmp_path, **files)
    assert setup.config.image_size == 10
    facts = describe(setup, setup.layout)
    assert facts["classes"] == ["no", "yes"] and facts["image_shape"] == [3, 10, 10, 2]
    assert facts["config"]["image_size"] == 10 and "note: the data set has only train" in capsys.readouterr().out
    record = {"classes": ["no", "yes"], "train_examples": 40, "num_classes": 2, "image_shape": [3, 10, 10, 2]}
    assert data_record(setup.outline) == record


def test_a_few_examples_take_the_place_of_every_split(tmp_path, capsys):
    """Two batches of 8 are an epoch, and what is evaluated on; the same ones after a resume, as the seed is."""
    setup = made(tmp_path, overfit_batches=2, quiet=False)
    assert setup.epoch_steps == 2
    images = [source.gather(np.arange(16))[0] for source in setup.sources.values()]
    assert {len(source) for source in setup.sources.values()} == {16} and len(images) == 3
    for other in images[1:]:
        np.testing.assert_array_equal(other, images[0])
    assert "evaluated on 16 examples of the training set alone" in capsys.readouterr().out
    with pytest.raises(UserError, match="--overfit_batches 6 are 48 examples, the training set has 40: type at most 5"):
        made(tmp_path, overfit_batches=6)
