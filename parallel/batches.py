"""Batches: how large, how padded, and how they reach the devices."""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from parallel.choice import DeviceError, count

AXIS = "devices"
"""Name of the device axis, for collectives and for every sharding: one name, or the step compiles twice."""


@dataclass(frozen=True)
class Batching:
    """The batch arithmetic of a run: `effective` examples make one optimizer step."""

    batch_size: int
    """Examples per device and micro-batch."""
    devices: int
    grad_accum: int

    @property
    def effective(self) -> int:
        return self.batch_size * self.devices * self.grad_accum


def resolve_batch(
    devices: int,
    batch_size: int | None,
    global_batch_size: int | None,
    grad_accum: int | None,
    default_batch_size: int,
) -> Batching:
    """Fill in the batch arithmetic: effective = batch_size (per device) x devices x grad_accum.

    None means "not given". The total alone gives batch_size, with batch_size it gives grad_accum, with both
    it must agree; without the total, batch_size defaults to `default_batch_size` and grad_accum to 1.
    Raises DeviceError for a size below 1 and for a total that does not divide, naming the nearest that do.
    """
    given = {"batch_size": batch_size, "global_batch_size": global_batch_size, "grad_accum": grad_accum}
    for name, value in given.items():
        if value is not None and value < 1:
            raise DeviceError(f"--{name} {value} is not a batch size: type 1 or more")
    if global_batch_size is None:
        return Batching(batch_size or default_batch_size, devices, grad_accum or 1)

    if batch_size is not None and grad_accum is not None:
        batching = Batching(batch_size, devices, grad_accum)
        if batching.effective != global_batch_size:
            raise DeviceError(
                f"--global_batch_size {global_batch_size} does not agree with batch_size {batch_size} x "
                f"{count(devices)} x grad_accum {grad_accum} = {batching.effective}: "
                f"type --global_batch_size {batching.effective}, or leave one of the three out"
            )
        return batching

    known = [f"batch_size {batch_size}"] if batch_size else []
    known += [count(devices)] + ([f"grad_accum {grad_accum}"] if grad_accum else [])
    unit = (batch_size or 1) * devices * (grad_accum or 1)
    factor, rest = divmod(global_batch_size, unit)
    if rest:
        nearest = [f"{factor * unit}"] * (factor > 0) + [f"{(factor + 1) * unit}"]
        total = f" = {unit}" if len(known) > 1 else ""
        raise DeviceError(
            f"--global_batch_size {global_batch_size} does not divide by {' x '.join(known)}{total}: "
            f"type {' or '.join(nearest)}"
        )
    if batch_size is None:
        return Batching(factor, devices, grad_accum or 1)
    return Batching(batch_size, devices, factor)


def pad_and_mask(batch: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Pad arrays [n, ...] with zeros to [size, ...], where n is less; add "mask", float32 [size]: 1 for a real example.

    Raises DeviceError if the arrays disagree on n, hold more than `size` examples, or include a mask.
    """
    n = leading_size(batch)
    if n > size or "mask" in batch:
        raise DeviceError(f"cannot pad a batch of {n} ({', '.join(batch)}) to {size} and add a mask")
    zeros = {name: np.zeros((size - n, *array.shape[1:]), array.dtype) for name, array in batch.items()}
    padded = {name: np.concatenate([array, zeros[name]]) if n < size else array for name, array in batch.items()}
    mask = np.zeros(size, np.float32)
    mask[:n] = 1
    return {**padded, "mask": mask}


def leading_size(batch: dict[str, np.ndarray]) -> int:
    """Number of examples in a batch of arrays [n, ...]; DeviceError if the arrays disagree."""
    sizes = {name: len(array) for name, array in batch.items()}
    if len(set(sizes.values())) != 1:
        raise DeviceError(f"the arrays of a batch must hold the same number of examples, not {sizes}")
    return next(iter(sizes.values()))


def local(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Those of the devices that belong to this process."""
    return [device for device in devices if device.process_index == jax.process_index()]


def device_sharding(devices: Sequence[jax.Device]) -> NamedSharding:
    """Sharding that puts row d of an array [D, ...] on device d of this process; the same as `spmd`'s outputs."""
    return NamedSharding(Mesh(np.array(local(devices)), (AXIS,)), PartitionSpec(AXIS))


def shard_batch(batch: dict[str, np.ndarray], devices: Sequence[jax.Device]) -> dict[str, jax.Array]:
    """Split host arrays [B, ...] into device arrays [D, B/D, ...], each slice sent straight to its device.

    B and D are those of this process; device d gets rows d*B/D to (d+1)*B/D. The arrays must not be written to
    afterwards: a transfer may still be reading them, and the CPU backend shares their memory.
    Raises DeviceError if B does not divide by the number of devices.
    """
    n, d = leading_size(batch), len(local(devices))
    if n % d or not n:
        nearest = " or ".join(str(k * d) for k in (n // d, n // d + 1) if k)
        raise DeviceError(f"a batch of {n} does not divide over {count(d)}: use {nearest}")
    rows = {name: np.asarray(array).reshape(d, n // d, *array.shape[1:]) for name, array in batch.items()}
    return jax.device_put(rows, device_sharding(devices))


def prefetch_to_device(
    batches: Iterable[dict[str, np.ndarray]], devices: Sequence[jax.Device], depth: int
) -> Generator[dict[str, jax.Array]]:
    """Yield `shard_batch` of each batch, in order, while a background thread prepares the next `depth`.

    depth 0 does the work in the caller's thread. An exception of `batches` is raised at its place in the
    order. Closing the iterator (or its end) joins the thread, and closes `batches` if it can be closed.
    """
    source = iter(batches)

    def fetch() -> dict[str, jax.Array] | None:
        batch = next(source, None)
        return None if batch is None else shard_batch(batch, devices)

    try:
        if depth == 0:
            while (batch := fetch()) is not None:
                yield batch
            return
        with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
            ahead = deque(pool.submit(fetch) for _ in range(depth))
            try:
                while (batch := ahead.popleft().result()) is not None:
                    ahead.append(pool.submit(fetch))
                    yield batch
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    finally:
        if close := getattr(source, "close", None):
            close()
