"""What a machine has, in lines: the `devices` verb's view of the facts that it gathers."""

from collections.abc import Mapping, Sequence
from typing import Any

from cssm.report.terminal import device_lines, gibibytes

Facts = Mapping[str, Any]


def machine_lines(facts: Facts, rule: str) -> list[str]:
    """Devices, software, host, variables and topology, with a rule between them; facts: see cssm.hardware.gather."""
    parts = [
        [*device_lines(facts["devices"]), *_in_use(facts["devices"])],
        [f"{name}: {version}" for name, version in facts["versions"].items()],
        _host_lines(facts["host"]),
        [f"${name}: {value}" for name, value in facts["environment"].items()],
        topology_lines(facts["topology"]),
    ]
    lines: list[str] = []
    for part in filter(None, parts):
        lines += [rule, *part] if lines else part
    return lines


def topology_lines(links: Mapping[str, Mapping[str, str]] | None) -> list[str]:
    """How the GPUs are linked, as a small table: {GPU0: {GPU0: X, GPU1: NV18}, ...}; None where that is unknown."""
    if not links:
        return ["Topology: unknown, there is no nvidia-smi to ask"]
    width = max(len(text) for row in links.values() for text in [*row, *row.values()])
    header = " ".join(f"{name:>{width}}" for name in links)
    rows = [f"{name:>{width}} {' '.join(f'{row[other]:>{width}}' for other in links)}" for name, row in links.items()]
    return ["Topology (NV: NVLink, PIX to SYS: PCIe, near to far):", f"{'':{width}} {header}", *rows]


def self_test_lines(result: Mapping[str, Any]) -> list[str]:
    """The result of the test of the collectives, or why there is none."""
    if "skipped" in result:
        return [f"Collectives: not tested, {result['skipped']}"]
    if not result["ok"]:
        return [f"Collectives: FAILED, {result['error']}"]
    devices, n_bytes = result["devices"], result["bytes"]
    return [
        "Collectives: right on every device, for real and complex numbers",
        f"Bandwidth: {result['gigabytes_per_s']:.3g} GB/s = {n_bytes / 1e6:,.1f} MB averaged over {devices} devices in "
        f"{result['seconds'] * 1e3:.3g} ms",
        f"Bus bandwidth: {result['bus_gigabytes_per_s']:.3g} GB/s = that x 2 ({devices} - 1) / {devices}, "
        "what each link carries in a ring",
    ]


def advice_lines(advice: Sequence[Mapping[str, Any]], warnings_only: bool = False) -> list[str]:
    """`ok    ...` and `warn  ...`, the warnings last, where they are read."""
    kept = [finding for finding in advice if not (warnings_only and finding["ok"])]
    return [f"{'ok' if f['ok'] else 'warn':<4}  {f['text']}" for f in sorted(kept, key=lambda f: not f["ok"])]


def parity_lines(parity: Mapping[str, Any]) -> list[str]:
    """A row for each model, with the largest differences and the verdict; see cssm.agreement.compare."""
    width = max(len(row["model"]) for row in parity["models"])
    columns = ("parameters", "loss", "gradient")
    lines = [
        f"{parity['steps']} steps of {parity['optimizer']} on 1 device and on {parity['devices']}, the same "
        f"{parity['effective_batch']} images a step; f32, matmul precision {parity['matmul_precision']}",
        f"strategy: --shard {parity['shard']} --sync_backend {parity['sync_backend']}",
        f"{'model':<{width}}  {'  '.join(f'{name:>10}' for name in columns)}",
    ]
    for row in parity["models"]:
        values = "  ".join(f"{row[name]:>10.1e}" for name in columns)
        lines.append(f"{row['model']:<{width}}  {values}  {'PASS' if row['ok'] else 'FAIL'}")
    return [*lines, f"largest relative differences; at most {parity['tolerance']:.0e} passes"]


def _in_use(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    known = [(i, row) for i, row in enumerate(rows) if row["bytes_in_use"] is not None]
    texts = {i: f"{gibibytes(row['bytes_in_use'])} of {gibibytes(row['memory_bytes'])}" for i, row in known}
    if len(texts) > 1 and len(set(texts.values())) == 1:
        return [f"Memory in use: {texts[known[0][0]]} on each"]
    return [f"Memory in use: {', '.join(f'device {i} {text}' for i, text in texts.items())}"] if texts else []


def _host_lines(host: Mapping[str, Any]) -> list[str]:
    lines = [f"CPU cores: {host['cpu_cores']}"]
    lines += [f"Memory: {gibibytes(host['memory_bytes'])}"] if host["memory_bytes"] else []
    lines += [f"/dev/shm: {gibibytes(host['shm_bytes'])}"] if host["shm_bytes"] is not None else []
    lines += [f"Open files: {host['open_files']:,}"] if host["open_files"] is not None else []
    for name, label in (("cache_dir", "Cache"), ("checkpoint_dir", "Checkpoints")):
        folder = host[name]
        on = f"{folder['filesystem']}, " if folder["filesystem"] else ""
        lines.append(f"{label}: {folder['path']} ({on}{gibibytes(folder['free_bytes'])} free)")
    return lines
