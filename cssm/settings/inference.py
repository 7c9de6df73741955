"""Settings of what is done with a trained model, and of where verbs that make files put them."""

import dataclasses
from functools import partial

from cssm.knobs import OF_A_RUN, knob

# What `--format` may be, by verb; the first is the default.
FORMATS = {"prepare": ("published", "array_record"), "export": ("safetensors", "stablehlo", "onnx")}
SPLIT_CHOICES = ("test", "val", "train", "all")

_trained = partial(knob, group="trained models", resume="fresh", saved=False)


@dataclasses.dataclass(frozen=True)
class InferenceSettings:
    """Which trained model, and what is wanted of it."""

    # fmt: off
    checkpoint: str | None = _trained(None, "the trained model: the folder of a run, one of its checkpoints, or an "
        "exported folder", verbs=OF_A_RUN, aliases=("model_path",), unset="none, one must be given")
    checkpoint_step: str = _trained("best", "which checkpoint of a run: best on the validation split (the newest where "
        "none was evaluated), latest, or the number of its step", verbs=OF_A_RUN)
    split: str = _trained("test", "what eval evaluates on; all: the three together", choices=SPLIT_CHOICES,
        verbs=("eval",))
    top_k: int | None = _trained(None, "classes that predict tells of each image, the likeliest first", bounds="[1,)",
        verbs=("predict",), unset="5, or all there are")
    explain: str | None = _trained(None, "folder for two pictures of each image: which pixels decide, and what each "
        "cell holds over time", verbs=("predict",), unset="no pictures")
    format: str | None = _trained(None, "prepare: as the published files, or array_record of tfds, for generated "
        "images; export: parameters, or a program that JAX runs without this one",
        choices=tuple(name for names in FORMATS.values() for name in names), verbs=tuple(FORMATS),
        unset="published; safetensors")
    output: str | None = _trained(None, "where bench, eval and export put their files, a folder; also prepare, of a "
        "folder of images; of predict, a .jsonl or .csv file; of compare, a page in HTML",
        verbs=("bench", "compare", "prepare", *OF_A_RUN), unset="bench: "
        "checkpoint_dir/TIME_bench_ARCH_CSSM; eval, export: in the folder of the run; predict: the screen; compare: "
        "no page")
    # fmt: on
