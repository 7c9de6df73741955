"""What a knob is: one setting, with its type, range, names and where it applies; and how a value is checked.

config.py declares the settings, flags.py reads them from the command line and from YAML.
"""

import dataclasses
import difflib
import math
import os
import types
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any


class UserError(Exception):
    """A mistake of the user's, told in one sentence: what was given, what is wrong, what to type instead.

    exit_code: what the program exits with (2 usage, 5 non-finite loss, 6 storage).
    """

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


VERBS = ("train", "devices", "compare", "bench", "prepare", "eval", "predict", "export")
TRAINING = ("train", "bench")
WITH_DEVICES = ("train", "devices", "bench")
# What is done with a trained model, whose settings come with it.
INFERRING = ("eval", "predict")
OF_A_RUN = (*INFERRING, "export")

Applies = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Knob:
    """One setting.

    applies: other knobs and the values under which this one has a meaning; all of a mapping must hold, of several
    mappings one; none: it always has.
    bounds: an interval such as "[0,1)"; an open end is left out, "[1,)".
    unset: what None stands for, in words.
    verbs: the verbs that take it. saved: whether it describes a run, and is kept with one.
    resume: what becomes of it when a run goes on. "fixed": must not change; "kept": the saved value unless
    typed anew; "fresh": belongs to the invocation, and is never taken from the saved run.
    """

    name: str
    type: type
    optional: bool
    default: Any
    help: str
    group: str
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    applies: tuple[Applies, ...] = ()
    bounds: str = ""
    multiple_of: int = 1
    unset: str = "by recipe"
    resume: str = "kept"
    verbs: tuple[str, ...] = ("train",)
    saved: bool = True

    def coerce(self, value: Any, label: str) -> Any:
        """The value in this knob's type. A UserError opens with the label and the value as given."""
        if value is None and self.optional:
            return None
        try:
            result = _CONVERT[self.type](value)
        except (TypeError, ValueError, ArithmeticError):
            raise UserError(f"{label} {value}: must be {_KINDS[self.type]}") from None
        if self.choices and choice_of(result) not in self.choices:
            near = did_you_mean(result, self.choices)
            raise UserError(f"{label} {value}: must be one of {', '.join(self.choices)}{near}")
        if self.bounds and not _inside(result, self.bounds):
            raise UserError(f"{label} {value}: must be {_interval(self.bounds)}")
        if self.multiple_of > 1 and result % self.multiple_of:
            raise UserError(f"{label} {value}: must be {multiple(self.multiple_of, result)}")
        return result

    def unmet(self, settings: object) -> list[tuple[str, tuple[str, ...]]]:
        """Why this setting has no meaning among `settings`: of each way in which it would have one, the first setting
        that is in its way, and what that must be. Empty where it has a meaning.
        """
        causes = [
            next(
                ((name, values) for name, values in way.items() if choice_of(getattr(settings, name)) not in values),
                None,
            )
            for way in self.applies
        ]
        return [] if None in causes else [cause for cause in causes if cause]


def choice_of(value: Any) -> Any:
    """Which of the choices of a knob a value is: itself, but tfds:NAME for a text such as tfds:mnist."""
    head, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return f"{head}:NAME" if colon and name else value


def knob(default: Any, help: str, **properties: Any) -> Any:
    """A dataclass field that is a knob; the properties are those of Knob."""
    return dataclasses.field(default=default, metadata={"help": help, **properties})


def knobs_of(cls: type) -> dict[str, Knob]:
    """The knobs that the fields of a dataclass declare, by name, in order."""
    found = {}
    for field in dataclasses.fields(cls):
        kinds: tuple[Any, ...] = field.type.__args__ if isinstance(field.type, types.UnionType) else (field.type,)
        base = next(kind for kind in kinds if kind is not types.NoneType)
        properties = dict(field.metadata)
        if isinstance(applies := properties.get("applies"), Mapping):
            properties["applies"] = (applies,)
        found[field.name] = Knob(field.name, base, types.NoneType in kinds, field.default, **properties)
    return found


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """`, did you mean X?` for the known word nearest in spelling; empty when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {prefix}{near[0]}?" if near else ""


def multiple(of: int, near: int) -> str:
    """The rule in words, with the multiples on either side: `even, type 32 or 34`."""
    sides = [n for n in (near // of * of, near // of * of + of) if n > 0]
    return f"{'even' if of == 2 else f'a multiple of {of}'}, type {' or '.join(map(str, sides))}"


def _to_bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9}


def _to_int(value: Any) -> int:
    """1.5k is 1500; 1.5 and 1.0005k are no whole numbers. A suffix may be of either case."""
    if isinstance(value, bool):
        raise ValueError
    text = str(value)
    factor = SUFFIXES.get(text[-1:].lower(), 1)
    number = Decimal(text[:-1] if factor > 1 else text) * factor  # exact to 28 digits
    if number.adjusted() > 27 or number != number.to_integral_value():
        raise ValueError
    return int(number)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError
    return float(value)


def _to_str(value: Any) -> str:
    if isinstance(value, list | tuple):  # device indices
        text = ",".join(str(int(str(index))) for index in value)
    else:
        text = str(value) if type(value) is int else os.fspath(value)
    if not text:
        raise ValueError
    return text


_CONVERT = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}
_KINDS = {
    bool: "true or false",
    int: "a whole number, such as 500 or 5k",
    float: "a number",
    str: "a text that is not empty",
}


def _ends(bounds: str) -> tuple[float | None, float | None]:
    low, high = bounds[1:-1].split(",")
    return float(low) if low else None, float(high) if high else None


def _inside(value: float, bounds: str) -> bool:
    low, high = _ends(bounds)
    above = low is None or value > low or (value == low and bounds[0] == "[")
    below = high is None or value < high or (value == high and bounds[-1] == "]")
    return above and below


def _interval(bounds: str) -> str:
    low, high = bounds[1:-1].split(",")
    words = [f"{'at least' if bounds[0] == '[' else 'above'} {low}"] if low else []
    words += [f"{'at most' if bounds[-1] == ']' else 'below'} {high}"] if high else []
    return " and ".join(words)
