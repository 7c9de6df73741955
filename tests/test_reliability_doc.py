"""docs/reliability.md: every promise, exit code and symptom has a test that exists."""

import ast
import re
from pathlib import Path

import pytest

from cssm.config import KNOBS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| (?!---|promise|exit code|symptom|what)", line)]
PROVEN = [row for row in ROWS if "::" in row]


def names_in(path):
    """The names of the tests in a file, also of those in its classes."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_each_row_names_tests_and_all_of_them_exist():
    before_figures = PAGE.split("## What was measured")[0]
    assert all(row in PROVEN for row in ROWS if row in before_figures)
    named = set(re.findall(r"`((?:faults/)?test_\w+\.py)::(\w+)`", PAGE))
    assert len(named) > 60 and PAGE.count("::") >= len(named)
    assert not [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / "tests" / file)]


def test_every_exit_code_of_the_readme_has_a_row():
    table = PAGE.split("## Exit codes")[1].split("##")[0]
    codes = set(re.findall(r"^\| (\d+) \|", table, re.MULTILINE))
    readme = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert codes == {code.strip() for row in readme for code in row.split(",")}


def test_an_audit_that_looked_nothing_up_fails():
    """Without --strict pip-audit passes over what the index does not answer for."""
    recipe = (ROOT / "Makefile").read_text().split("\naudit:")[1].split("\n\n")[0]
    assert "pip-audit --strict" in recipe and "|| exit 1" in recipe


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"`--(\w+)", PAGE))))
def test_flags_are_those_of_the_program(flag):
    assert flag in KNOBS


def test_defaults_are_those_of_the_program():
    assert f"`--stall_timeout` ({KNOBS['stall_timeout'].default:,.0f} s" in PAGE
    assert f"`--rollback_factor` ({KNOBS['rollback_factor'].default})" in PAGE
    assert f"`--max_rollbacks` ({KNOBS['max_rollbacks'].default})" in PAGE
