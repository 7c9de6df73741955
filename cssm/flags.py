"""Text to settings: the command line, YAML files, and the help text.

The command line is read by a loop of its own, not by argparse: a value may itself begin with dashes
(--xla_flags --xla_dump_to=x), names have hyphen spellings, and every error is one sentence.
"""

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cssm.knobs import Applies, Knob, UserError, did_you_mean
from cssm.settings.names import REFUSED, REFUSED_VALUES, SHORTHANDS, VALUE_ALIASES

Knobs = Mapping[str, Knob]


@dataclasses.dataclass(frozen=True)
class Command:
    """What was typed: the verb, the settings by name, the --config file, and a request to print and stop."""

    verb: str
    typed: dict[str, Any]
    config_path: str | None = None
    paths: tuple[str, ...] = ()  # what compare or predict is to read, or prepare to make
    show: str | None = None  # "help" or "version"


def read_argv(argv: Sequence[str], knobs: Knobs, verbs: Sequence[str]) -> Command:
    """Read a command line; the first verb is what runs when none is typed. Raises UserError."""
    words = list(argv)
    verb = words.pop(0) if words and not words[0].startswith("-") else verbs[0]
    if verb not in verbs:
        raise UserError(f"unknown verb {verb}{did_you_mean(verb, verbs) or ': type ' + ' or '.join(verbs)}")
    typed: dict[str, Any] = {}
    config_path, paths = None, []
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if not word.startswith("-") and verb in WITH_WORDS:
            paths.append(word)
            continue
        if verb == "predict" and flag == "--input":  # its first word; others follow, as *.jpg gives them
            paths.append(value if equals else _value(flag, words, knobs))
            continue
        if not word.startswith("-"):
            raise UserError(f"unexpected argument {word}: settings are typed as --name value")
        if flag in _SHOW:
            if equals:
                raise UserError(f"{flag} takes no value, but {value} was given: type {flag} alone")
            return Command(verb, typed, show=_SHOW[flag])
        if flag in _CONFIG:
            config_path = value if equals else _value(flag, words, knobs)
            if not config_path:
                raise UserError(f"{flag} needs a value: type {flag} FILE")
            continue
        name = flag[2:].replace("-", "_") if flag.startswith("--") else flag
        knob, fixed = _find(name, knobs, flag, "flag")
        if fixed is not None and equals:
            raise UserError(f"{flag} takes no value, but {value} was given: type {flag} alone")
        if fixed is None and not equals:
            value = "true" if knob.type is bool else _value(flag, words, knobs)
        typed |= _settings(knob, value if fixed is None else fixed, flag)
    return Command(verb, typed, config_path, tuple(paths))


WITH_WORDS = ("compare", "prepare", "predict")
_SHOW = {"-h": "help", "--help": "help", "--version": "version"}
_CONFIG = ("-f", "--config")


def _value(flag: str, words: list[str], knobs: Knobs) -> str:
    following = words[0].partition("=")[0] if words else ""
    names = (*_SHOW, *_CONFIG, *(f"--{name}" for name in _names(knobs)))
    if not words or following.replace("-", "_").replace("__", "--", 1) in names or following in names:
        raise UserError(f"{flag} needs a value: type {flag} VALUE")
    return words.pop(0)


def _names(knobs: Knobs) -> list[str]:
    """Every name that a setting answers to."""
    names = list(SHORTHANDS)
    for knob in knobs.values():
        names += [knob.name, *knob.aliases, *([f"no_{knob.name}"] if knob.type is bool else [])]
    return names


def _find(name: str, knobs: Knobs, label: str, kind: str) -> tuple[Knob, Any]:
    """The setting that a name means, and its value where the name alone says it; `label` is as written."""
    if name in SHORTHANDS:
        setting, value = SHORTHANDS[name]
        return knobs[setting], value
    for knob in knobs.values():
        if name == knob.name or name in knob.aliases:
            return knob, None
        if knob.type is bool and name == f"no_{knob.name}":
            return knob, "false"
    if name in REFUSED:
        raise UserError(f"{label} is not accepted: {REFUSED[name]}")
    dashes = "--" if kind == "flag" else ""
    others = ("help", "version", "config") if kind == "flag" else ()
    near = did_you_mean(name.lstrip("-"), [*_names(knobs), *others], dashes) or ", --help lists them all"
    raise UserError(f"unknown {kind} {label}{near}" if kind == "flag" else f"{label}: unknown {kind}{near}")


def _settings(knob: Knob, value: Any, label: str) -> dict[str, Any]:
    """What a value of a setting stands for: itself, unless it is another's name."""
    if reason := REFUSED_VALUES.get((knob.name, str(value))):
        raise UserError(f"{label} {value} is not accepted: {reason}")
    if meant := VALUE_ALIASES.get((knob.name, str(value))):
        return dict(meant)
    return {knob.name: knob.coerce(value, label)}


def read_yaml(path: str | Path, knobs: Knobs) -> dict[str, Any]:
    """The settings of a YAML 1.2 file, flat or in sections one level deep. A null leaves its setting unset.

    Values keep their text until their setting's type is known, so `lr: 1e-3` is a number and `run_name: 007`
    stays as it is. Errors name the file and the line.
    """
    found: dict[str, Any] = {}
    for key, value, line in _entries(path):
        label = f"{path} line {line}: {key}"
        knob, fixed = _find(key.replace("-", "_"), knobs, label, "key")
        if knob.name in found:
            raise UserError(f"{label}: {knob.name} is set twice in this file, keep one of the two")
        if fixed is not None and value != "true":
            raise UserError(f"{label} {value}: can only be true, otherwise set {knob.name}")
        found |= {knob.name: None} if value is None else _settings(knob, value if fixed is None else fixed, label)
    return {name: value for name, value in found.items() if value is not None}


def _entries(path: str | Path) -> list[tuple[str, Any, int]]:
    """(key, text or list of texts or None, line) of a YAML file, sections flattened."""
    try:
        from ruamel.yaml import YAML, MappingNode, ScalarNode, SequenceNode
        from ruamel.yaml.error import MarkedYAMLError, YAMLError
    except ImportError:
        raise UserError(f"reading {path} needs a YAML library: pip install ruamel.yaml") from None
    try:
        root = YAML(typ="safe", pure=True).compose(Path(path).read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{path} line {mark.line + 1 if mark else 1}: not YAML ({error.problem})") from None
    except (YAMLError, UnicodeDecodeError, AssertionError, KeyError, RecursionError):  # the third and fourth: %YAML 1.3
        raise UserError(f"{path} line 1: not YAML 1.2 in UTF-8") from None
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read, {error.strerror}") from None

    def scalar(node: Any, label: str) -> Any:
        if isinstance(node, SequenceNode) and all(isinstance(item, ScalarNode) for item in node.value):
            return [item.value for item in node.value]
        if not isinstance(node, ScalarNode):
            raise UserError(f"{label}: must be a value; sections go one level deep")
        return None if not node.style and node.value in ("", "~", "null", "Null", "NULL") else node.value

    entries: list[tuple[str, Any, int]] = []
    if root is not None and not isinstance(root, MappingNode):
        raise UserError(f"{path} line {root.start_mark.line + 1}: must be lines of the form `name: value`")
    for key, node in root.value if root else ():
        inside = node.value if isinstance(node, MappingNode) else [(key, node)]
        for name, value in inside:
            line = name.start_mark.line + 1
            if not isinstance(name, ScalarNode):
                raise UserError(f"{path} line {line}: must be lines of the form `name: value`")
            entries.append((name.value, scalar(value, f"{path} line {line}: {name.value}"), line))
    return entries


def write_yaml(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write `name: value` lines, each value a JSON scalar: YAML 1.1 and 1.2 read them alike."""
    text = "".join(f"{name}: {_scalar(value)}\n" for name, value in mapping.items())
    Path(path).write_text(text, encoding="utf-8")


def _scalar(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # YAML 1.1 takes 1e-07 for a text.
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def help_text(knobs: Knobs, verbs: Sequence[str]) -> str:
    """All flags by group, each with its default, choices, other names, and where it applies."""
    lines = [
        f"usage: python main.py [{'|'.join(verbs)}] [flags]  (installed: cssm ...)",
        "",
        "Train CSSM vision models, on every visible device unless told otherwise. No verb means train;",
        "devices shows and tests what there is; compare RUN RUN ... puts runs side by side; bench times steps;",
        "prepare NAME --data_dir FOLDER writes a data set as files: pathfinder, cabc, pathtracker, tfds:NAME;",
        "prepare folder --data_dir IMAGES --output FOLDER decodes photographs once, for faster training;",
        "eval, predict --input FILES|FOLDER|X.npz and export take a trained model by --checkpoint RUN.",
        "A typed flag wins over --config, which wins over the preset and the defaults; of a repeated flag",
        "the last wins. Hyphens may stand for underscores. A switch such as --remat is off as --no_remat.",
        "N may be written 300k, 1.5M or 2G: thousands, millions, thousands of millions.",
        "By recipe: chosen to fit the architecture, the preset and the data; a run's config.yaml holds it.",
    ]
    group = ""
    for knob in knobs.values():
        if knob.group != group:
            group = knob.group
            lines += ["", f"{group}:"]
        lines += _help_entry(knob, knobs)
    lines += ["", "other:"]
    lines += _columns("-f, --config FILE", "read settings from a YAML file, flat or in sections")
    lines += [line for name, (knob, value) in SHORTHANDS.items() for line in _columns(f"--{name}", f"--{knob} {value}")]
    lines += _columns("-h, --help", "print this") + _columns("--version", "print the version")
    return "\n".join(lines)


def conditions(knob: Knob, knobs: Knobs) -> list[dict[str, tuple[str, ...]]]:
    """Where a setting applies, less what is the condition of another one among these, which brings it along."""

    def follows(name: str, values: tuple[str, ...], way: Applies) -> bool:
        others = [ways for other in way if other != name and (ways := knobs[other].applies)]
        return any(all(other.get(name) == values for other in ways) for ways in others)

    return [{n: values for n, values in way.items() if not follows(n, values, way)} for way in knob.applies]


def _condition(name: str, values: tuple[str, ...], knobs: Knobs) -> str:
    """`--arch vit or baseline`, or where that is much shorter `any --arch but simple`."""
    others = [choice for choice in knobs[name].choices if choice not in values]
    few = 0 < 2 * len(others) < len(values)
    return f"any --{name} but {' or '.join(others)}" if few else f"--{name} {' or '.join(values)}"


def condition_text(knob: Knob, knobs: Knobs) -> str:
    """`with --arch vit and ..., or ...`; empty for a setting that always applies."""
    ways = [" and ".join(_condition(*pair, knobs) for pair in way.items()) for way in conditions(knob, knobs)]
    return f"with {', or '.join(ways)}" if ways else ""


def _help_entry(knob: Knob, knobs: Knobs) -> list[str]:
    metavar = {bool: "", int: " N", float: " X", str: " TEXT"}[knob.type]
    default = knob.unset if knob.default is None else str(knob.default).replace("False", "off").replace("True", "on")
    notes = [f"default: {default}"]
    if knob.default is True:
        notes.append(f"off as --no_{knob.name}")
    if knob.applies:
        notes.append(condition_text(knob, knobs))
    if knob.aliases:
        notes.append("also " + ", ".join(f"--{alias}" for alias in knob.aliases))
    choices = f": {', '.join(knob.choices)}" if knob.choices else ""
    return _columns(f"--{knob.name}{metavar}", f"{knob.help}{choices} [{'; '.join(notes)}]")


def _columns(left: str, right: str) -> list[str]:
    first, *rest = textwrap.wrap(right, 70)
    return [f"  {left:<29} {first}", *(f"{'':32}{line}" for line in rest)]
