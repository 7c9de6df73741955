"""docs/reference.md holds every flag, and is what the settings give today."""

import re
from pathlib import Path

from cssm.config import KNOBS
from cssm.reference import reference_page
from cssm.settings.names import REFUSED, SHORTHANDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"


def test_the_page_is_current():
    assert PAGE.read_text() == reference_page(), "type make reference"


def test_every_name_has_a_row():
    told = set(re.findall(r"`--(\w+)[^`]*`", "\n".join(re.findall(r"^\| (`--.*?) \|", PAGE.read_text(), re.MULTILINE))))
    aliases = {alias for knob in KNOBS.values() for alias in knob.aliases}
    assert told >= {*KNOBS, *aliases, *SHORTHANDS, *REFUSED}


def test_tables_are_whole():
    """A bar or an angle in a help text would end a cell or vanish."""
    for block in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1
        assert not re.search(r"<(?!br>)", block)
