"""The test of the collectives: it passes where they work, and each way of failing gets its own sentence."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel import selftest
from parallel.selftest import CollectiveError, collective_self_test
from parallel.sync import pmean_complex_safe

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("n", [1, 3, 8])
def test_working_collectives_pass(n):
    result = collective_self_test(jax.devices()[:n], 0, 60)
    assert (result["devices"], result["ok"]) == (n, True)
    assert result["bytes"] == selftest.SMALLEST_BYTES + 8 * selftest.COMPLEX_ELEMENTS
    assert result["gigabytes_per_s"] == pytest.approx(result["bytes"] / result["seconds"] / 1e9)
    assert result["bus_gigabytes_per_s"] == pytest.approx(result["gigabytes_per_s"] * 2 * (n - 1) / n)


@pytest.mark.parametrize("asked,used", [(3_000_000, 3_000_000), (2**40, 2**24)])
def test_the_buffer_is_as_large_as_the_gradients_within_bounds(asked, used):
    result = collective_self_test(jax.devices()[:2], asked, 60)
    assert result["bytes"] == used + 8 * selftest.COMPLEX_ELEMENTS


@pytest.fixture
def hanging(monkeypatch):
    """The devices never answer, until the test is over."""
    over = threading.Event()
    monkeypatch.setattr(selftest, "_measure", lambda *_: over.wait() and {})
    yield
    over.set()


def test_a_hang_ends_at_the_timeout(hanging):
    with pytest.raises(CollectiveError, match=r"on 2 devices .* did not end within 0\.2 s.* hangs: try .*") as error:
        collective_self_test(jax.devices()[:2], 0, 0.2)
    assert "--sync_backend cpu to average on the host, or --self_test_timeout 1 if" in str(error.value)
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "collective self-test"]
    assert waiting.daemon  # else the interpreter would wait for it at its end


def refusing(error):
    def measure(*_):
        raise error

    return measure


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_failure_is_told_with_its_cause(monkeypatch, kind):
    cause = kind("INTERNAL: NCCL operation ncclGroupEnd() failed\nmore")
    monkeypatch.setattr(selftest, "_measure", refusing(cause))
    with pytest.raises(CollectiveError, match=r"failed \(INTERNAL: NCCL operation .* failed\): try") as error:
        collective_self_test(jax.devices()[:2], 0, 60)
    assert error.value.__cause__ is cause
    assert "\n" not in str(error.value)


def test_no_memory_is_no_failure_of_the_collectives(monkeypatch):
    cause = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    monkeypatch.setattr(selftest, "_measure", refusing(cause))
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        collective_self_test(jax.devices()[:2], 0, 60)
    assert error.value is cause


def on_one_device(means):
    """What a device reads that gets another answer than the others."""
    return jax.tree.map(lambda x: jnp.where(jax.lax.axis_index("devices") == 1, x + 0.5, x), means)


@pytest.mark.parametrize(
    "mean,places",
    [
        (lambda tree: tree, "device 0 .*, device 2 "),  # device 1 holds what the mean would be
        (lambda tree: jax.tree.map(lambda x: jax.lax.psum(x, "devices"), tree), "device 0 .*, device 1 .*, device 2 "),
        (lambda tree: jax.tree.map(lambda x: jnp.roll(x, 1), pmean_complex_safe(tree)), "device 0 .*, device 1 "),
        (lambda tree: on_one_device(pmean_complex_safe(tree)), "device 1 "),
        (lambda tree: pmean_complex_safe(tree) | {"complex": tree["complex"]}, "device 0 .*, device 2 "),
        (lambda tree: jax.tree.map(lambda x: x * np.nan, pmean_complex_safe(tree)), "device 0 .*off by nan"),
    ],
    ids=["none", "sum", "displaced", "one device", "complex left out", "nan"],
)
def test_a_wrong_answer_is_found_where_it_is(monkeypatch, mean, places):
    monkeypatch.setattr(selftest, "pmean_complex_safe", mean)
    with pytest.raises(CollectiveError, match=f"gave a wrong mean on {places}") as error:
        collective_self_test(jax.devices()[:3], 0, 60)
    assert "--sync_backend cpu" in str(error.value)


class Gpu:
    """As much of a GPU as a sentence needs."""

    platform, device_kind, process_index = "gpu", "NVIDIA H100", 0


def test_on_gpus_the_sentence_names_the_switches_and_versions_of_nccl(hanging, monkeypatch):
    monkeypatch.setattr(selftest, "driver_version", lambda: "580.1")
    monkeypatch.setattr(selftest, "nccl_version", lambda: "2.28.3")
    with pytest.raises(CollectiveError) as error:
        collective_self_test([Gpu(), Gpu()], 0, 0.01)
    for part in (
        "NVIDIA H100, driver 580.1, NCCL 2.28.3",
        "NCCL_P2P_DISABLE=1",
        "NCCL_IB_DISABLE=1",
        "NCCL_DEBUG=INFO",
    ):
        assert part in str(error.value)


PROCESS = """
import jax, sys
jax.distributed.initialize("127.0.0.1:" + sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from parallel import selftest
if sys.argv[3] == "wrong":
    selftest.pmean_complex_safe = lambda tree: jax.tree.map(lambda x: jax.lax.psum(x, "devices"), tree)
try:
    print(selftest.collective_self_test(jax.devices(), 0, 60), flush=True)
except selftest.CollectiveError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("answer,expected", [("right", "'ok': True"), ("wrong", "all processes run and reach")])
def test_each_process_checks_its_own_devices(answer, expected, free_port, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2")
    commands = [[sys.executable, "-c", PROCESS, str(free_port), str(i), answer] for i in range(2)]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for command in commands]
    for i, process in enumerate(processes):
        out, err = process.communicate(timeout=120)
        assert expected in out, err
        if answer == "wrong":
            assert f"wrong mean on device {2 * i} (off by" in out
            assert f"device {2 * i + 1} (off by" in out


@pytest.fixture
def free_port():
    """A port that nobody listens at."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
