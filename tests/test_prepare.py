"""The verb prepare, from the command line: what it writes can be trained on as it says, and what it refuses."""

import json
import os
import shlex
import signal

import pytest

from cssm import data
from cssm import prepare as module
from cssm.cli import main
from cssm.config import parse_args
from cssm.data import written

FEW = ["--max_train_examples", "24", "--max_eval_examples", "8", "--num_workers", "0"]


def events(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    "argv, told",
    [
        (["pathfinder"], "--dataset pathfinder"),
        (["cabc", "--cabc_difficulty", "hard", "--image_size", "64"], "--dataset cabc --cabc_difficulty hard"),
        (["pathtracker", "--pathtracker_difficulty", "0"], "--dataset pathtracker"),
        (["pathfinder", "--format", "array_record"], "--dataset tfds:pathfinder/easy-32"),
        (["pathtracker", "--format=array_record"], "--dataset tfds:pathtracker/easy-32"),
    ],
)
def test_it_says_how_to_train_on_what_it_wrote(tmp_path, capsys, argv, told):
    root = tmp_path / "my sets"
    assert main(["prepare", *argv, "--data_dir", str(root), *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"train on it: python main.py {told} --data_dir {shlex.quote(str(root))}"
    assert lines[-2].startswith(str(root)) and lines[-2].endswith(": 24 train, 8 val, 8 test")
    # The command, as it is told, finds the data.
    command = shlex.split(lines[-1].partition("main.py ")[2])
    assert sum(data.outline(parse_args([*command, "--dry_run"]).config).examples.values()) == 40


def test_with_headless_it_is_one_event(tmp_path, capfd):
    assert main(["prepare", "pathfinder", "--data_dir", str(tmp_path), *FEW, "--headless"]) == 0
    (event,) = events(capfd.readouterr().out)
    assert event["event"] == "prepare" and event["examples"] == {"train": 24, "val": 8, "test": 8}
    assert event["folder"] == str(tmp_path / "curv_contour_length_easy") and event["there"] is False


@pytest.mark.parametrize(
    "argv, sentence",
    [
        ([], "prepare takes one data set, without --dataset: type prepare NAME --data_dir FOLDER"),
        (["pathfinder", "cabc"], "prepare takes one data set"),
        (["--dataset", "pathfinder", "--data_dir", "x"], "prepare takes one data set, without --dataset"),
        (["pathfinder"], "prepare pathfinder: it needs a folder to write to: type --data_dir FOLDER"),
        (["digits", "--data_dir", "x"], "prepare digits: can prepare pathfinder, cabc, pathtracker, folder, imagenet"),
        (["pathfindr", "--data_dir", "x"], "did you mean pathfinder?"),
        (
            ["tfds:mnist", "--data_dir", "x", "--format", "array_record"],
            "--format is not for data sets that are downloaded",
        ),
        (
            ["tfds:mnist", "--data_dir", "x", "--num_workers", "2"],
            "--num_workers is not for data sets that are downloaded, as",
        ),
        (["cabc", "--data_dir", "x", "--lr", "1"], "--lr does not apply to the verb prepare"),
        (["cabc", "--data_dir", "x", "--image_size", "32"], "cABC takes 64 to 448 pixels"),
        (["pathtracker", "--data_dir", "x", "--image_size", "64"], "clips of PathTracker are 32 pixels wide"),
    ],
)
def test_what_is_refused(capsys, argv, sentence):
    assert main(["prepare", *argv]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("code, why", [(28, "the disk is full"), (13, "it is not writable")])
def test_where_nothing_can_be_written_it_ends_with_6(tmp_path, capsys, monkeypatch, code, why):
    def fail(*_args):
        raise OSError(code, "no")

    monkeypatch.setattr(module, "write_published", fail)
    assert main(["prepare", "cabc", "--data_dir", str(tmp_path), *FEW]) == 6
    assert f"error: cannot write cabc to {tmp_path}: {why}; make room, or type another" in capsys.readouterr().err


def test_sigterm_clears_up_and_ends_with_143(tmp_path, monkeypatch):
    make = written._write

    def stop(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return make(*args)

    monkeypatch.setattr(written, "_write", stop)
    with pytest.raises(SystemExit) as ended:
        main(["prepare", "pathfinder", "--data_dir", str(tmp_path), *FEW])
    assert ended.value.code == 143 and list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_format_is_not_for_training(capsys):
    assert main(["--dataset", "pathfinder", "--format", "published"]) == 2
    assert "--format does not apply to the verb train: it is for prepare or export" in capsys.readouterr().err


@pytest.mark.slow
def test_a_few_steps_of_training_on_what_was_prepared(tmp_path, capfd):
    assert main(["prepare", "pathfinder", "--data_dir", str(tmp_path), *FEW, "--format", "array_record"]) == 0
    capfd.readouterr()
    argv = ["--dataset", "tfds:pathfinder", "--data_dir", str(tmp_path), "--checkpoint_dir", str(tmp_path / "runs")]
    argv += ["--max_steps", "3", "--batch_size", "4", "--num_devices", "1", "--embed_dim", "8", "--seq_len", "2"]
    assert main([*argv, "--kernel_size", "3", "--headless"]) == 0
    found = events(capfd.readouterr().out)
    config, summary = found[0], found[-1]
    assert config["dataset"] == "tfds:pathfinder" and config["classes"] == ["neg", "pos"]
    assert config["image_shape"] == [32, 32, 1] and summary["event"] == "summary"
    assert [event["count"] for event in found if event["event"] == "eval"][-1] == 8
