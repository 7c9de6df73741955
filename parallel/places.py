"""Which devices go to which process of a host, settled before any of them runs. Loads no jax."""

import glob
import itertools
import re
from collections.abc import Mapping, Sequence

from parallel.choice import narrowed
from parallel.job import Job, JobError, check_port, free_port
from parallel.launch import Place

_FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def local_places(
    processes: str,
    environ: Mapping[str, str],
    *,
    gpus: str | None = None,
    num_devices: int | None = None,
    port: int | None = None,
) -> list[Place]:
    """The processes to start on this host, each with its share of the visible GPUs; none where one process will do.

    processes: how many, or "auto" for one a device. gpus and num_devices narrow down the devices of the host. A CPU
    simulates as many devices as JAX_NUM_CPU_DEVICES or XLA_FLAGS say: in all with "auto", else in each process.
    Raises JobError or DeviceError for numbers that do not fit, LaunchError for a port that is taken; without one a
    free one is found.
    """
    kind = _platform(environ)
    if kind == "tpu":
        raise JobError("one process has all the TPU chips of a host: leave --nproc_per_node and --multi_gpu ddp out")
    auto = processes == "auto"
    visible = _gpus(environ) if kind == "gpu" else _simulated(environ) * (1 if auto else int(processes))
    chosen = _chosen(visible, gpus, num_devices)
    count = len(chosen) if auto else int(processes)
    if count == 1:
        return []
    shares = _shares(chosen, count)
    keep_all = kind == "cpu" and not auto and len(chosen) == len(visible)
    port = port or free_port()
    check_port(port)
    jobs = [Job("local", count, i, f"127.0.0.1:{port}", i, count) for i in range(count)]
    return [
        Place(job, {} if keep_all else _variables(kind, share), stderr_shown=job.process_id == 0)
        for job, share in zip(jobs, shares, strict=True)
    ]


def place_in(job: Job, environ: Mapping[str, str], gpus: str | None = None, num_devices: int | None = None) -> Place:
    """The place of this process in a job that another launcher started, with its share of the visible GPUs.

    Nothing is divided for a process alone on its host, nor where the launcher did it. Raises JobError or
    DeviceError.
    """
    if job.local_count == 1 or _platform(environ) != "gpu":
        return Place(job)
    visible, on_host = _gpus(environ), environ.get("SLURM_GPUS_ON_NODE", "")
    if len(visible) == 1 or (on_host.isdecimal() and int(on_host) > len(visible)):
        return Place(job)  # bound to its own
    chosen = _chosen(visible, gpus, num_devices)
    # Without the number of processes on the host each takes one GPU, as they do with torch.
    shares = _shares(chosen, len(chosen) if job.local_count is None else job.local_count)
    if job.local_index >= len(shares):
        raise JobError(f"this is process {job.local_index} on its host, counted from 0, but it has {len(shares)} GPUs")
    return Place(job, _variables("gpu", shares[job.local_index]))


def _platform(environ: Mapping[str, str]) -> str:
    """cpu | gpu | tpu: the one named in JAX_PLATFORMS, or as jax will choose."""
    named = (environ.get("JAX_PLATFORMS") or environ.get("JAX_PLATFORM_NAME", "")).split(",")[0]
    if named:
        return {"cpu": "cpu", "tpu": "tpu"}.get(named, "gpu")
    if _gpu_files() and _gpus(environ):
        return "gpu"
    return "tpu" if glob.glob("/dev/accel[0-9]*") else "cpu"


def _gpu_files() -> list[str]:
    return glob.glob("/dev/nvidia[0-9]*")


def _gpus(environ: Mapping[str, str]) -> list[str]:
    """Names of the visible GPUs, as CUDA_VISIBLE_DEVICES has them; the first that is none ends the list."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(i) for i in range(len(_gpu_files()))]
    words = (word.strip() for word in named.split(","))
    return list(itertools.takewhile(lambda word: word not in ("", "-1", "NoDevFiles"), words))


def _simulated(environ: Mapping[str, str]) -> list[str]:
    """A name for each device that jax makes of this CPU; it listens to the variable before the flag."""
    flags = _FORCED.findall(environ.get("XLA_FLAGS", ""))
    number = environ.get("JAX_NUM_CPU_DEVICES") or (flags[-1] if flags else "1")
    return ["cpu"] * int(number)


def _chosen(visible: Sequence[str], gpus: str | None, num_devices: int | None) -> list[str]:
    if not visible:
        raise JobError("no GPU is visible: check CUDA_VISIBLE_DEVICES and the driver, or type --platform cpu")
    return narrowed(visible, gpus, num_devices)


def _shares(devices: Sequence[str], count: int) -> list[list[str]]:
    """`count` parts of equal length, in order."""
    n = len(devices)
    if n % count:
        fits = [str(k) for k in range(1, n + 1) if n % k == 0]
        numbers = f"{', '.join(fits[:-1])} or {fits[-1]}" if fits[1:] else fits[0]
        fewer = f", or type --num_devices {n - n % count}" if n > count else ""
        given = "1 device does" if n == 1 else f"{n} devices do"
        raise JobError(f"{given} not divide over {count} processes: start {numbers} of them{fewer}")
    size = n // count
    return [list(devices[i * size : (i + 1) * size]) for i in range(count)]


def _variables(kind: str, share: Sequence[str]) -> dict[str, str]:
    if kind == "cpu":
        return {"JAX_NUM_CPU_DEVICES": str(len(share))}
    return {"CUDA_VISIBLE_DEVICES": ",".join(share)}
