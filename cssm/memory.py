"""Memory of devices: reserving it, and running out: how to know it, how full they are, and which flags need less for
the same effective batch.
"""

import re
from collections.abc import Sequence
from typing import Any

from cssm.config import Config
from cssm.rules import WHOLE

# The CPU backend calls it INTERNAL where several devices run, the CUDA driver has a name of its own for it, and cuFFT
# says only that it has no plan, for which it needs memory of its own.
_MESSAGE = re.compile(r"RESOURCE_EXHAUSTED|out[ _]of[ _]memory|create cuFFT batched plan", re.IGNORECASE)
_GIB = 2**30
# Characters of an error's words that are told.
SAID = 150


def reserve(config: Config) -> None:
    """Begin to, which takes a GPU about as long as the modules of training take to load. Raises DeviceError."""
    from parallel.devices import reserve_memory

    reserve_memory(_devices(config))


def _devices(config: Config) -> list[Any]:
    from parallel.devices import select_devices

    return select_devices(config.platform, config.gpus, config.num_devices, config.multi_gpu == "off")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device (an error of jax) or the host (MemoryError) ran out of memory."""
    of_jax = type(error).__module__.split(".")[0] in ("jax", "jaxlib")
    return isinstance(error, MemoryError) or (of_jax and _MESSAGE.search(str(error)) is not None)


def out_of_memory(config: Config, error: BaseException | None = None) -> str:
    """One sentence: what each device has in use, where the backend tells, what to type instead, and the error's words.

    Call it while the error is at hand, when what did not fit is still held. Each way but the last resorts keeps the
    effective batch.
    """
    said = f"; it said: {str(error).splitlines()[0][:SAID]}" if error and str(error) else ""
    from parallel.devices import local

    devices = _devices(config)
    in_use = memory_in_use([device.memory_stats() or {} for device in local(devices)])
    if config.checkpoint:  # a model is used, not trained
        return f"out of memory{in_use}: type a smaller --batch_size{said}"
    given, ways = _halves(config, len(devices))
    if config.resume:
        ways += ["--remat (where --arch is not simple)"]
    elif not config.remat and config.arch != "simple":
        ways += ["--remat"]
    splits = config.sync_backend != "cpu" and config.shard != "params" and config.optimizer not in WHOLE
    if len(devices) > 1 and splits:
        shard = "--shard params" if config.shard == "optimizer" else "--shard optimizer or --shard params"
        ways += [f"{shard} (where --optimizer is not {' or '.join(WHOLE)})" if config.resume else shard]
    ways += ["--bf16"] if config.dtype == "f32" and not config.resume else []
    return f"out of memory{given}{in_use}: type {', or '.join(ways or ['a smaller --embed_dim'])}{said}"


def memory_in_use(stats: Sequence[dict[str, Any]]) -> str:
    """As ` (in use: device 0 71.9 of 79.6 GiB, device 1 ...)`; "" where a backend does not tell.

    stats: memory_stats() of each device: bytes_in_use and bytes_limit are read.
    """
    if not all("bytes_in_use" in device and "bytes_limit" in device for device in stats):
        return ""
    texts = [f"{device['bytes_in_use'] / _GIB:.1f} of {device['bytes_limit'] / _GIB:.1f} GiB" for device in stats]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f" (in use: {texts[0]} on each of {len(texts)} devices)"
    return f" (in use: {', '.join(f'device {i} {text}' for i, text in enumerate(texts))})"


def _halves(config: Config, devices: int) -> tuple[str, list[str]]:
    """What the batch is, and the flags for a smaller one with as much more accumulation: half, if that divides."""
    if config.resume:  # the batch is the saved run's
        return "", ["half the --batch_size with twice the --grad_accum (the same effective batch)"]
    batch, accum = config.batch_size, config.grad_accum or 1
    images = batch or (config.global_batch_size or 1) // (devices * accum)
    factor = next((n for n in range(2, images + 1) if images % n == 0), None)
    given = f" with {images} images per device" if images > 1 else " with one image per device"
    if factor is None:
        return given, []
    flags = [f"--batch_size {images // factor}"] if batch else []
    if not (batch and config.global_batch_size and config.grad_accum is None):  # where the total gives it
        flags += [f"--grad_accum {factor * accum}"]
    return given, [f"{' '.join(flags)} (the same effective batch)"]
