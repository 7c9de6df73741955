"""The command line in jobs of several processes: who starts what, who speaks, and how every command ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cssm import cli
from cssm.config import Config
from parallel.job import JobError, LaunchError, SharedError, free_port
from parallel.launch import LOST_PEER

ROOT = Path(__file__).resolve().parents[1]
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# Takes the place of training, in processes that do not join: tells on every channel who it is.
ALONE = """
import json, os, sys, types
import cssm.cli as cli
from parallel.launch import WORKER
rank = json.loads(os.environ[WORKER])["job"]["process_id"] if WORKER in os.environ else None
cli.join = cli.leave = cli.reserve = lambda *args: None
def train(config, typed, json_stream):
    print("rank", rank, "prints", config.num_devices, typed.get("num_devices"))
    os.write(1, b"[Gloo] a library prints\\n")
    if json_stream:
        json_stream.write(json.dumps({"event": "config", "rank": rank}) + "\\n")
    ENDING
sys.modules["cssm.training"] = types.SimpleNamespace(train=train)
code = cli.main()
if rank is None:
    print("the parent has jax:", "jax" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


def command(code: str, *argv: str) -> list[str]:
    return [sys.executable, "-W", "error", "-c", code, *argv]


def run(*argv: str, ending: str = "return {}", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(ALONE.replace("ENDING", ending), *argv),
        cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_two_processes_speak_with_one_voice():
    result = run("--nproc_per_node", "2")
    assert result.returncode == 0
    first, *rest = result.stdout.splitlines()
    assert first.endswith("simple hgru_bi on digits; 2 processes, loading JAX ...")
    assert rest == ["rank 0 prints None None"]
    assert result.stderr == "the parent has jax: False\n"


def test_headless_is_one_stream_of_json():
    result = run("--nproc_per_node=2", "--headless")
    assert (result.returncode, result.stdout) == (0, '{"event": "config", "rank": 0}\n')
    assert result.stderr == "rank 0 prints None None\nthe parent has jax: False\n"


def test_a_process_per_device_sees_its_share_alone():
    show = "print(os.environ['JAX_NUM_CPU_DEVICES'])"
    result = run("--multi_gpu=ddp", "--num_devices=2", "--quiet", ending=show)
    assert result.stdout.splitlines() == ["rank 0 prints None None", "1"]
    assert "rank None prints 2 2" in run("--nproc_per_node=1", "--num_devices=2").stdout.splitlines()


def test_one_of_torchruns_processes_is_started_again_as_a_worker():
    quiet = "the parent has jax: False\n"
    result = run("--coordinator_port=1234", **RANK_1)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", quiet)
    result = run("--num_devices=3", **{**RANK_1, "RANK": "0"})
    assert "; 2 processes, loading JAX" in result.stdout
    assert result.stdout.splitlines()[1:] == ["rank 0 prints 3 3"]
    alone = run(**{**RANK_1, "RANK": "0", "WORLD_SIZE": "1"})
    assert "rank None prints" in alone.stdout


@pytest.mark.parametrize(
    "argv, environ, words",
    [
        ([], {"RANK": "0"}, "WORLD_SIZE is not set"),
        (["--nproc_per_node=2"], RANK_1, "--nproc_per_node 2 is for a process started alone, and this is one of 2"),
        (["--multi_gpu=off"], RANK_1, "--multi_gpu off is for a process started alone"),
        (["--sync_backend=cpu"], RANK_1, "--sync_backend cpu is for a process started alone"),
        (["--nproc_per_node=3", "--num_devices=4"], {}, "4 devices do not divide over 3 processes"),
        (["--coordinator_port=1234"], {}, "--coordinator_port 1234 is for several processes"),
        (
            ["--num_processes=2", "--process_id=0", "--coordinator_address=h"],
            {},
            "--coordinator_address h: type --coordinator_port too",
        ),
    ],
)
def test_a_mistake_about_processes_is_one_sentence_and_one_event(argv, environ, words):
    result = run(*argv, "--headless", **environ)
    error, parent = result.stderr.splitlines()
    assert (result.returncode, parent) == (2, "the parent has jax: False")
    assert error.startswith(f"error: {words}")
    assert json.loads(result.stdout)["message"] == error.removeprefix("error: ")


def test_a_mistake_that_every_process_finds_is_told_once():
    ending = "from cssm.config import UserError; raise UserError('it is so')"
    result = run("--nproc_per_node=2", "--headless", ending=ending)
    assert result.returncode == 2
    assert [line for line in result.stderr.splitlines() if "it is so" in line] == ["error: it is so"]
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == ["config", "error"]


@pytest.mark.parametrize("first", ["time.sleep(60)", "time.sleep(0.2); raise ValueError('Gloo all-reduce failed')"])
def test_what_another_process_dies_of_is_told_in_one_event(first):
    ending = f"import time\n    if rank: os.kill(os.getpid(), 9)\n    {first}"
    result = run("--nproc_per_node=2", "--headless", ending=ending)
    assert result.returncode == 4
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events if event["event"] != "config"] == ["error"]
    assert (events[-1]["exit_code"], "process 1 of 2 was killed by SIGKILL" in events[-1]["message"]) == (4, True)
    assert "--resume auto" in events[-1]["message"]


def test_a_port_that_is_taken_is_exit_code_4():
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        result = run("--nproc_per_node=2", f"--coordinator_port={port}")
    assert result.returncode == 4
    assert result.stderr.startswith(f"error: port {port} is taken by ")


def test_a_hung_thread_holds_up_no_ending_with_code_4():
    hang = "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start(); sys.modules['jax'] = os"
    hang += (
        "\n    E = type('CollectiveError', (RuntimeError,), {'__module__': 'parallel.selftest'}); raise E('it hangs')"
    )
    result = run("--quiet", ending=hang)
    assert (result.returncode, result.stderr) == (4, "error: it hangs\n")


class TestExplain:
    """What broke in a job, and whose fault it is."""

    @pytest.mark.parametrize("error, code", [(JobError("x"), 2), (LaunchError("x"), 4), (SharedError("x", 6), 6)])
    def test_errors_of_the_parallel_package(self, error, code):
        assert cli.explain(error, Config()) == (code, "x")

    def test_an_error_of_the_runtime_means_a_lost_process_where_there_are_several(self):
        import jax

        lost = jax.errors.JaxRuntimeError("UNAVAILABLE: socket closed\nmore")
        assert cli.explain(lost, Config(), several=True) == (LOST_PEER, "UNAVAILABLE: socket closed")
        assert cli.explain(lost, Config())[0] == 1
        gloo = ValueError("UNKNOWN: Gloo all-reduce failed: read error")
        assert cli.explain(gloo, Config(), several=True)[0] == LOST_PEER
        assert cli.explain(ValueError("x"), Config(), several=True)[0] == 1
        full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        assert cli.explain(full, Config(), several=True)[0] == 3


# Takes the place of training in a job that joins: averages with the others until it is stopped.
TOGETHER = """
import os, sys, time, types
from pathlib import Path
def train(config, typed, json_stream):
    import jax, numpy as np
    from cssm.signals import StopSignals, stopped
    rank, total = jax.process_index(), jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    ones, folder = np.ones((jax.local_device_count(), 1)), Path(os.environ["FOLDER"])
    assert total(ones).addressable_data(0)[0, 0] == jax.device_count()
    (folder / "tmp{}".format(rank)).write_text(str(os.getpid()))
    with StopSignals() as stop:
        (folder / "tmp{}".format(rank)).rename(folder / str(rank))
        for _ in range(4000):
            asked = total(ones * int(stop.requested or 0)).addressable_data(0)[0, 0]
            if asked:
                raise stopped(int(asked) // int(os.environ.get("SIGNALLED", "1")), 1, folder)
            time.sleep(0.03)
sys.modules["cssm.training"] = types.SimpleNamespace(train=train)
from cssm.cli import main
sys.exit(main())
"""
HEARTBEAT_S = 5


class Members:
    """A job of two: by --nproc_per_node (one command), or by hand (two); its workers' pids once they are up."""

    def __init__(self, folder: Path, by_hand: bool, **environ: str) -> None:
        place = f"--coordinator_address=127.0.0.1:{free_port()}"
        by_rank = [[place, "--num_processes=2", f"--process_id={i}"] for i in (0, 1)] if by_hand else []
        flags = ["--heartbeat_timeout", str(HEARTBEAT_S), "--xla_flags=--xla_force_host_platform_device_count=1"]
        options = {"cwd": ROOT, "env": {**os.environ, "FOLDER": str(folder), **environ}, "text": True}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        commands = [command(TOGETHER, *flags, *own) for own in by_rank or [["--nproc_per_node=2"]]]
        self.commands = [subprocess.Popen(words, **options) for words in commands]
        deadline = time.monotonic() + 200
        while not all((folder / rank).exists() for rank in "01"):
            assert time.monotonic() < deadline and not any(c.poll() for c in self.commands), self.end()
            time.sleep(0.05)
        self.pids = [int((folder / rank).read_text()) for rank in "01"]

    def ends(self, *which: int) -> list[tuple[int, str]]:
        """(exit code, stderr) of these commands, which must end in time."""
        deadline = time.monotonic() + HEARTBEAT_S + 10
        ended = []
        for i in which:
            _, stderr = self.commands[i].communicate(timeout=deadline - time.monotonic())
            ended.append((self.commands[i].returncode, stderr))
        return ended

    def end(self) -> list[str]:
        for process in self.commands:
            process.kill()
        return [process.communicate()[1] for process in self.commands]

    def left(self) -> list[int]:
        """Workers that still exist, a moment after their commands have ended."""
        deadline = time.monotonic() + 20
        while (left := [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


@pytest.fixture
def job_of_two(tmp_path):
    started: list[Members] = []

    def start(by_hand: bool, **environ: str) -> Members:
        started.append(Members(tmp_path, by_hand, **environ))
        return started[-1]

    yield start
    for members in started:
        members.end()
        assert members.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
class TestALostProcess:
    """Dead or stopped, under one parent or in ranks started by hand: all commands end with 4, in time."""

    def test_under_one_parent(self, job_of_two, victim, number):
        members = job_of_two(by_hand=False)
        os.kill(members.pids[victim], number)
        ((code, stderr),) = members.ends(0)
        assert code == 4
        how = "was killed by SIGKILL" if number == signal.SIGKILL else "was stopped, by SIGSTOP"
        assert stderr.startswith(f"error: process {victim} of 2 {how}") and stderr.count("\n") == 1

    def test_in_ranks_started_by_hand(self, job_of_two, victim, number):
        members = job_of_two(by_hand=True)
        os.kill(members.pids[victim], number)
        ended = members.ends(0, 1)
        assert [code for code, _ in ended] == [4, 4]
        assert ended[victim][1].startswith(f"error: process {victim} of 2 was ")
        assert ended[1 - victim][1].startswith(f"error: process {1 - victim} of 2 lost the others: ")
        assert [stderr.count("\n") for _, stderr in ended] == [1, 1]

    def test_where_the_command_itself_is_hit(self, job_of_two, victim, number):
        members = job_of_two(by_hand=True)
        members.commands[victim].send_signal(number)
        ((code, stderr),) = members.ends(1 - victim)
        assert (code, stderr[: len("error: process")]) == (4, "error: process")
        if number == signal.SIGSTOP:
            members.commands[victim].send_signal(signal.SIGCONT)
            assert members.ends(victim)[0][0] == 4


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_signal_to_one_command_stops_all_in_order(job_of_two, by_hand, number, code):
    members = job_of_two(by_hand, SIGNALLED="1" if by_hand else "2")
    members.commands[-1].send_signal(number)
    ended = members.ends(*range(len(members.commands)))
    assert [ending for ending, _ in ended] == [code] * len(ended)
    assert all("after step 1, which is saved" in stderr for _, stderr in ended)
