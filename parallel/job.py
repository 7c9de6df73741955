"""A job of several processes: how one joins the others, what they decide together, how they part.

Loads jax only where it joins. Process 0 runs the coordination service of jax.distributed, the others connect to it.
"""

import contextlib
import errno
import json
import math
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOIN_TIMEOUT_S = 300
# Below those that systems give to connections: at such a one, a process that waits for another to listen could connect
# to itself, and hold the port.
OWN_PORTS = (15000, 32000)
# How long a process that is done waits for the others. One that died ends the job long before, by its heartbeat.
_FOREVER_MS = 7 * 24 * 3600 * 1000


class JobError(ValueError):
    """A mistake of the user about processes: one sentence, fit to be printed."""


class LaunchError(RuntimeError):
    """A job could not be started, or broke: one sentence. exit_code: that of the process that failed first, or 4."""

    def __init__(self, message: str, exit_code: int = 4) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class SharedError(RuntimeError):
    """What went wrong in process 0, raised in all the others with the same message. exit_code: likewise."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Job:
    """The place of this process in a job. kind: flags | local | torchrun | slurm | openmpi | tpu.

    coordinator: "host:port" at which process 0 listens; None leaves it to jax (TPU). local_index of local_count: the
    same on this host; local_count is None where the launcher does not tell.
    """

    kind: str
    num_processes: int
    process_id: int
    coordinator: str | None
    local_index: int = 0
    local_count: int | None = 1


def free_port() -> int:
    """A port at which no one on this host listens."""
    while True:
        port = random.randrange(*OWN_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def check_port(port: int) -> None:
    """LaunchError, naming who has it where the system tells, unless a server may listen at the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise LaunchError(f"port {port} cannot be used: {error.strerror}; type another port") from error
            owner = _listener(port) or "a process that the system does not name"
            raise LaunchError(f"port {port} is taken by {owner}: type another --coordinator_port") from None


def _listener(port: int) -> str | None:
    """`process 123 (python serve.py)`, from /proc."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            inodes |= {f"socket:[{row[9]}]" for row in rows if int(row[1].split(":")[1], 16) == port and row[3] == "0A"}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if inodes and str(link.readlink()) in inodes:
                command = (link.parents[1] / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f"process {link.parts[2]} ({command.strip()[:100]})"
    return None


def join(job: Job, heartbeat_timeout: int) -> None:
    """Make this process part of the job, before jax is first used; heartbeat_timeout in seconds.

    Raises LaunchError where the port is taken or process 0 cannot be reached. When a process of the job dies or does
    not answer for heartbeat_timeout, jax aborts the others (SIGABRT).
    """
    import jax

    # It would take SIGTERM from this program, which saves before it ends.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    options: dict[str, Any] = {"heartbeat_timeout_seconds": heartbeat_timeout, "shutdown_timeout_seconds": 10}
    if job.coordinator is not None:
        host, _, port = job.coordinator.rpartition(":")
        # A proxy, to which the connection would go otherwise, does not know the hosts of a cluster.
        direct = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")  # noqa: SIM112 - so gRPC reads them
        os.environ["no_grpc_proxy"] = f"{direct},{host}" if direct else host  # noqa: SIM112
        if job.process_id == 0:
            check_port(int(port))
        else:
            _wait_for(job, host.strip("[]"), int(port))
        options |= {"coordinator_address": job.coordinator, "num_processes": job.num_processes}
        options |= {"process_id": job.process_id, "cluster_detection_method": "deactivate"}
        if job.kind == "local":
            options["coordinator_bind_address"] = job.coordinator
    with _interruptible():
        try:
            jax.distributed.initialize(initialization_timeout=JOIN_TIMEOUT_S, **options)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise LaunchError(
                f"process {job.process_id} cannot join {job.coordinator or 'the pod'}: {reason}"
            ) from error


def _wait_for(job: Job, host: str, port: int) -> None:
    """Until process 0 listens. jax would wait too, but abort where it does not."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                loopback = host in ("localhost", "::1") or host.startswith("127.")
                own = f" ({host} is each host itself: from another, type the address of the first)" if loopback else ""
                raise LaunchError(
                    f"process {job.process_id} waited {JOIN_TIMEOUT_S} s for process 0 at {job.coordinator}: {error}"
                    f"{own}; check that it runs, and that its address and port can be reached from here"
                ) from error
            time.sleep(0.2)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process, as Python's own handler would not run before jax returns."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _client() -> Any:
    """The connection to the coordination service; None in a single process."""
    from jax._src import distributed  # the store of keys and values has no public door

    return distributed.global_state.client


def leave() -> None:
    """Part from a job that has ended well in every process; waits until all of them are here."""
    if (client := _client()) is not None:
        import jax

        # jax's own shutdown aborts all when one of them comes later than its timeout.
        client.wait_at_barrier("cssm/leave", _FOREVER_MS)
        jax.distributed.shutdown()


_calls: Counter[str] = Counter()


def share(name: str, decide: Callable[[], Any]) -> Any:
    """What `decide` returns in process 0, a value that JSON can hold, in every process; all must call it alike.

    In a single process, just decide(). Where it raises, process 0 raises that, and all the others a SharedError.
    """
    client = _client()
    if client is None:
        return decide()
    key = f"cssm/{name}/{_calls[name]}"
    _calls[name] += 1
    if _process_id() == 0:
        try:
            text = json.dumps({"value": decide()})
        except Exception as error:
            mistake = 2 if isinstance(error, ValueError) and type(error).__module__.startswith("parallel") else 1
            code = getattr(error, "exit_code", mistake)
            client.key_value_set(key, json.dumps({"error": str(error), "exit_code": code}))
            raise
        client.key_value_set(key, text)
    else:
        text = _wait_for_key(client, key)
    answer = json.loads(text)
    if "error" in answer:
        raise SharedError(answer["error"], answer["exit_code"])
    return answer["value"]


def gather(name: str, value: Any, timeout_s: float = math.inf) -> list[Any]:
    """What each process says, values that JSON can hold, in the order of the processes and in all of them; all must
    call it alike. LaunchError where one says nothing within timeout_s.
    """
    client = _client()
    if client is None:
        return [value]
    import jax

    key = f"cssm/{name}/{_calls[name]}"
    _calls[name] += 1
    client.key_value_set(f"{key}/{_process_id()}", json.dumps(value))
    deadline = time.monotonic() + timeout_s
    return [json.loads(_wait_for_key(client, f"{key}/{i}", deadline)) for i in range(jax.process_count())]


def _process_id() -> int:
    from jax._src import distributed

    return distributed.global_state.process_id


def _wait_for_key(client: Any, key: str, deadline: float = math.inf) -> str:
    import jax

    while True:
        try:
            return client.blocking_key_value_get(key, 1000)
        except jax.errors.JaxRuntimeError as error:  # in between, Python can answer a signal
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() > deadline:
                raise LaunchError(f"no answer to {key} came: the process that is asked for it hangs") from None
