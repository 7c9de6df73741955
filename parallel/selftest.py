"""A test of the collectives before anything depends on them: do they end, and is their answer right?"""

import re
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parallel.batches import AXIS, count
from parallel.devices import local, spmd
from parallel.sync import pmean_complex_safe

SMALLEST_BYTES = 2**20
"""Large enough to go the way of gradients: NCCL sends small messages by another protocol."""
LARGEST_BYTES = {"cpu": 2**24, "gpu": 2**28}
"""By platform, tpu as gpu: beyond this the bandwidth does not change, and the memory is better left to others."""
REPEATS = 3
PERIOD = 1021  # a prime, so that a part that ends up in another's place is noticed
COMPLEX_ELEMENTS = 1024


class CollectiveError(RuntimeError):
    """The devices cannot average over each other: one sentence with the cause and what to do."""


def collective_self_test(devices: Sequence[jax.Device], size_bytes: int, timeout_s: float) -> dict[str, Any]:
    """Average a float32 buffer and a small complex one over `devices`, as gradients will be, and check the answers.

    devices: those of all processes, each of which calls this and checks its own. size_bytes: of the buffer on each
    device, taken as at least SMALLEST_BYTES and at most LARGEST_BYTES of the platform. Returns {devices, bytes,
    seconds (the fastest of REPEATS means), gigabytes_per_s (bytes / seconds), bus_gigabytes_per_s (times
    2 (D - 1) / D, what each link carries in a ring), ok (True)}.

    Raises CollectiveError if it does not end within timeout_s (compilation included), fails, or gives a wrong number.
    After the first of these a thread still waits for the devices: leave with os._exit.
    """
    outcome: dict[str, Any] = {}
    failure: list[RuntimeError | ValueError] = []

    def run() -> None:
        try:
            outcome.update(_measure(devices, size_bytes))
        except (RuntimeError, ValueError) as error:  # of jax, of Gloo; anything else shows its traceback here
            failure.append(error)

    thread = threading.Thread(target=run, name="collective self-test", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        slow = f"--self_test_timeout {round(4 * timeout_s) or 1} if they are only slow"
        raise _error(devices, f"did not end within {timeout_s:g} s, a device or the way to it hangs", slow)
    if failure and "RESOURCE_EXHAUSTED" in str(failure[0]):
        raise failure[0]
    if failure or not outcome:
        reason = str(failure[0]) if failure else "its thread ended early"
        raise _error(devices, f"failed ({reason.splitlines()[0]})") from (failure[0] if failure else None)
    if wrong := outcome.pop("wrong"):
        where = ", ".join(f"device {index} (off by {off:g})" for index, off in wrong.items())
        raise _error(devices, f"gave a wrong mean on {where}: training would go wrong unnoticed")
    return outcome


def driver_version() -> str | None:
    """Of the NVIDIA kernel module, if there is one."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", path.read_text()) if path.exists() else None
    return found[1] if found else None


def nccl_version() -> str | None:
    """Of the NCCL package that jax loads, if one is installed."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _measure(devices: Sequence[jax.Device], size_bytes: int) -> dict[str, Any]:
    largest = LARGEST_BYTES.get(devices[0].platform, LARGEST_BYTES["gpu"])
    elements = min(max(size_bytes, SMALLEST_BYTES), largest) // 4
    here = local(devices)

    def pattern(number: jax.Array | float) -> dict[str, jax.Array]:
        """What device `number` holds. As the pattern is linear in it, the mean is what device (D - 1) / 2 would."""
        real = jnp.arange(elements) % PERIOD + jnp.float32(number)
        return {"real": real, "complex": jax.lax.complex(real[:COMPLEX_ELEMENTS], 1 - 2 * real[:COMPLEX_ELEMENTS])}

    def deviation(means: dict[str, jax.Array]) -> jax.Array:
        expected = pattern((len(devices) - 1) / 2)
        off = [jnp.max(jnp.abs(means[name] - expected[name])) for name in means]
        return jnp.max(jnp.stack(off))

    fill = spmd(lambda _: pattern(jax.lax.axis_index(AXIS)), devices)
    mean = spmd(pmean_complex_safe, devices)
    buffers = jax.block_until_ready(fill(np.zeros(len(here))))
    means = jax.block_until_ready(mean(buffers))
    offs = [float(np.asarray(shard.data)[0]) for shard in spmd(deviation, devices)(means).addressable_shards]
    # Sums of these whole numbers are exact in float32; the division by D may round on a GPU.
    tolerance = 1e-6 * (PERIOD + len(devices))
    places = [index for index, device in enumerate(devices) if device in here]
    wrong = {index: off for index, off in zip(places, offs, strict=True) if not off <= tolerance}

    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(mean(buffers))
        seconds.append(time.perf_counter() - start)
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(buffers)) // len(here)
    rate = n_bytes / min(seconds) / 1e9
    return {
        "devices": len(devices),
        "bytes": n_bytes,
        "seconds": min(seconds),
        "gigabytes_per_s": rate,
        "bus_gigabytes_per_s": rate * 2 * (len(devices) - 1) / len(devices),
        "ok": True,
        "wrong": wrong,
    }


def _error(devices: Sequence[jax.Device], what: str, *ways: str) -> CollectiveError:
    """What happened, on which devices with which software, and what may be typed."""
    gpu, several = devices[0].platform == "gpu", any(device.process_index for device in devices)
    software = {"driver": driver_version(), "NCCL": nccl_version()} if gpu else {}
    known = [devices[0].device_kind, *(f"{name} {number}" for name, number in software.items() if number)]
    first = (
        ["NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 in front of the command (NCCL_DEBUG=INFO tells more)"] if gpu else []
    )
    # The host of one process averages for its own devices only.
    first += (
        ["whether all processes run and reach each other"] if several else ["--sync_backend cpu to average on the host"]
    )
    *others, last = [*first, *ways]
    advice = f"{', '.join(others)}, or {last}" if others else last
    return CollectiveError(
        f"the test of the collectives on {count(len(devices))} ({', '.join(known)}) {what}: try {advice}"
    )
