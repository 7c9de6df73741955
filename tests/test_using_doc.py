"""docs/using.md says what is so: its commands run in turn and print what it shows, its programs run after them."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from page_commands import commands, run
from PIL import Image

from cssm.config import KNOBS
from cssm.inference.export import ONNX
from cssm.inference.scores import BINS, LEVEL, RESAMPLES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "using.md").read_text()
# (command, the lines that it prints)
SHOWN = [
    (block.splitlines()[0], [line.strip() for line in block.splitlines()[1:]])
    for block in re.findall(r"^    \$ python main\.py (.*\n(?:    [^$\n].*\n)*)", PAGE, re.MULTILINE)
]
PROGRAMS = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
NAMES = [f"{i}_is_a_{label}.png" for i, label in enumerate((2, 1, 1, 6, 7, 9, 6))]


def form(line):
    """A line without its numbers."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*", "0", line)).strip()


def test_what_is_shown_is_of_commands():
    assert {shlex.split(command)[0] for command, _ in SHOWN} == {"eval", "predict", "export"} and len(SHOWN) == 6
    assert {f"python main.py {command}" for command, _ in SHOWN} < {*commands(ROOT / "docs" / "using.md")}


def test_flags_and_figures_are_those_of_the_program():
    for name in re.findall(r"`--(\w+)", PAGE):
        assert name in KNOBS or name == "input", name
    assert f"{BINS} equal bins" in PAGE and f"middle {LEVEL:.0%}" in PAGE and f"{RESAMPLES:,} samples" in PAGE
    for said in ("has no 2-D FFT", "fails with jax 0.12", "wants an older orbax-checkpoint than this program"):
        assert said in PAGE and said in ONNX


@pytest.mark.slow
def test_commands_print_what_is_shown_and_programs_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (1797, 16, 16, 1), np.uint8)
    np.savez("new.npz", images=images)
    (tmp_path / "photos").mkdir()
    for name, pixels in zip(NAMES, images, strict=False):
        Image.fromarray(pixels[..., 0]).resize((128, 128)).save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "notes.txt").write_text("x")
    shown = dict(SHOWN)
    for command in commands(ROOT / "docs" / "using.md"):
        assert run(command, devices=1) == 0
        printed = {form(line) for line in capsys.readouterr().out.splitlines()}
        lines = shown.get(command.removeprefix("python main.py "), [])
        assert {form(line) for line in lines if line != "..."} <= printed, command
    assert all(shown.values())
    assert len(PROGRAMS) == 2
    for program in PROGRAMS:
        exec(compile(program, "using.md", "exec"), {"__name__": "docs"})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(second), "both programs are one model"
    pictures = {path.name for path in (tmp_path / "why").iterdir()}
    assert pictures == set(re.findall(r"`(0_0_is\S+)`", PAGE))
