"""Predictions are written whole, in any of three ways."""

import csv
import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from cssm.config import UserError
from cssm.inference.predictions import Predictions, check_output
from cssm.report import Reporter

TOP = [{"class": "cat, grey", "label": 1, "probability": 0.75}, {"class": 'a "dog"', "label": 0, "probability": 0.25}]
ROWS = [{"input": name, **TOP[0], "top": TOP} for name in ("a.png", "b,c.png", "ä\udc80.png")]


def written(path, **options):
    out = io.StringIO()
    with redirect_stdout(out), Reporter(None, **options) as report, Predictions(path, 2, report) as predictions:
        for row in ROWS:
            predictions.write(row)
            assert path is None or not path.exists(), "it has its name once it is complete"
    return out.getvalue()


def test_json_lines(tmp_path):
    assert written(tmp_path / "sub" / "x.jsonl") == ""
    text = (tmp_path / "sub" / "x.jsonl").read_text(errors="surrogateescape")
    assert [json.loads(line) for line in text.splitlines()] == ROWS
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["x.jsonl"]


def test_csv(tmp_path):
    written(tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="", errors="surrogateescape") as file:
        header, *rows = csv.reader(file)
    assert header == ["input", "class_1", "probability_1", "class_2", "probability_2"]
    assert rows == [[row["input"], "cat, grey", "0.75", 'a "dog"', "0.25"] for row in ROWS]


def test_the_screen_and_headless(tmp_path):
    ROWS[2]["input"] = "c.png"
    assert written(None).splitlines()[1] == 'b,c.png: cat, grey 0.7500, a "dog" 0.2500'
    stream = io.StringIO()
    assert written(None, headless_stream=stream) == ""
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["prediction"] * 3 and events[0]["top"] == TOP


def test_what_was_predicted_before_the_end_is_kept(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text("before\n")
    with pytest.raises(KeyboardInterrupt), Reporter(None) as report, Predictions(path, 2, report) as predictions:
        predictions.write(ROWS[0])
        raise KeyboardInterrupt
    assert path.read_text() == "before\n" and len((tmp_path / "x.jsonl.partial").read_text().splitlines()) == 1
    assert "x.jsonl.partial" in capsys.readouterr().out


def test_outputs_that_are_not_written_are_refused(tmp_path):
    (tmp_path / "x.csv").mkdir()
    for output, sentence in (("x.txt", r"written as \.jsonl or \.csv"), (str(tmp_path / "x.csv"), "is a folder")):
        with pytest.raises(UserError, match=sentence):
            check_output(output)
    assert check_output(None) is None


def test_pictures_go_to_a_folder_that_holds_nothing(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for folder in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(UserError, match=f"--explain {folder} exists already and is not overwritten"):
            check_output(None, str(folder))
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "new"):
        assert check_output("a.csv", str(folder)) == Path("a.csv")


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def test_predictions_replace_predictions_and_no_other_file(tmp_path, name):
    path = tmp_path / name
    for _ in range(2):
        assert check_output(str(path)) == path
        with Reporter(None, quiet=True) as report, Predictions(path, 2, report) as predictions:
            predictions.write(ROWS[0])
    path.write_bytes(b"")
    assert check_output(str(path)) == path
    for content in ("name,salary\n", '{"text": "mine"}\n'):
        path.write_text(content)
        with pytest.raises(UserError, match="is there already, and not of this command, which replaces only what it"):
            check_output(str(path))
        assert path.read_text() == content
