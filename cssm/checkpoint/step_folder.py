"""One checkpoint on disk: a folder with an orbax Composite and the digest of every file.

    state/          the arrays in zarr's format, one folder each by path: params/block_0/kernel/
    record/         JSON: what the caller wants to keep, and the shape, dtype and sha256 of each array
    files.json      sha256 of each of the other files

The digests of the files find damage before orbax reads it: its own errors come late and with noise, and
flipped bytes are no error to it at all. The digests of the arrays prove that what comes out is what went in.
"""

import errno
import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from cssm.config import UserError

Tree = Any
Leaves = dict[str, np.ndarray]
FILES = "files.json"


def open_checkpointer() -> ocp.Checkpointer:
    """Orbax's writer and reader, for this process alone: it waits for no other, where there are several."""
    _hush()
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(here, {here}, barrier_sync_key_prefix=f"process_{here}")
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        # With OCDBT, the default, orbax asks TensorStore for a `Spec.to_json` of every array, of which each leaks its
        # strings: the memory of a run grew with every save. Steps written with it are read all the same.
        state=ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone),
        record=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _hush() -> None:
    """Let a failed save be told once, by its exception: orbax logs the traceback of each of its threads as well,
    asyncio that of each array after the first, and their event loops are closed while TensorStore still has answers
    for them. Nor is it news that there is no OCDBT.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_worth_telling)
    if getattr(sys.unraisablehook, "__name__", "") != _but_closed_loops.__name__:
        before = sys.unraisablehook
        sys.unraisablehook = functools.wraps(_but_closed_loops)(functools.partial(_but_closed_loops, before))


def _worth_telling(record: logging.LogRecord) -> bool:
    twice = ("_SignalingThread.run() raised", "exception was never retrieved", "Skipping merge of OCDBT")
    return not any(text in str(record.msg) for text in twice)


def _but_closed_loops(hook: Callable[[Any], object], unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)


class DamagedError(Exception):
    """The folder does not hold what was written."""


def by_path(tree: Tree) -> dict[str, Any]:
    """Leaves by path, in the order of the tree: {"opt_state/0/count": leaf, "params/w": leaf}.

    Raises ValueError if two leaves share a path, which a key with a slash could cause.
    """
    named = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in named}
    if len(leaves) != len(named):
        raise ValueError("two leaves of the state have the same path, because a key holds a slash")
    return leaves


def host_copies(state: Tree) -> Leaves:
    """The arrays by path, safe from what the caller does to them next; TypeError for what is not numeric."""
    leaves = {name: np.asarray(leaf) for name, leaf in by_path(state).items()}
    if wrong := [name for name, leaf in leaves.items() if leaf.dtype.kind in "OSUMm"]:
        raise TypeError(f"{wrong[0]} is of dtype {leaves[wrong[0]].dtype}: a checkpoint holds numbers")
    # A read-only array is JAX's view of a device buffer: a donation of the buffer leaves it intact.
    return {name: leaf.copy() if leaf.flags.writeable else leaf for name, leaf in leaves.items()}


def array_record(leaf: np.ndarray) -> dict[str, Any]:
    """What identifies an array: shape, dtype, and the sha256 of its bytes."""
    digest = hashlib.sha256(leaf.tobytes()).hexdigest()
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "sha256": digest}


def write(checkpointer: ocp.Checkpointer, folder: Path, leaves: Leaves, record: dict[str, Any]) -> None:
    """Write the folder, through to the disk, and read it back. record["arrays"] holds `array_record` of each leaf.

    Raises DamagedError if what is read differs; OSError, or orbax's ValueError, if it cannot be written.
    """
    # orbax refuses arrays without elements: the record says all there is to know about them.
    state = {name: leaf for name, leaf in leaves.items() if leaf.size}
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), record=ocp.args.JsonSave(record))
    checkpointer.save(folder, args=args)
    (folder / FILES).write_text(json.dumps(_file_digests(folder)))
    for path in [*folder.rglob("*"), folder]:  # what is renamed after this outlives the machine
        sync(path)
    read_arrays(checkpointer, folder, record["arrays"])


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, as far as the file system offers that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def read_record(folder: Path) -> dict[str, Any]:
    """The JSON record, as it is on disk: {meta, metric, arrays}; `check_files` tells whether it is intact.

    Raises DamagedError where it has another form; what `meta` holds is for the caller to check.
    """
    try:
        record = json.loads((folder / "record" / "metadata").read_text())
    except (ValueError, RecursionError) as error:
        raise DamagedError("its record cannot be read") from error
    if not _is_record(record):
        raise DamagedError("its record is not one of this program")
    return record


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or record.keys() != {"meta", "metric", "arrays"}:
        return False
    metric, arrays = record["metric"], record["arrays"]
    right = isinstance(record["meta"], dict) and isinstance(arrays, dict)
    return right and (metric is None or type(metric) in (int, float)) and all(map(_is_array_record, arrays.values()))


def _is_array_record(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"shape", "dtype", "sha256"}:
        return False
    shape, texts = entry["shape"], (entry["dtype"], entry["sha256"])
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    return sizes and all(isinstance(text, str) for text in texts)


def read_arrays(checkpointer: ocp.Checkpointer, folder: Path, arrays: dict[str, Any]) -> Leaves:
    """Read these arrays of the record, all or some. Raises DamagedError if one is not what was saved."""
    stored = [name for name, entry in arrays.items() if 0 not in entry["shape"]]
    for name in stored:
        _check_size(folder / "state" / name / ".zarray", name, arrays[name]["shape"])
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    args = ocp.args.PyTreeRestore(
        dict.fromkeys(stored, 0), restore_args=dict.fromkeys(stored, as_numpy), partial_restore=True
    )
    try:
        restored = checkpointer.restore(folder, args=ocp.args.Composite(state=args)).state
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:  # of orbax, by what it meets
        raise DamagedError(f"orbax cannot read it: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    empty = {name: np.zeros(entry["shape"], entry["dtype"]) for name, entry in arrays.items() if 0 in entry["shape"]}
    leaves = {**restored, **empty}
    if wrong := [name for name, entry in arrays.items() if array_record(leaves[name]) != entry]:
        raise DamagedError(f"{wrong[0]} is not what was saved")
    return leaves


def _check_size(described: Path, name: str, shape: list[int]) -> None:
    """Raise DamagedError if the array on disk claims another shape, or more than one chunk of it: TensorStore would set
    memory aside for whatever is claimed, and end the program where there is none.
    """
    try:
        claim = json.loads(described.read_text())
    except FileNotFoundError:  # of an OCDBT step, where it is a value among others
        return
    except (ValueError, RecursionError, NotADirectoryError) as error:
        raise DamagedError(f"{name} has no description") from error
    if not isinstance(claim, dict) or not claim.get("shape") == claim.get("chunks") == shape:
        raise DamagedError(f"{name} is not of shape {tuple(shape)} in one piece")


def check_files(folder: Path) -> None:
    """Raise DamagedError if a file of the folder is missing, added, changed, or a link."""
    try:
        expected = json.loads((folder / FILES).read_text())
        if not isinstance(expected, dict):
            raise ValueError("it is no object")
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError) as error:
        raise DamagedError(f"{FILES} cannot be read") from error
    found = _file_digests(folder)
    if wrong := [name for name in {**expected, **found} if expected.get(name) != found.get(name)]:
        raise DamagedError(f"{wrong[0]} is not what was written")


def check_model(folder: Path, arrays: dict[str, Any], target: dict[str, Any]) -> None:
    """Raise UserError, naming the first array, if the target by path has others than the record tells of."""
    here = {
        name: (tuple(np.shape(leaf)), str(leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)))
        for name, leaf in target.items()
    }
    there = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in arrays.items()}
    # Parameters first: they say more about what differs than the optimizer state that mirrors them.
    for name in sorted({*here, *there}, key=lambda name: (not name.startswith("params/"), name)):
        if here.get(name) != there.get(name):
            a, b = (" ".join(map(str, side[name])) if name in side else "missing" for side in (there, here))
            raise UserError(
                f"the checkpoint {folder} is of another model: {name} is {a} there and {b} here; "
                "use the settings it was trained with, or start another run"
            )


def _file_digests(folder: Path) -> dict[str, str]:
    paths = list(folder.rglob("*"))
    if links := [path for path in paths if path.is_symlink()]:
        raise DamagedError(f"{links[0].relative_to(folder)} is a link")
    files = sorted(path for path in paths if path.is_file() and path != folder / FILES)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
