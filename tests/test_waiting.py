"""Waiting for data: when it is told, and that the advice fits."""

import dataclasses
import os
from types import SimpleNamespace

import pytest

from cssm.config import Config, applicable
from cssm.loop import Loop
from cssm.step import Totals
from cssm.waiting import Waiting, advice, waited

MUCH, LITTLE = {"step_ms": 10.0, "data_wait_ms": 2.0}, {"step_ms": 10.0, "data_wait_ms": 0.4}


def test_much_is_told_once():
    waiting = Waiting()
    assert waiting.share(50, LITTLE, 3.0) is None
    assert [waiting.share(50, rates, 3.0) for rates in (LITTLE, MUCH, MUCH)] == [None, pytest.approx(0.12), None]


def test_little_of_everything_is_not_told():
    waiting = Waiting()
    assert not any(waiting.share(50, LITTLE, 0.0) for _ in range(9))
    assert waiting.share(10, MUCH, 0.0) is None, "it is the mean that counts"


def test_intervals_that_compile_and_hiccups_do_not_count():
    waiting = Waiting()
    assert waiting.share(100, MUCH, 5.0) is None and waiting.share(0, {}, 5.0) is None
    assert waiting.share(100, MUCH, 6.0) is None, "compiled again"
    assert waiting.share(19, MUCH, 6.0) is None
    assert waiting.share(1, MUCH, 6.0) == 0.2
    assert waited(0.2) == "20% of the time was spent waiting for data"


@pytest.mark.parametrize(
    "settings,named,others",
    [
        ({"num_workers": 2}, {"prefetch"}, {"num_workers", "image_size", "dataset"}),
        ({"num_workers": 0, "prefetch": 8}, {"num_workers"}, {"prefetch"}),
        (
            {"dataset": "folder", "data_dir": "x", "num_workers": 2},
            {"num_workers", "prefetch", "image_size", "crop_scale"},
            {"cache_dir", "dataset"},
        ),
        ({"dataset": "folder", "data_dir": "x", "num_workers": 16}, {"prefetch"}, {"num_workers"}),
        ({"dataset": "pathfinder", "num_workers": 1}, {"prefetch", "cache_dir"}, {"num_workers", "image_size"}),
        ({"dataset": "cabc", "data_dir": "x", "num_workers": 1}, {"num_workers", "dataset"}, {"image_size"}),
        ({"dataset": "pathtracker", "num_workers": 1}, {"prefetch", "cache_dir"}, {"num_workers", "image_size"}),
        ({"dataset": "tfds:mnist", "data_dir": "x", "num_workers": 1}, {"num_workers", "dataset"}, {"crop_scale"}),
        ({"num_workers": 4, "prefetch": 8}, set(), {"num_workers", "prefetch"}),
    ],
)
def test_what_is_advised_applies(settings, named, others):
    text = advice(applicable(Config(**settings)), cores=16)
    assert all(f"--{name}" in text for name in named) and not any(f"--{name}" in text for name in others)
    assert "now" in text or not named & {"num_workers", "prefetch"}
    assert ("prepare folder" in text) == (settings.get("dataset") == "folder")


def test_a_run_tells_it_in_an_event_and_in_a_line(monkeypatch):
    events, lines, config = [], [], Config(num_workers=1)
    totals = Totals(loss=1.0, correct=1, count=1, grad_norm=1.0, steps=30)
    monkeypatch.setattr(Loop, "_checked_window", lambda self: totals)
    monkeypatch.setattr(Loop, "_learning_rate", lambda self: 0.1)
    loop = object.__new__(Loop)
    loop.step, loop.config, loop.waiting = 30, config, Waiting()
    loop.setup = SimpleNamespace(epoch_steps=10)
    loop.engine = SimpleNamespace(reset=lambda: None)
    loop.meter = SimpleNamespace(window=lambda *_: MUCH | {"images_per_s": 1.0}, seconds={"compile": 0.0})
    loop.report = SimpleNamespace(
        event=lambda kind, **fields: events.append(fields), line=lines.append, update=lambda *_, **__: None
    )
    loop._log()
    loop._log()
    told = f"{waited(0.2)}: {advice(dataclasses.asdict(config), os.cpu_count())}"
    assert [event.get("note") for event in events] == [told, None]
    assert lines == [f"note: {told}"]
