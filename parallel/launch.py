"""Watch over the processes of a job: the parent of --nproc_per_node, and of each rank that another launcher started.

jax ends the survivors of a job by aborting them, and prints pages as it does. The parent, which never loads jax, makes
one sentence and one exit code of that, and leaves no process behind.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from parallel.job import JOIN_TIMEOUT_S, Job, LaunchError

WORKER = "CSSM_WORKER"
"""The variable that tells a process that a parent of this kind started it, and its job, as JSON."""
LOST_PEER = 104
"""Exit code of a process that could not go on because another was lost; only its parent sees it."""
LOST_LABEL = "lost another process: "
"""Begins the line in which that process tells its parent why."""
ORDERLY = (0, 5, 130, 143)
"""Exit codes of endings that all processes share."""
_OWN = (1, 2, 3, 4, 5, 6, 130, 141, 143)
_LOST = 4
_PR_SET_PDEATHSIG = 1
_POLL_S, _WATCH_S = 0.05, 0.5
# After one process has failed, the others may end by themselves for so long; then they are asked to, then killed.
_SETTLE_S, _ORDERLY_SETTLE_S, _GRACE_S = 1.5, 10.0, 5.0
_KEPT_LINES = 40
# What jax and Gloo print in C++: the first is never of interest, after the second comes nothing but more of it.
_CHATTER = "[Gloo]"
_FATAL = re.compile(r"[EF]\d{4} .*(coordination_service|client\.h)|terminate called .*'gloo::")
_ABORTS = ("the JAX distributed service detected fatal errors", "gloo::")


@dataclass(frozen=True)
class Worker:
    """What a process knows that has a parent of this kind. divided: it sees its share of the devices asked for."""

    job: Job
    divided: bool


def enter_worker(environ: MutableMapping[str, str]) -> Worker | None:
    """If such a parent started this process: take note of the job, and live no longer than the parent."""
    text = environ.pop(WORKER, None)
    if text is None:
        return None
    told = json.loads(text)
    follow(told["parent"])
    return Worker(Job(**told["job"]), told["divided"])


def follow(parent: int) -> None:
    """Live no longer than the process that started this one, whose number is `parent`."""
    if sys.platform == "linux":  # also ends a stopped process, and needs no turn of Python's
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_follow, args=(parent,), name="parent watch", daemon=True).start()


def _follow(parent: int) -> None:
    """End with the parent; stop while it is stopped, so that the job sees what was done to the command."""
    while os.getppid() == parent:
        if _state(parent) == "T":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(_WATCH_S)
    os._exit(_LOST)


def _state(pid: int) -> str:
    """The letter of /proc: T is stopped by a signal. Empty where there is no such process, or no /proc."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


@dataclass(frozen=True)
class Place:
    """One process to start. environ: what it gets besides the parent's variables, if devices are divided its share.

    Of several, only process 0 has the standard output. stderr_shown: or only kept, to be shown if the process fails.
    """

    job: Job
    environ: Mapping[str, str] = field(default_factory=dict)
    stderr_shown: bool = True


def run(
    command: Sequence[str],
    places: Sequence[Place],
    heartbeat_timeout: int,
    *,
    verbose: bool = False,
    stdout: IO[str] | None = None,
) -> int:
    """Run `command` in every place, until all have ended; the exit code, 0 if it is that of all.

    Ctrl-C and SIGTERM are passed on. When a process fails, dies, or is stopped for heartbeat_timeout seconds, all are
    ended. What it says itself, the sentence of process 0, is not said again: then its code is returned. Raises
    LaunchError for everything else. verbose: show what jax and Gloo print. stdout: of process 0, instead of this one's.
    """
    with _signals() as received:
        children: list[_Child] = []
        try:
            children.extend(_Child(command, place, verbose, stdout) for place in places)
            _wait(children, received, heartbeat_timeout)
            failure = _first_failure(children)
            _end(children)
        finally:
            for child in children:
                child.close()
    return 0 if failure is None else _verdict(*failure, asked=received.last, timeout=heartbeat_timeout)


class _Child:
    """A process, and the last lines of what it printed on stderr."""

    def __init__(self, command: Sequence[str], place: Place, verbose: bool, stdout: IO[str] | None) -> None:
        self.job, self.shown, self._verbose = place.job, place.stderr_shown, verbose
        told = {"job": asdict(place.job), "divided": bool(place.environ), "parent": os.getpid()}
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **place.environ, WORKER: json.dumps(told)},
            stdin=subprocess.DEVNULL,
            stdout=stdout if place.job.process_id == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal reaches the parent alone
        )
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.stopped_at: float | None = None
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    @property
    def code(self) -> int | None:
        """None while it runs; negative after a signal."""
        return self.process.poll()

    @property
    def aborted_by_jax(self) -> bool:
        aborted = self.code in (-signal.SIGABRT, 128 + signal.SIGABRT)
        return aborted and any(words in line for line in self.lines for words in _ABORTS)

    @property
    def name(self) -> str:
        return f"process {self.job.process_id} of {self.job.num_processes}"

    def send(self, number: int) -> None:
        """A signal to the process; SIGKILL to what it started too."""
        with suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)

    def note_state(self, now: float) -> None:
        stopped = self.code is None and _state(self.process.pid) == "T"
        self.stopped_at = (self.stopped_at or now) if stopped else None

    def close(self) -> None:
        """Leave nothing behind."""
        if self.code is None:
            self.send(signal.SIGKILL)
        self.process.wait()
        self.read_to_end()

    def read_to_end(self) -> None:
        """What an ended process has printed; not for ever, as something that it started may go on printing."""
        self._thread.join(2)

    def _pump(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            muted = False
            for raw in stream:
                line = raw.decode(errors="replace")
                chatter = line.startswith(_CHATTER)
                if not chatter:
                    self.lines.append(line)
                muted = muted or _FATAL.match(line) is not None
                noise = chatter or line.startswith(LOST_LABEL) or (muted and not line.startswith("error: "))
                if self.shown and (self._verbose or not noise):
                    sys.stderr.write(line)
                    sys.stderr.flush()


class _Received:
    """Signals that came and have not been passed on yet; the last of all; when it was last told to continue."""

    def __init__(self) -> None:
        self.waiting: deque[int] = deque()
        self.last: int | None = None
        self.continued_at = 0.0

    def note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCONT:
            self.continued_at = time.monotonic()
        else:
            self.waiting.append(number)
            self.last = number


@contextmanager
def _signals() -> Any:
    received = _Received()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCONT)
    before = {number: signal.signal(number, received.note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: Sequence[_Child], received: _Received, heartbeat_timeout: int) -> None:
    """Until all have ended, or one has failed and the others had time to end by themselves."""
    deadline: float | None = None
    while running := [child for child in children if child.code is None]:
        now = time.monotonic()
        while received.waiting:
            number = received.waiting.popleft()
            for child in running:
                child.send(number)
        for child in children:
            child.note_state(now)
            # They stopped themselves when this process was stopped, some of them perhaps just now.
            if child.stopped_at is not None and now - received.continued_at < 2 * _WATCH_S:
                child.send(signal.SIGCONT)
        if any(child.stopped_at is not None and now - child.stopped_at > heartbeat_timeout for child in running):
            return
        if deadline is None and (codes := [child.code for child in children if child.code]):
            deadline = now + (_ORDERLY_SETTLE_S if codes[0] in ORDERLY else _SETTLE_S)
        if deadline is not None and now > deadline:
            return
        time.sleep(_POLL_S)


def _end(children: Sequence[_Child]) -> None:
    """Ask the processes that are left to end, and kill those that do not."""
    deadline = time.monotonic() + _GRACE_S
    for child in children:
        if child.code is None:
            child.send(signal.SIGKILL if child.stopped_at is not None else signal.SIGTERM)
    while any(child.code is None for child in children) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _first_failure(children: Sequence[_Child]) -> tuple[_Child, int | None] | None:
    """The process that made the others fail, and its exit code, None if it only stopped; None if none failed.

    Which of them ended first can hardly be seen. What is likely the cause of the others comes before them: a death by
    a signal, an error of its own, a stop; last come those that lost another.
    """

    def order(child: _Child) -> tuple[int, int]:
        code = child.code
        if code is not None and (code in (LOST_PEER, 0) or child.aborted_by_jax):
            return 4, child.job.process_id
        kinds = [code is not None and code < 0, code in _OWN and code != _LOST, child.stopped_at is not None, True]
        return kinds.index(True), child.job.process_id

    for child in children:
        if child.code is not None:
            child.read_to_end()
    failed = [child for child in children if child.code or child.stopped_at is not None]
    first = min(failed, key=order, default=None)
    return first and (first, first.code)


def _verdict(child: _Child, code: int | None, asked: int | None, timeout: int) -> int:
    """What to return or raise for the process that failed first; asked: the signal that this process was sent."""
    if asked is not None and code == -asked:
        raise LaunchError(f"stopped by {_signal_name(asked)}", 128 + asked)
    if code in _OWN:
        if child.shown:
            return code
        said = [line for line in child.lines if line.startswith("error: ")]
        if code == 1 or not said:
            _print_lines(child)
        reason = said[-1].removeprefix("error: ").strip() if said else f"it ended with exit code {code}"
        raise LaunchError(f"{child.name} failed first: {reason}", code)
    if sys.stdout.isatty():
        print("\x1b[?25h", flush=True)  # its progress bar may have hidden the cursor
    resume = "checkpoints are intact, if one was saved: go on with --resume auto"
    if code is None:
        what = f"{child.name} was stopped, by SIGSTOP or Ctrl-Z, and did not go on"
    elif code == LOST_PEER or child.aborted_by_jax:
        what = f"{child.name} lost the others: {_reason(child, timeout)}"
    elif code < 0:
        what = f"{child.name} was killed by {_signal_name(-code)}"
    else:
        what = f"{child.name} ended with exit code {code}"
    if not (child.shown or code in (None, LOST_PEER) or child.aborted_by_jax):
        _print_lines(child)
    raise LaunchError(f"{what}; {resume}", _LOST)


def _reason(child: _Child, timeout: int) -> str:
    """In words: what it said itself, or what jax printed before it aborted."""
    text, own = "".join(child.lines), str(child.job.process_id)
    if said := re.search(rf"^{LOST_LABEL}(.*)", text, re.MULTILINE):
        return said[1]
    if "RegisterTask" in text:
        return f"not all {child.job.num_processes} processes joined within {JOIN_TIMEOUT_S} s"
    silent = re.search(r"stopped sending heartbeats\):\n([\d, \n]+)", text)
    others = [number for number in re.findall(r"\d+", silent[1]) if number != own] if silent else ["0"]
    return f"process {' and '.join(others)} died or did not answer for {timeout} s"


def _print_lines(child: _Child) -> None:
    if child.lines:
        text = "".join(f"    {line.rstrip()}\n" for line in child.lines)
        print(f"the last lines of {child.name}:\n{text}", end="", file=sys.stderr, flush=True)


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
