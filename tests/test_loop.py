"""The loop: how it stops, what it compiles, and that one run cannot be taken twice."""

import os
import signal

import jax
import pytest
from test_training import go_on, start

from cssm.config import UserError
from cssm.loop import Loop
from cssm.report import read_events
from cssm.runs import LOCK
from cssm.signals import Stopped


def stop_after_two(monkeypatch):
    """SIGTERM comes after the second step of every run."""
    after_step = Loop._after_step

    def signal_after(self, *args):
        after_step(self, *args)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Loop, "_after_step", signal_after)


def test_a_signal_saves_and_leaves_with_its_code(tmp_path, monkeypatch):
    stop_after_two(monkeypatch)
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 2") as stopped:
        start(tmp_path, "run", log_every=4)
    assert stopped.value.exit_code == 143
    events = read_events(tmp_path / "run" / "metrics.jsonl")
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2], "what a log line has not told yet is told"
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [2]


@pytest.mark.slow
def test_a_run_that_another_writes_to_is_refused_by_name(tmp_path, monkeypatch):
    """Also to go on with it; and the refusal leaves the other's files alone."""
    refused = []

    def meanwhile(self, *args):
        self.checkpoints.wait()
        assert (tmp_path / "run" / LOCK).read_text().startswith(f"process {os.getpid()} of ")
        for again in (lambda: start(tmp_path, "run"), lambda: go_on(tmp_path, "run", "--num_devices", "1")):
            with pytest.raises(UserError) as error:
                again()
            refused.append(error.value)

    monkeypatch.setattr(Loop, "finish", meanwhile)
    start(tmp_path, "run", max_steps=1)
    assert "exists already" in str(refused[0])
    assert f"is being written by process {os.getpid()} of " in str(refused[1]) and refused[1].exit_code == 2
    assert not (tmp_path / "run" / LOCK).exists() and (tmp_path / "run" / "checkpoints" / "1").is_dir()


@pytest.mark.slow
def test_nothing_is_compiled_between_the_first_log_line_and_the_first_evaluation(tmp_path, monkeypatch):
    compiled, at = [], {}

    def listen(name, duration, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    def marked(method, mark):
        def call(self, *args):
            if mark == "evaluation":
                at.setdefault(mark, len(compiled))
            result = method(self, *args)
            if mark == "first step":
                at.setdefault(mark, len(compiled))
            return result

        return call

    jax.monitoring.register_event_duration_secs_listener(listen)
    monkeypatch.setattr(Loop, "_after_step", marked(Loop._after_step, "first step"))
    monkeypatch.setattr(Loop, "_evaluate", marked(Loop._evaluate, "evaluation"))
    start(tmp_path, "run", eval_every=100, log_every=100)
    assert at["evaluation"] == at["first step"] > 0
    at.clear()
    go_on(tmp_path, "run", "--max_steps", "12", "--num_devices", "1")
    assert at["evaluation"] == at["first step"]
