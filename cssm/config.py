"""Every setting once, and the rules between them. Knows neither jax nor yaml.

A Config is complete and valid by construction: what is left unset is filled in from recipes.py, and what
contradicts itself, or cannot apply to the chosen model, raises UserError.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from cssm import __version__, flags, recipes, rules
from cssm.flags import write_yaml
from cssm.knobs import Knob, UserError, did_you_mean, knob, knobs_of
from cssm.rules import warnings_for

__all__ = [
    "ARCHS",
    "CELLS_NAMES",
    "KNOBS",
    "VERBS",
    "Config",
    "Parsed",
    "UserError",
    "applicable",
    "known",
    "parse_args",
    "read_yaml",
    "resolve",
    "warnings_for",
    "write_yaml",
]

VERBS = ("train", "devices")
ARCHS = ("simple", "vit", "baseline")
CELLS_NAMES = ("hgru_bi", "hgru", "gated", "gdn", "no_gate", "no_fft", "conv_ssm", "transformer", "mult_transformer")
CELLS_NAMES += ("opponent", "standard", "add_kqv", "s4nd", "spatial_attn", "spatiotemporal_attn")
_POSITIONS = ("none", "learnable", "sinusoidal", "temporal", "spatial_only", "spatiotemporal")
_POSITIONS += ("spatiotemporal_legacy", "mrope")

_CELL = {"arch": ("simple", "vit")}


def _cells(*names: str) -> dict[str, tuple[str, ...]]:
    """Where a setting of these cells has a meaning."""
    return {**_CELL, "cssm": names}


_NO_KERNEL = ("no_fft", "conv_ssm", "s4nd", "spatial_attn", "spatiotemporal_attn")
_KERNEL = tuple(name for name in CELLS_NAMES if name not in (*_NO_KERNEL, "standard"))


def _spectral(*more: str, **conditions: tuple[str, ...]) -> tuple[dict[str, tuple[str, ...]], ...]:
    """Where spectral kernels are, and in `more` cells; standard has one unless its state is carried by a decay."""
    return ({**_cells(*_KERNEL, *more), **conditions}, {**_cells("standard"), "transition": ("kernel",), **conditions})


_GATES = _cells(*(n for n in CELLS_NAMES if n not in ("no_gate", "standard", *_NO_KERNEL[1:])))
_RECURRENT = _cells(*(n for n in CELLS_NAMES if n not in _NO_KERNEL[2:]))
_ATTENTION = _cells("spatial_attn", "spatiotemporal_attn")
_BLOCKS = {"arch": ("vit", "baseline")}

_model = partial(knob, group="model", resume="fixed")
_data = partial(knob, group="data", resume="fixed")
_optim = partial(knob, group="optimisation")
_parallel = partial(knob, group="parallel", resume="fresh", verbs=VERBS)
# Where this process stands in a job: never part of what describes a run.
_process = partial(_parallel, saved=False)
_precision = partial(knob, group="precision and memory")
_checkpoint = partial(knob, group="checkpoints")
_report = partial(knob, group="reporting")


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run. None means what the setting's `unset` says; one that does not apply keeps its
    default. Sizes are in pixels or channels, intervals in optimizer steps.
    """

    # fmt: off
    arch: str = _model("simple", "the trunk", choices=ARCHS)
    cssm: str = _model("hgru_bi", "the cell, which mixes space and time", choices=CELLS_NAMES, applies=_CELL)
    preset: str = _model("nano", "the size; tiny, small and base have 12 blocks of 192, 384 and 768 channels",
        choices=tuple(recipes.PRESETS), applies=_BLOCKS)
    embed_dim: int | None = _model(None, "channels, an even number", bounds="[2,)", multiple_of=2)
    depth: int | None = _model(None, "number of blocks", bounds="[1,)")
    mlp_ratio: float | None = _model(None, "width of a block's MLP over embed_dim", bounds="(0,)",
        applies=_BLOCKS)
    num_heads: int | None = _model(None, "attention heads, a divisor of embed_dim", bounds="[1,)",
        applies=({"arch": ("baseline",)}, _ATTENTION))
    stem_mode: str = _model("conv", "how images become maps; pathtracker keeps the resolution (simple only), "
        "patch is for vit and baseline", choices=("conv", "patch", "pathtracker"))
    patch_size: int = _model(16, "side of a patch, a divisor of image_size", bounds="[1,)",
        applies={"stem_mode": ("patch",)})
    stem_stride: int | None = _model(None, "stride of the stem's convolution", bounds="[1,)",
        applies={**_BLOCKS, "stem_mode": ("conv",)})
    stem_layers: int = _model(1, "layers of the stem, each halves the resolution", bounds="[1,)",
        applies={"arch": ("simple",), "stem_mode": ("conv",)})
    kernel_size: int | None = _model(None, "side of the spatial kernels", bounds="[1,)",
        applies=_spectral("conv_ssm"))
    kernel_domain: str = _model("spatial", "where kernels are learnt; spectral means complex parameters",
        choices=("spatial", "spectral"), applies=_spectral())
    kernel_origin: str = _model("origin", "where the centre of a kernel lies; image_center shifts the map",
        choices=("origin", "image_center"), applies=_spectral(kernel_domain=("spatial",)))
    spectral_clip: bool = _model(True, "bound the magnitude of kernels; mult_transformer was published without",
        applies=_cells("transformer", "mult_transformer"))
    gate_type: str | None = _model(None, "gates: a value a frequency, or rows and columns (few parameters); gdn: also "
        "one a head, or one", choices=("dense", "factored", "channel", "scalar"), applies=_GATES)
    gate_activation: str = _model("sigmoid", "of the couplings", choices=("sigmoid", "softplus_clamped", "tanh_scaled"),
        applies=_cells("opponent"))
    gate_rank: int = _model(0, "width of a hidden layer of the gates, 0 for none", bounds="[0,)",
        applies={**_cells("opponent"), "gate_type": ("dense",)})
    readout_state: str | None = _model(None, "states that are read out, such as xy", unset="all of the cell's",
        aliases=("transformer_readout",), applies=_cells(*recipes.STATES))
    short_conv_size: int = _model(4, "taps of the short convolution over time, 0 for none", bounds="[0,)",
        applies=_cells("gated", "gdn", "no_fft"))
    short_conv_spatial_size: int = _model(3, "side of the short convolution over space, 0 for none",
        bounds="[0,)", applies=_cells("gated", "no_fft"))
    delta_key_dim: int = _model(2, "size of a key, a divisor of embed_dim", bounds="[1,)", applies=_cells("gdn"))
    output_norm: str = _model("rms", "norm of what is read", choices=("rms", "layer", "none"), applies=_cells("gdn"))
    input_gates: bool = _model(True, "gate keys and values in space", applies=_cells("gdn"))
    output_gate_act: str = _model("silu", "activation of the output's gate", choices=("silu", "sigmoid"),
        applies=_cells("gdn"))
    spectral_l2_norm: bool = _model(True, "unit norm of queries and keys over frequencies", applies=_cells("gdn"))
    qkv_conv_size: int = _model(1, "side of a convolution before the projection, 1 for none", bounds="[1,)",
        applies=_cells("gdn"))
    cross_freq_conv_size: int = _model(0, "taps of a convolution along frequencies, 0 for none", bounds="[0,)",
        applies=_cells("gdn"))
    asymmetric_qk: bool = _model(False, "a gate for each direction between Q and K", applies=_cells("transformer"))
    feedback: bool = _model(True, "A reaches Q", applies=_cells("transformer"))
    k_state: bool = _model(True, "K has a state of its own", applies=_cells("transformer"))
    use_layernorm: bool = _model(False, "standardise magnitudes of what is read", applies=_cells("transformer"))
    transition: str = _model("kernel", "what carries the state: a kernel, or one decay a channel",
        choices=("kernel", "scalar"), applies=_cells("standard"))
    chain: str = _model("qkv", "the states; add_kqv_2 is qv, add_kqv_1 is q", choices=("qkv", "qv", "q", "qk"),
        applies=_cells("add_kqv"))
    s4nd_d_state: int = _model(64, "states along each axis", bounds="[2,)", multiple_of=2, applies=_cells("s4nd"))
    s4nd_bidirectional: bool = _model(False, "later frames reach earlier ones", applies=_cells("s4nd"))
    seq_len: int | None = _model(None, "time steps", bounds="[1,)", applies=_CELL)
    pos_embed: str | None = _model(None, "positions; baseline takes none or learnable", choices=_POSITIONS,
        aliases=("rope_mode",), unset="by recipe")
    norm_type: str = _model("layer", "normalisation of maps: over channels, the batch, each channel's map, "
        "or all of an example", choices=("layer", "batch", "instance", "global_layer"))
    pool_type: str = _model("max", "pooling over space at the end", choices=("mean", "max", "logsumexp"))
    drop_path_rate: float = _model(0.0, "highest rate at which a block is skipped in training",
        bounds="[0,1)", applies=_BLOCKS)
    layer_scale_init: float | None = _model(None, "first value of the factor on each branch", bounds="(0,)",
        applies=_BLOCKS)

    dataset: str = _data("digits", "the images", choices=("digits", "pathfinder"))
    pathfinder_difficulty: str = _data("easy", "easy, or the number of paddles of a contour",
        choices=tuple(recipes.PATHFINDER_SIZES), applies={"dataset": ("pathfinder",)})
    image_size: int | None = _data(None, "side of the images", bounds="[1,)", unset="by data set")
    cache_dir: str | None = _data(None, "where generated images are kept", resume="fresh",
        unset="$XDG_CACHE_HOME/cssm or ~/.cache/cssm")
    num_workers: int | None = _data(None, "workers that prepare data", bounds="[0,)", resume="fresh",
        unset="the number of cores, at most 8")
    prefetch: int = _data(2, "batches made ahead, 0 for none", bounds="[0,)", aliases=("prefetch_batches",),
        resume="fresh")
    max_train_examples: int | None = _data(None, "train on the first so many", bounds="[1,)", unset="all")
    max_eval_examples: int | None = _data(None, "evaluate on the first so many", bounds="[1,)", resume="kept",
        unset="all")

    epochs: int | None = _optim(None, "passes over the training data", bounds="[1,)", aliases=("num_epochs",))
    max_steps: int | None = _optim(None, "optimizer steps; given with epochs, whichever ends first",
        bounds="[1,)", unset="by epochs")
    lr: float | None = _optim(None, "peak learning rate", bounds="(0,)", aliases=("learning_rate",))
    lr_scale: str = _optim("none", "multiply lr by effective batch / base_batch_size, or its square root",
        choices=("none", "linear", "sqrt"))
    base_batch_size: int | None = _optim(None, "effective batch for which lr is meant", bounds="[1,)",
        applies={"lr_scale": ("linear", "sqrt")}, unset="the recipe's batch_size")
    warmup_steps: int | None = _optim(None, "steps until the learning rate is full", bounds="[0,)",
        unset="5% of the run")
    warmup_epochs: float | None = _optim(None, "the same in epochs", bounds="[0,)", unset="see warmup_steps")
    schedule: str = _optim("cosine", "learning rate after the warm-up", choices=("cosine", "constant"))
    weight_decay: float = _optim(1e-4, "decoupled weight decay of the matrices", bounds="[0,)")
    grad_clip: float = _optim(1.0, "highest norm of the gradient, 0 for no limit", bounds="[0,)",
        aliases=("max_grad_norm",))
    optimizer: str = _optim("adamw", "the optimizer", choices=("adamw", "sgd"), resume="fixed")
    label_smoothing: float = _optim(0.0, "share of the label spread over all classes", bounds="[0,1)")
    ema_decay: float = _optim(0.0, "decay of the moving average of the parameters, 0 for none",
        bounds="[0,1)", resume="fixed")
    batch_size: int | None = _optim(None, "images per device and forward pass", bounds="[1,)",
        aliases=("per_device_train_batch_size",))
    global_batch_size: int | None = _optim(None, "images per step; with batch_size it gives grad_accum",
        bounds="[1,)", unset="batch_size x devices x grad_accum")
    grad_accum: int | None = _optim(None, "forward passes per optimizer step", bounds="[1,)", unset="1",
        aliases=("grad_accum_steps", "gradient_accumulation", "gradient_accumulation_steps"))
    seed: int = _optim(0, "seed of parameters, order and randomness", bounds="[0,4294967295]", resume="fixed")

    gpus: str | None = _parallel(None, "indices of the devices to use, for example 0,1", aliases=("gpu_ids",),
        unset="all")
    num_devices: int | None = _parallel(None, "use the first so many devices", bounds="[1,)", unset="all")
    platform: str = _parallel("auto", "kind of device", choices=("auto", "cpu", "gpu", "tpu"),
        aliases=("target_device",))
    multi_gpu: str = _parallel("auto", "auto and dp use all devices in one process, ddp has a process for each, "
        "off uses the first", choices=("auto", "dp", "ddp", "off"))
    sync_backend: str = _parallel("auto", "how gradients are averaged: auto and nccl by the devices, cpu on the "
        "host, where collectives do not work", choices=("auto", "nccl", "cpu"))
    shard: str = _parallel("none", "what is split over the devices instead of copied: the state of the optimizer, "
        "or parameters too", choices=("none", "optimizer", "params"))
    sync_bn: bool = _parallel(False, "normalise with the statistics of all devices", resume="kept",
        applies={"norm_type": ("batch",)})
    nproc_per_node: str | None = _parallel(None, "start so many processes here, or auto: one per device",
        unset="one process")
    coordinator_address: str | None = _process(None, "host of process 0, in a job of several processes",
        aliases=("master_addr",), unset="by torchrun, SLURM, Open MPI or TPU variables")
    coordinator_port: int | None = _process(None, "port at which process 0 listens", bounds="[1,65535]",
        aliases=("master_port",), unset="likewise, or a free one")
    num_processes: int | None = _process(None, "processes in the job", bounds="[1,)", unset="likewise, or 1")
    process_id: int | None = _process(None, "which of them this is, from 0", bounds="[0,)", unset="likewise")
    heartbeat_timeout: int = _parallel(60, "seconds after which a process that does not answer ends the job",
        bounds="[1,)")
    self_test_timeout: float = _parallel(120.0, "seconds that the test of the collectives at the start may take, "
        "0 for no test", bounds="[0,)")
    parity: bool = _parallel(False, "train 3 steps on one device and on all, and compare", verbs=("devices",))

    dtype: str = _precision("f32", "type of activations; parameters stay f32", choices=("f32", "bf16"))
    remat: bool = _precision(False, "recompute activations in the backward pass, to save memory",
        applies=_BLOCKS)
    spectral_backend: str = _precision("auto", "how spectra are computed", choices=("auto", "fft", "dft"),
        applies=_spectral("s4nd"))
    scan: str = _precision("auto", "how time is scanned", choices=("auto", "reference", "associative"),
        applies=_RECURRENT)
    compile_cache: bool = _precision(True, "keep compiled programs for the next run", resume="fresh")
    mem_fraction: float | None = _precision(None, "share of a GPU's memory to reserve", bounds="(0,1]",
        resume="fresh", verbs=VERBS, unset="left to JAX")
    xla_flags: str | None = _precision(None, "flags for XLA, added to those in XLA_FLAGS", resume="fresh",
        verbs=VERBS, unset="none")

    checkpoint_dir: str = _checkpoint("runs", "where runs are kept", aliases=("save_dir", "output_dir"),
        resume="fresh")
    run_name: str | None = _checkpoint(None, "folder of the run", resume="fresh", unset="TIME_ARCH_CSSM")
    save_every: int | None = _checkpoint(None, "steps between checkpoints", bounds="[1,)",
        aliases=("save_interval",), unset="at each evaluation")
    max_checkpoints: int = _checkpoint(3, "newest checkpoints to keep, besides the best", bounds="[2,)")
    resume: str | None = _checkpoint(None, "go on with a run: auto for the newest, or its path",
        resume="fresh", unset="start a new run")

    log_every: int = _report(10, "steps between log lines", bounds="[1,)", aliases=("log_interval",))
    eval_every: int | None = _report(None, "steps between evaluations", bounds="[1,)", unset="once per epoch")
    quiet: bool = _report(False, "print results only", resume="fresh", verbs=VERBS)
    headless: bool = _report(False, "print JSON lines on stdout and nothing else", resume="fresh", verbs=VERBS)
    tensorboard: bool = _report(False, "write TensorBoard events")
    debug: bool = _report(False, "show the traceback of errors", resume="fresh", verbs=VERBS)
    # fmt: on

    @classmethod
    def from_preset(cls, preset: str, **settings: Any) -> Self:
        """The sizes of a preset, in the trunk vit unless `settings` name another; UserError as for Config."""
        return cls(**{"arch": "vit", **settings, "preset": preset})

    def __post_init__(self) -> None:
        """Check and convert every value, fill in the recipe, then check the values against each other."""
        for name, setting in KNOBS.items():
            object.__setattr__(self, name, setting.coerce(getattr(self, name), f"--{name}"))
        for name, value in recipes.recipe(self).items():
            if getattr(self, name) is None and KNOBS[name].unmet(self) is None:
                object.__setattr__(self, name, value)
        rules.check(self, KNOBS)


KNOBS: dict[str, Knob] = knobs_of(Config)

# Settings that say the same thing in two ways: one typed replaces both of the config file's.
_EITHER = ({"epochs", "max_steps"}, {"warmup_steps", "warmup_epochs"})


def known(values: Mapping[str, Any], label: str = "--") -> dict[str, Any]:
    """The values that are given, in their types. Raises UserError for a name that no setting has."""
    if unknown := [name for name in values if name not in KNOBS]:
        near = did_you_mean(unknown[0], KNOBS)
        raise UserError(f"unknown setting {unknown[0]}{near}")
    return {n: KNOBS[n].coerce(v, f"{label}{n}") for n, v in values.items() if v is not None}


def _settle(typed: Mapping[str, Any], from_file: Mapping[str, Any]) -> dict[str, Any]:
    """Typed over file. What is typed also replaces the file's other ways of saying the same: epochs and
    max_steps, the two warm-ups, and of the three batch settings those that the typed ones determine.
    """
    typed, kept = known(typed), known(from_file, "")
    parts = {"batch_size", "grad_accum"}
    dropped = {name for pair in _EITHER if typed.keys() & pair for name in pair}
    if typed.keys() & {*parts, "global_batch_size"} and "global_batch_size" in {**kept, **typed}:
        dropped |= {"global_batch_size"} if parts <= typed.keys() else parts
    return {name: value for name, value in kept.items() if name not in dropped} | typed


def resolve(typed: Mapping[str, Any], from_file: Mapping[str, Any]) -> Config:
    """The configuration of a run: typed > file > preset and recipe > default; None means not given."""
    return Config(**_settle(typed, from_file))


def applicable(config: Config) -> dict[str, Any]:
    """The settings of a run that apply, None included. Written to a file and fed back they give the same run."""
    kept = {name: knob for name, knob in KNOBS.items() if knob.saved and "train" in knob.verbs}
    return {name: getattr(config, name) for name, knob in kept.items() if knob.unmet(config) is None}


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A command line as read: the verb, the configuration, and what was given by flag or file, flags first.

    With --resume the model is the saved run's: `config` then holds the settings of the invocation only. The
    whole follows from resume_config(saved, typed), or from resolve(typed, {}) if there is nothing to resume.
    """

    verb: str
    config: Config
    typed: dict[str, Any]


def parse_args(argv: Sequence[str]) -> Parsed:
    """Read a command line, without the program's name. --help and --version print and raise SystemExit(0)."""
    command = flags.read_argv(argv, KNOBS, VERBS)
    if command.show:
        print(f"cssm {__version__}" if command.show == "version" else flags.help_text(KNOBS, VERBS))
        raise SystemExit(0)
    from_file = read_yaml(command.config_path) if command.config_path else {}
    given = _settle(command.typed, from_file)
    if stray := [name for name in given if command.verb not in KNOBS[name].verbs]:
        verbs = " or ".join(KNOBS[stray[0]].verbs)
        raise UserError(f"--{stray[0]} does not apply to the verb {command.verb}: it is for {verbs}, leave it out")
    fresh = {name: value for name, value in given.items() if KNOBS[name].resume == "fresh"}
    return Parsed(command.verb, Config(**(fresh if "resume" in given else given)), given)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file (see flags.read_yaml)."""
    return flags.read_yaml(path, KNOBS)
