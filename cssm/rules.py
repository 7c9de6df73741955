"""What settings must hold together, checked when a Config is made; what is allowed but worth a warning.

With --target_params the width and the depth may be open; what depends on them is checked once they are found.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cssm.knobs import Knob, UserError, multiple
from cssm.recipes import OPTIMIZERS, PRESETS, STATES
from cssm.settings.data import FILES, GENERATED
from cssm.stages import STAGED, numbers, stages, stride

if TYPE_CHECKING:
    from cssm.config import Config

# Optimizers that do not treat every element by itself, but norms of arrays, or matrices.
WHOLE = ("lamb", "muon")

# Cells whose transition lengthens no state, gdn as long as its kernels are bounded (docs/math.md).
CONTRACTIONS = ("gated", "gdn", "no_gate", "no_fft", "conv_ssm", "standard")
# Cells whose states may grow, mostly by less than 3 a step; over MANY_STEPS that is 3e30, and float32 ends at 3e38.
GROWING = ("hgru_bi", "hgru", "opponent", "transformer", "mult_transformer")
MANY_STEPS = 64

# Choices that depend on the architecture; an architecture that is not named has them all.
_BY_ARCH = {
    "stem_mode": {"simple": ("conv", "pathtracker"), "vit": ("conv", "patch"), "baseline": ("conv", "patch")},
    "pos_embed": {"baseline": ("none", "learnable")},
    "preset": {arch: tuple(presets) for arch, presets in PRESETS.items()},
    "stem_stride": {"shvit": (1, 2, 4)},
}
# Positions that end in more steps than one, which only pass from block to block elsewhere.
_UNROLLED = ("sinusoidal", "separate")
# What takes the place of a setting in trunks of the other kind.
_INSTEAD = {"embed_dim": "dims", "depth": "depths", "dims": "embed_dim", "depths": "depth"}


def check(config: "Config", knobs: Mapping[str, Knob]) -> None:
    """Raise UserError for settings that do not apply or do not fit together."""
    check_applies(config, knobs, [name for name, knob in knobs.items() if getattr(config, name) != knob.default])
    for name, choices in _BY_ARCH.items():
        value, allowed = getattr(config, name), choices.get(config.arch)
        if allowed and value not in allowed:
            raise UserError(f"--{name} {value} is not for --arch {config.arch}: type {' or '.join(map(str, allowed))}")
    if config.warmup_steps is not None and config.warmup_epochs is not None:
        raise UserError("--warmup_steps and --warmup_epochs both set the warm-up: give one of the two")
    if config.gpus and not all(index.strip().isdecimal() for index in config.gpus.split(",")):
        raise UserError(f"--gpus {config.gpus}: must be device indices separated by commas, for example 0,1")
    if config.xla_flags and not all(flag.startswith("--") for flag in config.xla_flags.split()):
        raise UserError(f"--xla_flags {config.xla_flags}: each of them must begin with two dashes")
    if config.run_name and (config.run_name in (".", "..") or set(config.run_name) & {"/", "\\", "\0"}):
        raise UserError(
            f"--run_name {config.run_name}: must be the name of one folder, --checkpoint_dir says where it is"
        )
    _check_stages(config)
    _check_cell(config)
    _check_parallel(config)
    _check_batches(config)
    _check_peer(config)
    _check_trunk(config)
    _check_files(config)
    _check_image(config)
    if config.rand_augment:
        operations(config.rand_augment)


def check_applies(config: "Config", knobs: Mapping[str, Knob], names: Iterable[str]) -> None:
    """Raise UserError for the first of the settings named that has no meaning among the others."""
    for name in names:
        knob, value = knobs[name], getattr(config, name)
        if ways := knob.unmet(config):
            given = f"--{'no_' if value is False else ''}{name}" if knob.type is bool else f"--{name} {value}"
            needed = ", or ".join(dict.fromkeys(f"--{cause} {' or '.join(values)}" for cause, values in ways))
            needed += f", others have --{_INSTEAD[name]}" if name in _INSTEAD else ""
            cause = ways[0][0]
            raise UserError(f"{given} does not apply with --{cause} {getattr(config, cause)}: it needs {needed}")


def operations(text: str) -> tuple[int, float]:
    """(how many, magnitude) of a text such as m9-n2; UserError for another."""
    found = re.fullmatch(r"m(\d+(?:\.\d+)?)-n(\d+)", text)
    if not found or float(found[1]) > 10 or not int(found[2]):
        raise UserError(
            f"--rand_augment {text}: must be a magnitude from 0 to 10 and a number of operations from 1, such as m9-n2"
        )
    return int(found[2]), float(found[1])


def _check_stages(config: "Config") -> None:
    """--dims and --depths, and positions in shvit."""
    if config.arch not in STAGED:
        return
    dims, depths = config.dims or "", config.depths or ""
    counts = numbers(depths)
    widths = [2] * len(counts or [1]) if config.target_params and config.dims is None else numbers(dims)
    for name, text, found in (("dims", dims, widths), ("depths", depths, counts)):
        if not found or 0 in found:
            raise UserError(
                f"--{name} {text}: must be whole numbers of at least 1, separated by commas, for example 64,128,256"
            )
    assert widths and counts
    if odd := [width for width in widths if width % 2]:
        raise UserError(f"--dims {dims}: each must be even, instead of {odd[0]} type {odd[0] - 1 or 2} or {odd[0] + 1}")
    if len(widths) != len(counts):
        raise UserError(
            f"--dims {dims} and --depths {depths} speak of {len(widths)} and {len(counts)} stages: "
            f"type as many numbers in both"
        )
    if config.arch == "shvit" and config.pos_embed in _UNROLLED:
        raise UserError(
            f"--pos_embed {config.pos_embed} differs between steps, and from block to block of shvit a still image is "
            f"one: type learnable, or mrope, which cells apply by themselves"
        )
    if config.cell is None and config.pos_embed not in ("none", "learnable"):
        raise UserError(f"--pos_embed {config.pos_embed} is not for --late_mixer attention: type none or learnable")


def _check_trunk(config: "Config") -> None:
    if config.num_heads is not None:
        _check_divides(config, "num_heads", config.num_heads)
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
    cell, read = config.cell, config.readout_state
    states = STATES.get(cell or "", "")
    if read is not None and (not set(read) <= set(states) or list(read) != sorted(set(read), key=states.index)):
        raise UserError(f"--readout_state {read}: {cell} has {', '.join(states)}, type some in this order")
    if not config.k_state and (config.asymmetric_qk or not config.feedback or "k" in (read or "")):
        other = "--asymmetric_qk" if config.asymmetric_qk else "--no_feedback" if not config.feedback else ""
        other = other or f"--readout_state {read}"
        raise UserError(f"--no_k_state leaves nothing for {other} to act on: leave one of the two out")
    if read and "a" not in read and not config.feedback:
        raise UserError(f"--no_feedback keeps A from --readout_state {read}: read a as well, or leave one of them out")
    if cell == "spatial_attn" and config.pos_embed == "temporal":
        raise UserError(
            "--pos_embed temporal turns all pixels of a frame alike, which spatial_attn does not see: type mrope"
        )
    if cell == "gdn":
        _check_divides(config, "delta_key_dim", config.delta_key_dim)
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


def _check_batches(config: "Config") -> None:
    """That they are said in one way; and the lists of a benchmark."""
    for name, least in (("devices", 1), ("batch_sizes", 1), ("worker_counts", 0)):
        given = getattr(config, name)
        found = numbers(given or "1")
        if not found or min(found) < least or len(set(found)) < len(found):
            raise UserError(
                f"--{name} {given}: must be different numbers from {least} on, separated by commas, for example 1,2,4"
            )
    if config.input == "data" and config.profile:
        raise UserError(
            f"--profile {config.profile} traces steps, and --input data takes none: leave one of the two out"
        )
    ways = {"batch_sizes": config.batch_sizes, "find_batch_size": config.find_batch_size}
    ways |= {"batch_size": config.batch_size, "global_batch_size": config.global_batch_size}
    given = [f"--{name}" if value is True else f"--{name} {value}" for name, value in ways.items() if value]
    if (config.batch_sizes or config.find_batch_size) and len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} both set the batch: leave one of the two out")
    for name in ("resume", "dry_run"):
        if config.find_lr and getattr(config, name):
            raise UserError(f"--find_lr is a test of a run that begins, without --{name}: leave one of the two out")
    if config.remat is False and config.remat_keep:
        raise UserError(f"--remat_keep {config.remat_keep} and --no_remat: leave one of the two out")
    if config.find_batch_size and config.dry_run:
        raise UserError("--find_batch_size takes steps, and --dry_run takes none: leave one of the two out")


def _check_peer(config: "Config") -> None:
    """What PyTorch's side of a benchmark does not do."""
    if config.peer != "none" and config.input == "data" and not config.prefetch:
        raise UserError("--prefetch 0: the workers of torch make batches ahead, type --prefetch 1 or more")
    here = {"temporal_attn_every": config.temporal_attn_every, "use_dwconv": config.use_dwconv}
    here |= {"ema_decay": config.ema_decay, "drop_path_rate": config.drop_path_rate, "remat": config.remat}
    here |= {name: getattr(config, name) for name in ("mixup", "cutmix", "random_erasing", "rand_augment")}
    here |= {
        "flip": config.flips_on_device,
        "grad_accum": (config.grad_accum or 1) > 1,
        "target_params": config.target_params,
    }
    if config.peer != "none" and config.input != "data" and (stray := [name for name, value in here.items() if value]):
        raise UserError(
            f"--peer {config.peer} trains the plain attention model, without --{stray[0]}: leave one of the two out"
        )


def _check_divides(config: "Config", name: str, number: int) -> None:
    """Of all stages with a cell or attention."""
    widths = [stage.width for stage in stages(config) if stage.mixes]
    common = math.gcd(*widths)
    if common % number:
        divisors = [n for n in range(1, common + 1) if common % n == 0]
        near = [max(n for n in divisors if n < number), *(n for n in divisors if n > number)][:2]
        what = f"each of {', '.join(map(str, widths))} (--dims)"
        instead = ""
        if config.arch not in STAGED:
            step = math.lcm(number, 2)
            wide = [n for n in (common // step * step, common // step * step + step) if n]
            what, instead = f"embed_dim {common}", f", or --embed_dim {' or '.join(map(str, wide))}"
        raise UserError(f"--{name} {number} does not divide {what}: type {' or '.join(map(str, near))}{instead}")


def _check_files(config: "Config") -> None:
    if config.source not in FILES or config.data_dir is not None:
        return
    if config.dataset not in GENERATED:
        raise UserError(f"--dataset {config.dataset} is read from files: type --data_dir with where they are")
    if config.max_bad_examples:
        raise UserError(
            f"--max_bad_examples {config.max_bad_examples}: generated images are never unreadable, "
            f"leave it out, or type --data_dir to read published ones"
        )


def _check_image(config: "Config") -> None:
    if config.image_size is None:  # the files tell, and the configuration is then checked with what they say
        return
    size, (step, cause) = config.image_size, stride(config)
    if size < step:
        raise UserError(
            f"--image_size {size} is smaller than the stride of the stem, {step} (--{cause}): "
            f"type --image_size {step} or more, or a smaller --{cause}"
        )
    sides = [stage.side for stage in stages(config)]
    if len(sides) > 1 and sides[-2] == 1:
        least = step * 2 ** (len(sides) - 2) + 1
        raise UserError(
            f"--image_size {size} leaves a map of 1x1 before the last of {len(sides)} stages (stride {step} by "
            f"--{cause}): type --image_size {least} or more, a smaller --{cause}, or fewer --dims and --depths"
        )
    if config.norm_type == "instance" and sides[-1] == 1:
        raise UserError(
            f"--norm_type instance leaves nothing of a map of 1x1 (--image_size {size}, stride {step} by --{cause}): "
            f"type --norm_type layer, or a smaller --{cause}"
        )
    if config.stem_mode == "patch" and size % step:
        raise UserError(f"--image_size {size} does not split into patches of {step}: it must be {multiple(step, size)}")


def warnings_for(config: "Config") -> list[str]:
    """What is allowed but may not be meant, one sentence each."""
    return [*_cropped_kernels(config), *_growing_states(config)]


def _growing_states(config: "Config") -> list[str]:
    steps = config.seq_len or 0
    if config.stable_transition and config.cell in CONTRACTIONS and config.spectral_clip:
        return [f"{config.cell} is a contraction already, --stable_transition changes nothing"]
    if states_may_grow(config) and steps > MANY_STEPS:
        return [f"states of {config.cell} may overflow over {steps} steps: --stable_transition keeps them bounded"]
    return []


def states_may_grow(config: "Config") -> bool:
    """Whether the recurrence is one whose states nothing keeps bounded."""
    grows = config.cell in GROWING or (config.cell == "gdn" and not config.spectral_clip)
    return grows and not config.stable_transition and config.scan != "goom"


def _cropped_kernels(config: "Config") -> list[str]:
    if config.image_size is None:
        return []
    k = config.kernel_size or 0  # attention has no kernels
    small = dict.fromkeys(f"{stage.side}x{stage.side}" for stage in stages(config) if stage.mixes and stage.side < k)
    if not small:
        return []
    maps = f"the {' and '.join(small)} map{'s' if len(small) > 1 else ''}"
    return [f"--kernel_size {k} is larger than {maps}, kernels are cropped to {'them' if len(small) > 1 else 'it'}"]
