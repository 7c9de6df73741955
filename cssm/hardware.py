"""The `devices` verb: what there is to train on, whether it works together, and what should be seen to."""

import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import jax

from cssm.advice import advise
from cssm.agreement import compare
from cssm.config import Config, UserError
from cssm.memory import is_out_of_memory
from cssm.report import RULE, Reporter
from cssm.report.machine import advice_lines, machine_lines, parity_lines, self_test_lines
from parallel.devices import describe, enable_compile_cache, local, running_line, select_devices
from parallel.selftest import CollectiveError, collective_self_test, driver_version
from parallel.sharded import make_strategy

OUT_OF_MEMORY, DEVICES = 3, 4
TEST_BYTES = 2**28
PACKAGES = {"jax": "jax", "jaxlib": "jaxlib", "flax": "flax", "optax": "optax", "orbax": "orbax-checkpoint",
            "numpy": "numpy", "libtpu": "libtpu"}  # fmt: skip
CUDA_PACKAGES = {
    "CUDA runtime": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
VARIABLES = re.compile(
    r"(CUDA|NVIDIA)_VISIBLE_DEVICES|LD_LIBRARY_PATH|(XLA|JAX|NCCL|CSSM)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_RUN_ID"
    r"|SLURM_(JOB_ID|NTASKS|PROCID|LOCALID|STEP_NUM_TASKS|STEP_NODELIST|STEP_GPUS)"
    r"|OMPI_COMM_WORLD_(SIZE|RANK|LOCAL_SIZE|LOCAL_RANK)|TPU_WORKER_(ID|HOSTNAMES)"
)


def show_devices(config: Config, json_stream: IO[str] | None = None) -> None:
    """Print what a run with this configuration would find, test the collectives and, with --parity, the training.

    With json_stream one `devices` event {platform, num_devices, devices, versions, environment, self_test, advice,
    ...} is all that is written. Raises UserError or DeviceError for a mistake; after the report CollectiveError where
    the collectives do not work, and UserError with exit code 4 where parity fails.
    """
    smi = nvidia_smi()  # before jax takes its share of the memory
    devices = select_devices(config.platform, config.gpus, config.num_devices, config.multi_gpu == "off")
    if config.compile_cache:
        enable_compile_cache(Path(str(config.cache_dir)) / "xla")
    make_strategy(config.shard, config.sync_backend, devices, 0.0)  # refuses what cannot go together
    if config.parity and len(devices) == 1:
        raise UserError(
            "--parity compares one device with several, and there is 1: on a CPU, "
            "--xla_flags=--xla_force_host_platform_device_count=8 simulates 8"
        )
    options = {"headless_stream": json_stream, "quiet": config.quiet, "primary": jax.process_index() == 0}
    failure: CollectiveError | None = None
    with Reporter(None, **options) as report:
        facts = gather(config, devices, smi)
        if not config.quiet:
            report.block("DEVICE CONFIGURATION", machine_lines(facts, RULE))
        report.line(running_line(devices))
        try:
            facts["self_test"] = _self_test(config, devices, report)
        except CollectiveError as error:
            failure = error
            facts["self_test"] = {"ok": False, "error": str(error)}
        facts["advice"] = advise(facts)
        lines = [*self_test_lines(facts["self_test"]), *advice_lines(facts["advice"], warnings_only=config.quiet)]
        report.block("SELF-TEST AND ADVICE", lines)
        if config.parity and failure is None:
            facts["parity"] = compare(config, devices, report)
            report.block("PARITY", parity_lines(facts["parity"]))
        report.event("devices", **facts)
    if failure is not None:
        raise failure
    if config.parity and not all(row["ok"] for row in facts["parity"]["models"]):
        raise UserError(
            f"training on {len(devices)} devices does not give what one device gives: see the table; "
            f"--sync_backend cpu tells whether the collectives are to blame",
            DEVICES,
        )


def gather(config: Config, devices: list[jax.Device], smi: dict[str, Any]) -> dict[str, Any]:
    """The facts of this machine and of the devices (those of all processes) that do not need a computation.

    {platform, num_devices, local_devices, processes, devices: rows of parallel.devices.describe with bytes_in_use,
    versions, environment, host, and gpus, gpu_processes, topology from `nvidia_smi`}.
    """
    here = local(devices)
    used = {device.id: (device.memory_stats() or {}).get("bytes_in_use") for device in here}
    return {
        "platform": devices[0].platform,
        "num_devices": len(devices),
        "local_devices": len(here),
        "processes": jax.process_count(),
        "devices": [{**row, "bytes_in_use": used.get(row["id"])} for row in describe(devices)],
        "versions": versions(devices[0].platform),
        "environment": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)},
        "host": _host(config),
        **smi,
    }


def versions(platform_name: str) -> dict[str, str]:
    """Of Python and the libraries that are installed; on gpu also of the driver and of CUDA's."""
    found = {"python": platform.python_version()}
    for label, package in PACKAGES.items():
        found |= _version(label, package)
    if platform_name == "gpu":
        found |= {"NVIDIA driver": number} if (number := driver_version()) else {}
        for label, packages in CUDA_PACKAGES.items():
            found |= next(filter(None, (_version(label, package) for package in packages)), {})
    return found


def nvidia_smi() -> dict[str, Any]:
    """{gpus, gpu_processes, topology} of this machine as nvidia-smi tells them: None each where it does not.

    gpus: [{index, uuid, name, memory_bytes, used_bytes}]; gpu_processes: [{gpu, pid, name, used_bytes}], others than
    this one; topology: see `parse_topology`.
    """
    gpus = _query("--query-gpu=index,uuid,name,memory.total,memory.used", 5)
    if gpus is None:
        return {"gpus": None, "gpu_processes": None, "topology": None}
    index_of = {uuid: int(index) for index, uuid, *_ in gpus}
    processes = _query("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", 4) or []
    return {
        "gpus": [
            {"index": int(index), "uuid": uuid, "name": name, "memory_bytes": _mib(total), "used_bytes": _mib(used)}
            for index, uuid, name, total, used in gpus
        ],
        "gpu_processes": [
            {"gpu": index_of[uuid], "pid": int(pid), "name": name, "used_bytes": _mib(used)}
            for uuid, pid, name, used in processes
            if uuid in index_of and int(pid) != os.getpid()
        ],
        "topology": parse_topology(_ask("topo", "-m") or ""),
    }


def parse_topology(text: str) -> dict[str, dict[str, str]] | None:
    """The matrix that `nvidia-smi topo -m` prints, GPUs only: {GPU0: {GPU0: X, GPU1: NV18}}; None if there is none."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in text.splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows]
    header = next((row for row in rows if "GPU0" in row[1:]), None)
    if header is None:
        return None
    columns = {name: i for i, name in enumerate(header) if re.fullmatch(r"GPU\d+", name)}
    return {row[0]: {name: row[i] for name, i in columns.items()} for row in rows if row[0] in columns}


def _ask(*arguments: str) -> str | None:
    """What nvidia-smi prints; None if it is not there, fails, or does not answer."""
    try:
        result = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def _query(what: str, columns: int) -> list[list[str]] | None:
    text = _ask(what, "--format=csv,noheader,nounits")
    if text is None:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns]


def _mib(text: str) -> int:
    """Bytes; 0 for what nvidia-smi does not tell ([N/A])."""
    return int(text) * 2**20 if text.isdecimal() else 0


def _version(label: str, package: str) -> dict[str, str]:
    try:
        return {label: version(package)}
    except PackageNotFoundError:
        return {}


def _host(config: Config) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shm = Path("/dev/shm")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        "cpu_cores": cores,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "shm_bytes": shutil.disk_usage(shm).total if shm.is_dir() else None,
        "open_files": None if limit == resource.RLIM_INFINITY else limit,
        "cache_dir": folder(str(config.cache_dir)),
        "checkpoint_dir": folder(config.checkpoint_dir),
    }


def folder(path: str) -> dict[str, Any]:
    """{path, filesystem (its type, None where that is unknown), free_bytes} of a folder that may not exist yet."""
    place = Path(path).resolve()
    while not place.exists():
        place = place.parent
    return {"path": path, "filesystem": _filesystem(place), "free_bytes": shutil.disk_usage(place).free}


def _filesystem(place: Path) -> str | None:
    mounts = Path("/proc/self/mounts")
    rows = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else []
    # A later mount hides an earlier one at the same place; the deepest holds the folder.
    points = {row[1].replace("\\040", " "): row[2] for row in rows}
    inside = [point for point in points if place.is_relative_to(point)]
    return points[max(inside, key=len)] if inside else None


def _self_test(config: Config, devices: Sequence[jax.Device], report: Reporter) -> dict[str, Any]:
    if len(devices) == 1:
        return {"skipped": "one device has no other to average with"}
    if config.sync_backend == "cpu":
        return {"skipped": "with --sync_backend cpu the host averages"}
    if not config.self_test_timeout:
        return {"skipped": "as --self_test_timeout 0 asks"}
    try:
        with report.busy("testing the collectives"):
            return collective_self_test(devices, TEST_BYTES, config.self_test_timeout)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        what = "the devices have no room for the test of the collectives: another process may hold their memory"
        raise UserError(f"{what} (nvidia-smi shows it), end it or choose others by --gpus", OUT_OF_MEMORY) from error
