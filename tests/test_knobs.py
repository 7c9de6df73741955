"""A value is converted without loss or refused in one sentence."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from cssm.knobs import UserError, choice_of, did_you_mean, knob, knobs_of, multiple


@dataclasses.dataclass
class Sample:
    width: int = knob(4, "a size", group="g", bounds="[2,)", multiple_of=2)
    steps: int | None = knob(None, "a length", group="g", bounds="[1,)")
    rate: float | None = knob(None, "a share", group="g", bounds="[0,1)")
    fraction: float = knob(1.0, "a part", group="g", bounds="(0,1]")
    switch: bool = knob(False, "a switch", group="g", applies={"kind": ("b",), "width": (4, 6)})
    kind: str = knob("a", "a choice", group="g", choices=("a", "b", "14", "of:NAME"))
    named: bool = knob(False, "a switch", group="g", applies={"kind": ("of:NAME",)})
    path: str | None = knob(None, "a text", group="g")


KNOBS = knobs_of(Sample)


@pytest.mark.parametrize(
    "name, given, expected",
    [
        ("steps", "7", 7),
        ("steps", "1e4", 10_000),
        ("steps", "300k", 300_000),
        ("steps", "300K", 300_000),
        ("steps", "5M", 5_000_000),
        ("steps", "5m", 5_000_000),
        ("steps", "1.5k", 1500),
        ("steps", "1.1M", 1_100_000),
        ("steps", "2e-3k", 2),
        ("steps", "0.5G", 500_000_000),
        ("steps", 5.0, 5),
        ("steps", np.int64(5), 5),
        ("steps", "12345678901234567890", 12_345_678_901_234_567_890),
        ("steps", None, None),
        ("rate", "1e-7", 1e-7),
        ("rate", 0, 0.0),
        ("fraction", "1", 1.0),
        ("switch", "True", True),
        ("switch", False, False),
        ("kind", 14, "14"),
        ("path", "1e-3", "1e-3"),
        ("path", [0, 1], "0,1"),
        ("path", Path("a") / "b", str(Path("a") / "b")),
        ("width", "6", 6),
    ],
)
def test_values_take_the_type_of_their_knob(name, given, expected):
    value = KNOBS[name].coerce(given, name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    "name, given, sentence",
    [
        ("steps", "2.5", "steps 2.5: must be a whole number, such as 500 or 5k"),
        ("steps", 2.5, "steps 2.5: must be a whole number, such as 500 or 5k"),
        ("steps", True, "steps True: must be a whole number, such as 500 or 5k"),
        ("steps", "many", "steps many: must be a whole number, such as 500 or 5k"),
        ("steps", "inf", "steps inf: must be a whole number, such as 500 or 5k"),
        ("steps", "nan", "steps nan: must be a whole number, such as 500 or 5k"),
        ("steps", "1e999999999", "steps 1e999999999: must be a whole number, such as 500 or 5k"),
        ("steps", "1e-9", "steps 1e-9: must be a whole number, such as 500 or 5k"),
        ("steps", "1.0005k", "steps 1.0005k: must be a whole number, such as 500 or 5k"),
        ("steps", "5B", "steps 5B: must be a whole number, such as 500 or 5k"),
        ("steps", "k", "steps k: must be a whole number, such as 500 or 5k"),
        ("steps", "5kk", "steps 5kk: must be a whole number, such as 500 or 5k"),
        ("steps", "-5k", "steps -5k: must be at least 1"),
        ("rate", "1k", "rate 1k: must be a number"),
        ("steps", "0", "steps 0: must be at least 1"),
        ("rate", "nan", "rate nan: must be a number"),
        ("rate", "1e999", "rate 1e999: must be a number"),
        ("rate", True, "rate True: must be a number"),
        ("rate", "1", "rate 1: must be at least 0 and below 1"),
        ("rate", "-1e-9", "rate -1e-9: must be at least 0 and below 1"),
        ("fraction", "0", "fraction 0: must be above 0 and at most 1"),
        ("fraction", "1.5", "fraction 1.5: must be above 0 and at most 1"),
        ("switch", "yes", "switch yes: must be true or false"),
        ("switch", 1, "switch 1: must be true or false"),
        ("switch", None, "switch None: must be true or false"),
        ("kind", "bb", "kind bb: must be one of a, b, 14, of:NAME, did you mean b?"),
        ("kind", "xyz", "kind xyz: must be one of a, b, 14, of:NAME"),
        ("path", "", "path : must be a text that is not empty"),
        ("path", 0.5, "path 0.5: must be a text that is not empty"),
        ("path", ["a", 1], "path ['a', 1]: must be a text that is not empty"),
        ("width", 33, "width 33: must be even, type 32 or 34"),
    ],
)
def test_what_does_not_convert_is_refused(name, given, sentence):
    with pytest.raises(UserError) as caught:
        KNOBS[name].coerce(given, name)
    assert str(caught.value) == sentence


def test_a_knob_applies_when_all_its_conditions_hold():
    assert KNOBS["switch"].unmet(Sample(kind="b")) == []
    assert KNOBS["switch"].unmet(Sample()) == [("kind", ("b",))]
    assert KNOBS["switch"].unmet(Sample(kind="b", width=8)) == [("width", (4, 6))]
    assert KNOBS["kind"].unmet(Sample()) == []


def test_declarations_are_read_from_the_fields():
    assert [*KNOBS] == [field.name for field in dataclasses.fields(Sample)]
    assert (KNOBS["steps"].type, KNOBS["steps"].optional) == (int, True)
    assert (KNOBS["width"].type, KNOBS["width"].optional, KNOBS["width"].default) == (int, False, 4)


def test_hints():
    assert did_you_mean("embed_dimm", ["depth", "embed_dim"], "--") == ", did you mean --embed_dim?"
    assert did_you_mean("zzz", ["depth"]) == ""
    assert multiple(16, 24) == "a multiple of 16, type 16 or 32"
    assert multiple(16, 3) == "a multiple of 16, type 16"


def test_a_choice_may_be_open_behind_a_colon():
    assert KNOBS["kind"].coerce("of:x/y:1.0.0", "--kind") == "of:x/y:1.0.0"
    assert [choice_of(value) for value in ("of:x", "of:", "a", 3, None)] == ["of:NAME", "of:", "a", 3, None]
    for value in ("of:", "off:x", ":x"):
        with pytest.raises(UserError, match="must be one of a, b, 14, of:NAME"):
            KNOBS["kind"].coerce(value, "--kind")
    assert KNOBS["named"].unmet(Sample(kind="of:x")) == []
    assert KNOBS["named"].unmet(Sample(kind="a")) == [("kind", ("of:NAME",))]
