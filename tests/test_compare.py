"""Runs side by side: what the table holds, what it leaves open, and which files are refused."""

import json

import pytest

from cssm import compare as module
from cssm.cli import main
from cssm.compare import compare, labels, read_run, table
from cssm.config import UserError

CONDITIONS = {"platform": "cpu", "devices": 1, "effective_batch": 32, "dataset": "digits", "image_shape": [16, 16, 1]}


def run(folder, name, cssm="gated", step_ms=(900.0, 11.0, 9.0, 10.0), evals=True, wait_ms=0.1, **facts):
    """A run as the program leaves it: an interval of loading, three of ten steps, two evaluations, a test."""
    settings = {"arch": "simple", "cssm": cssm, "seed": 0, "cache_dir": f"/x/{name}"}
    config = {"event": "config", "schema": 1, "num_params": 7345, "flops_per_image": 1334918, **CONDITIONS, **facts}
    events = [{**config, "config": {**settings, **facts.get("config", {})}}]
    for i, ms in enumerate(step_ms):
        events.append({"event": "step", "step": 10 * i + 1, "loss": 1.0, "step_ms": ms, "data_wait_ms": wait_ms})
    if evals:
        for split, accuracy in (("val", 0.5), ("val", 0.875), ("val", 0.75), ("test", 0.6875)):
            events.append({"event": "eval", "split": split, "step": 31, "accuracy": accuracy, "loss": 1.0, "count": 16})
    directory = folder / name
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def rows(text):
    lines = [line.strip("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_the_table_holds_costs_and_scores(tmp_path, capsys):
    """The median leaves out the interval in which programs are loaded."""
    compare([str(run(tmp_path, "a")), str(run(tmp_path, "b", "hgru_bi", (900.0, 23.0, 20.0, 1.0), num_params=12))])
    head, first, second = rows(capsys.readouterr().out)
    assert head == ["run", "parameters", "FLOPs per image", "steps", "step ms", "ratio", "best val", "test"]
    assert first == ["gated", "7,345", "1.33e+06", "31", "10.0", "1.00", "0.875", "0.688"]
    assert second == ["hgru_bi", "12", "1.33e+06", "31", "20.0", "2.00", "0.875", "0.688"]


def test_a_folder_of_runs_is_those_in_it_and_headless_prints_an_object_for_each(tmp_path, capfd):
    run(tmp_path, "a")
    run(tmp_path, "b", "gdn")
    assert main(["compare", str(tmp_path), "--headless"]) == 0
    first, second = map(json.loads, capfd.readouterr().out.splitlines())
    assert (first["run"], second["run"], second["settings"]["cssm"]) == ("a", "b", "gdn")
    assert (first["step_ms"], first["ratio"], first["best_val"]) == (10.0, 1.0, 0.875)


def test_what_a_run_does_not_tell_is_a_dash(tmp_path):
    records = [read_run(run(tmp_path, "a", step_ms=(900.0,), evals=False)), read_run(run(tmp_path, "b"))]
    _, first, second = rows(table(records))
    assert first[3:] == ["1", "-", "-", "-", "-"]
    assert second[5] == "-", "a ratio to nothing"


def test_runs_are_called_by_what_tells_them_apart(tmp_path):
    names = iter("abcdefghx")
    make = lambda **settings: read_run(run(tmp_path, next(names), config=settings))
    assert labels([make(seed=1), make(seed=2)]) == ["seed=1", "seed=2"]
    assert labels([make(cssm="gdn"), make(cssm="hgru", seed=1)]) == ["cssm=gdn seed=0", "cssm=hgru seed=1"]
    assert labels([make(), make()]) == ["e", "f"]
    resumed = make(cssm="hgru", batch_size=None, global_batch_size=32)
    first = make(cssm="gdn", batch_size=32, global_batch_size=None, delta_key_dim=2)
    assert labels([first, resumed]) == ["gdn", "hgru"]
    other = read_run(run(tmp_path, "i", effective_batch=64))
    assert labels([make(), other]) == ["effective_batch=32", "effective_batch=64"]


def test_runs_under_other_conditions_are_told_apart(tmp_path, capsys):
    compare([str(run(tmp_path, "a")), str(run(tmp_path, "b", "hgru", platform="gpu"))])
    assert 'the runs differ in platform ("cpu", "gpu")' in capsys.readouterr().out
    compare([str(run(tmp_path, "c")), str(run(tmp_path, "d"))])
    assert "note" not in capsys.readouterr().out


def test_of_a_resumed_run_the_last_configuration_holds(tmp_path):
    directory = run(tmp_path, "a")
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = json.loads(lines[0]) | {"num_params": 99}
    (directory / "metrics.jsonl").write_text("".join([*lines, json.dumps(again) + "\n"]))
    assert read_run(directory).facts["num_params"] == 99


def test_steps_are_counted_beyond_the_last_interval(tmp_path):
    directory = run(tmp_path, "a")
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"event": "checkpoint", "step": 34}\n')
    assert read_run(directory).steps == 34


def test_each_start_has_an_interval_of_loading(tmp_path):
    """Here of three starts, of which two were stopped within it."""
    directory, brief = run(tmp_path, "a", step_ms=(900.0, 10.0)), run(tmp_path, "b", step_ms=(900.0,))
    with open(directory / "metrics.jsonl", "a") as file:
        file.write((brief / "metrics.jsonl").read_text() * 2)
    assert read_run(directory).step_ms == 10.0


def test_a_line_half_written_is_left_out_and_told(tmp_path, capsys):
    """A killed run leaves one, also amid the file where it went on, and in bytes that are no UTF-8."""
    directory = run(tmp_path, "a")
    whole = (directory / "metrics.jsonl").read_bytes()
    for torn in (b'{"event": "ev', b'{"event": "ev\n' + whole, b'{"event": "\xff'):
        (directory / "metrics.jsonl").write_bytes(whole + torn)
        compare([str(directory)])
        out = capsys.readouterr().out
        assert rows(out)[1][3:5] == ["31", "10.0"]
        assert "lines left out because they are half written: 1" in out


def test_what_makes_a_row_doubtful_is_told(tmp_path, capsys):
    """A step that waits for data takes longer than it computes; an accuracy of nothing is none."""
    waiting, failed = run(tmp_path, "a", wait_ms=2.0), run(tmp_path, "b", "gdn", evals=False)
    with open(failed / "metrics.jsonl", "a") as file:
        file.write('{"event": "eval", "split": "val", "step": 31, "accuracy": "nan"}\n')
        file.write('{"event": "error", "step": 33, "message": "the loss is not finite"}\n')
    compare([str(waiting), str(failed)])
    out = capsys.readouterr().out
    assert "a: 20% of the time was spent waiting for data" in out and "b: " not in out
    assert "b ended in an error: the loss is not finite" in out and "a ended" not in out
    assert rows(out)[2][-2:] == ["-", "-"]


@pytest.mark.parametrize(
    "text,words",
    [
        ('{"event": "st\n{"event": "step", "step": 1}\n', "holds no config event"),
        ('{"event": "config", "schema": 99}\n', "line 1 is no event of schema 1"),
        ("[1]\n", "line 1 is no event"),
        ("", "holds no config event"),
    ],
)
def test_files_that_are_no_events_are_refused(tmp_path, text, words):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=words):
        compare([str(tmp_path)])


@pytest.mark.parametrize(
    "argv,words",
    [
        ([], "compare needs the directories of runs"),
        (["absent"], "absent is no directory"),
        (["{empty}"], "holds no run"),
        (["a", "--lr", "1"], "--lr does not apply to the verb compare"),
        (["a", "--gpus", "0"], "--gpus does not apply to the verb compare: it is for train or devices"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, argv, words):
    assert main(["compare", *(word.format(empty=tmp_path) for word in argv)]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_the_columns_are_those_of_the_events():
    """A run of the program is compared by the script in test_configs."""
    from cssm.report.events import SCHEMA

    assert module.SCHEMA == SCHEMA
