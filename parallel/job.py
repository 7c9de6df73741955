"""A job of several processes: which one this is, how it joins the others, what they decide together, how they part.

Loads jax only where it joins. Process 0 runs the coordination service of jax.distributed, the others connect to it.
"""

import contextlib
import errno
import json
import re
import signal
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOIN_TIMEOUT_S = 300
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


def find_job(
    environ: Mapping[str, str],
    *,
    coordinator_address: str | None = None,
    coordinator_port: int | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Job | None:
    """The job that this process belongs to, as told by the flags, torchrun, srun, mpirun or a TPU pod, in this order.

    An address or port given wins over the launcher's. A job of one process is none. Raises JobError where what is told
    is incomplete or contradicts itself.
    """
    given = (coordinator_address, coordinator_port)
    if num_processes is not None:
        return _by_flags(given, num_processes, process_id)
    for find in (_by_torchrun, _by_slurm, _by_open_mpi):
        if job := find(environ, given):
            return job if job.num_processes > 1 else None
    return _by_tpu(environ)


_Given = tuple[str | None, int | None]


def _by_flags(given: _Given, num_processes: int, process_id: int | None) -> Job | None:
    if num_processes == 1:
        return None
    if process_id is None or given[0] is None:
        raise JobError(f"--num_processes {num_processes}: type --process_id and --coordinator_address too")
    return Job("flags", num_processes, process_id, _coordinator(given, None, None))


def _by_torchrun(environ: Mapping[str, str], given: _Given) -> Job | None:
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    rank, size = _place(environ, "RANK", "WORLD_SIZE")
    if size == 1:
        return None
    # torchrun's own store listens at MASTER_PORT, so that another port must follow from it in every process.
    about = [environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    if not (environ.get("MASTER_ADDR") or given[0]) or not (about[0] or given[1]):
        raise JobError("RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not: torchrun sets all four")
    local = _count(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else 0
    count = _count(environ, "LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in environ else None
    count = 1 if "LOCAL_RANK" not in environ and count is None else count
    return Job("torchrun", size, rank, _coordinator(given, environ.get("MASTER_ADDR"), _port(*about)), local, count)


def _by_slurm(environ: Mapping[str, str], given: _Given) -> Job | None:
    # Inside srun only: a batch script has SLURM_NTASKS, but is one process.
    if environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    rank, size = _place(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    local = _count(environ, "SLURM_LOCALID")
    host = re.match(r"([^,\[]+)(?:\[([^],-]+))?", _text(environ, "SLURM_STEP_NODELIST"))
    if host is None:
        raise JobError(f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} names no host: srun sets it")
    port = _port(_text(environ, "SLURM_JOB_ID"), environ.get("SLURM_STEP_ID", ""))
    # 2(x3),1: two tasks on each of three nodes, one on the fourth.
    per_node = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(tasks) for tasks, nodes in per_node for _ in range(int(nodes or 1))]
    node = _count(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    count = counts[node] if node < len(counts) else None
    return Job("slurm", size, rank, _coordinator(given, host[1] + (host[2] or ""), port), local, count)


def _by_open_mpi(environ: Mapping[str, str], given: _Given) -> Job | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    rank, size = _place(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if size == 1:
        return None
    local = _count(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    count = _count(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[...]: only up to version 4.
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri)
    host = "127.0.0.1" if count == size else (found[1] or f"[{found[2]}]") if found else environ.get("MASTER_ADDR")
    name = uri or environ.get("PMIX_NAMESPACE", "")
    if not (host or given[0]) or not (name or given[1]):
        raise JobError("mpirun does not tell where process 0 is: type --coordinator_address and --coordinator_port")
    return Job("openmpi", size, rank, _coordinator(given, host, _port(name)), local, count)


def _by_tpu(environ: Mapping[str, str]) -> Job | None:
    hosts = environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if len(hosts) == 1 or "tpu" not in (environ.get("JAX_PLATFORMS") or "tpu"):
        return None
    worker = _count(environ, "TPU_WORKER_ID")
    if worker >= len(hosts):
        raise JobError(f"TPU_WORKER_ID={worker}, but TPU_WORKER_HOSTNAMES has {len(hosts)} hosts, counted from 0")
    return Job("tpu", len(hosts), worker, None)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise JobError(f"{name} is not set, but other variables tell of a job of several processes: set it too")
    return environ[name]


def _count(environ: Mapping[str, str], name: str, least: int = 0) -> int:
    value = _text(environ, name)
    if not value.isdecimal() or int(value) < least:
        raise JobError(f"{name}={value} is not a number from {least}: it must tell of the job of several processes")
    return int(value)


def _place(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _count(environ, rank_name), _count(environ, size_name, 1)
    if rank >= size:
        raise JobError(f"{rank_name}={rank} with {size_name}={size}: processes count from 0 to {size - 1}")
    return rank, size


def _port(*about: str) -> int:
    """The same port in every process that is told the same; below the ports that systems give to connections."""
    return 15000 + zlib.crc32("/".join(about).encode()) % 17000


def _coordinator(given: _Given, host: str | None, port: int | None) -> str:
    address, with_port = given[0] or host or "", re.fullmatch(r"(\[.+\]|[^:]+):(\d+)", given[0] or "")
    if with_port:
        address, port = with_port[1], int(with_port[2])
        if given[1] not in (None, port):
            raise JobError(f"--coordinator_address {given[0]} contradicts --coordinator_port {given[1]}: type one port")
    port = given[1] or port
    if port is None:
        raise JobError(f"--coordinator_address {address}: type --coordinator_port too, the same for every process")
    return f"[{address}]:{port}" if ":" in address.strip("[]") and address[0] != "[" else f"{address}:{port}"


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
    options: dict[str, Any] = {"heartbeat_timeout_seconds": heartbeat_timeout, "shutdown_timeout_seconds": 10}
    if job.coordinator is not None:
        host, _, port = job.coordinator.rpartition(":")
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
                raise LaunchError(
                    f"process {job.process_id} waited {JOIN_TIMEOUT_S} s for process 0 at {job.coordinator}: {error}; "
                    f"check that it runs, and that its address and port can be reached from here"
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


def _process_id() -> int:
    from jax._src import distributed

    return distributed.global_state.process_id


def _wait_for_key(client: Any, key: str) -> str:
    import jax

    while True:
        try:
            return client.blocking_key_value_get(key, 1000)
        except jax.errors.JaxRuntimeError as error:  # in between, Python can answer a signal
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
