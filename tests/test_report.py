"""What a run says, to a terminal, to a pipe, and to a program."""

import csv
import io
import json
import re
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from cssm.report import Reporter, read_events

RUNNING = "Running on 4 devices (multi-GPU enabled)"
ROWS = [{"id": i, "kind": "cpu", "platform": "cpu", "process": 0, "memory_bytes": None} for i in range(4)]
INFO = {
    "device_table": ROWS, "devices": 4, "batch_size": 32, "grad_accum": 1, "effective_batch": 128, "shard": "none",
    "arch": "vit", "cssm": "hgru_bi", "num_params": 123456, "flops_per_image": 12.34e6, "dataset": "digits",
    "image_shape": [16, 16, 1], "train_examples": 1258, "val_examples": 270, "test_examples": 269,
}  # fmt: skip
STEP = {"loss": 0.5, "accuracy": 0.75, "images_per_s": 1000.0}


class Terminal(io.StringIO):
    """A stdout on which things move."""

    def isatty(self) -> bool:
        return True

    def until(self, pattern: str) -> None:
        """Wait for the drawing thread to show it."""
        deadline = time.monotonic() + 30
        while not re.search(pattern, self.getvalue()):
            assert time.monotonic() < deadline, f"{pattern} is not shown in {self.getvalue()!r}"
            time.sleep(0.01)


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 60 columns."""
    screen = Terminal()
    monkeypatch.setattr("cssm.report.sys", SimpleNamespace(stdout=screen))
    for name, value in {"TERM": "xterm", "COLUMNS": "60", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    return screen


def run(directory, steps=range(1, 4), total=3, **options):
    """A short run as the training loop reports it."""
    with Reporter(directory, **options) as report:
        report.event("config", **INFO)
        report.banner(INFO)
        report.line(RUNNING)
        with report.progress(total, steps[0] - 1):
            for step in steps:
                if step == steps[0]:
                    with report.compiling("compiling the step"):
                        pass
                report.update(step)
                report.event("step", step=step, epoch=1, **STEP)
                report.update(step, **STEP)
            with report.busy("evaluating val"):
                pass
            report.event("eval", split="val", step=step, loss=0.25, accuracy=0.975, count=1270, best=True)
        report.event("summary", best={"step": step}, compile_s=1.5, peak_bytes=None)
        report.leave("finished")


def test_piped_output_is_plain_lines(tmp_path, capsys):
    run(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:9] == [
        "=" * 80,
        "DEVICE CONFIGURATION",
        "=" * 80,
        "Backend: cpu",
        "Device type: cpu",
        "Number of devices: 4",
        *[f"Device {i}: cpu:{i}" for i in range(3)],
    ]
    assert "effective batch 128 = 32 per device x 4 devices x 1 accumulation" in lines
    at = lines.index(RUNNING)
    assert lines[at + 1] == "compiling the step ..."
    assert re.fullmatch(r"compiling the step: \d+\.\d s", lines[at + 2])
    assert lines[at + 3 : at + 8] == [
        "step 1/3  loss 0.5000  accuracy 0.7500  1,000 images/s",
        "step 2/3  loss 0.5000  accuracy 0.7500  1,000 images/s  0:00 left",
        "step 3/3  loss 0.5000  accuracy 0.7500  1,000 images/s",
        "val   step 3  loss 0.2500  accuracy 0.9750  of 1,270  best",
        "trained 3 steps in 0:00",
    ]
    summary = ["=" * 80, "RUN SUMMARY", "=" * 80, "best: step 3", "compile: 1.5 s", "=" * 80]
    assert lines[at + 8 :] == [*summary, f"report: {tmp_path / 'report.html'}"]


def test_headless_output_is_the_record_and_nothing_else(tmp_path, capsys):
    stream = io.StringIO()
    run(tmp_path, headless_stream=stream)
    assert capsys.readouterr().out == ""
    assert stream.getvalue() == (tmp_path / "metrics.jsonl").read_text()
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert events == ["config", "step", "step", "step", "eval", "summary"]


def test_quiet_leaves_results(tmp_path, capsys):
    run(tmp_path, quiet=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == RUNNING
    assert lines[1].startswith("val ")
    assert lines[2:5] == ["=" * 80, "RUN SUMMARY", "=" * 80]


def test_other_processes_are_silent(tmp_path, capsys):
    stream = io.StringIO()
    run(tmp_path / "run", primary=False, headless_stream=stream, tensorboard=True)
    run(tmp_path / "run", primary=False)
    assert (capsys.readouterr().out, stream.getvalue(), list(tmp_path.iterdir())) == ("", "", [])


def test_without_a_directory_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(None)
    assert RUNNING in capsys.readouterr().out.splitlines()
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_is_drawn_whole(tmp_path, capsys):
    run(tmp_path, range(1, 6), total=9)
    assert "stopped at step 5 of 9" in capsys.readouterr().out
    run(tmp_path, range(4, 10), total=9)
    assert "trained 6 steps" in capsys.readouterr().out
    taken = [event["step"] for event in read_events(tmp_path / "metrics.jsonl") if event["event"] == "step"]
    assert taken == list(range(1, 10))
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"loss.png", "accuracy.png"}


def test_steps_and_evaluations_are_a_table_too(tmp_path):
    run(tmp_path, range(1, 3), total=2)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [(row["event"], row["split"], row["step"], row["loss"], row["count"]) for row in rows] == [
        ("step", "", "1", "0.5", ""),
        ("step", "", "2", "0.5", ""),
        ("eval", "val", "2", "0.25", "1270"),
    ]
    assert "schema" not in rows[0] and rows[0]["images_per_s"] == "1000.0"


def test_without_matplotlib_a_run_still_ends_well(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "cssm.report.plots", raising=False)
    run(tmp_path)
    assert "no curves were drawn, matplotlib" in capsys.readouterr().out


def test_a_narrow_terminal_keeps_the_running_line_whole(tmp_path, terminal):
    with Reporter(None) as report, report.progress(10):
        report.banner(INFO)
        report.line(RUNNING)
        report.line("x" * 100)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n")
    lines = [line for line in plain.splitlines() if line]
    assert RUNNING in lines
    assert "x" * 100 in lines
    assert "=" * 60 in lines
    assert "effective batch 128 = 32 per device x 4 devices x 1" in lines
    assert "    accumulation" in lines


def test_a_terminal_shows_a_moving_clock_and_bar(terminal):
    with Reporter(None) as report:
        with report.compiling("compiling the step"):
            terminal.until(r"compiling the step  (\d+) s(?s:.*)compiling the step  (?!\1 )\d+ s")
        with report.progress(20):
            see_a_bar(report, terminal)
    after = terminal.getvalue().rsplit(" 7/20", 1)[1]
    assert "\x1b[2K" in after.split("stopped")[0]  # the bar is wiped out
    assert "\x1b[?25h" in terminal.getvalue().split("\x1b[?25l")[-1]  # the cursor is back
    assert re.search(r"val   step  7  loss 0.2500  accuracy 0.9750  of 270\s*\n", terminal.getvalue())
    assert "step  1/20" not in terminal.getvalue()  # the lines for pipes


def see_a_bar(report, terminal):
    report.update(1, **STEP)
    report.update(7)
    terminal.until(r" 7/20 [^\n]* 35%")
    terminal.until(r"loss 0.5000  accuracy 0.7500  1,000 images/s  0:\d\d left")
    report.event("eval", split="val", step=7, loss=0.25, accuracy=0.975, count=270)
    with report.busy("evaluating test") as count:
        count(50, 200)
        terminal.until(r"evaluating test  \d+ s [^\n]* 50/200")


def test_an_interruption_leaves_the_terminal_usable(terminal):
    with (
        suppress(KeyboardInterrupt),
        Reporter(None) as report,
        report.progress(20),
        report.compiling("compiling the step"),
    ):
        terminal.until(r"compiling the step  \d+ s")
        raise KeyboardInterrupt
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
    assert "stopped at step 0 of 20" in terminal.getvalue()
    assert "compiling the step: " not in terminal.getvalue()  # it was not done


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_gets_lines(terminal, monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    with Reporter(None) as report, report.progress(20):
        report.update(1, **STEP)
    assert terminal.getvalue().startswith("step  1/20  loss 0.5000")
    assert "\x1b" not in terminal.getvalue()


def test_counted_work_is_told_to_a_pipe_at_both_ends(capsys):
    with Reporter(None) as report:
        with report.busy("loading") as count:
            pass
        with report.busy("making images") as count:
            count(1, 2)
            count(2, 2)
    start, end = capsys.readouterr().out.splitlines()
    assert start == "making images ..."
    assert re.fullmatch(r"making images: 2 in \d\.\d s", end)


def test_progress_must_run_to_be_updated():
    with Reporter(None) as report, pytest.raises(RuntimeError, match="outside of progress"):
        report.update(1)
