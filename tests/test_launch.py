"""A parent and its processes, without jax: one sentence and one code for every way to fail, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from parallel import launch
from parallel.job import Job, LaunchError
from parallel.launch import LOST_LABEL, LOST_PEER, WORKER, Place, enter_worker

ROOT = Path(__file__).resolve().parents[1]
HEARTBEAT_S = 1
# What each process runs first: `rank`, and the means to say how it ends. All begin when the last is there.
PRELUDE = """
import json, os, signal, sys, time
job = json.loads(os.environ["CSSM_WORKER"])["job"]
rank, folder = job["process_id"], "FOLDER"
open(f"{folder}/{rank}", "w").close()
while len(os.listdir(folder)) < job["num_processes"]: time.sleep(0.01)
def say(text, code): print(text, file=sys.stderr, flush=True); os._exit(code)
def die(number): os.kill(os.getpid(), number); time.sleep(60)
def stay(): time.sleep(60)
def stay_stubbornly(): signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)
def abort(text): os.write(2, text.encode()); os.abort()
"""
ABORT = "F1128 03:53:37.1 4174 client.h:80] Terminating process because the JAX distributed service detected fatal "
ABORT += "errors. absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\\n1\\nThe "
ABORT += "tasks have crashed.\\n*** Check failure stack trace: ***\\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(launch, "_SETTLE_S", 0.3)
    monkeypatch.setattr(launch, "_GRACE_S", 0.3)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """Every process that a test starts through the parent has ended when the test has."""
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    yield started
    assert [process.returncode for process in started if process.returncode is None] == []


def places(count: int) -> list[Place]:
    return [Place(Job("local", count, i, "h:1", i, count), stderr_shown=i == 0) for i in range(count)]


def run(*by_rank: str, **options) -> int:
    """A process for each statement; ends as `launch.run` does."""
    with tempfile.TemporaryDirectory() as folder:
        code = PRELUDE.replace("FOLDER", folder) + "".join(
            f"if rank == {rank}:\n    {what}\n" for rank, what in enumerate(by_rank)
        )
        return launch.run([sys.executable, "-c", code], places(len(by_rank)), HEARTBEAT_S, **options)


def test_all_end_well_and_only_process_0_is_heard(capfd):
    loud = "print('out', rank, flush=True); print('[Gloo] noise', file=sys.stderr); print('err', rank, file=sys.stderr)"
    assert run(loud, loud, loud) == 0
    assert capfd.readouterr() == ("out 0\n", "err 0\n")


def test_standard_output_goes_where_it_is_told_and_verbose_shows_everything(tmp_path, capfd):
    with (tmp_path / "out").open("w") as stdout:
        run("print('out'); print('[Gloo] noise', file=sys.stderr)", stdout=stdout, verbose=True)
    assert (tmp_path / "out").read_text() == "out\n"
    assert capfd.readouterr() == ("", "[Gloo] noise\n")


@pytest.mark.parametrize(
    "by_rank, code, shown",
    [
        (["say('error: wrong', 2)", "say('error: wrong', 2)"], 2, "error: wrong\n"),
        (["say('error: no room', 3)", f"say('{LOST_LABEL}gone', {LOST_PEER})"], 3, "error: no room\n"),
        (["say('error: no room', 3)", "stay()"], 3, "error: no room\n"),
        (["say('error: full', 6)", "sys.exit(1)"], 6, "error: full\n"),
        (["say('stopped', 143)", "sys.exit(143)"], 143, "stopped\n"),
        (["say('', 141)", "stay()"], 141, "\n"),
    ],
)
def test_what_process_0_says_itself_is_not_said_again(by_rank, code, shown, capfd):
    assert run(*by_rank) == code
    assert capfd.readouterr().err == shown


@pytest.mark.parametrize(
    "by_rank, code, sentence, shown",
    [
        (["stay()", "say('error: no room', 3)"], 3, "process 1 of 2 failed first: no room", ""),
        (["stay()", "say('boom', 1)"], 1, "process 1 of 2 failed first: it ended with exit code 1", "    boom\n"),
        (["stay_stubbornly()", "die(signal.SIGKILL)"], 4, "process 1 of 2 was killed by SIGKILL", ""),
        ([f"say('{LOST_LABEL}x', {LOST_PEER})", "stay()", "die(9)"], 4, "process 2 of 3 was killed by SIGKILL", ""),
        (["abort('gloo::EnforceNotMet')", "die(signal.SIGKILL)"], 4, "process 1 of 2 was killed by SIGKILL", ""),
        ([f"abort('{ABORT}')", "die(signal.SIGSEGV)"], 4, "process 1 of 2 was killed by SIGSEGV", ""),
        (["die(signal.SIGABRT)", f"say('{LOST_LABEL}x', {LOST_PEER})"], 4, "process 0 of 2 was killed by SIGABRT", ""),
        (["say('error: hangs', 4)", f"abort('{ABORT}')"], None, "", "error: hangs\n"),
        (["stay()", "die(signal.SIGSTOP)"], 4, "process 1 of 2 was stopped, by SIGSTOP or Ctrl-Z", ""),
        ([f"abort('{ABORT}')", "die(signal.SIGSTOP)"], 4, "process 1 of 2 was stopped, by SIGSTOP or Ctrl-Z", ""),
        ([f"abort('{ABORT}')"], 4, "process 0 of 1 lost the others: process 1 died or did not answer for 1 s", ""),
        ([f"say('{LOST_LABEL}read error', {LOST_PEER})"], 4, "process 0 of 1 lost the others: read error", ""),
        (["stay()", f"say('{LOST_LABEL}x', {LOST_PEER})"], 4, "process 1 of 2 lost the others: x", ""),
        (["abort('... fatal errors. RPC: RegisterTask')", "stay()"], 4, "process 0 of 2 was killed by SIGABRT", "..."),
        (["say('error: x', 4)", "say('error: no room', 3)"], 3, "process 1 of 2 failed first: no room", "error: x"),
        (["say('error: x', 4)", "die(signal.SIGSTOP)"], 4, "process 1 of 2 was stopped, by SIGSTOP or Ctrl-Z", ""),
        (["sys.exit(77)", "stay()"], 4, "process 0 of 2 ended with exit code 77", ""),
    ],
)
def test_the_process_that_made_the_others_fail_is_named(by_rank, code, sentence, shown, capfd):
    if code is None:
        assert run(*by_rank) == 4
    else:
        with pytest.raises(LaunchError, match=r"^[^\n]*$") as raised:
            run(*by_rank)
        assert str(raised.value).startswith(sentence)
        assert raised.value.exit_code == code
    err = capfd.readouterr().err
    assert shown in err
    assert "Terminating" not in err and LOST_LABEL not in err


def test_only_lost_processes_say_why(capfd):
    register = ABORT.replace("The following", "DEADLINE_EXCEEDED RPC: RegisterTask, not the following")
    with pytest.raises(LaunchError, match=r"lost the others: not all 1 processes joined within \d+ s"):
        run(f"abort('{register}')")
    closed = ABORT.replace("The following tasks are unhealthy (stopped sending heartbeats):", "Socket closed")
    with pytest.raises(LaunchError, match="process 1 of 2 lost the others: process 0 died or did not answer"):
        run("stay()", f"abort('{closed}')")


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"no {paths}"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_to_all(number, tmp_path):
    count = f"""got = []
    signal.signal({int(number)}, lambda *_: got.append(1))
    open(f"{tmp_path}/{{rank}}", "w").close()
    while not got: time.sleep(0.01)
    time.sleep(0.5)
    open(f"{tmp_path}/got{{rank}}", "w").write(str(len(got)))
    sys.exit(128 + {int(number)})"""

    def strike() -> None:
        wait_for(tmp_path / "0", tmp_path / "1")
        os.kill(os.getpid(), number)

    threading.Thread(target=strike).start()
    before = signal.getsignal(number)
    assert run(count, count) == 128 + number
    assert [(tmp_path / f"got{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert signal.getsignal(number) == before


def test_a_signal_before_anyone_listens_ends_all_with_its_code(tmp_path):
    def strike() -> None:
        wait_for(tmp_path / "0", tmp_path / "1")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=strike).start()
    stay = f'open(f"{tmp_path}/{{rank}}", "w").close(); stay()'
    with pytest.raises(LaunchError, match=r"^stopped by SIGTERM$") as raised:
        run(stay, stay)
    assert raised.value.exit_code == 143


def test_a_process_that_cannot_be_started_leaves_no_other(nothing_left, monkeypatch):
    popen = launch.subprocess.Popen

    def second_fails(*args, **options):
        if nothing_left:
            raise OSError("no more processes")
        return popen(*args, **options)

    monkeypatch.setattr(launch.subprocess, "Popen", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        run("stay()", "stay()")
    assert nothing_left[0].returncode == -signal.SIGKILL


def test_without_a_parent_there_is_no_worker():
    assert enter_worker({}) is None


# A parent with one worker, which counts in a file for as long as it lives.
COUNTING = """
import os, sys, time
from parallel import launch
from parallel.job import Job
if "no prctl" in sys.argv:
    launch.sys.platform = "other"
worker = launch.enter_worker(os.environ)
if worker is None:
    command = [sys.executable, "-c", sys.argv[1], *sys.argv[1:]]
    sys.exit(launch.run(command, [launch.Place(Job("flags", 2, 1, "h:1"))], 60))
assert worker == launch.Worker(Job("flags", 2, 1, "h:1"), False) and launch.WORKER not in os.environ
folder = sys.argv[2]
open(folder + "/pid", "w").write(str(os.getpid()))
os.rename(folder + "/pid", folder + "/up")
for i in range(100000):
    open(folder + "/count", "w").write("x" * i)
    time.sleep(0.02)
"""


@pytest.fixture
def counting(tmp_path, request):
    """(parent, pid of its worker, the worker's growing file)."""
    command = [sys.executable, "-c", COUNTING, COUNTING, str(tmp_path), getattr(request, "param", "")]
    parent = subprocess.Popen(command, cwd=ROOT)
    wait_for(tmp_path / "up")
    pid = int((tmp_path / "up").read_text())
    yield parent, pid, tmp_path / "count"
    parent.kill()
    parent.wait()
    try:
        until(lambda: state(pid) in "ZX")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("counting, stopped", [("", False), ("", True), ("no prctl", False)], indirect=["counting"])
def test_a_worker_ends_with_its_parent(counting, stopped):
    parent, pid, _ = counting
    if stopped:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state(pid) == "T")
    parent.kill()
    until(lambda: state(pid) in "ZX")


def test_a_worker_stops_and_goes_on_with_its_parent(counting):
    parent, pid, file = counting
    parent.send_signal(signal.SIGSTOP)
    until(lambda: state(pid) == "T")
    parent.send_signal(signal.SIGCONT)
    before = file.stat().st_size
    until(lambda: file.stat().st_size > before and state(pid) != "T")
    assert parent.poll() is None


@pytest.mark.parametrize("environ, divided", [({}, False), ({"CUDA_VISIBLE_DEVICES": "1"}, True)])
def test_a_worker_is_told_its_job_and_whether_devices_were_divided(environ, divided, capfd):
    job = Job("torchrun", 4, 0, "h:1", 1, None)
    show = f"import os; print(os.environ['{WORKER}']); print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    launch.run([sys.executable, "-c", show], [Place(job, environ)], HEARTBEAT_S)
    told, visible = capfd.readouterr().out.splitlines()
    assert json.loads(told) == {"job": vars(job), "divided": divided, "parent": os.getpid()}
    assert visible == environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "None"))
