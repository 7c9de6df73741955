"""Numbers in words, and the progress bar: how things look on a terminal."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SMALLEST_BAR = 16
FIGURES = {"loss": "loss {:.4f}", "accuracy": "accuracy {:.4f}", "images_per_s": "{:,.0f} images/s"}
UNIT = re.compile(r"(?<!_per)_(bytes|ms|s)(?=$|_per_)")
LAYOUTS = {
    "none": "parameters are replicated",
    "optimizer": "parameters are replicated, the optimizer's state is split",
    "params": "parameters and the optimizer's state are split",
}
JAX_NAMES = {"gpu": "cuda"}  # of a device: cuda:0 on the gpu backend, cpu:0, tpu:0


def plural(n: int, noun: str) -> str:
    """As 1 device, 2 devices."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def clock(seconds: float) -> str:
    """As 0:07, 12:34 or 3:01:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def gibibytes(n_bytes: float) -> str:
    """As 79.6 GiB."""
    return f"{n_bytes / 2**30:.1f} GiB"


def memory_size(n_bytes: float) -> str:
    """As 61.8 KiB, 12.3 MiB or 1.5 GiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if n_bytes >= 0.95 * unit:
            return f"{n_bytes / unit:.1f} {name}"
    return f"{n_bytes / 2**10:.1f} KiB"


def si(value: float) -> str:
    """Three digits and a prefix: 12.3 M."""
    for prefix in ("", " k", " M", " G"):
        if value < 999.5:
            return f"{value:.3g}{prefix}"
        value /= 1000
    return f"{value:.3g} T"


def in_words(name: str, value: Any) -> str:
    """`compile_s`, 12.34 -> `compile: 12.3 s`: the unit is read from the name."""
    if isinstance(value, Mapping):
        known = [in_words(key, item).replace(": ", " ", 1) for key, item in value.items() if item is not None]
        return f"{name.replace('_', ' ')}: {', '.join(known)}"
    found = UNIT.search(name)
    unit = found[1] if found else ""
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        unit, text = "", str(value)
    elif unit == "bytes":
        text = gibibytes(value)
    elif unit == "s" and value >= 120:
        text = clock(value)
    elif unit:
        text = f"{value:.1f} {unit}"
    else:
        text = f"{value:,}" if isinstance(value, int) else f"{float(value):,.4g}"
    return f"{(UNIT.sub('', name) if unit else name).replace('_', ' ')}: {text}"


def device_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Backend, type and number of devices, and each; rows {id, kind, platform, process, memory_bytes}."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [
        f"Backend: {rows[0]['platform']}",
        f"Device type: {' / '.join(kinds)}",
        f"Number of devices: {len(rows)}",
    ]
    for i, row in enumerate(rows):
        platform = JAX_NAMES.get(row["platform"], row["platform"])
        extras = [row["kind"]] if len(kinds) > 1 else []
        extras += [gibibytes(row["memory_bytes"])] if row["memory_bytes"] else []
        extras += [f"process {row['process']}"] if any(other["process"] for other in rows) else []
        lines.append(f"Device {i}: {platform}:{row['id']}" + (f" ({', '.join(extras)})" if extras else ""))
    if len(kinds) > 1:
        lines.append("These devices differ: the slowest of them sets the pace of every step.")
    return lines


def run_lines(info: Mapping[str, Any]) -> list[str]:
    """Batch arithmetic, model and data; the keys are those of Reporter.banner."""
    devices = info["devices"]
    flops = info["flops_per_image"]
    mixer = f" {info['cssm']}" if info["cssm"] else ""
    sizes = " / ".join(f"{info[f'{split}_examples']:,} {split}" for split in ("train", "val", "test"))
    return [
        f"effective batch {info['effective_batch']} = {info['batch_size']} per device x "
        f"{plural(devices, 'device')} x {info['grad_accum']} accumulation",
        *([f"using jax.pmap: {LAYOUTS[info['shard']]}, each batch is split"] if devices > 1 else []),
        f"model: {info['arch']}{mixer}, {plural(info['num_params'], 'parameter')}"
        + (f", {si(flops)}FLOPs per image" if flops else "")
        + (f", FLOPs not counted ({info['flops_uncounted']})" if "flops_uncounted" in info else ""),
        *_size_lines(info),
        f"data: {info['dataset']}, {sizes}, images {'x'.join(str(n) for n in info['image_shape'])}",
    ]


def _size_lines(info: Mapping[str, Any]) -> list[str]:
    """What --target_params found, where it was given."""
    target, config = info.get("target_params"), info.get("config", {})
    if not target:
        return []
    off = info["num_params"] / target - 1
    found = " and ".join(f"{name} {config[name]}" for name in ("embed_dim", "depth", "dims") if config.get(name))
    return [f"size: {found}, found for --target_params {target:,} ({off:+.1%})"]


class Task:
    """Something that takes a while: how long already and, where that can be counted, how far."""

    def __init__(self, label: str):
        self.label, self.done, self.total = label, 0, 0
        self._start = time.monotonic()

    def count(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def view(self) -> RenderableType:
        """One row: label, seconds, and a bar where there is a count."""
        text = Text(f"{self.label}  {self.seconds():.0f} s", no_wrap=True, overflow="ellipsis")
        if not self.total:
            return text
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(text, ProgressBar(self.total, self.done), Text(f"{self.done:,}/{self.total:,}"))
        return row

    def closing_line(self) -> str:
        what = f"{self.total:,} in " if self.total else ""
        return f"{self.label}: {what}{self.seconds():.1f} s"


class Bar:
    """How far training is, in numbers and as something to draw."""

    def __init__(self, total: int, done: int):
        self.total, self.first, self.step = total, done, done
        self._shown: dict[str, float] = {}
        self._start = time.monotonic()
        self._timed: tuple[int, float] | None = None  # when the first step ended: compilation does not count

    def update(self, step: int, figures: Mapping[str, float | None]) -> None:
        self.step = step
        self._shown |= {name: float(value) for name, value in figures.items() if value is not None}
        self._timed = self._timed or (step, time.monotonic())

    def count(self) -> str:
        return f"{self.step:>{len(str(self.total))}}/{self.total}"

    def figures(self) -> str:
        """What was given last, and the time left once two steps tell it."""
        figures = [text.format(self._shown[name]) for name, text in FIGURES.items() if name in self._shown]
        if self._timed and self._timed[0] < self.step < self.total:
            first, start = self._timed
            step_s = (time.monotonic() - start) / (self.step - first)
            figures.append(f"{clock(step_s * (self.total - self.step))} left")
        return "  ".join(figures)

    def view(self, width: int) -> RenderableType:
        """One row where that fits the width, else the numbers under the bar."""
        figures = self.figures()
        one_row = len(self.count()) + len(figures) + SMALLEST_BAR + 4 <= width
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        last = figures if one_row else f"{self.step / max(self.total, 1):.0%}"
        row.add_row(Text(self.count()), ProgressBar(self.total, self.step), Text(last))
        return row if one_row else Group(row, Text(figures, no_wrap=True, overflow="ellipsis"))

    def closing_line(self) -> str:
        took = clock(time.monotonic() - self._start)
        if self.step == self.total:
            return f"trained {plural(self.total - self.first, 'step')} in {took}"
        return f"stopped at step {self.step:,} of {self.total:,} after {took}"
