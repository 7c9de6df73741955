"""What is known of a machine, in lines that fit a terminal."""

from cssm.report.machine import advice_lines, machine_lines, parity_lines, self_test_lines, topology_lines

GIB = 2**30
FOLDER = {"path": "runs", "filesystem": "ext4", "free_bytes": 100 * GIB}
FACTS = {
    "devices": [
        {"id": i, "kind": "NVIDIA H100", "platform": "gpu", "process": 0, "memory_bytes": 60 * GIB, "bytes_in_use": use}
        for i, use in enumerate([0, 3 * GIB])
    ],
    "versions": {"python": "3.11.7", "jax": "0.10.2"},
    "environment": {"NCCL_DEBUG": "INFO"},
    "topology": {"GPU0": {"GPU0": "X", "GPU1": "NV18"}, "GPU1": {"GPU0": "NV18", "GPU1": "X"}},
    "host": {
        "cpu_cores": 32,
        "memory_bytes": 256 * GIB,
        "shm_bytes": None,
        "open_files": 1024,
        "cache_dir": {**FOLDER, "path": "cache", "filesystem": None},
        "checkpoint_dir": FOLDER,
    },
}


def test_a_machine_in_lines():
    assert machine_lines(FACTS, "----") == [
        "Backend: gpu",
        "Device type: NVIDIA H100",
        "Number of devices: 2",
        "Device 0: cuda:0 (60.0 GiB)",
        "Device 1: cuda:1 (60.0 GiB)",
        "Memory in use: device 0 0.0 GiB of 60.0 GiB, device 1 3.0 GiB of 60.0 GiB",
        "----",
        "python: 3.11.7",
        "jax: 0.10.2",
        "----",
        "CPU cores: 32",
        "Memory: 256.0 GiB",
        "Open files: 1,024",
        "Cache: cache (100.0 GiB free)",
        "Checkpoints: runs (ext4, 100.0 GiB free)",
        "----",
        "$NCCL_DEBUG: INFO",
        "----",
        "Topology (NV: NVLink, PIX to SYS: PCIe, near to far):",
        "     GPU0 GPU1",
        "GPU0    X NV18",
        "GPU1 NV18    X",
    ]


def test_what_is_not_known_is_said_or_left_out():
    bare = {**FACTS, "environment": {}, "devices": [{**FACTS["devices"][0], "bytes_in_use": None}]}
    lines = machine_lines(bare, "----")
    assert not [line for line in lines if line.startswith(("Memory in use", "$"))]
    assert lines.count("----") == 3
    alike = machine_lines({**FACTS, "devices": FACTS["devices"][:1] * 4}, "----")
    assert "Memory in use: 0.0 GiB of 60.0 GiB on each" in alike
    assert topology_lines(None) == ["Topology: unknown, there is no nvidia-smi to ask"]


def test_a_topology_of_eight_fits_80_columns():
    names = [f"GPU{i}" for i in range(8)]
    lines = topology_lines({a: {b: "X" if a == b else "NV18" for b in names} for a in names})
    assert max(map(len, lines)) < 80
    assert len(lines) == 10


def test_the_bandwidths_come_with_their_formulas():
    result = {"devices": 4, "bytes": 256_000_000, "seconds": 0.002, "gigabytes_per_s": 128.0,
              "bus_gigabytes_per_s": 192.0, "ok": True}  # fmt: skip
    assert self_test_lines(result)[1:] == [
        "Bandwidth: 128 GB/s = 256.0 MB averaged over 4 devices in 2 ms",
        "Bus bandwidth: 192 GB/s = that x 2 (4 - 1) / 4, what each link carries in a ring",
    ]
    assert self_test_lines({"ok": False, "error": "no"}) == ["Collectives: FAILED, no"]
    assert self_test_lines({"skipped": "as asked"}) == ["Collectives: not tested, as asked"]


def test_warnings_come_last():
    advice = [{"ok": False, "text": "a"}, {"ok": True, "text": "b"}]
    assert advice_lines(advice) == ["ok    b", "warn  a"]
    assert advice_lines(advice, warnings_only=True) == ["warn  a"]


def test_parity_is_a_table():
    row = {"parameters": 1e-7, "loss": 0.0, "gradient": 2e-3}
    parity = {
        "models": [{"model": "a", **row, "ok": False}, {"model": "longer", **row, "ok": True}],
        "steps": 3, "devices": 4, "effective_batch": 8, "optimizer": "SGD", "matmul_precision": "highest",
        "shard": "params", "sync_backend": "auto", "tolerance": 1e-5,
    }  # fmt: skip
    assert parity_lines(parity) == [
        "3 steps of SGD on 1 device and on 4, the same 8 images a step; f32, matmul precision highest",
        "strategy: --shard params --sync_backend auto",
        "model   parameters        loss    gradient",
        "a          1.0e-07     0.0e+00     2.0e-03  FAIL",
        "longer     1.0e-07     0.0e+00     2.0e-03  PASS",
        "largest relative differences; at most 1e-05 passes",
    ]
