"""Batch arithmetic, padding, sharding and prefetching."""

import threading
import time

import jax
import numpy as np
import pytest

from parallel.batches import (
    Batching,
    DeviceError,
    pad_and_mask,
    prefetch_to_device,
    resolve_batch,
    shard_batch,
)


@pytest.mark.parametrize(
    "devices, batch_size, total, accum, expected",
    [
        (4, None, None, None, Batching(64, 4, 1)),  # the recipe's batch size is per device
        (4, 8, None, None, Batching(8, 4, 1)),
        (2, 2, None, 4, Batching(2, 2, 4)),
        (4, None, None, 2, Batching(64, 4, 2)),
        (4, None, 64, None, Batching(16, 4, 1)),
        (4, None, 64, 2, Batching(8, 4, 2)),
        (4, 1, 64, None, Batching(1, 4, 16)),
        (4, 8, 32, None, Batching(8, 4, 1)),
        (4, 8, 64, 2, Batching(8, 4, 2)),
        (1, None, 7, None, Batching(7, 1, 1)),
    ],
)
def test_batch_arithmetic(devices, batch_size, total, accum, expected):
    batching = resolve_batch(devices, batch_size, total, accum, default_batch_size=64)
    assert batching == expected
    assert batching.effective == batching.batch_size * devices * batching.grad_accum
    assert total in (None, batching.effective)


@pytest.mark.parametrize(
    "devices, batch_size, total, accum, words",
    [
        (4, None, 10, None, ["10", "4 devices", "type 8 or 12"]),
        (3, None, 64, None, ["64", "3 devices", "type 63 or 66"]),
        (4, None, 2, None, ["2", "type 4"]),
        (4, None, 20, 2, ["4 devices x grad_accum 2 = 8", "type 16 or 24"]),
        (3, 1, 64, None, ["batch_size 1 x 3 devices = 3", "type 63 or 66"]),
        (4, 8, 33, None, ["type 32 or 64"]),
        (4, 8, 64, 4, ["8 x 4 devices x grad_accum 4 = 128", "--global_batch_size 128"]),
        (1, 0, None, None, ["--batch_size 0", "1 or more"]),
        (1, None, -8, None, ["--global_batch_size -8"]),
        (1, None, None, 0, ["--grad_accum 0"]),
    ],
)
def test_batch_arithmetic_refuses_what_does_not_divide(devices, batch_size, total, accum, words):
    with pytest.raises(DeviceError) as caught:
        resolve_batch(devices, batch_size, total, accum, default_batch_size=64)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n", [0, 1, 7, 8])
def test_padding_keeps_the_examples_and_counts_them(n):
    batch = {"image": np.full((n, 2, 2, 1), 9, np.uint8), "label": np.arange(n, dtype=np.int32)}
    padded = pad_and_mask(batch, 8)
    assert padded["mask"].dtype == np.float32
    assert padded["mask"].tolist() == [1.0] * n + [0.0] * (8 - n)
    for name, array in batch.items():
        assert padded[name].dtype == array.dtype
        assert padded[name].shape == (8, *array.shape[1:])
        np.testing.assert_array_equal(padded[name][:n], array)
        assert not padded[name][n:].any()


@pytest.mark.parametrize(
    "batch",
    [{"label": np.zeros(9)}, {"label": np.zeros(8), "image": np.zeros(7)}, {"mask": np.ones(3)}],
    ids=["too many", "unequal", "masked twice"],
)
def test_padding_refuses(batch):
    with pytest.raises(DeviceError):
        pad_and_mask(batch, 8)


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_each_device_gets_its_own_slice_and_no_other(devices):
    chosen = jax.devices()[:devices][::-1]  # not in the order of their ids
    image = np.arange(24 * 5, dtype=np.uint8).reshape(24, 5)
    sharded = shard_batch({"image": image}, chosen)["image"]
    b = 24 // devices
    assert sharded.shape == (devices, b, 5)
    assert sharded.dtype == np.uint8
    shards = {shard.device: np.asarray(shard.data) for shard in sharded.addressable_shards}
    assert set(shards) == set(chosen)
    for d, device in enumerate(chosen):
        np.testing.assert_array_equal(shards[device], image[None, d * b : (d + 1) * b])


def test_sharding_copies_nothing_between_devices():
    devices = jax.devices()
    with jax.transfer_guard_device_to_device("disallow"):
        shard_batch({"label": np.arange(16)}, devices)


@pytest.mark.parametrize(
    "n, words", [(10, "use 8 or 16"), (3, "use 8"), (0, "use 8")], ids=["between", "below", "none"]
)
def test_a_batch_that_does_not_divide_is_refused(n, words):
    with pytest.raises(DeviceError, match=f"{n} does not divide over 8 devices: {words}"):
        shard_batch({"label": np.arange(n)}, jax.devices())


def labels(count, log=None):
    try:
        for k in range(count):
            if log is not None:
                log.append(k)
            yield {"label": np.full(8, k)}
    finally:
        if log is not None:
            log.append("closed")


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("depth", [0, 1, 3, 20])
def test_prefetching_keeps_every_batch_in_order(depth):
    out = list(prefetch_to_device(labels(10), jax.devices(), depth))
    assert [int(np.asarray(batch["label"])[0, 0]) for batch in out] == list(range(10))
    assert out[0]["label"].shape == (8, 1)
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [0, 2])
def test_prefetching_runs_ahead_by_its_depth_and_no_further(depth):
    log = []
    source = labels(10, log)
    batches = prefetch_to_device(source, jax.devices(), depth)
    next(batches)
    wait_for(lambda: len(log) > depth)
    time.sleep(0.1)  # room for a batch too many
    assert log == list(range(1 + depth))
    batches.close()
    assert log[-1] == "closed"
    assert not prefetch_threads()


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_closing_waits_for_the_batch_in_hand_and_starts_no_other():
    log, release = [], threading.Event()

    def source():
        for k in range(10):
            log.append(k)
            if k:
                assert release.wait(timeout=30)
            yield {"label": np.arange(8)}

    batches = prefetch_to_device(source(), jax.devices(), 5)
    next(batches)
    wait_for(lambda: len(log) == 2)
    threading.Timer(0.2, release.set).start()
    batches.close()
    assert log == [0, 1]
    assert not prefetch_threads()


def test_prefetching_happens_in_the_background():
    seen = threading.Event()

    def source():
        yield {"label": np.arange(8)}
        seen.set()
        yield {"label": np.arange(8)}

    batches = prefetch_to_device(source(), jax.devices(), 1)
    next(batches)
    assert seen.wait(timeout=30), "the second batch was not pulled while the first was in use"
    batches.close()


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_an_exception_of_the_source_arrives_in_its_place(depth):
    def source():
        yield {"label": np.arange(8)}
        yield {"label": np.arange(8)}
        raise OSError("the disk is gone")

    batches = prefetch_to_device(source(), jax.devices(), depth)
    next(batches)
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert not prefetch_threads()


def test_an_exception_of_the_consumer_ends_the_thread():
    def consume():
        for _ in prefetch_to_device(labels(100), jax.devices(), 2):
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        consume()
    assert not prefetch_threads()
