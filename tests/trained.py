"""Runs that hold a checkpoint but were never trained: for tests of what is done with a trained model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from cssm import data, models
from cssm.checkpoint import Checkpoints
from cssm.config import Config
from cssm.resume import resume_record
from cssm.setup import data_record

TINY = {"embed_dim": 4, "depth": 1, "seq_len": 2, "kernel_size": 3, "image_size": 8, "batch_size": 8}
DIGITS = {"max_eval_examples": 21, **TINY}


def variables_of(config, num_classes, image_shape, seed=0):
    """Parameters at random, scaled such that images differ in their logits; no two runs are alike."""
    model = models.build(config, num_classes)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *image_shape)))
    rng = np.random.default_rng(seed)

    def drawn(path, leaf):
        x = rng.normal(size=leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            x = x + 1j * rng.normal(size=leaf.shape)
        name = path[-1].key
        if len(leaf.shape) > 1:
            x = 2 * x / np.sqrt(np.prod(leaf.shape[:-1]))
        else:
            x = 0.1 * x + (name in ("scale", "gamma", "var"))
        return np.asarray(x, leaf.dtype)

    made = jax.tree_util.tree_map_with_path(drawn, dict(variables))
    return {"batch_stats": {}, **made}


def make_run(folder, steps=(3,), metrics=None, data_facts=None, **settings) -> Path:
    """A run's folder with a checkpoint of each step, its parameters drawn with the step as seed; metrics: by step."""
    config = Config(**{**DIGITS, "cache_dir": str(folder) + "-cache", **settings})
    outline = data.outline(config)
    facts = data_record(outline) if data_facts is None else data_facts
    with Checkpoints(Path(folder) / "checkpoints") as checkpoints:
        for step in steps:
            made = variables_of(config, outline.num_classes, outline.image_shape, step)
            averaged = variables_of(config, outline.num_classes, outline.image_shape, 100 + step)["params"]
            state = made | {"ema_params": averaged if config.ema_decay else {}, "step": np.int32(step)}
            state["opt_state"] = {"mu": jax.tree.map(np.zeros_like, made["params"])}
            best = {"step": step, "loss": 0.5, "accuracy": 0.75, "count": 20}
            meta = {"step": step, "best": best, "config": resume_record(config, 8, 1), "data": facts}
            checkpoints.save(step, state, meta, (metrics or {}).get(step))
    return Path(folder)
