"""The page of several runs: the table, and one curve for each run in each picture."""

import json

import pytest
from test_compare import run
from test_page import Reader
from test_plots import EVENTS

from cssm.cli import main
from cssm.compare import compare
from cssm.report import plots
from cssm.report.comparison import comparison_page


def test_each_run_has_a_row_and_its_curves():
    rows = [("run", "test"), ("a<b", "0.9"), ("_c$d$", "0.8")]
    read = Reader(comparison_page(rows, {"a<b": EVENTS, "_c$d$": EVENTS[:5]}, ["they <differ>"]))
    assert {"a<b", "0.9", "_c$d$", "they <differ>"} <= set(read.texts)
    words = " ".join(read.texts)
    assert "loss on the val split" in words and "learning rate" not in words
    assert words.count("a<b (last") == 4 and words.count("_c$d$ (last") == 2


def test_the_page_is_written_where_it_is_wanted(tmp_path, capsys):
    for name in "ab":
        run(tmp_path, name)
    target = tmp_path / "new" / "page.html"
    assert main(["compare", str(tmp_path), "--output", str(target)]) == 0
    assert f"page: {target}" in capsys.readouterr().out
    assert Reader(target.read_text()).texts.count("0.875") == 2


def test_a_run_that_went_back_is_drawn_once(tmp_path, monkeypatch):
    """As it would be had it run through."""
    drawn, draw = {}, plots.draw
    monkeypatch.setattr(plots, "draw", lambda metric, curves: drawn.setdefault(metric, curves) and draw(metric, curves))
    directory = run(tmp_path, "a")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "step", "step": 11, "loss": 2.0, "step_ms": 10.0}) + "\n")
    compare([str(directory)], output=str(tmp_path / "x.html"))
    assert drawn["loss"] == {"a": [(1, 1.0), (11, 2.0)]}


@pytest.mark.parametrize("output, instead", [("", "/compare.html"), ("/table.md", "/table.html")])
def test_what_is_no_page_is_refused(tmp_path, capsys, output, instead):
    run(tmp_path, "a")
    assert main(["compare", str(tmp_path / "a"), "--output", f"{tmp_path}{output}"]) == 2
    assert capsys.readouterr().err.endswith(f"type --output {tmp_path}{instead}\n")


def test_a_page_replaces_a_page_and_no_other_file(tmp_path, capsys):
    run(tmp_path, "a")
    run(tmp_path, "b")
    for name, content in {"report.html": "<title>Run a</title>", "notes.html": "mine"}.items():
        (tmp_path / name).write_text(content)
        assert main(["compare", str(tmp_path / "a"), "--output", str(tmp_path / name)]) == 2
        assert f"--output {tmp_path / name} is there already, and not of this command" in capsys.readouterr().err
        assert (tmp_path / name).read_text() == content
    target = tmp_path / "page.html"
    target.touch()
    for names in (["a"], ["a", "b"]):  # over an empty file, then over its own
        assert main(["compare", *(str(tmp_path / name) for name in names), "--output", str(target)]) == 0
        assert Reader(target.read_text()).texts.count("0.875") == len(names)
