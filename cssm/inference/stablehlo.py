"""A model as one program with its parameters in it, which runs where JAX is, without this package.

It is lowered for several platforms at once and for any batch. Kernels and choices that depend on the machine are left
out: the recurrence runs step by step (scan reference), spectra are FFTs.
"""

from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import export as jax_export

from cssm import models
from cssm.config import KNOBS, UserError
from cssm.inference.weights import Trained
from cssm.step import normalise

PROGRAM = "model.stablehlo"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_PORTABLE = {"scan": "reference", "spectral_backend": "fft"}


def portable(trained: Trained) -> nn.Module:
    """The model, computed in the one way that every platform has."""
    settings = {name: value for name, value in _PORTABLE.items() if not KNOBS[name].unmet(trained.config)}
    return models.build(replace(trained.config, **settings), trained.num_classes)


def write_program(trained: Trained, path: Path) -> None:
    """Write what jax.export serializes: uint8 [b, *image_shape] -> float32 logits [b, classes], b any number from 1.

    UserError unless JAX runs on the CPU: elsewhere the model would bring that platform's kernels.
    """
    if jax.default_backend() != "cpu":
        raise UserError(
            f"--format stablehlo is lowered on a CPU, for all platforms, and JAX runs on {jax.default_backend()} here: "
            "set JAX_PLATFORMS=cpu, as the command line does"
        )
    model = portable(trained)
    variables = jax.tree.map(jnp.asarray, trained.variables)

    def logits(images: jax.Array) -> jax.Array:
        found = model.apply(variables, normalise(images, trained.config.pixel_statistics), train=False)
        assert isinstance(found, jax.Array)
        return found

    (batch,) = jax_export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((batch, *trained.image_shape), jnp.uint8)
    exported = jax_export.export(jax.jit(logits), platforms=PLATFORMS)(images)
    path.write_bytes(exported.serialize())
