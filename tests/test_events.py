"""The record of a run: valid JSON line by line, and one course of events however often it was interrupted."""

import errno
import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from cssm.config import UserError
from cssm.report import events
from cssm.report.events import EventLog, jsonable, read_events


def log(run_dir, *events):
    """Write (kind, fields) pairs as one process would."""
    out = EventLog(run_dir)
    for kind, fields in events:
        out.write(kind, fields)
    out.close()
    return run_dir / "metrics.jsonl"


def steps(run, *numbers):
    return [("step", {"step": step, "run": run}) for step in numbers]


def course(path):
    """(kind, step, run) of what is read."""
    return [(event["event"], event.get("step"), event.get("run")) for event in read_events(path)]


def test_every_line_is_one_json_object_with_its_time_and_the_first_names_the_schema(monkeypatch, tmp_path):
    stream = io.StringIO()
    monkeypatch.setattr(events.time, "time", lambda: 1764400000.12345)
    out = EventLog(tmp_path, stream)
    out.write("config", {"devices": 2, "image_shape": (16, 16, 1), "run_dir": Path("a/b")})
    out.write("step", {"step": np.int64(1), "loss": np.float32(0.5), "best": np.bool_(True)})
    text = (tmp_path / "metrics.jsonl").read_text()  # before close: each event is flushed
    out.close()
    assert text == stream.getvalue()
    assert [list(json.loads(line).items()) for line in text.splitlines()] == [
        [
            ("event", "config"),
            ("schema", 1),
            ("devices", 2),
            ("image_shape", [16, 16, 1]),
            ("run_dir", "a/b"),
            ("time", 1764400000.123),
        ],
        [("event", "step"), ("step", 1), ("loss", 0.5), ("best", True), ("time", 1764400000.123)],
    ]


@pytest.mark.parametrize("number", [math.nan, np.float32("nan"), np.array(math.nan)])
def test_what_is_not_finite_is_a_string(number, tmp_path):
    path = log(tmp_path, ("step", {"step": 1, "loss": number, "deep": [{"norm": -math.inf}, math.inf]}))
    event = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (event["loss"], event["deep"]) == ("nan", [{"norm": "-inf"}, "inf"])
    assert math.isnan(float(event["loss"]))


def test_what_is_no_json_is_refused():
    with pytest.raises(TypeError):
        json.dumps(jsonable({"a": object()}))


@pytest.mark.parametrize(
    "torn", ['{"event": "step", "st', '{"event": "step", "step": 3}', "\0\0", "7", '{"a": 1}', "[1]", "x" * 200_000]
)
def test_a_torn_line_is_cut_and_the_next_event_stands_alone(tmp_path, torn):
    path = log(tmp_path, *steps("first", 1, 2))
    before = path.read_text()
    with path.open("a") as file:
        file.write(torn)
    out = EventLog(tmp_path)
    whole = torn.endswith("3}")
    assert out.cut_bytes == (0 if whole else len(torn))
    out.write(*steps("second", 4)[0])
    out.close()
    assert path.read_text().startswith(before)
    assert all(json.loads(line)["event"] == "step" for line in path.read_text().splitlines())
    middle = [("step", 3, None)] if whole else []
    assert course(path) == [("step", 1, "first"), ("step", 2, "first"), *middle, ("step", 4, "second")]


def test_a_torn_line_in_the_middle_is_skipped_by_the_reader(tmp_path):
    path = log(tmp_path, *steps("first", 1))
    path.write_text(path.read_text() + '{"event": "step", "st\n\0\0\n7\n')
    log(tmp_path, *steps("second", 4))
    assert course(path) == [("step", 1, "first"), ("step", 4, "second")]


def test_a_disk_that_is_full_halfway_through_a_line_leaves_none_of_it(tmp_path):
    path = log(tmp_path, *steps("first", 1))
    before = path.read_bytes()

    class Full(io.FileIO):
        """Takes ten bytes and no more."""

        def write(self, data):
            if self.tell() > len(before):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:10])

    out = EventLog(tmp_path)
    out._file.close()
    out._file = Full(path, "a")
    with pytest.raises(OSError, match="No space left"):
        out.write(*steps("second", 2)[0])
    out.close()
    assert path.read_bytes() == before


def test_appending_adds_no_empty_line(tmp_path):
    log(tmp_path, *steps("first", 1))
    assert len(log(tmp_path, *steps("second", 2)).read_text().splitlines()) == 2


def test_a_resumed_run_replaces_what_it_overtakes(tmp_path):
    killed = [
        *steps("killed", 1, 10, 20),
        ("eval", {"split": "val", "step": 20, "run": "killed"}),
        ("checkpoint", {"step": 20, "run": "killed"}),
        *steps("killed", 30),
        ("eval", {"split": "val", "step": 33, "run": "killed"}),
        ("checkpoint", {"step": 33, "run": "killed"}),
        *steps("killed", 40),
        ("error", {"step": 40, "run": "killed"}),
    ]
    log(tmp_path, ("config", {"run": "killed"}), *killed)
    resumed = [*steps("resumed", 25, 32, 39, 46), ("eval", {"split": "val", "step": 46, "run": "resumed"})]
    path = log(tmp_path, ("config", {"run": "resumed"}), *resumed)
    assert course(path) == [
        ("config", None, "killed"),
        *[("step", step, "killed") for step in (1, 10, 20)],
        ("eval", 20, "killed"),
        ("checkpoint", 20, "killed"),
        ("error", 40, "killed"),
        ("config", None, "resumed"),
        *[("step", step, "resumed") for step in (25, 32, 39, 46)],
        ("eval", 46, "resumed"),
    ]


def test_an_event_repeated_at_the_same_step_counts_once(tmp_path):
    both = [("eval", {"split": split, "step": 9, "run": "a"}) for split in ("val", "test")]
    path = log(tmp_path, *steps("a", 9), *both, *steps("b", 9), ("eval", {"split": "val", "step": 9, "run": "b"}))
    assert course(path) == [("eval", 9, "a"), ("step", 9, "b"), ("eval", 9, "b")]


def tensorboard_events(directory):
    """What TensorBoard would read of the one event file there."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = directory.iterdir()
    data, at = file.read_bytes(), 0
    while at < len(data):  # records of length (8 bytes), checksum (4), an Event, checksum (4)
        size = int.from_bytes(data[at : at + 8], "little")
        yield Event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size


def test_tensorboard_gets_the_scalars(tmp_path):
    out = EventLog(tmp_path, tensorboard=True)
    assert not (tmp_path / "logs").exists()
    out.write("config", {"devices": 2})
    out.write("step", {"step": 5, "epoch": 1, "loss": math.inf, "grad_norm": np.float32(2), "note": "x"})
    out.write("eval", {"split": "val", "step": 6, "accuracy": 0.5, "count": 9, "best": True})
    out.close()
    events = list(tensorboard_events(tmp_path / "logs"))
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert scalars == [(5, "train/loss", math.inf), (5, "train/grad_norm", 2.0), (6, "val/accuracy", 0.5)]
    # The start of a session tells TensorBoard to forget what an interrupted run recorded from that step on.
    assert [event.step for event in events if event.HasField("session_log")] == [5]


def test_tensorboard_without_its_library_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(UserError, match=r"--tensorboard needs .*pip install tensorboardX"):
        EventLog(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()
