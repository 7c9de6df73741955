"""Proof on the user's own machine: training on all devices takes the steps that training on one takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cssm.config import Config, resolve
from cssm.data.pipeline import train_batches
from cssm.engine import fresh_state
from cssm.report import Reporter
from cssm.runs import Run
from cssm.setup import set_up
from cssm.step import Sums, make_backward, make_finish
from parallel import devices as par
from parallel import sharded

STEPS = 3
IMAGES_PER_DEVICE = 2
TOLERANCE = {"cpu": 1e-5}
OTHER_TOLERANCE = 1e-4
"""Of GPUs and TPUs: their convolutions and transforms add up in another order for another batch size."""
PRECISION = "highest"
MODELS = {
    "vit hgru_bi": {"kernel_domain": "spatial"},
    "vit hgru_bi, complex kernels": {"kernel_domain": "spectral"},
}
SMALL = {"arch": "vit", "cssm": "hgru_bi", "embed_dim": 16, "depth": 1, "seq_len": 2, "image_size": 8, "kernel_size": 3}
# Without clipping, which would hide a sum in the place of a mean.
RECIPE = {"optimizer": "sgd", "lr": 0.01, "schedule": "constant", "warmup_steps": 0, "grad_clip": 0.0}


def compare(config: Config, devices: Sequence[jax.Device], report: Reporter) -> dict[str, Any]:
    """Train small models on one device and on `devices` with the same global batches, as config.shard and
    config.sync_backend say, and compare.

    Returns {models: [{model, parameters, loss, gradient, ok}], steps, devices, effective_batch, optimizer,
    matmul_precision, shard, sync_backend, tolerance}. parameters: the largest difference of any element, on any device,
    over the largest magnitude in its array; loss and gradient (its norm): the largest relative difference of a step.
    With several processes all must call it; each then compares with one device of its own.
    """
    images = IMAGES_PER_DEVICE * len(devices)
    tolerance = TOLERANCE.get(devices[0].platform, OTHER_TOLERANCE)
    rows = []
    with report.busy(f"training on 1 device and on {len(devices)}") as count:
        for name, model in MODELS.items():
            count(len(rows), len(MODELS))
            common = {**SMALL, **model, **RECIPE, "platform": config.platform, "max_steps": STEPS, "num_workers": 0}
            common |= {"global_batch_size": images, "cache_dir": config.cache_dir}
            strategy = {"shard": config.shard, "sync_backend": config.sync_backend}
            one = _train(resolve(common, {}), par.local(devices)[:1])
            every = _train(resolve(common | strategy, {}), list(devices))
            row = {key: _largest_difference(every[key], one[key]) for key in one}
            rows.append({"model": name, **row, "ok": all(value <= tolerance for value in row.values())})
    return {
        "models": rows,
        "steps": STEPS,
        "devices": len(devices),
        "effective_batch": images,
        "optimizer": "SGD (momentum 0.9, lr 0.01)",
        "matmul_precision": PRECISION,
        "shard": config.shard,
        "sync_backend": config.sync_backend,
        "tolerance": tolerance,
    }


def _train(config: Config, devices: list[jax.Device]) -> dict[str, list[np.ndarray]]:
    """STEPS steps as `training` takes them: {parameters: arrays [D, ...] of this process's devices, or [1, ...]; loss
    and gradient: one array [STEPS]}.
    """
    with Reporter(None, primary=False) as silent, jax.default_matmul_precision(PRECISION):
        setup = set_up(Run(Path(), config, resumed=False), devices, silent)
        backward = make_backward(setup.step_model, setup.strategy, config, setup.batching.grad_accum)
        step = setup.strategy.program(backward, make_finish(setup.tx, setup.strategy, config), devices)
        state = fresh_state(setup)
        no_sums = par.replicate(Sums.zeros(), devices)
        whole = len(par.local(devices)) == len(devices)
        place = {} if whole else {"process_index": jax.process_index(), "process_count": jax.process_count()}
        host = train_batches(
            setup.sources["train"], setup.batching.effective, config.seed, 1, STEPS, workers=0, **place
        )
        losses, norms = [], []
        for batch in par.prefetch_to_device(host, devices, 0):
            state, sums = step(state, no_sums, batch)
            loss, count = par.sum_over_devices((sums.loss, sums.count), devices)
            losses.append(loss / count)
            norms.append(par.unreplicate(sums.grad_norm))
    split = isinstance(setup.strategy, sharded.ShardedParams)
    # Where each device has all parameters, those of every device are compared.
    params = sharded.fetch(state.params, devices) if split else jax.device_get(state.params)
    leaves = [leaf[np.newaxis] if split else leaf for leaf in jax.tree.leaves(params)]
    return {"parameters": leaves, "loss": [np.array(losses)], "gradient": [np.array(norms)]}


def _largest_difference(given: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Over all arrays: the largest |given - expected| over the largest |expected| of its array; nan counts as inf."""
    worst = 0.0
    for a, b in zip(given, expected, strict=True):
        off = float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), np.finfo(np.float32).tiny))
        worst = max(worst, off if np.isfinite(off) else np.inf)
    return worst
