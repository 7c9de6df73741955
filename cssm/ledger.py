"""What a benchmark leaves: its rows with all that they depend on, as bench.json and as a table in bench.md."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cssm import __version__
from cssm.config import Config, applicable
from cssm.markdown import table
from cssm.report.events import jsonable
from cssm.waiting import MUCH, advice, waited

Row = dict[str, Any]
SCHEMA = 1
# What is not in the table is of the program alone, or follows from the rest.
COLUMNS: dict[str, tuple[str, Callable[[Row], str | None]]] = {
    "program": ("program", lambda row: row["program"]),
    "num_workers": ("workers", lambda row: f"{row['num_workers']}"),
    "devices": ("devices", lambda row: f"{row['devices']}"),
    "batch_size": ("batch_size", lambda row: f"{row['batch_size']:,}"),
    "effective_batch": ("images a step", lambda row: f"{row['effective_batch']:,}"),
    "step_ms": ("step ms", lambda row: f"{row['step_ms']:.2f}"),
    "step_ms_quartiles": ("quartiles", lambda row: " to ".join(f"{ms:.2f}" for ms in row["step_ms_quartiles"])),
    "images_per_s": ("images/s", lambda row: f"{row['images_per_s']:,.0f}"),
    "speedup": ("speed-up", lambda row: f"{row['speedup']:.2f}"),
    "efficiency": ("efficiency", lambda row: f"{row['efficiency']:.1%}"),
    "data_wait_ms": ("data wait ms", lambda row: f"{row['data_wait_ms']:.2f}"),
    "peak_bytes_per_device": ("peak GiB", lambda row: f"{row['peak_bytes_per_device'] / 2**30:.2f}"),
    "mfu": ("MFU", lambda row: f"{row['mfu']:.1%}"),
    "ratio_to_peer": ("ratio to torch", lambda row: f"{row['ratio_to_peer']:.2f}"),
}
ONLY_BESIDE_A_PEER = ("program", "ratio_to_peer")
LEGEND = """\
step ms: median and quartiles of steps that are waited for one by one, without the wait for data. images/s and data
wait: of as many steps with the host running ahead, as in training; log lines, evaluations and checkpoints are not in
it. speed-up and efficiency: in images/s, relative to the first number of devices. peak: of the process that measured
the row, its compiler included. MFU: FLOPs of the forward and the backward pass, as counted from the program (without
what is computed again, and without the update), over what the card's data sheet states for products of matrices. A
dash: not told."""

INPUT_LEGEND = """\
images/s: batches of training taken as fast as the host makes them, without a model or a device. workers: threads of
cssm, processes of torch; 0: none but the one that takes the batches. speed-up: relative to the first number of workers.
torch decodes every JPEG in full, cssm at 1/2, 1/4 or 1/8 where that is enough for the crop."""


class Ledger:
    """Writes both files anew with every row. facts: from cssm.measure.survey; command: as it was typed."""

    def __init__(self, directory: Path, config: Config, facts: dict[str, Any], command: str):
        self.directory, self.rows, self.notes, self._told_waiting = directory, [], [], False
        kinds = dict.fromkeys(device["kind"] for device in facts["devices"])
        self.head: dict[str, Any] = {
            "schema": SCHEMA,
            "command": command,
            "commit": commit(Path(__file__).parents[1]),
            "card": ", ".join(kinds),
            "platform": facts["platform"],
            "visible_devices": facts["num_devices"],
            "host": {"cpu": cpu_model(), **{name: facts["host"][name] for name in ("cpu_cores", "memory_bytes")}},
            "versions": {"cssm": __version__, **facts["versions"]},
            "scaling": config.scaling,
            "steps": config.steps,
            "input": config.input,
            "config": applicable(config),
        }

    def add(self, row: Row) -> Row:
        """Keep the row, with its speedup and efficiency, and write the files; returns it as it is kept."""
        alike = "batch_size" if self.head["scaling"] == "weak" else "effective_batch"
        first = next((old for old in self.rows if all(old[n] == row[n] for n in ("program", alike))), row)
        row["speedup"] = row["images_per_s"] / first["images_per_s"]
        if "devices" in row:
            row["efficiency"] = row["speedup"] * first["devices"] / row["devices"]
        self.rows.append(row)
        self._note_waiting(row)
        self._write()
        return row

    def _note_waiting(self, row: Row) -> None:
        """Once, where a row waited much for data."""
        if row.get("data_wait_ms") is None:
            return
        share = row["data_wait_ms"] * row["images_per_s"] / (1e3 * row["effective_batch"])
        if share > MUCH and not self._told_waiting:
            self._told_waiting = True
            how = advice(self.head["config"], self.head["host"]["cpu_cores"])
            self.notes.append(
                f"in the row of {row['devices']} devices, batch_size {row['batch_size']}, {waited(share)}: {how}"
            )

    def note(self, text: str) -> None:
        """A sentence below the table."""
        self.notes.append(text)
        self._write()

    def sentence(self, row: Row) -> str:
        """A row on a line."""
        if "num_workers" in row:
            return (
                f"{row['program']} with {row['num_workers']} workers, batch_size {row['batch_size']:,}: "
                f"{row['images_per_s']:,.0f} images/s"
            )
        devices = "1 device" if row["devices"] == 1 else f"{row['devices']} devices"
        return (
            f"{row['program']} on {devices}, batch_size {row['batch_size']:,}: {row['images_per_s']:,.0f} images/s, "
            f"{row['step_ms']:.2f} ms a step"
        )

    def lines(self) -> list[str]:
        """The table, and what is to be said about it."""
        several = any(row["program"] != "cssm" for row in self.rows)
        known = [name for name in COLUMNS if any(name in row for row in self.rows)]
        chosen = [name for name in known if several or name not in ONLY_BESIDE_A_PEER]
        cells = [[_cell(row, name) for name in chosen] for row in self.rows]
        text = table([[COLUMNS[name][0] for name in chosen], *cells], left=1 if several else 0)
        return [*text.splitlines(), *(line for note in self.notes for line in ("", f"note: {note}"))]

    def _write(self) -> None:
        everything = jsonable(self.head | {"rows": self.rows, "notes": self.notes})
        (self.directory / "bench.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
        (self.directory / "bench.md").write_text("\n".join(self._page()) + "\n", encoding="utf-8")

    def _page(self) -> list[str]:
        head = self.head
        versions = ", ".join(f"{name} {number}" for name, number in head["versions"].items())
        return [
            "# Benchmark",
            "",
            f"    {head['command']}",
            "",
            f"{head['visible_devices']} x {head['card']} ({head['platform']}), {head['host']['cpu_cores']} cores of "
            f"{head['host']['cpu'] or 'a CPU'}; "
            f"commit {head['commit'] or 'unknown'}; {versions}.",
            f"{head['steps']} batches of {head['config']['dataset']}, prefetch {head['config']['prefetch']}, no steps."
            if head["input"] == "data"
            else f"Input: {head['input']}; scaling: {head['scaling']}; {head['steps']} steps timed one by one, and as "
            f"many running ahead.",
            "",
            *self.lines(),
            "",
            INPUT_LEGEND if head["input"] == "data" else LEGEND,
        ]


def commit(root: Path) -> str | None:
    """Of the checkout at root, "-dirty" behind it where tracked files were changed; None where it is no checkout."""

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top) != root.resolve():  # an installed package may lie within another checkout
        return None
    return git("describe", "--always", "--abbrev=7", "--dirty", "--exclude=*")


def cpu_model() -> str | None:
    """Of this machine, where the system tells."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else None


def _cell(row: Row, name: str) -> str:
    return "-" if row.get(name) is None else COLUMNS[name][1](row) or "-"
