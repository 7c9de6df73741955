"""A trace of some steps: which ones, what is in the files, what is refused."""

import gzip
import json

import pytest

from cssm import train
from cssm.config import Config, UserError
from cssm.tracing import BEFORE, TRACED, Trace, check_length

TINY = {"cssm": "gated", "embed_dim": 4, "image_size": 8, "kernel_size": 3, "seq_len": 2, "max_train_examples": 40}
TINY |= {"max_eval_examples": 8, "global_batch_size": 8, "num_devices": 1, "quiet": True}


@pytest.fixture
def calls(monkeypatch):
    """What is asked of the profiler, in order."""
    made = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: made.append(f"start {folder}"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: made.append("stop"))
    return made


def steps(calls, directory, number, **options):
    with Trace(directory, lambda: calls.append("wait"), **options) as trace:
        for taken in range(number):
            trace.at(taken)
            calls.append(taken)
    return calls


def test_it_holds_the_steps_that_follow_the_first_ones(calls):
    """Nothing of an earlier step runs in it, and all of its own have ended."""
    assert steps(calls, "d", 12) == [*range(5), "wait", "start d", *range(5, 10), "wait", "stop", 10, 11]


def test_it_ends_with_the_run_at_the_latest(calls):
    assert steps(calls, "d", 7) == [*range(5), "wait", "start d", 5, 6, "wait", "stop"]
    calls.clear()
    assert steps(calls, "d", TRACED, before=0) == ["wait", "start d", *range(5), "wait", "stop"]


def test_it_ends_when_the_run_fails(calls):
    with pytest.raises(ZeroDivisionError), Trace("d", lambda: None, before=0) as trace:
        trace.at(0)
        raise ZeroDivisionError
    assert calls == ["start d", "stop"]


def test_each_process_has_a_folder_of_its_own(calls, monkeypatch):
    """Those on one host would overwrite each other's files."""
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert "start d/process_1" in steps(calls, "d", 6)


def test_without_a_folder_there_is_none(calls):
    assert steps(calls, None, 12) == [*range(12)]


def test_a_run_too_short_for_it_is_refused(tmp_path):
    check_length("d", BEFORE + TRACED)
    check_length(None, 1)
    with pytest.raises(UserError, match="traces steps 6 to 10 of a start, and there are 9: type --max_steps for 10"):
        check_length("d", 9)
    with pytest.raises(UserError, match="traces steps 6 to 10"):
        train(Config(**TINY, checkpoint_dir=str(tmp_path / "runs"), max_steps=6, profile=str(tmp_path / "trace")))
    assert not list((tmp_path / "runs").iterdir()) and not (tmp_path / "trace").exists()


def traced(folder):
    """Every event of the one trace in a folder."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    assert list(path.parent.glob("*.xplane.pb"))
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.mark.slow
def test_the_files_name_the_steps_and_the_program(tmp_path):
    settings = {"checkpoint_dir": str(tmp_path / "runs"), "max_steps": 10, "profile": str(tmp_path / "trace")}
    assert train(Config(**TINY, **settings))["trace"] == str(tmp_path / "trace")
    events = traced(tmp_path / "trace")
    marks = {event["args"]["step_num"] for event in events if event.get("name") == "training step"}
    assert marks == {str(step) for step in range(5, 10)}, "counted from 0, as the profiler does"
    assert any("hlo_module" in event.get("args", {}) for event in events)
    assert "profile" not in (next((tmp_path / "runs").iterdir()) / "config.yaml").read_text()
