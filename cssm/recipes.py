"""Values that fit together: what a setting left unset becomes, by architecture, preset and data set; and how the
learning rate follows the batch.

A row may hold settings that do not apply to every architecture that uses it; those are left out.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cssm.config import Config

Row = dict[str, Any]

# The states of cells that can read out some of them
STATES = {"hgru_bi": "xyz", "hgru": "xy", "opponent": "xy", "transformer": "qka"}

# Factored gates and a code of position learn Pathfinder too, but later, and not from every seed.
_SIMPLE: Row = {"depth": 1, "seq_len": 8, "pos_embed": "none", "norm_type": "layer", "num_heads": 4}
_SIMPLE_DIGITS = _SIMPLE | {
    "embed_dim": 32,
    "kernel_size": 7,
    "gate_type": "factored",
    "batch_size": 32,
    "lr": 3e-3,
    "epochs": 15,
}
_SIMPLE_PATHFINDER = _SIMPLE | {
    "embed_dim": 32,
    "kernel_size": 11,
    "gate_type": "dense",
    "batch_size": 32,
    "lr": 2e-3,
    "max_steps": 2000,
}

# Photographs, of 160 or 224 pixels
_SIMPLE_PHOTOS = _SIMPLE_DIGITS | {"kernel_size": 11, "batch_size": 32, "lr": 2e-3, "epochs": 30}

_TRUNK: Row = {"pos_embed": "learnable", "norm_type": "layer", "gate_type": "factored", "kernel_size": 11}
_NANO = _TRUNK | {
    "embed_dim": 32,
    "depth": 2,
    "mlp_ratio": 2.0,
    "num_heads": 4,
    "stem_stride": 2,
    "layer_scale_init": 1.0,
    "seq_len": 4,
    "batch_size": 32,
    "lr": 4e-3,
}
_LARGE = _TRUNK | {
    "depth": 12,
    "mlp_ratio": 4.0,
    "stem_stride": 4,
    "layer_scale_init": 1e-6,
    "seq_len": 8,
    "batch_size": 32,
    "lr": 1e-3,
    "epochs": 100,
}

# The convolutions of these trunks tell positions.
_CONVNEXT_NANO = _NANO | {"pos_embed": "none", "dims": "32,64", "depths": "1,1", "kernel_size": 7}
_CONVNEXT_TINY = _LARGE | {"pos_embed": "none", "kernel_size": 7, "num_heads": 3}
_SHVIT: Row = {"pos_embed": "none", "norm_type": "batch", "kernel_size": 3}
_SHVIT_NANO = _NANO | _SHVIT | {"dims": "16,32,64", "depths": "1,1,1"}


_SHVIT_LARGE = _LARGE | _SHVIT | {"kernel_size": 5, "num_heads": 4}


# Kinds of data that have recipes of their own, and which --dataset is of which kind
KINDS = ("digits", "pathfinder", "photos")
KIND = {"digits": "digits", "npz": "digits", **dict.fromkeys(("pathfinder", "cabc", "pathtracker"), "pathfinder")}
_FOLDERS = ("folder", "imagenet", "imagenette")
KIND |= dict.fromkeys((*_FOLDERS, "tfds:NAME"), "photos")


def _staged(row: Row, dims: str, depths: str) -> dict[str, Row]:
    """A published size, by kind; four stages need more than the digits' 16 pixels."""
    row = row | {"dims": dims, "depths": depths}
    return dict.fromkeys(KINDS, row) | {"digits": row | {"image_size": 32}}


# --arch simple, by kind
SIMPLE: dict[str, Row] = {"digits": _SIMPLE_DIGITS, "pathfinder": _SIMPLE_PATHFINDER, "photos": _SIMPLE_PHOTOS}

# The sizes of vit and baseline, by --preset, then by kind
_VIT: dict[str, dict[str, Row]] = {
    "nano": {
        "digits": _NANO | {"kernel_size": 7, "epochs": 12},
        "pathfinder": _NANO | {"epochs": 20},
        "photos": _NANO | {"stem_stride": 4, "epochs": 30},
    },
    "tiny": dict.fromkeys(KINDS, _LARGE | {"embed_dim": 192, "num_heads": 3}),
    "small": dict.fromkeys(KINDS, _LARGE | {"embed_dim": 384, "num_heads": 6}),
    "base": dict.fromkeys(KINDS, _LARGE | {"embed_dim": 768, "num_heads": 12}),
}

# By --arch, then --preset, then kind
PRESETS: dict[str, dict[str, dict[str, Row]]] = {
    "simple": {"nano": SIMPLE},
    "vit": _VIT,
    "baseline": _VIT,
    "convnext": {
        "nano": {
            "digits": _CONVNEXT_NANO | {"kernel_size": 3, "epochs": 16},
            "pathfinder": _CONVNEXT_NANO | {"epochs": 20},
            "photos": _CONVNEXT_NANO | {"stem_stride": 4, "epochs": 30},
        },
        "tiny": _staged(_CONVNEXT_TINY, "96,192,384,768", "1,1,1,1"),
    },
    "shvit": {
        "nano": {
            "digits": _SHVIT_NANO | {"stem_stride": 1, "epochs": 12},
            "pathfinder": _SHVIT_NANO | {"epochs": 20},
            "photos": _SHVIT_NANO | {"stem_stride": 4, "epochs": 30},
        },
        "s1": _staged(_SHVIT_LARGE, "64,128,256,384", "1,2,2,1"),
        "s2": _staged(_SHVIT_LARGE, "96,192,320,448", "1,2,3,1"),
        "s3": _staged(_SHVIT_LARGE, "112,224,352,480", "1,2,4,1"),
        "s4": _staged(_SHVIT_LARGE, "128,256,384,512", "1,2,4,1"),
    },
}
SIZES = tuple(dict.fromkeys(preset for sizes in PRESETS.values() for preset in sizes))

# By --optimizer. lr_factor times the lr of the rows above, which are for adamw; chosen on the validation split of the
# digits, simple and vit nano, among factors of about 3 apart.
OPTIMIZERS: dict[str, Row] = {
    "adamw": {"lr_factor": 1.0, "beta1": 0.9, "beta2": 0.999},
    "sgd": {"lr_factor": 30.0, "momentum": 0.9},
    "lion": {"lr_factor": 0.3, "beta1": 0.9, "beta2": 0.99},
    "lamb": {"lr_factor": 3.0, "beta1": 0.9, "beta2": 0.999},
    "muon": {"lr_factor": 1.0, "momentum": 0.95, "beta1": 0.9, "beta2": 0.999},
}

# Side of the images in pixels, by --dataset, then (generated Pathfinder) by --pathfinder_difficulty, and of what else
# is generated. What is missing has the size of its files.
SIZES_PX = {"digits": 16, "folder": 224, "imagenet": 224, "imagenette": 160}
PATHFINDER_SIZES: dict[str, int] = {"easy": 32, "6": 64, "9": 64, "14": 128, "20": 128, "25": 128}
GENERATED_PX = {"cabc": 128, "pathtracker": 32}

# Mean and standard deviation of each channel, of pixels from 0 to 1, by --dataset; others are taken from -1 to 1. Those
# of ImageNet as published with its networks.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PIXELS = {"imagenet": _IMAGENET, "imagenette": _IMAGENET}


def preset_row(config: "Config") -> Row:
    """The sizes and the schedule of a configuration's preset for its kind of data."""
    sizes = PRESETS[config.arch]
    preset = sizes.get(config.preset, sizes["nano"])  # one of another trunk is refused by the rules
    return preset[KIND[config.source]]


def recipe(config: "Config") -> Row:
    """Values for what a configuration leaves open; a length, a total batch or a size that is given stands alone."""
    pathfinder = PATHFINDER_SIZES[config.pathfinder_difficulty]
    generated = {} if config.data_dir else {"pathfinder": pathfinder, **GENERATED_PX}
    side = {**SIZES_PX, **generated}.get(config.dataset)
    values = {
        "image_size": side,
        **preset_row(config),
        **OPTIMIZERS[config.optimizer],
        "num_workers": min(8, os.cpu_count() or 1),
        "cache_dir": str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cssm"),
    }
    if side is None:
        values.pop("image_size")  # the files tell
    if config.dataset == "pathtracker":
        values.pop("seq_len", None)  # every frame is a step: what is left out may hide where a dot begins or ends
    if config.dataset in _FOLDERS:
        values |= {"crop_scale": 0.08, "flip": True}
    elif config.dataset == "npz":
        values["flip"] = False
    values["base_batch_size"] = values["batch_size"]
    values["lr"] = round(values["lr"] * values.pop("lr_factor"), 10)  # 0.009, not 0.009000000000000001
    given = {"epochs", "max_steps"} if config.epochs or config.max_steps else set()
    given |= {"batch_size"} if config.global_batch_size or config.batch_sizes or config.find_batch_size else set()
    given |= {"embed_dim", "depth", "dims"} if config.target_params else set()  # cssm.size finds what is left open
    return {name: value for name, value in values.items() if name not in given}


def scaled_lr(config: "Config", effective_batch: int) -> tuple[float, str | None]:
    """The peak learning rate of a run whose steps take `effective_batch` images, and what is to be said about it.

    With --lr_scale it is lr x ratio or lr x sqrt(ratio), ratio = effective_batch / base_batch_size; otherwise lr, with
    a hint where that is the recipe's own and the batch is larger than the recipe's. None: nothing to say.
    """
    lr, values = config.lr, recipe(config)
    assert lr is not None, "a complete configuration has one"
    if config.lr_scale == "none":
        base = values["base_batch_size"]
        if effective_batch <= base or lr != values["lr"]:
            return lr, None
        linear, root = lr * effective_batch / base, lr * math.sqrt(effective_batch / base)
        return lr, (
            f"the learning rate {lr:.3g} is meant for an effective batch of {base}, here a step takes "
            f"{effective_batch}: --lr_scale linear makes it {linear:.3g}, --lr_scale sqrt {root:.3g}"
        )
    base = config.base_batch_size
    assert base is not None, "a complete configuration has one where it applies"
    ratio = effective_batch / base
    factor = ratio if config.lr_scale == "linear" else math.sqrt(ratio)
    if factor == 1:
        return lr, None
    note = (
        f"--lr_scale {config.lr_scale}: the learning rate is {lr * factor:.3g}, {lr:.3g} x {factor:.3g}, "
        f"as a step takes {effective_batch} images instead of {base}"
    )
    if factor > 1 and 0 in (config.warmup_steps, config.warmup_epochs):
        given = "warmup_steps" if config.warmup_steps == 0 else "warmup_epochs"
        note += f"; without a warm-up such a rate often diverges: leave --{given} 0 out, or type --warmup_epochs 2"
    return lr * factor, note
