"""The shell commands of README and docs, and a small form of each that runs in a folder made for it.

One rule makes all of them small: the flags of SMALL that a command takes are typed behind its own, and of a repeated
flag the last wins; CUT shortens numbers of processes, trials and kills, and VARIABLES what scripts read. Words in
capitals stand for what PLACEHOLDERS says; a part in [brackets] may be left out, and is: `--peer torch` where PyTorch,
which is no requirement, is not installed.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from launchers import free_port, install
from PIL import Image
from toys import CLASSES, examples, toy

from cssm import data
from cssm.cli import main
from cssm.config import Config, UserError, parse_args

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/howto/*.md"))]
WORDS = "python|make|bash|cssm|source|torchrun|srun|sbatch|mpirun|kubectl|sky|uv|pip|pip-audit|apt-get|tensorboard"
PROGRAM = re.compile(rf'(?:[A-Z_]+=(?:"[^"]*"|\S+) |taskset -c 0 )*(?:\.[\w./-]+/)?(?:{WORDS}) +(?![\d=])')

SMALL = [
    ("--max_steps", "2"),
    ("--steps", "2"),
    ("--max_train_examples", "256"),
    ("--max_eval_examples", "16"),
    ("--embed_dim", "12"),
    ("--dims", "8,16"),
    ("--depth", "1"),
    ("--seq_len", "2"),
    ("--batch_size", "16"),
    ("--image_size", "64"),
    ("--image_size", "32"),
    ("--devices", "2"),
    ("--batch_sizes", "8"),
    ("--worker_counts", "0,1"),
]
SIZES = ("--batch_size", "--image_size")
CUT = {r"(--nproc_per_node[ =])\d+": r"\g<1>2", r"(--trials )\d+": r"\g<1>2", r'(CELLS="\w+) [^"]*': r"\1"}
CUT |= {r"^make soak": "make soak KILLS=1 MINUTES=0"}
PLACEHOLDERS = {"RUN": "runs/digits", "DIR": "sets", "NAME": "cifar10", "HOST": "127.0.0.1", "host0": "127.0.0.1"}
TORCH = all(find_spec(name) for name in ("torch", "torchvision"))
VARIABLES = {"CELLS": "standard"}
# What tests `make` runs: those that the suite has are not run again within it.
TESTS = {"test": "-n0 tests/test_citation.py", "slow": "--collect-only tests/test_sweep.py"}
TESTS |= {"browser": "--collect-only tests/test_browser.py"}
# Flags of main.py begin behind these, or behind the two dashes of a search.
DOORS = re.compile(r"main\.py|random_search\.py .* --(?= )|launch/(?:slurm\.sbatch|tpu_vm\.sh|compare_cells\.sh \w+)")
# What a script types in front of them.
TYPED = {"compare_cells.sh": ["--dataset", "pathfinder"]}
# Processes that meet at a port, which is free where it is typed; and all commands that start several.
JOB = re.compile(r"torchrun|srun|sbatch|mpirun|tpu_vm|--process_id")
SEVERAL = re.compile(rf"{JOB.pattern}|kubectl|sky |--nproc_per_node|--multi_gpu")
# Of `bench` each row has a process, which Python starts where this one began.
APART = re.compile(rf"(?!python main\.py)|.*main\.py bench|.*(?:{SEVERAL.pattern})")


def commands(page: Path) -> list[str]:
    """In the order of the page, each once: all lines of bash blocks, and what begins like a command in other code."""
    found, block = [], None
    for line in re.sub(r" *\\\n *", " ", page.read_text()).splitlines():
        if line.startswith("```"):
            block = None if block is not None else line[3:]
        elif block is not None:
            found += [line] if block == "bash" and line and not line.startswith("#") else []
        elif shown := re.fullmatch(rf" {{4}}(?:\$ |train on it: )?({PROGRAM.pattern}.*)", line):
            found.append(shown[1])
        else:
            found += [span for span in re.findall(r"`([^`]+)`", line) if PROGRAM.match(span)]
    once: dict[str, str] = {}
    for command in found:
        command = re.sub(r" +# .*", "", command).strip()
        once.setdefault(complete(cut(command), 0), command)
    return list(once.values())


def flags_of(command: str) -> list[str] | None:
    """What main.py gets of a command; None where it is none of its."""
    found = list(DOORS.finditer(command))
    typed = [word for script, words in TYPED.items() if script in command for word in words]
    return [*typed, *shlex.split(command[found[-1].end() :])] if found else None


def cut(command: str) -> str:
    """With fewer processes, trials, kills, cells."""
    for pattern, shorter in CUT.items():
        command = re.sub(pattern, shorter, command)
    return command


def complete(command: str, number: int) -> str:
    """As it would be typed: nothing in brackets, nothing in capitals."""
    command = command.replace("[--peer torch]", "--peer torch") if TORCH else command
    command = re.sub(r" ?\[[^\]]*\]| \.\.\.$", "", command)
    for word, meant in {**PLACEHOLDERS, "FOLDER": f"folder{number}"}.items():
        command = re.sub(rf"\b{word}\b", meant, command)
    return command


def more(words: list[str]) -> list[str]:
    """The flags of SMALL that these words may be followed by, and that make them no larger."""
    if {"--help", "--dry_run"} & {*words} or (words[:1] == ["prepare"] and words[1].startswith("tfds:")):
        return []
    if "--resume" in words:  # the run is small already
        return ["--max_steps", "3"]
    added = []
    for flag, value in SMALL:
        try:
            config = _accepted([*words, *added])
            _accepted([*words, *added, flag, value])
        except UserError:
            continue
        if flag in SIZES and (getattr(config, flag[2:]) or 0) <= int(value):
            continue
        if flag != "--image_size" or words[:1] != ["prepare"]:  # of which a set has its name
            added += [flag, value]
    return added


def _accepted(words: list[str]) -> Config:
    """UserError where the flags are refused, or what is generated does not have that size."""
    config = parse_args(words).config
    if config.data_dir is None:
        data.outline(config)
    return config


def shortened(command: str) -> str:
    """A complete command in its small form."""
    command = cut(command)
    if target := re.match(r"make (\w+)", command):
        words = shlex.split(command)[2:]
        given = shlex.split(words[0].removeprefix("ARGS=")) if words else []
        args = [*given, *more(given)] if target[1] == "train" else TESTS.get(target[1], "").split()
        return f"make {target[1]} {shlex.quote('ARGS=' + shlex.join(args))}" if args else command
    words = flags_of(command)
    if words is None:
        return command
    added = more(words) + (["--coordinator_port", str(free_port())] if JOB.search(command) else [])
    command = f"{command} {shlex.join(added)}".strip()
    if "--process_id 0" in command:
        command = f"{command} & {command.replace('--process_id 0', '--process_id 1')} && wait $!"
    return command


def photos(folder: Path) -> Path:
    """Enough for a step of 64 images."""
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(60):
            Image.new("RGB", (40, 30), (i, 2 * i, 3 * i)).save(folder / name / f"{i}.jpg")
    return folder


def make_checkout(folder: Path) -> None:
    """A checkout with its .venv, which has what the interpreter of the tests has, and data that the pages name."""
    for name in ("cssm", "parallel", "configs", "tests", "requirements", "main.py", "Makefile", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs").mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (site,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("runtime", "gpu", "cuda12", "dev"):
        (folder / ".venv" / f".{name}-{version}").touch()  # as make leaves it once it has installed
    install(folder / "bin")


def make_data(folder: Path, page: Path) -> None:
    """What the pages take from --data_dir and --input, but for what a page prepares itself."""
    import tensorflow_datasets as tfds

    rng = np.random.default_rng(0)
    photos(folder / "photos")
    labels = np.arange(160) % 3
    np.savez(folder / "arrays.npz", images=rng.integers(0, 256, (160, 16, 16, 1), np.uint8), labels=labels)
    np.savez(folder / "clips.npz", clips=rng.integers(0, 256, (160, 8, 32, 32, 3), np.uint8), labels=labels)
    for name in ("neg", "pos"):
        (folder / "pathfinder300" / "curv_contour_length_14" / "imgs" / name).mkdir(parents=True)
        for i in range(60):
            pixels = rng.integers(0, 256, (32, 32), np.uint8)
            Image.fromarray(pixels).save(folder / f"pathfinder300/curv_contour_length_14/imgs/{name}/{i}.png")
    images = rng.integers(0, 256, (160, 32, 32, 3), np.uint8)
    kinds = {"image": tfds.features.Image(shape=(32, 32, 3)), "label": tfds.features.ClassLabel(names=CLASSES)}
    splits = {"train": examples(images[:128], labels[:128]), "test": examples(images[128:], labels[128:])}
    toy(folder / "sets", splits, kinds, name="cifar10", version="3.0.2")
    if not any("prepare folder" in command for command in commands(page)):
        for size in sorted(set(re.findall(r"tfds:photos/(\d+)", page.read_text()))):
            where = ["--data_dir", str(folder / "photos"), "--output", str(folder / "sets")]
            assert main(["prepare", "folder", *where, "--image_size", size, "--num_workers", "0"]) == 0


def run(command: str, devices: int = 2) -> int:
    """Run a complete command, in small, in the working directory; the exit code. What is main.py alone is run in this
    process, where programs are compiled once, on so many of its devices.
    """
    command = shortened(command)
    if not APART.match(command):
        argv = shlex.split(command)[2:]
        with suppress(UserError, SystemExit):  # --help leaves
            parse_args([*argv, "--num_devices", str(devices)])
            argv += ["--num_devices", str(devices)]
        return _exit_code(lambda: main(argv))
    folder = Path.cwd()
    path = f"{folder / '.venv' / 'bin'}:{folder / 'bin'}:{os.environ['PATH']}"
    small = shlex.join(more(["--config", "configs/large.yaml"]))
    count = 1 if SEVERAL.search(command) else devices
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"
    environment = {**os.environ, **VARIABLES, "SMALL": small, "XLA_FLAGS": flags, "PATH": path}
    return subprocess.run(["bash", "-c", command], env=environment, timeout=300).returncode


def _exit_code(program: Callable[[], int]) -> int:
    try:
        return program()
    except SystemExit as ended:
        return int(ended.code or 0)
