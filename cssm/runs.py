"""Run directories: where a run lives, whether it is new, and with which configuration one goes on."""

import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cssm.checkpoint import saved_meta
from cssm.config import Config, UserError, resolve
from cssm.lock import lock_file
from cssm.resume import resume_config

CHECKPOINTS = "checkpoints"
LOCK = "run.lock"
STORAGE = 6


@dataclass(frozen=True)
class Run:
    """A run about to start or to go on. config: the complete one; notes: what a person should be told first."""

    directory: Path
    config: Config
    resumed: bool
    notes: tuple[str, ...] = ()

    def discard_if_unused(self) -> None:
        """Remove the directory of a new run in which no file has any content: a run refused before it began."""
        files = [path for path in self.directory.rglob("*") if path.is_file() and path.name != LOCK]
        if not self.resumed and self.directory.exists() and not any(path.stat().st_size for path in files):
            shutil.rmtree(self.directory)

    @property
    def checkpoints(self) -> Path:
        return self.directory / CHECKPOINTS

    def data_changes(self, now: Mapping[str, Any]) -> list[str]:
        """What is to be said where a run that goes on finds other data than it began with; `now` as the checkpoints
        keep it: {classes: names, train_examples: how many}. UserError for other classes.
        """
        before = saved(self.checkpoints).get("data", now) if self.resumed else now
        gone = [name for name in before["classes"] if name not in now["classes"]]
        new = [name for name in now["classes"] if name not in before["classes"]]
        if before["classes"] != now["classes"]:
            what = f"class {gone[0]} is gone" if gone else f"class {new[0]} is new" if new else "their order is another"
            raise UserError(
                f"the run to resume began with {len(before['classes'])} classes, the data has {len(now['classes'])} "
                f"({what}): --data_dir must hold the same, or start a new run without --resume"
            )
        was, number = before["train_examples"], now["train_examples"]
        if was == number:
            return []
        return [f"there were {was:,} training examples and now are {number:,}: the order of the examples is another"]


Share = Callable[[str, Callable[[], Any]], Any]


@contextmanager
def only_here(run: Run, share: Share) -> Iterator[tuple[str, ...]]:
    """Keep every other program out of the run's directory; yields what a person should be told.

    The processes of one job count as one: the first has the lock. Raises UserError, naming the owner, where another
    has it (exit code 2), and where the directory cannot be written (exit code 6).
    """

    def taken(owner: str) -> None:
        raise UserError(
            f"the run {run.directory} is being written by {owner}: wait until that ends, stop it, or type another "
            "--run_name"
        )

    def take() -> bool:
        return held.enter_context(lock_file(run.directory / LOCK, taken))

    with ExitStack() as held:
        if share("lock", take):
            yield ()
        else:
            yield (f"{run.directory} cannot be locked: nothing keeps a second run out of it",)


def open_run(config: Config, typed: Mapping[str, Any], share: Share, make: bool = True) -> Run:
    """Find the run that --resume names, or make the directory of a new one; with make=False it is only named.

    share(name, decide): of several processes, the first decides (parallel.job.share). Raises UserError for a path that
    holds no run, for an existing run without --resume, and where the directory cannot be made (exit code 6).
    """
    found = share("run", lambda: _find(config, typed, make))
    directory, saved = Path(found["directory"]), found["saved"]
    if saved is not None:
        resumed, changes = resume_config(saved, typed)
        return Run(directory, resumed, True, tuple(changes))
    if config.resume is None:
        return Run(directory, config, False)
    where = Path(config.checkpoint_dir, config.run_name or "")
    note = f"--resume auto: there is no checkpoint in {where}, so a new run starts"
    return Run(directory, _fresh(config, typed), False, (note,))


def _find(config: Config, typed: Mapping[str, Any], make: bool) -> dict[str, Any]:
    """{directory, saved: the configuration of the run to resume, or None}."""
    root = Path(config.checkpoint_dir)
    directory = None
    if config.resume is not None:
        directory = _newest(root, config.run_name) if config.resume == "auto" else _at(Path(config.resume))
    if directory is not None:
        return {"directory": str(directory), "saved": saved(directory / CHECKPOINTS)["config"]}
    return {"directory": str(_new_directory(_fresh(config, typed), root, make)), "saved": None}


def saved(checkpoints: Path) -> dict[str, Any]:
    """What the newest checkpoint keeps besides its arrays (see `checked`)."""
    return checked(saved_meta(checkpoints), checkpoints)


def checked(meta: dict[str, Any], checkpoints: Path) -> dict[str, Any]:
    """The `meta` of a checkpoint: {step, best, config, data, skipped}, the last two where it was made by a version that
    has them. UserError (exit code 6) where it holds something else.
    """
    forms = {"step": int, "best": dict, "config": dict}
    optional = {"skipped": int, "data": dict}
    right = forms.keys() <= meta.keys() and all(
        isinstance(meta[name], form) for name, form in {**forms, **optional}.items() if name in meta
    )
    data = meta.get("data", {"classes": [], "train_examples": 0}) if right else {}
    shape = data.get("image_shape", [])
    whole = [data.get("train_examples"), data.get("num_classes", 0), *(shape if isinstance(shape, list) else [None])]
    if not isinstance(data.get("classes"), list) or not all(type(number) is int for number in whole):
        raise UserError(f"the checkpoints in {checkpoints} were not made by a run: start without --resume", STORAGE)
    return meta


def _fresh(config: Config, typed: Mapping[str, Any]) -> Config:
    """The configuration of a new run; with --resume, `config` holds the settings of the invocation only."""
    return config if config.resume is None else resolve({**typed, "resume": "auto"}, {})


def _at(path: Path) -> Path:
    """The run directory for the path of a run, of its checkpoints folder, or of a checkpoint in it."""
    if not path.exists():
        raise UserError(
            f"--resume {path}: there is no such path; type the directory of a run, or --resume auto for the newest"
        )
    for directory in (path, path.parent, path.parent.parent):
        if _steps(directory):
            return directory
    raise UserError(f"--resume {path}: there is no checkpoint in it; type the directory of a run that has saved one")


def _newest(root: Path, run_name: str | None) -> Path | None:
    candidates = [root / run_name] if run_name else [path for path in root.glob("*") if path.is_dir()]
    saved = [path for path in candidates if _steps(path)]
    return max(saved, key=lambda path: max(step.stat().st_mtime for step in _steps(path)), default=None)


def _steps(directory: Path) -> list[Path]:
    return [path for path in (directory / CHECKPOINTS).glob("*") if path.name.isdecimal()]


def _new_directory(config: Config, root: Path, make: bool) -> Path:
    if config.run_name is None:
        return unused_directory(root, _name(config)) if make else root / _name(config)
    directory = root / config.run_name
    # With --resume auto there is no checkpoint in it: a run that ended before its first one begins anew.
    if config.resume is None and directory.exists() and {path.name for path in directory.iterdir()} - {LOCK}:
        raise UserError(
            f"the run directory {directory} exists already: type --resume {directory} to go on with it, "
            f"or another --run_name"
        )
    if make:
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def _name(config: Config) -> str:
    """After the time and the model."""
    return named_by_time("find_lr" if config.find_lr else None, config.arch, config.cell)


def named_by_time(*words: str | None) -> str:
    """The time of now and the words, those that are given."""
    return "_".join(filter(None, (time.strftime("%Y%m%d-%H%M%S"), *words)))


def unused_directory(root: Path, name: str) -> Path:
    """Makes the directory of that name in root; where there is one, names of the same second end in a number."""
    root.mkdir(parents=True, exist_ok=True)
    for attempt in itertools.count(1):
        directory = root / (name if attempt == 1 else f"{name}_{attempt}")
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        return directory
    raise AssertionError("unreachable: the numbers do not end")
