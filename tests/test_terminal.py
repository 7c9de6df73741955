"""Words and bars."""

import io

import numpy as np
import pytest
from rich.console import Console

from cssm.report import terminal
from cssm.report.terminal import Bar, Task, clock, device_lines, in_words, run_lines, si

INFO = {
    "devices": 4, "batch_size": 32, "grad_accum": 1, "effective_batch": 128, "shard": "none",
    "arch": "vit", "cssm": "hgru_bi", "num_params": 1234567, "flops_per_image": 12.34e6,
    "dataset": "digits", "image_shape": (16, 16, 1),
    "train_examples": 1258, "val_examples": 270, "test_examples": 269,
}  # fmt: skip


def row(i=0, kind="H100", platform="gpu", process=0, memory_bytes=80 * 2**30):
    return {"id": i, "kind": kind, "platform": platform, "process": process, "memory_bytes": memory_bytes}


def rendered(view, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(view)
    return console.file.getvalue().splitlines()


@pytest.fixture
def now(monkeypatch):
    """Set now[0] to move the clock."""
    time = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: time[0])
    return time


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("compile_s", 12.34, "compile: 12.3 s"),
        ("wall_s", 131.6, "wall: 2:12"),
        ("step_ms", np.float32(3.21), "step: 3.2 ms"),
        ("peak_bytes_per_device", 3 * 2**30, "peak per device: 3.0 GiB"),
        ("images_per_s", 3120.4, "images per s: 3,120"),
        ("goodput", 0.81234, "goodput: 0.8123"),
        ("num_params", 1234567, "num params: 1,234,567"),
        ("loss", float("nan"), "loss: nan"),
        ("run_dir", "runs/a_b", "run dir: runs/a_b"),
        ("best", {"step": 12, "accuracy": 0.97, "top_5": None}, "best: step 12, accuracy 0.97"),
        ("wait_s", "unknown", "wait s: unknown"),
    ],
)
def test_numbers_in_words(name, value, words):
    assert in_words(name, value) == words


def test_seconds_and_magnitudes():
    assert [clock(s) for s in (0, 7.4, 59.6, 754, 10867)] == ["0:00", "0:07", "1:00", "12:34", "3:01:07"]
    assert [si(n) for n in (12, 999.7, 12340, 1.234e7, 5e9, 2e13)] == [
        "12",
        "1 k",
        "12.3 k",
        "12.3 M",
        "5 G",
        "20 T",
    ]


def test_devices_have_a_line_each():
    assert device_lines([row(2), row(3)]) == [
        "Backend: gpu",
        "Device type: H100",
        "Number of devices: 2",
        "Device 0: cuda:2 (80.0 GiB)",
        "Device 1: cuda:3 (80.0 GiB)",
    ]
    assert device_lines([row(platform="cpu", kind="cpu", memory_bytes=None)])[-1] == "Device 0: cpu:0"


def test_processes_and_unlike_devices_are_told():
    lines = device_lines([row(0), row(1, kind="A100", process=1)])
    assert lines[1] == "Device type: H100 / A100"
    assert lines[4] == "Device 1: cuda:1 (A100, 80.0 GiB, process 1)"
    assert "differ" in lines[5]


def test_the_run_is_told_in_numbers():
    assert run_lines(INFO) == [
        "effective batch 128 = 32 per device x 4 devices x 1 accumulation",
        "using jax.pmap: parameters are replicated, each batch is split",
        "model: vit hgru_bi, 1,234,567 parameters, 12.3 MFLOPs per image",
        "data: digits, 1,258 train / 270 val / 269 test, images 16x16x1",
    ]
    one = run_lines(
        {**INFO, "devices": 1, "effective_batch": 64, "grad_accum": 2, "flops_per_image": None, "cssm": None}
    )
    assert one[0] == "effective batch 64 = 32 per device x 1 device x 2 accumulation"
    assert one[1] == "model: vit, 1,234,567 parameters"
    assert "the optimizer's state is split" in run_lines({**INFO, "shard": "optimizer"})[1]


@pytest.mark.parametrize("width", [30, 58, 60, 80, 100, 160])
def test_the_bar_fits_every_width_and_loses_no_figure_from_60_columns_on(width, now):
    bar = Bar(12345, 0)
    bar.update(1, {})
    now[0] += 60
    bar.update(6001, {"loss": 2.3456, "accuracy": 0.9876, "images_per_s": 123456.0})
    lines = rendered(bar.view(width), width)
    assert len(lines) == (2 if width < 100 else 1)
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith(" 6001/12345")
    text = "\n".join(lines)
    wanted = ["loss 2.3456", "accuracy 0.9876", "123,456 images/s", "1:03 left"] if width >= 60 else ["loss 2.3456"]
    assert all(word in text for word in wanted)


def test_time_left_counts_from_the_end_of_the_first_step(now):
    bar = Bar(110, 10)
    now[0] += 1000  # compilation
    bar.update(11, {"loss": 1.0})
    assert bar.figures() == "loss 1.0000"
    now[0] += 20
    bar.update(21, {})
    assert bar.figures() == "loss 1.0000  2:58 left"
    now[0] += 178
    bar.update(110, {"loss": None})
    assert bar.figures() == "loss 1.0000"
    assert bar.closing_line() == "trained 100 steps in 19:58"


def test_a_run_that_ends_early_says_so(now):
    bar = Bar(1000, 0)
    bar.update(7, {})
    now[0] += 5
    assert bar.closing_line() == "stopped at step 7 of 1,000 after 0:05"


def test_a_task_shows_a_running_clock_and_a_bar_once_it_is_counted(now):
    task = Task("making images")
    now[0] += 7
    assert rendered(task.view(), 60) == ["making images  7 s"]
    task.count(1500, 20000)
    (line,) = rendered(task.view(), 60)
    assert line.startswith("making images  7 s")
    assert line.rstrip().endswith("1,500/20,000")
    assert task.closing_line() == "making images: 20,000 in 7.0 s"
