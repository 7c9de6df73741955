"""Which job a process belongs to, as told by flags or by the launcher that started it. Loads no jax."""

import re
import zlib
from collections.abc import Mapping

from parallel.job import OWN_PORTS, Job, JobError

_Given = tuple[str | None, int | None]


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
    if about[0] and not about[0].isdecimal():
        raise JobError(f"MASTER_PORT={about[0]} is not a number: torchrun sets it to a port, such as 29500")
    local = _count(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else 0
    count = _count(environ, "LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in environ else None
    count = 1 if "LOCAL_RANK" not in environ and count is None else count
    if count is not None and local >= count:
        raise JobError(f"LOCAL_RANK={local} with LOCAL_WORLD_SIZE={count}: processes count from 0 to {count - 1}")
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
    if not (host or given[0]):
        raise JobError("mpirun does not tell where process 0 is: type mpirun -x MASTER_ADDR=HOST with its host")
    if not (name or given[1]):
        raise JobError("mpirun does not name the job: type --coordinator_port too, the same for every process")
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
    """The same port in every process that is told the same."""
    first, end = OWN_PORTS
    return first + zlib.crc32("/".join(about).encode()) % (end - first)


def _coordinator(given: _Given, host: str | None, port: int | None) -> str:
    address, with_port = given[0] or host or "", re.fullmatch(r"(\[.+\]|[^:]+):(\d+)", given[0] or "")
    if with_port:
        address, port = with_port[1], int(with_port[2])
        if given[1] not in (None, port):
            raise JobError(f"--coordinator_address {given[0]} contradicts --coordinator_port {given[1]}: type one port")
    port = given[1] or port
    if port is not None and not 0 < port < 65536:
        raise JobError(f"--coordinator_address {given[0]}: there is no port {port}, type one from 1 to 65535")
    if port is None:
        raise JobError(f"--coordinator_address {address}: type --coordinator_port too, the same for every process")
    return f"[{address}]:{port}" if ":" in address.strip("[]") and address[0] != "[" else f"{address}:{port}"
