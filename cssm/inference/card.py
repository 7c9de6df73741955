"""The model card of an exported folder, in Markdown: what the model is, what it takes, how to use it."""

from typing import Any

import jax

from cssm.inference.weights import Trained

MOST_CLASSES = 50
LOAD = """```python
from cssm import load_trained

model = load_trained("FOLDER")  # this folder
logits = model.logits(images)  # uint8 {shape} -> float32 [N, {classes}]
```"""
RUN = """```python
from pathlib import Path

import numpy as np
from jax import export

model = export.deserialize(bytearray(Path("FOLDER/model.stablehlo").read_bytes()))  # FOLDER: this one
images = np.zeros({sample}, np.uint8)  # yours; any number of them
logits = np.asarray(model.call(images))  # float32 [N, {classes}]
```"""
LAYOUT = """## Files

- `model.safetensors`: parameters (`params/...`) and running statistics (`batch_stats/...`) by path, float32. A complex
  array of shape [...] is stored as float32 [..., 2], its real and imaginary parts; the entry `complex` of the file's
  metadata is a JSON list of the names of such arrays.
- `config.yaml`: the settings it was trained with.
- `model.json`: classes in the order of the logits, shape of the images, step, SHA-256 of the two other files."""
PROGRAM_LAYOUT = """## Files

- `model.stablehlo`: the program with its parameters, as jax.export serializes it, for CPU, CUDA, ROCm and TPU. It takes
  any number of images; pixels are normalised inside.
- `model.json`: classes in the order of the logits, shape of the images, step, settings."""


def card(trained: Trained, settings: dict[str, Any], program: bool) -> str:
    """The text; program: of the folder with the program, otherwise of that with the parameters."""
    config = trained.config
    shape = ", ".join(["N", *map(str, trained.image_shape)])
    sample = f"({', '.join(['8', *map(str, trained.image_shape)])})"
    use = (RUN if program else LOAD).format(shape=f"[{shape}]", sample=sample, classes=trained.num_classes)
    names = trained.class_names
    listed = ", ".join(names[:MOST_CLASSES]) + (", ..." if len(names) > MOST_CLASSES else "")
    what = " ".join(filter(None, (config.arch, config.cell)))
    best = trained.best
    scored = []
    if {"step", "accuracy", "count"} <= best.keys():
        scored = [
            f"- best on the validation split: accuracy {best['accuracy']:.4f} of {best['count']}, step {best['step']}"
        ]
    command = ["", "On the command line: `python main.py predict --checkpoint FOLDER --input photos`."]
    return "\n".join(
        [
            f"# {what}, trained on {config.dataset}",
            "",
            f"An image classifier of the program cssm: trunk {config.arch}, "
            + (f"cell {config.cell}" if config.cell else "attention")
            + f", {_count(trained):,} parameters.",
            "",
            f"- images: uint8 [{shape}], pixels from 0 to 255, channels last",
            f"- {trained.num_classes} classes: {listed}",
            f"- saved at step {trained.step:,}{', averaged parameters' if trained.averaged else ''}",
            *scored,
            "",
            "## Use",
            "",
            use,
            *([] if program else command),
            "",
            PROGRAM_LAYOUT if program else LAYOUT,
            "",
            "## Settings",
            "",
            *(f"    {name}: {value}" for name, value in settings.items() if value is not None),
            "",
        ]
    )


def _count(trained: Trained) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(trained.variables["params"]))
