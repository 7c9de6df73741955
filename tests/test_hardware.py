"""The verb `devices`: its report, its one event, and how it ends where something is wrong."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from cssm import hardware
from cssm.config import UserError, parse_args
from cssm.hardware import folder, nvidia_smi, parse_topology, show_devices
from parallel import selftest
from parallel.devices import DeviceError
from parallel.selftest import CollectiveError

ROOT = Path(__file__).resolve().parents[1]
# As nvidia-smi prints it, underlined header and all.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t0-31\t0\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
)


def config(*argv: str):
    return parse_args(["devices", *argv]).config


@pytest.fixture
def quick(monkeypatch):
    """A self-test that has been passed, and no compile cache."""
    result = {"devices": 8, "bytes": 8, "seconds": 1.0, "gigabytes_per_s": 1.0, "bus_gigabytes_per_s": 1.75, "ok": True}
    monkeypatch.setattr(hardware, "collective_self_test", lambda *_: result)
    monkeypatch.setattr(hardware, "enable_compile_cache", lambda _: None)
    return result


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Put an nvidia-smi on the path that answers with these texts."""

    def install(gpus: str, processes: str = "", topology: str = TOPOLOGY, code: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        answers = {"--query-gpu": gpus, "--query-compute-apps": processes, "topo": topology}
        body = f"import sys\nanswers = {answers!r}\nword = sys.argv[1].split('=')[0]\n"
        program.write_text(f"#!{sys.executable}\n{body}print(answers[word])\nsys.exit({code})\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_the_report(quick, capsys, monkeypatch):
    variables = {"NCCL_DEBUG": "INFO", "SLURM_PROCID": "1", "WORLD_SIZE": "2", "MY_SECRET": "no", "XLA_FLAGS_": "x"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    show_devices(config())
    out = capsys.readouterr().out
    for line in ("Number of devices: 8", "Device 7: cpu:7", f"jax: {jax.__version__}", "$NCCL_DEBUG: INFO"):
        assert line in out.splitlines()
    assert "$SLURM_PROCID: 1\n" in out
    assert "$WORLD_SIZE: 2\n" in out
    assert "SECRET" not in out
    assert "Topology: unknown" in out
    assert "\nRunning on 8 devices (multi-CPU enabled)\n" in out
    assert "Collectives: right on every device" in out
    assert "\nwarn  8 simulated devices share" in out


def test_quiet_leaves_results_and_warnings(quick, capsys):
    show_devices(config("--quiet"))
    out = capsys.readouterr().out
    assert "Collectives: right" in out
    assert "\nwarn  " in out
    assert "\nok  " not in out
    assert "python:" not in out


def test_headless_is_one_event(quick, capsys):
    stream = io.StringIO()
    show_devices(config("--headless", "--num_devices=2"), stream)
    assert capsys.readouterr().out == ""
    (event,) = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (event["event"], event["schema"], event["platform"], event["num_devices"]) == ("devices", 1, "cpu", 2)
    assert [row["id"] for row in event["devices"]] == [0, 1]
    assert event["versions"]["jax"] == jax.__version__
    assert event["environment"]["XLA_FLAGS"]
    assert event["self_test"] == quick
    assert {True, False} == {finding["ok"] for finding in event["advice"]}
    assert "parity" not in event


def test_the_collectives_are_really_tested(monkeypatch):
    monkeypatch.setattr(hardware, "TEST_BYTES", 0)
    stream = io.StringIO()
    show_devices(config("--num_devices=2"), stream)
    result = json.loads(stream.getvalue())["self_test"]
    assert result["ok"] is True
    assert result["bytes"] > selftest.SMALLEST_BYTES


@pytest.mark.parametrize("headless", [False, True])
def test_collectives_that_fail_are_in_the_report_and_end_it(quick, capsys, monkeypatch, headless):
    def fail(*_):
        raise CollectiveError("they hang: try this")

    monkeypatch.setattr(hardware, "collective_self_test", fail)
    stream = io.StringIO()
    with pytest.raises(CollectiveError):
        show_devices(config("--parity"), stream if headless else None)  # parity would hang too
    if headless:
        event = json.loads(stream.getvalue())
        assert event["self_test"] == {"ok": False, "error": "they hang: try this"}
        assert "parity" not in event
    else:
        assert "Collectives: FAILED, they hang: try this" in capsys.readouterr().out


def test_no_room_for_the_test_is_told_with_its_cause(quick, monkeypatch):
    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(hardware, "collective_self_test", refuse)
    with pytest.raises(UserError, match="another process may hold their memory") as error:
        show_devices(config())
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    "flags,reason",
    [
        ("--num_devices=1", "one device has no other"),
        ("--sync_backend=cpu", "the host averages"),
        ("--self_test_timeout=0", "as --self_test_timeout 0 asks"),
    ],
)
def test_a_test_that_is_left_out_says_why(quick, capsys, flags, reason):
    show_devices(config(flags))
    assert f"Collectives: not tested, {reason}" in capsys.readouterr().out.replace("with --sync_backend cpu ", "")


@pytest.mark.parametrize(
    "flags,sentence",
    [
        ("--parity --num_devices=1", "--parity compares one device with several"),
        ("--sync_backend=nccl", "needs NVIDIA GPUs"),
        ("--gpus=9", "there is no device 9"),
    ],
)
def test_what_cannot_be_is_refused(quick, flags, sentence):
    with pytest.raises((UserError, DeviceError), match=sentence):
        show_devices(config(*flags.split()))


@pytest.mark.parametrize("ok", [True, False])
def test_parity_decides_how_it_ends(quick, capsys, monkeypatch, ok):
    row = {"model": "small", "parameters": 1e-7, "loss": 0.0, "gradient": 0.0, "ok": ok}
    parity = {"models": [row], "steps": 3, "devices": 8, "effective_batch": 16, "optimizer": "SGD", "shard": "none",
              "matmul_precision": "highest", "sync_backend": "auto", "tolerance": 1e-5}  # fmt: skip
    monkeypatch.setattr(hardware, "compare", lambda *_: parity)
    if ok:
        show_devices(config("--parity"))
    else:
        with pytest.raises(UserError, match="does not give what one device gives") as error:
            show_devices(config("--parity"))
        assert error.value.exit_code == 4
    assert ("PASS" if ok else "FAIL") in capsys.readouterr().out


def test_the_gpus_are_as_nvidia_smi_tells(smi):
    gpus = "0, GPU-a, NVIDIA H100 80GB HBM3, 81559, 100\n1, GPU-b, NVIDIA H100 80GB HBM3, 81559, [N/A]"
    smi(gpus, f"GPU-b, 77, python, 2048\nGPU-b, {os.getpid()}, python, 1\nGPU-a, 78, [Not Found], [N/A]")
    found = nvidia_smi()
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 1]
    assert [gpu["memory_bytes"] for gpu in found["gpus"]] == [81559 * 2**20] * 2
    assert [gpu["used_bytes"] for gpu in found["gpus"]] == [100 * 2**20, 0]
    assert found["gpu_processes"] == [
        {"gpu": 1, "pid": 77, "name": "python", "used_bytes": 2**31},
        {"gpu": 0, "pid": 78, "name": "[Not Found]", "used_bytes": 0},
    ]
    assert found["topology"] == {"GPU0": {"GPU0": "X", "GPU1": "NV18"}, "GPU1": {"GPU0": "NV18", "GPU1": "X"}}


def test_a_machine_whose_gpus_are_not_used_is_warned_of(quick, smi, capsys):
    smi("0, GPU-a, NVIDIA H100, 81559, 100\n1, GPU-b, NVIDIA H100, 81559, 100")
    show_devices(config("--num_devices=1"))
    out = capsys.readouterr().out
    assert "warn  2 GPUs are in this machine, 0 of them used: --platform cpu or JAX_PLATFORMS asks" in out
    assert "GPU1 NV18    X" in out


@pytest.mark.parametrize("there", [True, False])
def test_without_an_answer_of_nvidia_smi_nothing_is_known(smi, monkeypatch, tmp_path, there):
    if there:
        smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", code=9)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi() == {"gpus": None, "gpu_processes": None, "topology": None}


def test_a_text_without_a_matrix_is_no_topology():
    assert parse_topology("") is None
    assert parse_topology("Failed to run topology matrix\n") is None


def test_a_folder_is_where_its_nearest_parent_is(tmp_path):
    found = folder(str(tmp_path / "not" / "yet"))
    assert found["path"].endswith("yet")
    assert found["free_bytes"] > 0
    assert found["filesystem"] == folder(str(tmp_path))["filesystem"]
    assert folder("/proc")["filesystem"] == ("proc" if Path("/proc/self/mounts").exists() else None)


HANGING = """
import sys, threading
from parallel import selftest
selftest._measure = lambda *_: threading.Event().wait()
from cssm.cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["devices", "train"])
def test_collectives_that_hang_end_the_program_with_code_4(tmp_path, verb):
    flags = [verb, "--self_test_timeout=1", "--headless"]
    flags += [f"--checkpoint_dir={tmp_path}"] if verb == "train" else []
    command = [sys.executable, "-c", HANGING, *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 4
    assert "did not end within 1 s" in result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert (events[-1]["event"], events[-1]["exit_code"]) == ("error", 4)


@pytest.mark.slow
def test_several_processes_report_once_and_agree():
    flags = ["devices", "--nproc_per_node=2", "--parity", "--headless"]
    variables = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"}
    command = [sys.executable, "main.py", *flags]
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    (event,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert (event["processes"], event["num_devices"], event["local_devices"]) == (2, 4, 2)
    assert [row["process"] for row in event["devices"]] == [0, 0, 1, 1]
    assert event["self_test"]["ok"] is True
    assert all(row["ok"] for row in event["parity"]["models"])
