"""Devices: which ones, what they are, and one program on all of them."""

import glob
import hashlib
import os
import platform as host
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import numpy as np

from parallel.batches import (
    AXIS,
    Batching,
    device_sharding,
    local,
    pad_and_mask,
    prefetch_to_device,
    resolve_batch,
    shard_batch,
)
from parallel.choice import DeviceError, count, narrowed

__all__ = [
    "AXIS",
    "Batching",
    "DeviceError",
    "assert_replicated",
    "describe",
    "device_indices",
    "drawn_by_kernel",
    "enable_compile_cache",
    "local",
    "memory_bytes",
    "pad_and_mask",
    "per_device",
    "prefetch_to_device",
    "replicate",
    "reserve_memory",
    "resolve_batch",
    "running_line",
    "select_devices",
    "shard_batch",
    "spmd",
    "sum_over_devices",
    "unreplicate",
]

Tree = Any
DRAWN_BY_KERNEL = "jax_threefry_gpu_kernel_lowering"


def select_devices(
    platform: str = "auto",
    gpus: str | Sequence[int] | None = None,
    num_devices: int | None = None,
    single: bool = False,
) -> list[jax.Device]:
    """The devices to run on, of all processes in order: all that are visible, unless narrowed down.

    platform: auto | cpu | gpu | tpu. gpus: indices into the visible devices, "0,2" or a sequence, kept in
    that order. num_devices: the first so many. single: the first only. Each process narrows down its own.
    Raises DeviceError, naming what exists, for a platform or an index that is not there, a repeated index,
    contradictory choices, processes that have unequal numbers of devices, and for an NVIDIA GPU that jax cannot
    use: no run falls back to the CPU unasked.
    """
    _check_platform(platform)
    backend = None if platform == "auto" else platform
    visible = [jax.local_devices(process, backend) for process in range(jax.process_count(backend))]
    if len(sizes := {len(devices) for devices in visible}) > 1:
        least = min(sizes)
        raise DeviceError(
            f"the processes have {' or '.join(map(str, sorted(sizes)))} devices: each needs as many, "
            f"type --num_devices {least}"
        )
    chosen = [narrowed(devices, gpus, num_devices) for devices in visible]
    if single and len(chosen[0]) > 1 and not (gpus is None and num_devices is None):
        raise DeviceError(f"--multi_gpu off uses one device, not the {len(chosen[0])} asked for: type one of the two")
    return [device for devices in chosen for device in (devices[:1] if single else devices)]


def _check_platform(platform: str) -> None:
    try:
        devices = jax.local_devices(backend=None if platform == "auto" else platform)
    except (RuntimeError, AssertionError) as error:  # jax asserts where a GPU is asked for and CUDA is missing
        reason = str(error).partition("\n")[0] or "it has no backend"
        if platform == "auto":
            raise DeviceError(f"jax finds no device: {reason}; check the JAX_PLATFORMS variable") from error
        extra = {"gpu": "install the gpu extra (pip install 'cssm[gpu]')", "tpu": "install the tpu extra"}
        raise DeviceError(
            f"--platform {platform}: jax finds no such device here ({reason}); "
            f"{extra.get(platform, 'check the JAX_PLATFORMS variable')}, or leave --platform out"
        ) from error
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    unasked = platform == "auto" and not os.environ.get("JAX_PLATFORMS") and not hidden
    if unasked and devices[0].platform == "cpu" and glob.glob("/dev/nvidia[0-9]*"):
        raise DeviceError(
            "this machine has an NVIDIA GPU, but jax can use the CPU only: install the gpu extra "
            "(pip install 'cssm[gpu]'), or type --platform cpu"
        )


def running_line(devices: Sequence[jax.Device]) -> str:
    """`Running on 4 devices (multi-GPU enabled)`, multi-CPU or multi-TPU; `Running on 1 device`."""
    if len(devices) == 1:
        return "Running on 1 device"
    return f"Running on {len(devices)} devices (multi-{devices[0].platform.upper()} enabled)"


def describe(devices: Sequence[jax.Device]) -> list[dict[str, Any]]:
    """A row for each device: id, kind, platform, process, memory_bytes (None on CPU and in other processes)."""
    here = local(devices)
    return [
        {
            "id": device.id,
            "kind": device.device_kind,
            "platform": device.platform,
            "process": device.process_index,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit") if device in here else None,
        }
        for device in devices
    ]


def memory_bytes(devices: Sequence[jax.Device]) -> dict[str, list[int]]:
    """{peak, in_use}: bytes of each device of this process; empty lists where the backend does not say (CPU).

    The peak of the first device counts what its compiler tried out on it, unless the program came from the cache.
    """
    stats = [found for device in local(devices) if (found := device.memory_stats())]
    return {"peak": [s["peak_bytes_in_use"] for s in stats], "in_use": [s["bytes_in_use"] for s in stats]}


def memory_limit(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that this process may use on the smallest of its devices; None where the backend does not say (CPU)."""
    stats = [found for device in local(devices) if (found := device.memory_stats())]
    return min((s["bytes_limit"] for s in stats if "bytes_limit" in s), default=None)


def spmd(
    fn: Callable[..., Tree],
    devices: Sequence[jax.Device],
    *,
    donate_argnums: int | tuple[int, ...] = (),
    in_axes: Any = 0,
    out_axes: Any = 0,
    static: int | tuple[int, ...] = (),
) -> Callable[..., Tree]:
    """Compile `fn` to run on every device, over the leading dim D of its arguments; its collectives use AXIS.

    Of several processes each makes the same calls; D is then the number of its own devices, for arguments and
    results, and collectives span them all. Feed it host arrays, or what `replicate`, `per_device` and `shard_batch`
    return. in_axes / out_axes: 0 for a leading dim D, None for a value common to all devices. static: positions of
    compile-time constants.
    Raises DeviceError if the leading dim is not the number of devices.
    """

    def on_each_device(*args: Any) -> Tree:
        # A smaller leading dim would quietly run on some of the devices. The size is known while tracing, so
        # the check costs nothing later.
        if (size := jax.lax.axis_size(AXIS)) != len(devices):
            raise DeviceError(f"arguments with leading dim {size} were given to a function of {len(devices)} devices")
        return fn(*args)

    return jax.pmap(
        on_each_device,
        axis_name=AXIS,
        devices=devices,
        donate_argnums=donate_argnums,
        in_axes=in_axes,
        out_axes=out_axes,
        static_broadcasted_argnums=static,
    )


def reserve_memory(devices: Sequence[jax.Device]) -> list[Thread]:
    """Begin to use the devices of this process, each in a thread of its own, and return at once.

    JAX reserves three quarters of a GPU's memory when it is first used, which took 1.5 s on an H200: meanwhile modules
    load. What fails here fails again where the device is needed, and is told there.
    """

    def touch(device: jax.Device) -> None:
        with suppress(RuntimeError):
            jax.device_put(np.zeros(()), device).block_until_ready()

    threads = [Thread(target=touch, args=(device,), name=f"reserve memory of {device}") for device in local(devices)]
    for thread in threads:
        thread.start()
    return threads


def replicate(tree: Tree, devices: Sequence[jax.Device]) -> Tree:
    """Copy each leaf x to every device of this process: one array [D, *x.shape], laid out as `spmd` does.

    Leaves: arrays and numbers; random keys as raw uint32 (`jax.random.key_data`), not typed keys.
    """
    # The copy matters: the CPU backend may share a host array's memory with the device array made of it.
    stacked = jax.tree.map(lambda x: np.broadcast_to(np.array(x), (len(local(devices)), *np.shape(x))), tree)
    return per_device(stacked, devices)


def per_device(tree: Tree, devices: Sequence[jax.Device]) -> Tree:
    """Put row d of each host array [D, ...] on device d of this process; for values that differ between devices."""
    here = local(devices)
    for leaf in jax.tree.leaves(tree):
        if np.shape(leaf)[:1] != (len(here),):
            raise DeviceError(f"an array {np.shape(leaf)} has no row for each of {count(len(here))}")
    return jax.device_put(tree, device_sharding(devices))


def device_indices(devices: Sequence[jax.Device]) -> jax.Array:
    """int32 [D]: where each of this process's devices stands among all; their AXIS index, as an argument of `spmd`."""
    return per_device(np.asarray([devices.index(device) for device in local(devices)], np.int32), devices)


def sum_over_devices(tree: Tree, devices: Sequence[jax.Device]) -> Tree:
    """The numpy sum [...] of each leaf [D, ...] over the devices of all processes, which all must call it."""
    if len(local(devices)) < len(devices):
        return unreplicate(spmd(lambda x: jax.lax.psum(x, AXIS), devices)(tree))
    return jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), jax.device_get(tree))


def unreplicate(tree: Tree) -> Tree:
    """The numpy value [...] of each replicated leaf [D, ...], read from the first local device alone."""
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0))[0, ...], tree)


def assert_replicated(tree: Tree) -> None:
    """Raise AssertionError, naming the leaf, unless all devices hold the same bits of every leaf [D, ...]."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        first, *others = (np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards)
        different = [d for d, bits in enumerate(others, start=1) if bits != first]
        if different:
            raise AssertionError(f"{jax.tree_util.keystr(path)} differs between device 0 and devices {different}")


def enable_compile_cache(directory: str | Path) -> Path:
    """Keep compiled programs in a folder under `directory` for the next run; returns that folder.

    A JAX_COMPILATION_CACHE_DIR of the user's own is taken as it is instead, and no setting of jax is changed.
    Call it before the first compilation. The folder is named by jax version and CPU model, because a home
    directory may be shared by machines that cannot run each other's code. OSError if it cannot be made.
    """
    if own := os.environ.get("JAX_COMPILATION_CACHE_DIR", "").strip():
        return Path(own)
    cpuinfo = Path("/proc/cpuinfo")
    cpu = cpuinfo.read_text() if cpuinfo.exists() else host.processor()
    model = sorted(set(re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*", cpu, re.MULTILINE)))
    key = hashlib.sha256("\n".join(model or [cpu]).encode()).hexdigest()[:8]
    folder = Path(directory) / f"jax{jax.__version__}-{host.machine()}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


@contextmanager
def drawn_by_kernel() -> Iterator[None]:
    """What is lowered in this context for a GPU draws by jax's own kernel, the same bits, and not by some hundred
    operations each time, which XLA copies into whatever reads them.

    For a program that draws many arrays once: it compiles in a third of the time. The bits are memory of their own.
    """
    before = jax.config.values[DRAWN_BY_KERNEL]
    jax.config.update(DRAWN_BY_KERNEL, True)
    try:
        yield
    finally:
        jax.config.update(DRAWN_BY_KERNEL, before)
