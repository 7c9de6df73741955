"""Hours in minutes: `python tests/faults/soak.py kills 200` and `... memory 15`; both by `make soak`, not by pytest.

kills N: one run is killed at N random moments, now and then asked to stop instead, and goes on each time. After each,
what is on disk must be intact; at the end the run must be, to the bit, one that nothing happened to.
memory MINUTES: one run of at least 50 epochs; from epoch 5 on resident memory may grow by 1% and 10 MB over the least
that it was, and the numbers of open files and of threads must stay.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cssm.checkpoint import step_folder  # noqa: E402
from cssm.report import read_events  # noqa: E402

TINY = ["--cssm=gated", "--embed_dim=4", "--image_size=8", "--kernel_size=3", "--seq_len=2", "--global_batch_size=8"]
TINY += ["--max_train_examples=40", "--max_eval_examples=21", "--schedule=constant", "--warmup_steps=0"]
TINY += ["--num_devices=1", "--platform=cpu", "--quiet", "--run_name=run"]
KILLED = [*TINY, "--resume=auto", "--log_every=1", "--eval_every=7", "--max_checkpoints=2", "--ema_decay=0.9"]
FOR_EVER = "--max_steps=1000000"
FIRST_EPOCH, EPOCHS = 5, 50


def start(root: Path, *flags: str) -> subprocess.Popen:
    """The program, with its compiled programs kept in `root`; it says on stderr why it ends."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(root / "cache")}
    command = [sys.executable, str(ROOT / "main.py"), *flags, f"--checkpoint_dir={root}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environ, text=True, **quiet)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def since(path: Path, start: int) -> bytes:
    """What was appended to a file after its first `start` bytes."""
    if size(path) <= start:
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def strike(process: subprocess.Popen, draw: random.Random, metrics: Path) -> str:
    """End it at a random moment: while it starts, or a little after it has begun to write. How it was ended."""
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0, 4))
    else:
        before, deadline = size(metrics), time.monotonic() + 120
        while b'"event": "step"' not in since(metrics, before) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        time.sleep(draw.choice([draw.uniform(0, 0.2), draw.uniform(0, 1.5)]))
    how = draw.choices(["SIGKILL", "SIGTERM", "SIGINT SIGINT"], [7, 2, 1])[0]
    for name in how.split():
        process.send_signal(getattr(signal, name))
    _, said = process.communicate(timeout=120)
    number = getattr(signal, how.split()[0])
    allowed = {-number, 0 if how == "SIGKILL" else 128 + number}  # by the signal itself, before jax is loaded
    assert process.returncode in allowed, f"{how}: exit code {process.returncode}: {said}"
    return how


def check(run: Path, before: int) -> int:
    """What is on disk after a kill is intact, and no step that was once saved is gone; the newest step."""
    folders = [path for path in (run / "checkpoints").glob("*") if path.name.isdecimal()]
    for folder in folders:
        step_folder.check_files(folder)
    steps = sorted(int(folder.name) for folder in folders)
    newest = steps[-1] if steps else 0
    assert newest >= before, f"step {before} was saved, {newest} is the newest"
    assert len(steps) >= 2 or newest <= 14, f"no older step is kept beside {steps}"
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n") if (run / "metrics.jsonl").exists() else [b""]
    for line in lines[:-1]:
        json.loads(line)
    course = [e["step"] for e in read_events(run / "metrics.jsonl") if e["event"] == "step"] if len(lines) > 1 else []
    assert course == list(range(1, len(course) + 1)), "a step is missing or told twice"
    assert len(course) >= newest, "a saved step was not told"
    return newest


def kills(count: int) -> None:
    """See the module."""
    seed = int(os.environ.get("SEED", time.time()))
    draw, ways, newest = random.Random(seed), {}, 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        began = time.monotonic()
        for number in range(1, count + 1):
            how = strike(start(root, *KILLED, FOR_EVER), draw, root / "run" / "metrics.jsonl")
            ways[how] = ways.get(how, 0) + 1
            newest = check(root / "run", newest)
            if number % 10 == 0:
                print(f"{number} of {count} (SEED={seed}), {time.monotonic() - began:.0f} s, step {newest}", flush=True)
        last = newest + 10
        whole = root / "whole"
        for where in (root, whole):
            process = start(where, *KILLED, f"--max_steps={last}")
            _, said = process.communicate()
            assert process.returncode == 0, said
        assert told(root / "run") == told(whole / "run"), "the metrics differ from those of the run that went through"
        there, here = arrays(whole / "run", last), arrays(root / "run", last)
        for path, leaf in there.items():
            np.testing.assert_array_equal(here[path], leaf, err_msg=path)
    print(f"{count} kills {ways}, {last} steps, the same to the bit: {time.monotonic() - began:.0f} s")


def told(run: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_events(run / "metrics.jsonl") if e["event"] == "step"}


def arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    folder = (run / "checkpoints" / str(step)).absolute()
    with step_folder.open_checkpointer() as checkpointer:
        return step_folder.read_arrays(checkpointer, folder, step_folder.read_record(folder)["arrays"])


def sample(pid: int) -> tuple[float, int, int]:
    """(resident MB, open files, threads but those of TensorStore's pool, which grows to its limit) of a process."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    names = []
    for thread in (process / "task").iterdir():
        with suppress(OSError):  # it has just ended
            names.append((thread / "comm").read_text())
    threads = sum(not name.startswith("ts_pool_worker") for name in names)
    return int(status["VmRSS"].split()[0]) / 1e3, len(list((process / "fd").iterdir())), threads


def memory(minutes: float) -> None:
    """See the module."""
    examples = ["--max_train_examples=400", "--batch_size=8", "--global_batch_size=8", "--log_every=10"]
    flags = [flag for flag in TINY if "examples" not in flag and "batch" not in flag]
    with tempfile.TemporaryDirectory() as folder:
        root, samples, epoch = Path(folder), [], []
        process = start(root, *flags, *examples, "--epochs=1000000", "--max_eval_examples=21", "--tensorboard")
        end, seen = time.monotonic() + 60 * minutes, 0
        try:
            while time.monotonic() < end or len(samples) < EPOCHS:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.02)
                new = since(root / "run" / "metrics.jsonl", seen)
                seen += len(new)
                epoch.append(sample(process.pid))
                if b'"eval"' in new:  # a save or an evaluation opens files for a moment: an epoch's least look counts
                    least = [min(look[column] for look in epoch) for column in (1, 2)]
                    samples.append((epoch[-1][0], *least))
                    epoch = []
        finally:
            process.terminate()
            process.communicate()
    # What compiling took is given back at some time: growth is counted from the least on, or that would hide it.
    tail = samples[FIRST_EPOCH:]
    tenths = [list(zip(*tail[i * len(tail) // 10 : (i + 1) * len(tail) // 10], strict=True)) for i in range(10)]
    resident = [statistics.median(tenth[0]) for tenth in tenths]
    halves = tail[: len(tail) // 2], tail[len(tail) // 2 :]
    first, last = (tuple(int(statistics.median(s[column] for s in half)) for column in (1, 2)) for half in halves)
    grown = resident[-1] - min(resident)
    print(f"{len(samples)} epochs in {minutes} min: memory {', '.join(f'{mb:.1f}' for mb in resident)} MB", end="")
    print(f" (most {max(s[0] for s in tail):.1f}), open files {first[0]} -> {last[0]}, threads {first[1]} -> {last[1]}")
    assert grown < 0.01 * min(resident) + 10, f"memory grew by {grown:.1f} MB"
    assert last[0] <= first[0] and last[1] <= first[1], "files or threads are left open"


if __name__ == "__main__":
    {"kills": lambda: kills(int(sys.argv[2])), "memory": lambda: memory(float(sys.argv[2]))}[sys.argv[1]]()
