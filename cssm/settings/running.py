"""Settings of how a run is computed, kept and told."""

import dataclasses
from functools import partial

from cssm.knobs import INFERRING, OF_A_RUN, TRAINING, VERBS, WITH_DEVICES, knob
from cssm.settings.family import BLOCKS, RECURRENT, spectral

_precision = partial(knob, group="precision and memory", verbs=TRAINING)
_checkpoint = partial(knob, group="checkpoints")
_report = partial(knob, group="reporting")


@dataclasses.dataclass(frozen=True)
class RunningSettings:
    """Precision and memory, checkpoints, reporting."""

    # fmt: off
    dtype: str = _precision("f32", "type of activations; parameters stay f32", choices=("f32", "bf16"))
    remat: bool | None = _precision(None, "recompute activations in the backward pass, to save memory",
        applies=BLOCKS, unset="where the step would not fit otherwise")
    remat_keep: str | None = _precision(None, "what of a block is kept for its backward pass where that recomputes: "
        "what products with weights and inverse transforms give, or nothing",
        choices=("costly", "nothing"), applies={**BLOCKS, "shard": ("none", "optimizer")},
        unset="nothing with --remat, otherwise what fits")
    spectral_backend: str = _precision("auto", "how spectra are computed", choices=("auto", "fft", "dft"),
        applies=spectral("s4nd"), verbs=(*TRAINING, *INFERRING))
    scan: str = _precision("auto", "how time is scanned: step by step (reference, or chunked in less memory), by "
        "prefix products, by them in log space as published (goom), or in one GPU kernel; auto: that, or without such "
        "a GPU reference up to 64 steps and chunked beyond",
        choices=("auto", "reference", "chunked", "associative", "goom", "fused"), applies=RECURRENT,
        verbs=(*TRAINING, *INFERRING))
    deterministic: bool = _precision(False, "the same bits in every run, also on a GPU, where that is slower; on a CPU "
        "it is so anyway", resume="fresh", verbs=(*WITH_DEVICES, *INFERRING))
    compile_cache: bool = _precision(True, "keep compiled programs for the next run", resume="fresh",
        verbs=(*TRAINING, *INFERRING))
    mem_fraction: float | None = _precision(None, "share of a GPU's memory to reserve", bounds="(0,1]",
        resume="fresh", verbs=(*WITH_DEVICES, *INFERRING), unset="left to JAX")
    xla_flags: str | None = _precision(None, "flags for XLA, added to those in XLA_FLAGS", resume="fresh",
        verbs=(*WITH_DEVICES, *INFERRING), unset="none")
    checkpoint_dir: str = _checkpoint("runs", "where runs are kept", aliases=("save_dir", "output_dir"),
        resume="fresh", verbs=TRAINING)
    run_name: str | None = _checkpoint(None, "folder of the run", resume="fresh", unset="TIME_ARCH_CSSM")
    save_every: int | None = _checkpoint(None, "steps between checkpoints", bounds="[1,)",
        aliases=("save_interval",), unset="at each evaluation")
    max_checkpoints: int = _checkpoint(3, "newest checkpoints to keep, besides the best", bounds="[2,)")
    resume: str | None = _checkpoint(None, "go on with a run: auto for the newest, or its path",
        resume="fresh", unset="start a new run")
    stall_timeout: float = _checkpoint(1800.0, "seconds without a step, an evaluated batch or a save after which the "
        "program ends with the stacks of all threads; compilation counts; 0 for never", bounds="[0,)", resume="fresh",
        verbs=TRAINING)
    log_every: int = _report(10, "steps between log lines", bounds="[1,)", aliases=("log_interval",))
    eval_every: int | None = _report(None, "steps between evaluations", bounds="[1,)", unset="once per epoch")
    quiet: bool = _report(False, "print results only", resume="fresh", verbs=(*WITH_DEVICES, "prepare", *OF_A_RUN))
    headless: bool = _report(False, "print JSON lines on stdout and nothing else", resume="fresh", verbs=VERBS)
    tensorboard: bool = _report(False, "write TensorBoard events")
    wandb: bool = _report(False, "send metrics, images and settings to Weights & Biases; WANDB_PROJECT, WANDB_ENTITY, "
        "WANDB_MODE=offline are heeded, and a resumed run goes on in the same one")
    profile: str | None = _report(None, "write a trace of 5 steps into this folder: the 6th to the 10th, or with bench "
        "those after the timed ones", resume="fresh", saved=False, verbs=TRAINING, unset="no trace")
    dry_run: bool = _report(False, "show parameters, FLOPs and memory, and stop before anything is made or written",
        resume="fresh", saved=False)
    debug: bool = _report(False, "show the traceback of errors", resume="fresh", verbs=VERBS)
    # fmt: on
