"""The verb prepare: a generated data set, one of TensorFlow Datasets, or photographs, as files. No jax, no device."""

import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from cssm.config import KNOBS, Config, UserError
from cssm.data.downloaded import download
from cssm.data.generated import Generated, generated
from cssm.data.prepared import parts
from cssm.data.raw import SIZE, set_name, write_folder
from cssm.data.records import no_room
from cssm.data.written import write_array_record, write_published
from cssm.report import Reporter
from cssm.settings.data import FOLDERS

# Settings of prepare that each kind of data set does not have
_MAKING = ("image_size", "num_workers", "max_train_examples", "max_eval_examples")
_STRAY = {
    "generated": ("output", "max_bad_examples"),
    "downloaded": (*_MAKING, "format", "output", "max_bad_examples"),
    "in folders": ("format",),
}


def prepare(config: Config, typed: Mapping[str, Any], stream: IO[str] | None = None) -> None:
    """Write config.dataset below config.data_dir, or photographs that lie there below config.output, and tell how to
    train on it, on stdout or as an event on the stream.

    typed: what was given. UserError for a data set that cannot be prepared, with exit code 6 where the disk is full or
    not writable; then nothing is left that looks complete.
    """
    assert config.data_dir is not None, "the command line wants one"
    kind, write, flag = _kind(config)
    if stray := [name for name in _STRAY[kind] if name in typed]:
        raise UserError(f"--{stray[0]} is not for data sets that are {kind}, as {config.dataset} is: leave it out")
    start, place = time.monotonic(), config.output or config.data_dir
    with Reporter(None, headless_stream=stream, quiet=config.quiet) as report, _cleared_up():
        try:
            facts = write(config, typed, report)
        except OSError as error:
            if (why := no_room(error)) is None:
                raise
            raise UserError(
                f"cannot write {config.dataset} to {place}: {why}; make room, or type another {flag}", exit_code=6
            ) from error
        report.event("prepare", dataset=config.dataset, **facts, seconds=time.monotonic() - start)
        counts = ", ".join(f"{n:,} {split}" for split, n in facts["examples"].items())
        report.line(f"{facts['folder']}: {counts}{', as it was before' if facts['there'] else ''}")
        report.line(f"train on it: {facts['command']}")


def _kind(config: Config) -> tuple[str, Callable[[Config, Mapping[str, Any], Reporter], dict[str, Any]], str]:
    """What sort of data set it is, what writes it, and the flag that says where to."""
    if config.source == "tfds:NAME":
        return "downloaded", _downloaded, "--data_dir"
    if config.dataset in FOLDERS:
        return "in folders", _folder, "--output"
    return "generated", _generated, "--data_dir"


@contextmanager
def _cleared_up() -> Iterator[None]:
    """SIGTERM ends what runs inside as Ctrl-C does, so that nothing half written is left."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _generated(config: Config, typed: Mapping[str, Any], report: Reporter) -> dict[str, Any]:
    # Where files are given, their size is theirs; here it is that of what is generated.
    chosen = generated(replace(config, data_dir=None))
    examples = {split: _at_most(n, split, config) for split, n in chosen.examples.items()}
    root, workers = Path(str(config.data_dir)).absolute(), config.num_workers
    assert workers is not None, "the recipe has one"
    write = write_array_record if config.format == "array_record" else write_published
    with report.busy(f"writing {config.dataset}") as progress:
        folder = write(chosen, root, examples, workers, progress)
    return {
        "folder": str(folder),
        "examples": examples,
        "there": False,
        "command": _command([*_flags_of(chosen, config), "--data_dir", str(config.data_dir)]),
    }


def _flags_of(chosen: Generated, config: Config) -> list[str]:
    if config.format == "array_record":
        return ["--dataset", f"tfds:{chosen.dataset}/{chosen.difficulty}-{chosen.image_shape[-2]}"]
    name = f"{chosen.dataset}_difficulty"
    told = chosen.dataset != "pathtracker" and chosen.difficulty != KNOBS[name].default
    return ["--dataset", chosen.dataset, *([f"--{name}", chosen.difficulty] if told else [])]


def _at_most(n: int, split: str, config: Config) -> int:
    limit = config.max_train_examples if split == "train" else config.max_eval_examples
    return n if limit is None else min(limit, n)


def _downloaded(config: Config, typed: Mapping[str, Any], report: Reporter) -> dict[str, Any]:
    parts(config.dataset)
    with report.busy(f"preparing {config.dataset}"):
        folder, examples, there = download(config)
    return {
        "folder": str(folder),
        "examples": examples,
        "there": there,
        "command": _command(["--dataset", config.dataset, "--data_dir", str(config.data_dir)]),
    }


def _folder(config: Config, typed: Mapping[str, Any], report: Reporter) -> dict[str, Any]:
    assert config.output is not None and config.data_dir is not None, "the command line wants both"
    size = config.image_size if "image_size" in typed else SIZE
    assert size is not None, "it is checked as it is typed"
    with report.busy(f"decoding {config.data_dir}") as progress:
        folder, examples, bad = write_folder(config, size, Path(config.output).absolute(), progress)
    # As training on the folder sees them by default
    usual = replace(config, image_size=None)
    assert usual.image_size is not None, "the recipe has one"
    flags = ["--dataset", f"tfds:{set_name(Path(config.data_dir))}/{size}", "--data_dir", config.output]
    flags += ["--image_size", str(usual.image_size)] if usual.image_size < size else []
    flags += ["--crop_scale", str(usual.crop_scale), *(["--flip"] if usual.flip else [])]
    facts = {"folder": str(folder), "examples": examples, "there": False, "command": _command(flags)}
    return facts | {"bad_examples": bad}


def _command(flags: list[str]) -> str:
    return shlex.join(["python", "main.py", *flags])
