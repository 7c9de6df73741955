"""Every setting once, and the rules between them. Knows neither jax nor yaml.

A Config is complete and valid by construction: what is left unset is filled in from recipes.py, and what
contradicts itself, or cannot apply to the chosen model, raises UserError.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from cssm import __version__, flags, recipes, rules
from cssm.flags import write_yaml
from cssm.knobs import OF_A_RUN, TRAINING, VERBS, Knob, UserError, choice_of, did_you_mean, knobs_of
from cssm.rules import warnings_for
from cssm.settings import (
    CellSettings,
    DataSettings,
    InferenceSettings,
    MeasuringSettings,
    ModelSettings,
    OptimisationSettings,
    ParallelSettings,
    RunningSettings,
)
from cssm.settings.data import FOLDERS, GENERATED
from cssm.settings.family import ARCHS, CELLS_NAMES
from cssm.settings.inference import FORMATS

__all__ = [
    "ARCHS",
    "CELLS_NAMES",
    "KNOBS",
    "OF_A_RUN",
    "TRAINING",
    "VERBS",
    "Config",
    "Parsed",
    "UserError",
    "applicable",
    "did_you_mean",
    "known",
    "parse_args",
    "read_yaml",
    "resolve",
    "warnings_for",
    "write_yaml",
]


# No operation whose result depends on the order in which threads come, nor a choice of algorithms by their speed.
DETERMINISTIC = ("--xla_gpu_deterministic_ops=true",)


# The fields of a dataclass begin with those of its last base.
@dataclasses.dataclass(frozen=True)
class Config(
    InferenceSettings,
    MeasuringSettings,
    RunningSettings,
    ParallelSettings,
    OptimisationSettings,
    DataSettings,
    CellSettings,
    ModelSettings,
):
    """All settings of a run. None means what the setting's `unset` says; one that does not apply keeps its
    default. Sizes are in pixels or channels, intervals in optimizer steps.
    """

    @classmethod
    def from_preset(cls, preset: str, **settings: Any) -> Self:
        """The sizes of a preset, in the trunk vit unless `settings` name another; UserError as for Config."""
        return cls(**{"arch": "vit", **settings, "preset": preset})

    def __post_init__(self) -> None:
        """Check and convert every value, fill in the recipe, then check the values against each other."""
        for name, setting in KNOBS.items():
            object.__setattr__(self, name, setting.coerce(getattr(self, name), f"--{name}"))
        for name, value in recipes.recipe(self).items():
            if getattr(self, name) is None and not KNOBS[name].unmet(self):
                object.__setattr__(self, name, value)
        rules.check(self, KNOBS)

    @property
    def cell(self) -> str | None:
        """The cell's name, or None where attention stands in its place."""
        return None if KNOBS["cssm"].unmet(self) else self.cssm

    @property
    def operations(self) -> tuple[int, float] | None:
        """How many of RandAugment, and how strong from 0 to 10, if any."""
        return rules.operations(self.rand_augment) if self.rand_augment else None

    @property
    def flips_on_device(self) -> bool:
        """Whether images are mirrored on the device; those that are decoded are mirrored then."""
        return bool(self.flip) and self.dataset == "npz"

    @property
    def source(self) -> str:
        """The data set as it is listed among the choices: tfds:NAME for each of those."""
        return choice_of(self.dataset)

    @property
    def pixel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and standard deviation of each channel, of pixels from 0 to 1, if the data set has its own."""
        return recipes.PIXELS.get(self.dataset)

    @property
    def wanted_xla_flags(self) -> list[str]:
        """What must be in the XLA_FLAGS variable before jax is imported: --xla_flags, then those of --deterministic."""
        return [*(self.xla_flags or "").split(), *(DETERMINISTIC if self.deterministic else ())]


KNOBS: dict[str, Knob] = knobs_of(Config)

# Settings that say the same thing in two ways: one typed replaces both of the config file's.
_EITHER = ({"epochs", "max_steps"}, {"warmup_steps", "warmup_epochs"})
# What target_params finds: in a trunk of one width, and in one with stages, whose depths it does not.
_SIZES = ({"embed_dim", "depth"}, {"dims"})


def known(values: Mapping[str, Any], label: str = "--") -> dict[str, Any]:
    """The values that are given, in their types. Raises UserError for a name that no setting has."""
    if unknown := [name for name in values if name not in KNOBS]:
        near = did_you_mean(unknown[0], KNOBS)
        raise UserError(f"unknown setting {unknown[0]}{near}")
    return {n: KNOBS[n].coerce(v, f"{label}{n}") for n, v in values.items() if v is not None}


def _settle(typed: Mapping[str, Any], from_file: Mapping[str, Any]) -> dict[str, Any]:
    """Typed over file. What is typed also replaces the file's other ways of saying the same: epochs and
    max_steps, the two warm-ups, and of the three batch settings those that the typed ones determine. Where the file
    holds the sizes that its target_params found, one of these typed has what is not typed found anew.
    """
    typed, kept = known(typed), known(from_file, "")
    parts = {"batch_size", "grad_accum"}
    dropped = {name for pair in _EITHER if typed.keys() & pair for name in pair}
    if typed.keys() & {*parts, "global_batch_size"} and "global_batch_size" in {**kept, **typed}:
        dropped |= {"global_batch_size"} if parts <= typed.keys() else parts
    if typed.keys() & {"batch_sizes", "find_batch_size"}:
        dropped |= {"batch_size", "global_batch_size"}
    for sizes in _SIZES:
        touched = typed.keys() & {*sizes, "depths", "target_params"}
        if touched and kept.keys() >= sizes and "target_params" in {**kept, **typed}:
            dropped |= {*sizes, "target_params"} if typed.keys() >= sizes else sizes
    return {name: value for name, value in kept.items() if name not in dropped} | typed


def resolve(typed: Mapping[str, Any], from_file: Mapping[str, Any]) -> Config:
    """The configuration of a run: typed > file > preset and recipe > default; None means not given."""
    return Config(**_settle(typed, from_file))


def applicable(config: Config) -> dict[str, Any]:
    """The settings of a run that apply, None included. Written to a file and fed back they give the same run."""
    kept = {name: knob for name, knob in KNOBS.items() if knob.saved and "train" in knob.verbs}
    return {name: getattr(config, name) for name, knob in kept.items() if not knob.unmet(config)}


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A command line as read: the verb, the configuration, what was given by flag or file, flags first, paths, and
    notes: what may not be meant, a sentence each.

    With --resume, and for the verbs OF_A_RUN, the model is the saved run's: `config` then holds the settings of the
    invocation only. The whole follows from resume_config(saved, typed), or from resolve(typed, {}) if there is nothing
    to resume; for those verbs from cssm.inference.
    """

    verb: str
    config: Config
    typed: dict[str, Any]
    paths: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def parse_args(argv: Sequence[str]) -> Parsed:
    """Read a command line, without the program's name. --help and --version print and raise SystemExit(0)."""
    command = flags.read_argv(argv, KNOBS, VERBS)
    if command.show:
        print(f"cssm {__version__}" if command.show == "version" else flags.help_text(KNOBS, VERBS))
        raise SystemExit(0)
    if command.verb == "prepare":
        command = _with_target(command)
    for sizes in _SIZES:
        if command.typed.keys() >= {*sizes, "target_params"}:
            words = " and ".join(f"--{name}" for name in sorted(sizes, reverse=True))
            raise UserError(f"--target_params finds {words}, and all of them are typed: leave one out")
    from_file = read_yaml(command.config_path) if command.config_path else {}
    if command.verb == "bench":  # which may be given the configuration of a run, and takes what concerns a step
        from_file = {n: v for n, v in from_file.items() if "bench" in (verbs := KNOBS[n].verbs) or "train" not in verbs}
    given = _settle(command.typed, from_file)
    if stray := [name for name in given if command.verb not in KNOBS[name].verbs]:
        verbs = " or ".join(KNOBS[stray[0]].verbs)
        raise UserError(f"--{stray[0]} does not apply to the verb {command.verb}: it is for {verbs}, leave it out")
    if command.verb in FORMATS and given.get("format", FORMATS[command.verb][0]) not in FORMATS[command.verb]:
        raise UserError(f"--format {given['format']}: {command.verb} writes {' or '.join(FORMATS[command.verb])}")
    fresh = {name: value for name, value in given.items() if KNOBS[name].resume == "fresh"}
    comes_with_run = "resume" in given or command.verb in OF_A_RUN
    config = Config(**(fresh if comes_with_run else given))
    if not comes_with_run:  # also the default of a setting: whoever gives it wants it to mean something
        rules.check_applies(config, KNOBS, given)
    if command.verb in OF_A_RUN and config.checkpoint is None:
        raise UserError(f"{command.verb} needs a trained model: type --checkpoint with the folder of a run")
    notes = () if comes_with_run or command.verb != "train" else _rate_of_another(command, from_file, given)
    return Parsed(command.verb, config, given, command.paths, notes)


def _rate_of_another(command: flags.Command, from_file: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, ...]:
    """A note where the file's learning rate meets another optimizer than the file's: recipes differ up to 100 times."""
    file, lr = known(from_file, ""), given.get("lr")
    before, now = (settings.get("optimizer", KNOBS["optimizer"].default) for settings in (file, given))
    if lr is None or "lr" in known(command.typed) or before == now:
        return ()
    own = Config(**{name: value for name, value in given.items() if name != "lr"}).lr
    return (
        f"the learning rate {lr:g} of {command.config_path} is meant for --optimizer {before}: "
        f"the recipe of {now} has {own:g}, --lr {own:g} takes it",
    )


def _with_target(command: flags.Command) -> flags.Command:
    """The command prepare, whose one word is the data set. UserError where it is not one that can be prepared."""
    how = "type prepare NAME --data_dir FOLDER, for example prepare tfds:mnist --data_dir sets"
    if len(command.paths) != 1 or "dataset" in command.typed:
        raise UserError(f"prepare takes one data set, without --dataset: {how}")
    name = KNOBS["dataset"].coerce(command.paths[0], "prepare")
    if choice_of(name) not in (*GENERATED, *FOLDERS, "tfds:NAME"):
        known_ones = ", ".join((*GENERATED, *FOLDERS))
        raise UserError(f"prepare {name}: can prepare {known_ones} and tfds:NAME, others are read as they are")
    if name in FOLDERS and not {"data_dir", "output"} <= command.typed.keys():
        raise UserError(
            f"prepare {name}: it needs the images and a folder to write to: type --data_dir IMAGES --output FOLDER"
        )
    if "data_dir" not in command.typed:
        raise UserError(f"prepare {name}: it needs a folder to write to: type --data_dir FOLDER")
    return dataclasses.replace(command, typed={"dataset": name, **command.typed}, paths=())


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file (see flags.read_yaml)."""
    return flags.read_yaml(path, KNOBS)
