"""What settings must hold together, checked when a Config is made; what is allowed but worth a warning.

With --target_params the width and the depth may be open; what depends on them is checked once they are found.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cssm.knobs import Knob, UserError, multiple
from cssm.recipes import OPTIMIZERS, STATES

if TYPE_CHECKING:
    from cssm.config import Config

# Optimizers that do not treat every element by itself, but norms of arrays, or matrices.
WHOLE = ("lamb", "muon")

# Cells whose transition lengthens no state, gdn as long as its kernels are bounded (docs/math.md).
CONTRACTIONS = ("gated", "gdn", "no_gate", "no_fft", "conv_ssm", "standard")

# Choices that depend on the architecture; an architecture that is not named has them all.
_BY_ARCH = {
    "stem_mode": {"simple": ("conv", "pathtracker"), "vit": ("conv", "patch"), "baseline": ("conv", "patch")},
    "pos_embed": {"baseline": ("none", "learnable")},
}


def check(config: "Config", knobs: Mapping[str, Knob]) -> None:
    """Raise UserError for settings that do not apply or do not fit together."""
    for name, knob in knobs.items():
        value, unmet = getattr(config, name), knob.unmet(config)
        if unmet and value != knob.default:
            cause, values = unmet
            given = f"--{'no_' if value is False else ''}{name}" if knob.type is bool else f"--{name} {value}"
            needed = f"it needs --{cause} {' or '.join(values)}"
            raise UserError(f"{given} does not apply with --{cause} {getattr(config, cause)}: {needed}")
    for name, choices in _BY_ARCH.items():
        value, allowed = getattr(config, name), choices.get(config.arch)
        if allowed and value not in allowed:
            raise UserError(f"--{name} {value} is not for --arch {config.arch}: type {' or '.join(allowed)}")
    if config.warmup_steps is not None and config.warmup_epochs is not None:
        raise UserError("--warmup_steps and --warmup_epochs both set the warm-up: give one of the two")
    if config.gpus and not all(index.strip().isdecimal() for index in config.gpus.split(",")):
        raise UserError(f"--gpus {config.gpus}: must be device indices separated by commas, for example 0,1")
    if config.xla_flags and not all(flag.startswith("--") for flag in config.xla_flags.split()):
        raise UserError(f"--xla_flags {config.xla_flags}: each of them must begin with two dashes")
    _check_cell(config)
    _check_parallel(config)
    _check_trunk(config)
    _check_image(config)


def _check_trunk(config: "Config") -> None:
    if config.num_heads is not None:
        _check_divides("num_heads", config.num_heads, config.embed_dim or 0)
    depth = config.depth or math.inf
    if config.inter_mlp_ratio and depth == 1:
        raise UserError(
            f"--inter_mlp_ratio {config.inter_mlp_ratio} lies between cells, and --depth is 1: type --depth 2 or more"
        )
    if config.temporal_attn_every > depth:
        raise UserError(
            f"--temporal_attn_every {config.temporal_attn_every} is more than --depth {depth}: type {depth} or less, "
            f"or 0 for none"
        )


def _check_cell(config: "Config") -> None:
    if config.gate_type in ("channel", "scalar") and config.cssm != "gdn":
        raise UserError(f"--gate_type {config.gate_type} is for --cssm gdn: type dense or factored")
    states = STATES.get(config.cssm, "") if config.arch != "baseline" else ""
    read = config.readout_state
    if read is not None and (not set(read) <= set(states) or list(read) != sorted(set(read), key=states.index)):
        raise UserError(f"--readout_state {read}: {config.cssm} has {', '.join(states)}, type some in this order")
    if not config.k_state and (config.asymmetric_qk or not config.feedback or "k" in (read or "")):
        other = "--asymmetric_qk" if config.asymmetric_qk else "--no_feedback" if not config.feedback else ""
        other = other or f"--readout_state {read}"
        raise UserError(f"--no_k_state leaves nothing for {other} to act on: leave one of the two out")
    if read and "a" not in read and not config.feedback:
        raise UserError(f"--no_feedback keeps A from --readout_state {read}: read a as well, or leave one of them out")
    if config.arch != "baseline" and config.cssm == "spatial_attn" and config.pos_embed == "temporal":
        raise UserError(
            "--pos_embed temporal turns all pixels of a frame alike, which spatial_attn does not see: type mrope"
        )
    if config.arch != "baseline" and config.cssm == "gdn":
        _check_divides("delta_key_dim", config.delta_key_dim, config.embed_dim or 0)
        if config.qkv_conv_full and config.qkv_conv_size == 1:
            raise UserError("--qkv_conv_full needs a convolution, and --qkv_conv_size is 1: type 3 or 5")


def _check_parallel(config: "Config") -> None:
    if config.shard != "none" and config.optimizer in WHOLE:
        raise UserError(
            f"--optimizer {config.optimizer} needs whole arrays, --shard {config.shard} splits them over devices: "
            f"type --optimizer {' or '.join(name for name in OPTIMIZERS if name not in WHOLE)}, or leave --shard out"
        )
    nproc, processes = config.nproc_per_node, config.num_processes or 1
    if nproc not in (None, "auto") and not (nproc.isdecimal() and int(nproc)):
        raise UserError(f"--nproc_per_node {nproc}: must be a number of processes, at least 1, or auto")
    by_hand: dict[str, int | str | None] = {"num_processes": config.num_processes, "process_id": config.process_id}
    by_hand["coordinator_address"] = config.coordinator_address
    given = [f"--{name} {value}" for name, value in by_hand.items() if value is not None]
    if given and (nproc or config.multi_gpu == "ddp"):
        starts = "--nproc_per_node" if nproc else "--multi_gpu ddp"
        raise UserError(
            f"{starts} starts all processes by itself, {given[0]} is for those started by hand: leave one out"
        )
    if given and len(given) < len(by_hand):
        missing = " and ".join(f"--{name}" for name, value in by_hand.items() if value is None)
        raise UserError(f"{given[0]} tells of a job of several processes: type {missing} too")
    if (config.process_id or 0) >= processes:
        raise UserError(f"--process_id {config.process_id}: {processes} processes count from 0 to {processes - 1}")
    several = nproc not in (None, "1") or config.multi_gpu == "ddp" or processes > 1
    if config.multi_gpu == "off" and several:
        raise UserError("--multi_gpu off uses one device in one process: leave it out, or the flags for several")
    if config.sync_backend == "cpu":
        stray = {"shard": config.shard != "none", "sync_bn": config.sync_bn, "nproc_per_node": several}
        for name in (name for name, wanted in stray.items() if wanted):
            what = "works in one process" if name == "nproc_per_node" else "does without collectives"
            raise UserError(f"--sync_backend cpu {what}, --{name} does not: leave one of the two out")


def _check_divides(name: str, number: int, width: int) -> None:
    if width % number:
        divisors = [n for n in range(1, width + 1) if width % n == 0]
        near = [max(n for n in divisors if n < number), *(n for n in divisors if n > number)][:2]
        raise UserError(f"--{name} {number} does not divide embed_dim {width}: type {' or '.join(map(str, near))}")


def _check_image(config: "Config") -> None:
    size, (stride, cause) = config.image_size or 0, _stride(config)
    if size < stride:
        raise UserError(
            f"--image_size {size} is smaller than the stride of the stem, {stride} (--{cause}): "
            f"type --image_size {stride} or more, or a smaller --{cause}"
        )
    if config.norm_type == "instance" and -(-size // stride) == 1:
        raise UserError(
            f"--norm_type instance leaves nothing of a map of 1x1 (--image_size {size}, stride {stride} by --{cause}): "
            f"type --norm_type layer, or a smaller --{cause}"
        )
    if config.stem_mode == "patch" and size % stride:
        raise UserError(
            f"--image_size {size} does not split into patches of {stride}: it must be {multiple(stride, size)}"
        )


def _stride(config: "Config") -> tuple[int, str]:
    """Pixels of the image per cell of the map, along a side, and the setting that decides it."""
    if config.stem_mode == "pathtracker":
        return 1, "stem_mode"
    if config.stem_mode == "patch":
        return config.patch_size, "patch_size"
    if config.arch == "simple":
        return 2**config.stem_layers, "stem_layers"
    return config.stem_stride or 1, "stem_stride"


def warnings_for(config: "Config") -> list[str]:
    """What is allowed but may not be meant, one sentence each."""
    return [*_cropped_kernels(config), *_bounded_already(config)]


def _bounded_already(config: "Config") -> list[str]:
    if not config.stable_transition or config.cssm not in CONTRACTIONS or not config.spectral_clip:
        return []
    return [f"{config.cssm} is a contraction already, --stable_transition changes nothing"]


def _cropped_kernels(config: "Config") -> list[str]:
    side = -(-(config.image_size or 0) // _stride(config)[0])
    if config.kernel_size is None or config.kernel_size <= side:  # a baseline has no kernels
        return []
    return [f"--kernel_size {config.kernel_size} is larger than the {side}x{side} map, kernels are cropped to it"]
