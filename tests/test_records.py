"""Arrays made once: kept whole or not at all, made again where damaged, by workers that need no jax."""

import errno
import fcntl
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from cssm.config import UserError
from cssm.data import records
from cssm.data.pathfinder import generate, spec
from cssm.data.records import ArraySource, cached_arrays

ROOT = Path(__file__).resolve().parents[1]
SHAPE = (4, 3, 1)
# Makes 20 examples, in a folder, once `go` exists; every call of the maker leaves a line in `calls`.
MAKER = """
import sys, time
from pathlib import Path
import numpy as np
from cssm.data.records import cached_arrays

folder, calls, go = map(Path, sys.argv[1:])


def make(indices):
    with calls.open("a") as file:
        print(len(indices), file=file)
    print("making", file=sys.stderr, flush=True)
    while not go.exists():
        time.sleep(0.01)
    return np.full((len(indices), 4, 3, 1), 7, np.uint8), np.zeros(len(indices), np.int32)


images, labels = cached_arrays(folder, make, 20, (4, 3, 1))
assert len(images) == len(labels) == 20 and (images == 7).all()
"""


def _make(calls: list[int] | None, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if calls is not None:
        calls.append(len(indices))
    images = np.broadcast_to(indices[:, None, None, None] % 251, (len(indices), *SHAPE)).astype(np.uint8)
    return images, (indices % 7).astype(np.int32)


def _is_jax_here(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A worker's whole job; its labels say whether jax was imported on the way."""
    images, labels, _ = generate(spec("easy", 32), 0, "train", indices)
    return images, np.full_like(labels, "jax" in sys.modules)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_arrays_are_made_once_in_order_and_mapped_after(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "CHUNK", 100)
    calls, progress = [], []
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        images, labels = cached_arrays(
            folder, partial(_make, calls), 250, SHAPE, progress=lambda *done: progress.append(done)
        )
        assert isinstance(images, np.memmap)
        assert not images.flags.writeable
        expected, expected_labels = _make(None, np.arange(250))
        np.testing.assert_array_equal(images, expected)
        np.testing.assert_array_equal(labels, expected_labels)
    assert calls == [100, 100, 50]
    assert progress == [(100, 250), (200, 250), (250, 250)]
    assert _files(tmp_path / "a") == ["b", "b/images.npy", "b/index.json", "b/labels.npy"]


def test_workers_make_fewer_of_what_is_large():
    for n, shape in ((2500, (32, 32, 1)), (700, (64, 32, 32, 3)), (2, (10_000, 10_000, 3))):
        chunks = records.chunks_of(n, shape)
        np.testing.assert_array_equal(np.concatenate(chunks), np.arange(n))
        most = max(map(len, chunks))
        assert most == 1 or (most <= 1000 and most * math.prod(shape) <= 1 << 26)


def test_a_source_gathers_copies():
    images, labels = _make(None, np.arange(9))
    source = ArraySource(images, labels, num_classes=7)
    assert (len(source), source.image_shape, source.num_classes) == (9, SHAPE, 7)
    picked, picked_labels = source.gather(np.array([8, 0, 8]))
    np.testing.assert_array_equal(picked, images[[8, 0, 8]])
    np.testing.assert_array_equal(picked_labels, [1, 0, 1])
    picked[:] = 99
    assert images.max() == 8
    out = np.zeros((3, *picked.shape[1:]), np.uint8)
    assert source.gather(np.array([8, 0, 8]), out=out)[0] is out
    np.testing.assert_array_equal(out, source.gather(np.array([8, 0, 8]))[0])


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no labels", "no index", "another size"])
def test_a_damaged_cache_is_made_again_and_said(tmp_path, capsys, damage):
    folder, calls = tmp_path / "cache", []
    cached_arrays(folder, partial(_make, calls), 20, SHAPE)
    content = (folder / "images.npy").read_bytes()
    if damage == "truncated":
        (folder / "images.npy").write_bytes(content[:-1])
    elif damage == "flipped":
        (folder / "images.npy").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "no labels":
        (folder / "labels.npy").unlink()
    elif damage == "no index":
        (folder / "index.json").write_text("{")
    else:
        (folder / "images.npy").write_bytes(content + b"\0")
    images, _ = cached_arrays(folder, partial(_make, calls), 20, SHAPE)
    np.testing.assert_array_equal(images, _make(None, np.arange(20))[0])
    assert calls == [20, 20]
    assert "damaged" in capsys.readouterr().err
    assert _files(tmp_path) == ["cache", "cache/images.npy", "cache/index.json", "cache/labels.npy"]


@pytest.mark.parametrize("first_is_killed", [False, True], ids=["finishes", "is killed"])
def test_of_two_processes_one_makes_and_the_other_waits_until_it(tmp_path, first_is_killed):
    folder, calls, go = tmp_path / "cache", tmp_path / "calls", tmp_path / "go"
    command = [sys.executable, "-c", MAKER, str(folder), str(calls), str(go)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr.readline() == "making\n"
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as second:
            said = second.stderr.readline()
            assert f"waiting for process {first.pid} of" in said and str(folder) in said
            if first_is_killed:
                first.kill()
                assert second.stderr.readline() == "making\n"
            go.touch()
            assert second.wait(60) == 0
        assert (first.wait(60) == 0) != first_is_killed
    assert calls.read_text().split() == ["20"] * (1 + first_is_killed)
    left = [name for name in _files(tmp_path) if ".building" not in name]  # what the killed one had begun stays
    assert left == ["cache", "cache/images.npy", "cache/index.json", "cache/labels.npy", "calls", "go"]


@pytest.mark.parametrize("lack", ["of the file system", "of Python"])
def test_without_locks_two_that_make_at_once_end_with_one_intact_copy(tmp_path, monkeypatch, capsys, lack):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if lack == "of Python":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder, barrier = tmp_path / "cache", Barrier(2, timeout=60)

    def make(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        barrier.wait()
        return _make(None, indices)

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(cached_arrays, folder, make, 200, SHAPE) for _ in range(2)]
        for job in jobs:
            np.testing.assert_array_equal(job.result()[0], _make(None, np.arange(200))[0])
    said = f"{tmp_path} cannot be locked: of processes that need the same images each generates them"
    assert capsys.readouterr().err.splitlines() == [said] * 2
    assert _files(tmp_path) == ["cache", "cache/images.npy", "cache/index.json", "cache/labels.npy"]


def test_workers_make_the_same_without_jax(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "CHUNK", 4)
    images, seen = cached_arrays(tmp_path / "cache", _is_jax_here, 10, (32, 32, 1), num_workers=2)
    np.testing.assert_array_equal(images, generate(spec("easy", 32), 0, "train", np.arange(10))[0])
    np.testing.assert_array_equal(seen, 0)


@pytest.mark.parametrize(
    "code, why", [(errno.ENOSPC, "full"), (errno.EACCES, "not writable"), (errno.EROFS, "not writable")]
)
def test_no_place_on_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch, code, why):
    def fail(*_: object) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(UserError, match=why) as caught:
        cached_arrays(tmp_path / "cache", partial(_make, None), 20, SHAPE)
    assert caught.value.exit_code == 6
    assert _files(tmp_path) == []


def test_an_interrupted_making_leaves_nothing(tmp_path):
    def stop(_: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_arrays(tmp_path / "cache", stop, 20, SHAPE)
    assert _files(tmp_path) == []
