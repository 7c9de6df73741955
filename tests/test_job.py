"""What the processes of a job decide together, and how they join and part."""

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest

from parallel import job
from parallel.job import LaunchError, SharedError, check_port, free_port, gather, leave, share

ROOT = Path(__file__).resolve().parents[1]


def test_a_port_that_is_taken_is_named_with_its_owner():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        owner = rf"process {os.getpid()} \(.*python" if Path("/proc/net/tcp").exists() else "."
        with pytest.raises(LaunchError, match=f"port {port} is taken by {owner}") as raised:
            check_port(port)
        assert raised.value.exit_code == 4
    check_port(port)


@pytest.mark.parametrize(
    "host, words",
    [("127.0.0.1", "is each host itself: from another, type the address"), ("other.invalid", "check that")],
)
def test_a_coordinator_on_the_loopback_of_another_host_ends_with_a_sentence(host, words, monkeypatch):
    """Where nobody listens: jax itself would wait, then abort."""
    monkeypatch.setattr(job, "JOIN_TIMEOUT_S", 0)
    with pytest.raises(job.LaunchError, match=f"waited 0 s for process 0 at {host}:.*{words}") as raised:
        job.join(job.Job("flags", 2, 1, f"{host}:{job.free_port()}"), 10)
    assert raised.value.exit_code == 4


def test_in_a_single_process_sharing_is_a_call_and_leaving_is_nothing():
    assert share("a", lambda: (1, 2)) == (1, 2)
    with pytest.raises(OSError, match="it is so"):
        share("a", lambda: (_ for _ in ()).throw(OSError("it is so")))
    assert gather("b", 3) == [3]
    leave()


class Store:
    """The store of a job of two, where process 1 answers only to the first question."""

    def __init__(self):
        self.values = {"cssm/fits/0/1": "false"}

    def key_value_set(self, key, text):
        assert key not in self.values
        self.values[key] = text

    def blocking_key_value_get(self, key, wait_ms):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: x")
        return self.values[key]


def test_all_say_something_and_one_that_hangs_is_told(monkeypatch):
    store = Store()
    monkeypatch.setattr(job, "_client", lambda: store)
    monkeypatch.setattr(job, "_process_id", lambda: 0)
    monkeypatch.setattr(job, "_calls", Counter())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert gather("fits", True) == [True, False]
    with pytest.raises(LaunchError, match="no answer to cssm/fits/1/1 came"):
        gather("fits", True, timeout_s=0.0)


# Joins as process argv[1] of 3 at port argv[2], shares twice under one name, then shares errors, and leaves.
MEMBER = """
import sys, time
from parallel import job
rank = int(sys.argv[1])
job.join(job.Job("local", 3, rank, "127.0.0.1:" + sys.argv[2]), 5)
def fail():
    error = {kind}("it is so")
    error.__dict__.update({attributes})
    raise error
time.sleep(1.5 if rank == 0 else 0)  # longer than a wait for a key lasts
shared = [job.share("a", lambda: [rank, "first"]), job.share("a", lambda: {{"rank": rank}})]
assert job.gather("c", rank * 10) == [0, 10, 20]
try:
    job.share("b", fail)
except Exception as error:
    shared.append([type(error).__name__, str(error), getattr(error, "exit_code", None)])
print(shared, flush=True)
time.sleep(13 if rank == 0 and "{kind}" == "ValueError" else 0)  # longer than the timeout of jax's own shutdown
job.leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, attributes, code",
    [("ValueError", "dict(exit_code=6)", 6), ("job.JobError", "{}", 2), ("ZeroDivisionError", "{}", 1)],
)
def test_all_processes_get_what_process_0_decides_or_why_it_could_not(kind, attributes, code):
    port = str(free_port())
    program = [sys.executable, "-c", MEMBER.format(kind=kind, attributes=attributes)]
    # A proxy that is named but not there must not be asked for the way to a process.
    options = {"cwd": ROOT, "env": {**os.environ, "http_proxy": "http://127.0.0.1:9"}, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    members = [subprocess.Popen([*program, str(i), port], **options) for i in range(3)]
    outputs = [member.communicate(timeout=200) for member in members]
    assert [member.returncode for member in members] == [0, 0, 0], outputs
    common = [[0, "first"], {"rank": 0}]
    name, own_code = kind.split(".")[-1], code if "exit_code" in attributes else None
    said = [[line for line in stdout.splitlines() if line.startswith("[[")] for stdout, _ in outputs]
    assert said[0] == [str([*common, [name, "it is so", own_code]])]
    assert said[1] == said[2] == [str([*common, [SharedError.__name__, "it is so", code]])]
