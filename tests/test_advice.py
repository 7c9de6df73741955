"""Each finding about a machine: when there is one, what it warns of, and when it is content."""

import pytest

from cssm.advice import GIB, advise

ROW = {"id": 0, "kind": "NVIDIA H100", "platform": "gpu", "process": 0, "memory_bytes": 76 * GIB, "bytes_in_use": 0}
GPU = {"index": 0, "uuid": "GPU-0", "name": "NVIDIA H100", "memory_bytes": 80 * GIB, "used_bytes": 0}
FOLDER = {"path": "runs", "filesystem": "ext4", "free_bytes": 100 * GIB}
HOST = {"cpu_cores": 64, "memory_bytes": 512 * GIB, "shm_bytes": 64 * GIB, "open_files": 65536}


def links(n, link="NV18"):
    return {f"GPU{a}": {f"GPU{b}": "X" if a == b else link for b in range(n)} for a in range(n)}


def machine(n=4, **changes):
    """A machine of n GPUs to which nothing is wrong, but for the changes; those of `host` are added to its own."""
    host = {**HOST, "cache_dir": FOLDER, "checkpoint_dir": FOLDER, **changes.pop("host", {})}
    facts = {
        "platform": "gpu",
        "num_devices": n,
        "local_devices": n,
        "processes": 1,
        "devices": [{**ROW, "id": i} for i in range(n)],
        "environment": {},
        "gpus": [{**GPU, "index": i} for i in range(n)],
        "gpu_processes": [],
        "topology": links(n),
        "host": host,
    }
    return {**facts, **changes}


def warnings(facts):
    return [finding["text"] for finding in advise(facts) if not finding["ok"]]


def test_a_good_machine_is_told_so():
    findings = advise(machine())
    assert not warnings(machine())
    texts = " / ".join(finding["text"] for finding in findings)
    for part in (
        "all 4 devices are of one kind",
        "all 4 GPUs of this machine are used",
        "no other process is on the GPUs",
        "joined by NVLink",
        "76.0 of 80.0 GiB of each GPU are reserved",
        "4 times as many images",
        "64 CPU cores prepare data for 4 devices",
    ):
        assert part in texts


def test_one_device_alone_needs_no_word_about_others():
    texts = [finding["text"] for finding in advise(machine(1))]
    assert not [text for text in texts if "NVLink" in text or "one kind" in text or "as many images" in text]


def test_without_nvidia_smi_nothing_is_claimed():
    facts = machine(gpus=None, gpu_processes=None, topology=None)
    texts = " / ".join(finding["text"] for finding in advise(facts))
    assert "NVLink" not in texts
    assert "no other process" not in texts
    assert not warnings(facts)


PROCESS = {"gpu": 2, "pid": 77, "name": "python", "used_bytes": 5 * GIB}
CASES = {
    "the devices differ (NVIDIA H100, NVIDIA A100): the slowest": {
        "devices": [ROW, {**ROW, "kind": "NVIDIA A100"}] * 2
    },
    "4 GPUs are in this machine, 1 of them used: CUDA_VISIBLE_DEVICES=0 hides some": {
        "num_devices": 1,
        "environment": {"CUDA_VISIBLE_DEVICES": "0"},
    },
    "4 GPUs are in this machine, 2 of them used: as --gpus or --num_devices asks": {"num_devices": 2},
    "4 GPUs are in this machine, 0 of them used: --platform cpu or JAX_PLATFORMS asks": {
        "platform": "cpu",
        "num_devices": 1,
        "local_devices": 1,
    },
    "GPU 2 is in use by process 77 (python, 5.0 GiB)": {"gpu_processes": [PROCESS]},
    "GPU 0 has 20.0 GiB in use by a process that cannot be seen from here": {
        "gpus": [{**GPU, "used_bytes": 20 * GIB}] + [GPU] * 3
    },
    "no NVLink between GPU0 and GPU1 (SYS), GPU0 and GPU2 (SYS), GPU0 and GPU3 (SYS) and 3 more pairs": {
        "topology": links(4, "SYS")
    },
    "NCCL_P2P_DISABLE is set": {"environment": {"NCCL_P2P_DISABLE": "1"}},
    "XLA_PYTHON_CLIENT_PREALLOCATE is off": {"environment": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}},
    "XLA_PYTHON_CLIENT_ALLOCATOR=platform": {"environment": {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}},
    "LD_LIBRARY_PATH names a CUDA": {"environment": {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}},
    "6 CPU cores prepare data for 4 devices: fewer than 2": {"host": {"cpu_cores": 6}},
    "/dev/shm has 64 MiB": {"host": {"shm_bytes": 64 * 2**20}},
    "a process may open 256 files, 1024 are safer: type ulimit -n 1024": {"host": {"open_files": 256}},
    "--checkpoint_dir runs (checkpoints) is on nfs4": {"host": {"checkpoint_dir": {**FOLDER, "filesystem": "nfs4"}}},
    "--cache_dir runs (generated data and compiled programs) has 0.5 GiB free": {
        "host": {"cache_dir": {**FOLDER, "free_bytes": GIB / 2}}
    },
}


@pytest.mark.parametrize("sentence", CASES)
def test_what_should_be_seen_to_is_warned_of(sentence):
    found = [text for text in warnings(machine(**CASES[sentence])) if text.startswith(sentence)]
    assert len(found) == 1


def test_the_processes_of_a_job_are_no_strangers():
    assert not warnings(machine(processes=2, gpu_processes=[PROCESS]))


def test_switches_that_are_off_are_no_cause_for_a_warning():
    environment = {"NCCL_P2P_DISABLE": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "true", "LD_LIBRARY_PATH": "lib"}
    assert not warnings(machine(environment=environment))


def test_little_reserved_memory_names_the_flag_for_more():
    facts = machine(devices=[{**ROW, "memory_bytes": 60 * GIB}] * 4)
    assert any("--mem_fraction 0.95 reserves more" in finding["text"] for finding in advise(facts))


def test_simulated_devices_are_no_gain():
    facts = machine(platform="cpu", gpus=None, gpu_processes=None, topology=None, host={"cpu_cores": 2})
    assert warnings(facts) == ["4 simulated devices share 2 CPU cores: good for tests, no gain in speed"]


def test_more_than_eight_devices_need_more_files():
    assert "ulimit -n 4096" in warnings(machine(16, host={"open_files": 1024}))[0]
    assert not warnings(machine(8, host={"open_files": 1024}))
