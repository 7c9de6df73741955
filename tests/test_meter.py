"""Accounting of wall time, under a clock that the test moves."""

import pytest

from cssm import meter as module
from cssm.meter import Meter


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_evaluation_and_saving_do_not_slow_the_rate_down_but_waiting_does(clock):
    meter = Meter()
    clock[0] += 4
    with meter.span("evaluate"):
        clock[0] += 100
    with meter.span("data_wait"):
        clock[0] += 1
    assert meter.window(steps=5, images=50) == {
        "images_per_s": 10.0,
        "step_ms": 1000.0,
        "data_wait_ms": 200.0,
    }
    clock[0] += 2
    assert meter.window(steps=1, images=10) == {"images_per_s": 5.0, "step_ms": 2000.0, "data_wait_ms": 0.0}


def test_without_a_step_since_the_last_window_there_is_no_rate(clock):
    meter = Meter()
    with meter.span("compile"):
        clock[0] += 5
    assert meter.window(0, 0) == {}


def test_goodput_is_what_is_left_of_the_wall_time(clock):
    meter = Meter()
    for name, seconds in (("compile", 3), ("evaluate", 1), ("save", 1), ("data_wait", 1)):
        with meter.span(name):
            clock[0] += seconds
    clock[0] += 4
    assert meter.goodput() == pytest.approx(0.4)
    assert dict(meter.seconds) == {"compile": 3, "evaluate": 1, "save": 1, "data_wait": 1}


def test_a_failing_block_is_accounted_too(clock):
    meter = Meter()
    with pytest.raises(KeyError), meter.span("save"):
        clock[0] += 2
        raise KeyError
    assert meter.seconds["save"] == 2
