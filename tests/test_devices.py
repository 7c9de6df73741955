"""Choosing devices, running one program on all of them, and what the state looks like there."""

import contextlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cssm.checkpoint import Checkpoints
from parallel import devices as module
from parallel.devices import (
    AXIS,
    DeviceError,
    assert_replicated,
    describe,
    drawn_by_kernel,
    enable_compile_cache,
    memory_bytes,
    per_device,
    replicate,
    reserve_memory,
    running_line,
    select_devices,
    shard_batch,
    spmd,
    unreplicate,
)
from parallel.sync import Replicated


@pytest.mark.parametrize(
    "choice, ids",
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"platform": "cpu"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"gpus": "2,3"}, [2, 3]),
        ({"gpus": " 3, 1 "}, [3, 1]),
        ({"gpus": [7, 0]}, [7, 0]),
        ({"num_devices": 2}, [0, 1]),
        ({"gpus": "4,5", "num_devices": 2}, [4, 5]),
        ({"single": True}, [0]),
        ({"gpus": "5", "single": True}, [5]),
    ],
)
def test_devices_are_chosen(choice, ids):
    assert [device.id for device in select_devices(**choice)] == ids


@pytest.mark.parametrize(
    "choice, words",
    [
        ({"gpus": "0,9"}, ["--gpus 0,9", "no device 9", "0 to 7"]),
        ({"gpus": "0,0"}, ["named twice"]),
        ({"gpus": "0,one"}, ["0,one", "for example --gpus 0,1"]),
        ({"gpus": "-1"}, ["--gpus -1", "for example --gpus 0,1"]),
        ({"gpus": ""}, ["for example --gpus 0,1"]),
        ({"gpus": []}, ["for example --gpus 0,1"]),
        ({"num_devices": 9}, ["--num_devices 9", "8 devices visible", "type 1 to 8"]),
        ({"num_devices": 0}, ["--num_devices 0", "type 1 to 8"]),
        ({"gpus": "0,1", "num_devices": 1}, ["--num_devices 1", "--gpus"]),
        ({"gpus": "0,1", "single": True}, ["--multi_gpu off", "2"]),
        ({"num_devices": 4, "single": True}, ["--multi_gpu off", "4"]),
        ({"platform": "gpu"}, ["--platform gpu", "gpu extra"]),
        ({"platform": "tpu"}, ["--platform tpu", "tpu extra"]),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused(choice, words):
    with pytest.raises(DeviceError) as caught:
        select_devices(**choice)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "environment, platform, refused",
    [
        ({}, "auto", True),
        ({}, "cpu", False),
        ({"JAX_PLATFORMS": "cpu"}, "auto", False),
        ({"CUDA_VISIBLE_DEVICES": ""}, "auto", False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "auto", False),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "auto", True),
    ],
)
def test_an_unusable_gpu_is_no_reason_to_train_on_the_cpu_unasked(monkeypatch, environment, platform, refused):
    monkeypatch.setattr(module.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    expected = pytest.raises(DeviceError, match="--platform cpu") if refused else contextlib.nullcontext()
    with expected:
        select_devices(platform)


def test_the_running_line_is_exact():
    devices = jax.devices()
    assert running_line(devices[:1]) == "Running on 1 device"
    assert running_line(devices[:4]) == "Running on 4 devices (multi-CPU enabled)"
    assert running_line([SimpleNamespace(platform="gpu")] * 2) == "Running on 2 devices (multi-GPU enabled)"


def test_devices_are_described():
    rows = describe(jax.devices()[:2])
    assert rows == [{"id": i, "kind": "cpu", "platform": "cpu", "process": 0, "memory_bytes": None} for i in (0, 1)]
    assert memory_bytes(jax.devices()) == {"peak": [], "in_use": []}
    stats = [{"peak_bytes_in_use": n, "bytes_in_use": 1} for n in (3, 7)]
    gpus = [SimpleNamespace(process_index=0, memory_stats=lambda found=found: found) for found in stats]
    others = [SimpleNamespace(process_index=1), jax.devices()[0]]
    assert memory_bytes([*gpus, *others]) == {"peak": [3, 7], "in_use": [1, 1]}


@pytest.mark.parametrize("size", [4, 6])
def test_a_program_never_runs_on_some_of_its_devices(size):
    double = spmd(lambda x: 2 * x, jax.devices())
    with pytest.raises(DeviceError, match=f"leading dim {size} .* 8 devices"):
        double(np.ones((size, 2)))


def test_static_and_common_arguments():
    devices = jax.devices()[:3]
    scale = spmd(lambda x, c, n: jax.lax.psum(x * c, AXIS) * n, devices, in_axes=(0, None), out_axes=None, static=2)
    out = scale(np.arange(3.0, dtype=np.float32), np.float32(2), 10)
    assert out.shape == ()
    assert float(out) == 60


STATE = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "z": np.array([1 + 2j, -1j], np.complex64),
    "b": jnp.array([1.5, -2], jnp.bfloat16),
    "rng": np.array([0, 2**32 - 1], np.uint32),
    "step": np.int32(7),
    "nothing": {},
}


@pytest.mark.parametrize("count", [1, 3, 8])
def test_replicating_and_reading_back_changes_no_bit(count):
    replicated = replicate(STATE, jax.devices()[:count])
    assert all(leaf.shape[0] == count for leaf in jax.tree.leaves(replicated))
    assert_replicated(replicated)
    back = unreplicate(replicated)
    assert jax.tree.structure(back) == jax.tree.structure(STATE)
    for before, after in zip(jax.tree.leaves(STATE), jax.tree.leaves(back), strict=True):
        assert isinstance(after, np.ndarray)
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert after.tobytes() == np.asarray(before).tobytes()


@pytest.mark.parametrize("count", [1, 8])
def test_a_replica_does_not_share_the_memory_of_its_source(count):
    source = np.zeros((128, 128), np.float32)
    replicated = replicate(source, jax.devices()[:count])
    source[:] = 7
    assert not unreplicate(replicated).any()


def test_a_value_read_back_survives_the_donation_of_its_buffer():
    devices = jax.devices()
    increment = spmd(lambda x: x + 1, devices, donate_argnums=0)
    state = replicate(np.zeros((64, 64), np.float32), devices)
    read = unreplicate(state)
    for _ in range(3):
        state = increment(state)
    assert not read.any()
    assert (unreplicate(state) == 3).all()


def test_each_device_can_hold_a_value_of_its_own():
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 8)))
    placed = per_device(keys, jax.devices())
    for d, shard in enumerate(placed.addressable_shards):
        np.testing.assert_array_equal(shard.data[0], keys[d])
    with pytest.raises(DeviceError, match="8 devices"):
        per_device(keys[:6], jax.devices())


def test_replicas_that_differ_are_named():
    values = np.ones((8, 3), np.float32)
    values[5, 1] = np.nextafter(np.float32(1), np.float32(2))
    with pytest.raises(AssertionError, match=r"\['b'\].*\[5\]"):
        assert_replicated(per_device({"a": np.ones((8, 2)), "b": values}, jax.devices()))
    negative_zero = np.zeros((8, 1), np.float32)
    negative_zero[2] = -0.0
    with pytest.raises(AssertionError, match=r"\[2\]"):
        assert_replicated(per_device(negative_zero, jax.devices()))
    assert_replicated(per_device(np.full((8, 1), np.nan, np.float32), jax.devices()))


@pytest.fixture
def compiled():
    """Names of the programs that XLA has compiled, or read from its cache, since the test began."""
    count = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            count.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


def training(devices, traces):
    """A step of AdamW on a mixed tree, and a way to count its compilations."""
    tx, strategy = optax.adamw(0.1), Replicated()
    params = {"w": np.ones(3, np.float32), "z": np.ones(2, np.complex64)}

    def step(state, batch):
        traces.append(1)

        def loss(params):
            error = batch["x"] @ params["w"] - jnp.abs(params["z"]).sum()
            return (error**2).mean()

        grads = jax.grad(loss)(state["params"])
        params, opt, norm = strategy.apply(tx, strategy.reduce(grads), state["params"], state["opt"])
        return {"params": params, "opt": opt, "step": state["step"] + 1}, norm

    host = {"params": params, "opt": tx.init(params), "step": np.int32(0)}
    batch = shard_batch({"x": np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)}, devices)
    return host, batch, spmd(step, devices, donate_argnums=0)


def compilations(step, state, batch, compiled, calls=3):
    counts = []
    for _ in range(calls):
        before = len(compiled)
        state, _ = step(state, batch)
        counts.append(len(compiled) - before)
    return counts, state


@pytest.mark.parametrize("count", [1, 8])
def test_the_step_compiles_once(count, compiled, tmp_path):
    devices, traces = jax.devices()[:count], []
    host, batch, step = training(devices, traces)
    counts, state = compilations(step, replicate(host, devices), batch, compiled)
    assert counts == [1, 0, 0]

    # Nor does a state that was saved and restored compile it again.
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, unreplicate(state), {})
        restored, *_ = checkpoints.restore(jax.eval_shape(lambda: unreplicate(state)))
    counts, _ = compilations(step, replicate(restored, devices), batch, compiled)
    assert counts == [0, 0, 0]
    assert len(traces) == 1


def test_the_count_would_notice_a_second_compilation(compiled):
    devices = jax.devices()
    host, batch, step = training(devices, [])
    elsewhere = NamedSharding(Mesh(np.array(devices), ("other",)), PartitionSpec("other"))
    stacked = jax.tree.map(lambda x: np.stack([np.asarray(x)] * 8), host)
    state = jax.device_put(stacked, elsewhere)
    assert compilations(step, state, batch, compiled)[0] == [1, 1, 0]


def test_compiled_programs_are_kept_for_the_next_process(tmp_path):
    code = (
        "import sys, jax\n"
        "from parallel.devices import enable_compile_cache\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))\n"
        "folder = enable_compile_cache(sys.argv[1])\n"
        "assert folder.name.startswith(f'jax{jax.__version__}-')\n"
        "jax.jit(lambda x: x * 3 + 1)(2.0)\n"
        "print(hits.count('/jax/compilation_cache/cache_hits'), len(list(folder.iterdir())))\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_") and k != "XLA_FLAGS"}

    def run():
        command = [sys.executable, "-c", code, str(tmp_path / "cache")]
        return subprocess.run(
            command, env={**environment, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=True
        ).stdout.split()

    (hits, files), (hits_again, _) = run(), run()
    assert int(hits) == 0
    assert int(files) > 0
    assert int(hits_again) > 0


def test_a_compile_cache_of_the_users_own_is_left_as_it_is(tmp_path, monkeypatch):
    names = [name for name in jax.config.values if "cache" in name]
    before = [jax.config.values[name] for name in names]
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    assert enable_compile_cache(tmp_path / "ours") == tmp_path / "own"
    assert [jax.config.values[name] for name in names] == before
    assert list(tmp_path.iterdir()) == []


def test_a_compile_cache_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        enable_compile_cache(tmp_path / "file")


def test_each_device_is_used_beside_what_goes_on_and_its_failure_is_told_where_it_is_needed(monkeypatch):
    devices, begun, waits = jax.devices()[2:5], [], threading.Event()

    def put(value, device):
        waits.wait(60)
        begun.append(device)
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(jax, "device_put", put)
    threads = reserve_memory(devices)
    assert not begun
    waits.set()
    for thread in threads:
        thread.join(60)
    assert sorted(begun, key=lambda device: device.id) == devices


def test_a_gpu_draws_by_one_operation_within_the_context_alone():
    """Also after an error; a CPU draws as it does without."""

    def lowered(platform):
        draw = jax.jit(lambda key: jax.random.normal(key, (8,)))
        return draw.trace(jax.random.key(0)).lower(lowering_platforms=(platform,)).as_text()

    without = {platform: lowered(platform) for platform in ("cuda", "cpu")}
    with pytest.raises(KeyError), drawn_by_kernel():
        within = {platform: lowered(platform) for platform in ("cuda", "cpu")}
        raise KeyError
    assert "threefry2x32_ffi" in within["cuda"] and "threefry2x32_ffi" not in without["cuda"]
    assert len(within["cuda"]) < len(without["cuda"]) / 2
    assert within["cpu"] == without["cpu"]
    assert lowered("cuda") == without["cuda"]
