"""Every way of running in parallel takes the same three steps as one device.

SGD with momentum on one sequence of global batches, float32, parameters to 1e-5; the model with layer norm, and the one
with complex parameters. Each row goes through a whole run and is compared by its checkpoint.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cssm.engine
import parallel.sync
from cssm import train
from cssm.checkpoint import step_folder
from cssm.config import Config
from parallel.devices import spmd
from parallel.sync import Replicated

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "arch": "vit",
    "embed_dim": 4,
    "depth": 1,
    "mlp_ratio": 1.0,
    "image_size": 8,
    "kernel_size": 3,
    "seq_len": 2,
    "max_train_examples": 72,
    "max_eval_examples": 10,
    "global_batch_size": 24,
    "max_steps": 3,
    "optimizer": "sgd",
    "lr": 0.01,
    "warmup_steps": 0,
    "grad_clip": 0.0,  # it would hide a gradient of another length
    "quiet": True,
}
MODELS = {"real": {"cssm": "gated"}, "complex": {"cssm": "hgru_bi", "kernel_domain": "spectral"}}
BATCH_NORM = {"norm_type": "batch"}
ROWS = {
    "2 devices": {"num_devices": 2},
    "3 devices": {"num_devices": 3},
    "4 devices": {"num_devices": 4},
    "8 devices": {"num_devices": 8},
    "accumulation 4": {"num_devices": 2, "grad_accum": 4},
    "backend cpu": {"sync_backend": "cpu"},
    "shard optimizer": {"shard": "optimizer"},
    "shard params": {"shard": "params"},
    "shard params, accumulation 2, remat": {"shard": "params", "num_devices": 4, "grad_accum": 2, "remat": True},
    "sync_bn": {"sync_bn": True, **BATCH_NORM},
    "masks": {"num_devices": 8},
    "2 processes x 4 devices": {"nproc_per_node": 2},
    "2 processes x 4 devices, shard optimizer": {"nproc_per_node": 2, "shard": "optimizer"},
    "2 processes x 4 devices, shard params": {"nproc_per_node": 2, "shard": "params"},
    "4 processes x 1": {"nproc_per_node": 4},
}
DEVICES_EACH = {2: 4, 4: 1}
# The complex model is the harder one; of the rest the fast tests see what differs most.
FAST = {("complex", "8 devices"), ("complex", "backend cpu")}
TABLE = [
    pytest.param(model, row, marks=[] if (model, row) in FAST else pytest.mark.slow) for row in ROWS for model in MODELS
]


def masked(batches):
    """The same batches with about a third of the examples left out, unequally by device."""
    for batch in batches:
        keep = np.resize([1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1], len(batch["label"])) * (batch["label"] != 3)
        yield {**batch, "mask": keep.astype(np.float32)}


def run(root, name, masks=False, **settings):
    """Parameters and statistics after three steps, by path."""
    settings = {**TINY, "checkpoint_dir": str(root), "run_name": name, **settings}
    if count := settings.get("nproc_per_node"):
        environ = {
            **os.environ,
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES_EACH[count]}",
        }
        flags = [f"--{key}={value}" if value is not True else f"--{key}" for key, value in settings.items()]
        command = [sys.executable, str(ROOT / "main.py"), *flags]
        result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)
        assert result.returncode == 0, result.stderr
        assert f"Running on {count * DEVICES_EACH[count]} devices" in result.stdout
    else:
        with pytest.MonkeyPatch.context() as patch:
            if masks:
                batches = cssm.engine.train_batches
                patch.setattr(cssm.engine, "train_batches", lambda *args, **kw: masked(batches(*args, **kw)))
            train(Config(**settings))
    folder = root / name / "checkpoints" / "3"
    with step_folder.open_checkpointer() as checkpointer:
        arrays = step_folder.read_arrays(checkpointer, folder, step_folder.read_record(folder)["arrays"])
    return {path: leaf for path, leaf in arrays.items() if path.startswith(("params/", "batch_stats/"))}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """(model, masks, batch norm) -> what one device makes of it, once."""
    root = tmp_path_factory.mktemp("one")

    @functools.cache
    def of(model, masks, batch_norm):
        norm = BATCH_NORM if batch_norm else {}
        return run(root, f"{model}{masks}{batch_norm}", masks, num_devices=1, **MODELS[model], **norm)

    return of


@pytest.fixture
def check(one_device, tmp_path):
    """Run a row for a model; AssertionError unless it equals the run on one device."""

    def of(model, row):
        settings, masks = ROWS[row], row == "masks"
        want = one_device(model, masks, "norm_type" in settings)
        got = run(tmp_path, "run", masks, **MODELS[model], **settings)
        assert got.keys() == want.keys()
        assert (model == "complex") == any(np.iscomplexobj(leaf) for leaf in want.values())
        for path, leaf in want.items():
            np.testing.assert_allclose(got[path], leaf, rtol=1e-5, atol=1e-5, err_msg=path)

    return of


@pytest.mark.parametrize("model,row", TABLE)
def test_a_way_of_running_in_parallel_equals_one_device(model, row, check):
    check(model, row)


STAGES = {"cssm": "gated", "embed_dim": None, "depth": None, "stem_stride": 2, "depths": "1,1"}
TRUNKS = {
    "convnext": {**STAGES, "arch": "convnext", "convnext_block": "hybrid", "dims": "4,6"},
    # Each device alone would normalise with the statistics of its three images.
    "shvit": {**STAGES, "arch": "shvit", "dims": "4,6,8", "depths": "1,1,1", "stem_stride": 1, "sync_bn": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("trunk", TRUNKS)
def test_a_trunk_of_stages_with_split_parameters_equals_one_device(trunk, tmp_path):
    want = run(tmp_path, "one", num_devices=1, **TRUNKS[trunk])
    got = run(tmp_path, "split", shard="params", **TRUNKS[trunk])
    assert got.keys() == want.keys()
    assert (trunk == "shvit") == any(path.startswith("batch_stats/") for path in want)
    for path, leaf in want.items():
        np.testing.assert_allclose(got[path], leaf, rtol=1e-5, atol=1e-5, err_msg=path)


def no_mean(patch):
    patch.setattr(parallel.sync, "pmean_complex_safe", lambda tree: tree)


def summed_accumulation(patch):
    """What a step does that forgets to divide by the number of micro-batches."""
    reduce = Replicated.reduce
    patch.setattr(Replicated, "reduce", lambda self, grads: jax.tree.map(lambda g: 4 * g, reduce(self, grads)))


def no_conjugate(patch):
    patch.setattr(parallel.sync, "conjugate", lambda tree: tree)


def mean_of_means(patch):
    """Each device's mean has the same weight, however many examples it saw."""

    def program(self, backward, finish, devices):
        def step(state, sums, batch):
            grads, shared, own = backward(state, batch)
            share = jnp.maximum(shared["share"], 1e-9)
            grads = self.reduce(jax.tree.map(lambda g: g / share, grads))
            return finish(state, sums, grads, {**self.mean(shared), "share": jnp.ones(())}, own)

        return spmd(step, devices, donate_argnums=0)

    patch.setattr(Replicated, "program", program)


@pytest.mark.parametrize(
    "mutation,model,row",
    [
        pytest.param(no_mean, "complex", "8 devices", marks=pytest.mark.slow),
        pytest.param(mean_of_means, "real", "masks", marks=pytest.mark.slow),
        pytest.param(summed_accumulation, "complex", "accumulation 4", marks=pytest.mark.slow),
        (no_conjugate, "complex", "8 devices"),
    ],
)
def test_a_mistake_breaks_the_parity(mutation, model, row, check, one_device, monkeypatch):
    one_device(model, row == "masks", False)  # what is right is made first
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(model, row)
