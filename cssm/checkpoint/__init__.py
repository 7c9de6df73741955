"""Checkpoints: written in the background, verified before they count, and verified again when they are read.

A step is the folder <directory>/<step> (see step_folder.py). It is written as <step>.partial, read back,
compared, and only then renamed: a kill at any moment leaves the earlier steps as they were, and whatever
carries a bare number was once read back intact.
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

import jax

from cssm.checkpoint import step_folder
from cssm.checkpoint.step_folder import DamagedError, Leaves, Tree
from cssm.config import UserError

STORAGE_FAULT = 6


class Checkpoints:
    """The checkpoints of one run. A context manager: leaving it waits until the last save is on disk.

    directory: parent of the step folders. max_checkpoints: how many of the newest are kept, at least 2, in
    case one is damaged; the best is kept besides. primary: whether this process writes; if not, `save` does
    nothing. Raises UserError (exit code 6) if the directory cannot be written.
    """

    def __init__(self, directory: str | Path, max_checkpoints: int = 3, primary: bool = True) -> None:
        if max_checkpoints < 2:
            raise ValueError(f"max_checkpoints is {max_checkpoints}: at least 2 are kept")
        self.directory = Path(directory).absolute()
        self.max_checkpoints = max_checkpoints
        self.primary = primary
        self._committed: list[int] = []
        self._abandoned: list[int] = []
        self._saving: Future[None] | None = None
        if primary:
            self._prepare_directory()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._checkpointer = step_folder.open_checkpointer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until the last save is committed; raises what it raised."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._checkpointer.close()

    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.directory.iterdir() if entry.name.isdecimal())

    def latest(self) -> int | None:
        """The newest committed step; None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The committed step with the highest metric, the newest of equals; None if no step has a metric."""
        metrics = [(metric, step) for step in self.steps() if (metric := self._metric(step)) is not None]
        return max(metrics)[1] if metrics else None

    def drain(self) -> list[int]:
        """Steps committed and verified since the last call; raises what a save that has ended raised."""
        if self._saving is not None and self._saving.done():
            self.wait()
        committed, self._committed = self._committed, []
        return committed

    def save(self, step: int, state: Tree, meta: dict[str, Any], metric: float | None = None) -> None:
        """Begin to write a step, once the save before it has ended; what that one raised is raised here.

        state: tree of arrays and numbers, without a device dim; random keys as raw uint32. It may be donated
        or overwritten as soon as this returns. meta: JSON values. metric: higher is better, NaN is never the
        best. A step already on disk with the same content is left alone, one with other content is replaced.
        After `restore`, the first save removes the steps newer than the restored one. Raises ValueError for a
        step older than the newest, UserError (exit code 6) if it cannot be written.
        """
        if not self.primary:
            return
        self.wait()
        if (newest := max(set(self.steps()) - set(self._abandoned), default=step)) > step:
            raise ValueError(f"step {step} is older than step {newest}, which {self.directory} holds already")
        leaves = step_folder.host_copies(state)
        self._need_space(sum(leaf.nbytes for leaf in leaves.values()))
        metric = None if metric is None or math.isnan(metric) else float(metric)
        meta = json.loads(json.dumps(meta))  # a snapshot; what is not JSON fails here and not later
        self._saving = self._worker.submit(self._write, step, leaves, meta, metric)

    def restore(self, target: Tree, step: int | None = None) -> tuple[Tree, dict[str, Any], int, list[str]]:
        """Read the newest intact step, or exactly `step`: (state, meta, step, notes).

        target: tree of arrays or jax.ShapeDtypeStruct. The state has its structure, shapes and dtypes, in
        numpy arrays: it does not depend on the devices it was saved from. notes: a sentence for each damaged
        step passed over, and one that names newer steps, which the next save will remove. Raises UserError if
        there is no checkpoint, if none is intact (exit code 6), and if the checkpoint is of another model,
        naming the array and both shapes. A dtype that differs is an error, never a cast.
        """
        self.wait()
        steps = self.steps()
        known = f"it holds steps {', '.join(map(str, steps))}" if steps else "it holds no checkpoint"
        if not steps or (step is not None and step not in steps):
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise UserError(f"there is {what} in {self.directory}: {known}")
        notes: list[str] = []
        for candidate in reversed(steps) if step is None else [step]:
            try:
                state, meta = self._read(candidate, target)
                break
            except PermissionError as error:
                raise UserError(f"cannot read {error.filename}: permission denied", STORAGE_FAULT) from error
            except (DamagedError, OSError) as damage:
                notes.append(f"the checkpoint of step {candidate} is damaged ({damage})")
        else:
            raise UserError(f"{'; '.join(notes)}; {self.directory}: {known}", STORAGE_FAULT)
        self._abandoned = [newer for newer in steps if newer > candidate]
        if self._abandoned:
            newer = ", ".join(map(str, self._abandoned))
            notes.append(f"going on from step {candidate}; the next save removes newer steps: {newer}")
        return state, meta, candidate, notes

    def read(self, step: int, parts: Sequence[str]) -> tuple[Leaves, dict[str, Any]]:
        """(arrays by path, meta) of a step: those below the top-level entries named, such as "params". UserError with
        exit code 6 where the step is damaged.
        """
        folder = self._folder(step)
        try:
            step_folder.check_files(folder)
            record = step_folder.read_record(folder)
            arrays = {name: entry for name, entry in record["arrays"].items() if name.split("/")[0] in parts}
            return step_folder.read_arrays(self._checkpointer, folder, arrays), record["meta"]
        except PermissionError as error:
            raise UserError(f"cannot read {error.filename}: permission denied", STORAGE_FAULT) from error
        except (DamagedError, OSError) as damage:
            others = ", ".join(str(other) for other in self.steps() if other != step) or "no other"
            raise UserError(
                f"the checkpoint of step {step} in {self.directory} is damaged ({damage}): there is {others}",
                STORAGE_FAULT,
            ) from damage

    def wait(self) -> None:
        """Until the last save is committed; raises what it raised."""
        if self._saving is not None:
            wait([self._saving])  # Ctrl-C may end this; the save is then still to be waited for
            saving, self._saving = self._saving, None
            saving.result()

    def _prepare_directory(self) -> None:
        """Create it, and remove what a killed save left."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not os.access(self.directory, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "permission denied")
            for entry in self.directory.iterdir():
                if re.fullmatch(r"\d+\.(partial|removed).*", entry.name):
                    shutil.rmtree(entry)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"cannot write checkpoints to {self.directory} ({error.strerror}): choose another --checkpoint_dir",
            STORAGE_FAULT,
        )

    def _need_space(self, size_bytes: int) -> None:
        try:
            free_bytes = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise self._unwritable(error) from error
        if free_bytes < size_bytes:
            raise UserError(
                f"a checkpoint needs {size_bytes / 1e6:.2f} MB, but {self.directory} has "
                f"{free_bytes / 1e6:.2f} MB free: make room, or choose another --checkpoint_dir",
                STORAGE_FAULT,
            )

    def _write(self, step: int, leaves: Leaves, meta: dict[str, Any], metric: float | None) -> None:
        """Write, verify, publish, then remove what is no longer kept. Runs in the worker thread."""
        try:
            for newer in self._abandoned:
                self._remove(newer)
            self._abandoned = []
            arrays = {name: step_folder.array_record(leaf) for name, leaf in leaves.items()}
            record = {"meta": meta, "metric": metric, "arrays": arrays}
            if not self._holds(step, record):
                partial = self.directory / f"{step}.partial"
                step_folder.write(self._checkpointer, partial, leaves, record)
                self._remove(step)
                partial.rename(self._folder(step))
                step_folder.sync(self.directory)
            self._committed.append(step)
            kept = {*self.steps()[-self.max_checkpoints :], self.best()}
            for old in set(self.steps()) - kept:
                self._remove(old)
        except (OSError, ValueError, DamagedError) as error:  # to orbax a full disk is a ValueError
            for leftover in self.directory.glob(f"{step}.partial*"):
                shutil.rmtree(leftover, ignore_errors=True)
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"cannot write the checkpoint of step {step} to {self.directory}: {reason}", STORAGE_FAULT
            ) from error

    def _holds(self, step: int, record: dict[str, Any]) -> bool:
        """Whether the step is on disk, intact, with this record. A metric it was once given is kept."""
        if step not in self.steps():
            return False
        try:
            step_folder.check_files(self._folder(step))
            old = step_folder.read_record(self._folder(step))
        except DamagedError:
            return False
        if record["metric"] is None and record["arrays"] == old["arrays"]:
            record["metric"] = old["metric"]
        return record == old

    def _read(self, step: int, target: Tree) -> tuple[Tree, dict[str, Any]]:
        folder, wanted = self._folder(step), step_folder.by_path(target)
        step_folder.check_files(folder)
        record = step_folder.read_record(folder)
        step_folder.check_model(folder, record["arrays"], wanted)
        leaves = step_folder.read_arrays(self._checkpointer, folder, record["arrays"])
        return jax.tree.structure(target).unflatten(leaves[name] for name in wanted), record["meta"]

    def _metric(self, step: int) -> float | None:
        try:
            return step_folder.read_record(self._folder(step))["metric"]
        except (OSError, DamagedError):  # `restore` says so, and passes over it
            return None

    def _folder(self, step: int) -> Path:
        return self.directory / str(step)

    def _remove(self, step: int) -> None:
        """Remove a step that may be there; a kill halfway leaves no half of it under its number."""
        if self._folder(step).exists():
            removed = self.directory / f"{step}.removed"
            self._folder(step).rename(removed)
            shutil.rmtree(removed)


def saved_meta(directory: str | Path) -> dict[str, Any]:
    """The `meta` of the newest step under `directory` whose record can be read; UserError if there is none.

    Whether that step's arrays are intact is for `Checkpoints.restore` to say.
    """
    folders = [entry for entry in Path(directory).glob("*") if entry.name.isdecimal()]
    for folder in sorted(folders, key=lambda entry: int(entry.name), reverse=True):
        try:
            return step_folder.read_record(folder)["meta"]
        except (OSError, DamagedError):
            continue
    raise UserError(f"there is no readable checkpoint in {directory}", STORAGE_FAULT)
