"""What a model has and a run needs, in a table and in lines: the view of a dry run."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from cssm.report.terminal import memory_size, plural, si

Row = Mapping[str, Any]
_NUMBERED = re.compile(r"(.*_)(\d+)")


def parameter_table(modules: Sequence[Row]) -> Table:
    """Every module with its arrays, under the part of the model that it is in; numbered parts that follow each other
    and are alike, such as blocks, are one. modules: see dry_run.modules_of.
    """
    total = sum(row["params"] for row in modules)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("module", "total", overflow="fold")
    table.add_column("arrays", overflow="fold")
    table.add_column("parameters", f"{total:,}", justify="right", no_wrap=True)
    table.add_column("share", "100.0%", justify="right", no_wrap=True)

    def add(name: str, arrays: str, number: int, copies: int, each: bool) -> None:
        count = f"{copies} x {number:,}" if each and copies > 1 else f"{copies * number:,}"
        table.add_row(name, arrays, count, f"{copies * number / total:.1%}")

    for names, rows in _parts(modules):
        label = names[0] if len(names) == 1 else f"{names[0]}..{names[-1].removeprefix(_stem(names[0]))}"
        inside = [row["module"].removeprefix(names[0]).removeprefix("/") for row in rows]
        under = any(inside)
        if under:
            about = f"{len(names)} alike, of which each has" if len(names) > 1 else ""
            add(label, about, sum(row["params"] for row in rows), len(names), each=False)
        for name, row in zip(inside, rows, strict=True):
            arrays = ", ".join(f"{array} {_shape(shape)}" for array, shape in row["shapes"].items())
            add(f"  {name}" if under else label, arrays, row["params"], len(names), each=True)
    return table


def cost_lines(facts: Row) -> list[str]:
    """Complex parameters, FLOPs, steps; facts: see dry_run.dry_run."""
    lines = []
    if number := facts["num_complex_params"]:
        lines.append(f"complex parameters: {number:,} of {facts['num_params']:,}; each counts once and takes 8 bytes")
    if facts["train_flops_per_image"]:
        forward, training = si(facts["flops_per_image"]), si(facts["train_flops_per_image"])
        lines.append(f"FLOPs per image: {forward} forward, {training} forward and backward")
    begins = f", going on from step {facts['step']:,}" if "step" in facts else ""
    return [*lines, f"steps: {facts['total_steps']:,}, {facts['steps_per_epoch']:,} an epoch{begins}"]


def memory_lines(facts: Row) -> list[str]:
    """What each device holds, in all and by kind."""
    limits = [row["memory_bytes"] for row in facts["device_table"] if row["memory_bytes"]]
    of = f" of {memory_size(min(limits))}" if limits else ""
    of += ", more than it has" if limits and facts["total_bytes"] > min(limits) else ""
    lines = [f"memory of each device: about {memory_size(facts['total_bytes'])}{of}"]
    split = {"none": (), "optimizer": ("optimizer",), "params": ("parameter", "gradient", "optimizer")}[facts["shard"]]
    notes = dict.fromkeys(split, f", one of {facts['devices']} parts")
    notes["activation"] = f" of {plural(facts['batch_size'], 'image')}, estimated"
    names = {"parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer state"}
    names |= {"average": "averaged parameters", "activation": "activations", "batch": "batches made ahead"}
    for key, name in names.items():
        if held := facts[f"{key}_bytes"]:
            lines.append(f"  {name}: {memory_size(held)}{notes.get(key, '')}")
    return lines


def totals_line(facts: Row) -> str:
    """All of it in a line."""
    flops = facts["flops_per_image"]
    parts = [plural(facts["num_params"], "parameter")]
    parts += [f"{si(flops)}FLOPs per image"] if flops else []
    return ", ".join([*parts, f"about {memory_size(facts['total_bytes'])} on each device"])


def _shape(shape: Sequence[Any]) -> str:
    *sides, last = shape or ["scalar"]
    return f"{'x'.join(map(str, sides))} complex" if last == "complex" else "x".join(map(str, shape or ["scalar"]))


def _parts(modules: Sequence[Row]) -> Iterator[tuple[list[str], list[Row]]]:
    """(names, rows of the first): the parts of the model, several where they are alike."""
    names: list[str] = []
    first: list[Row] = []
    for part, group in groupby(modules, lambda row: row["module"].split("/")[0]):
        rows = list(group)
        if names and _stem(part) == _stem(names[0]) and _inside(part, rows) == _inside(names[0], first):
            names.append(part)
            continue
        if names:
            yield names, first
        names, first = [part], rows
    if names:
        yield names, first


def _inside(part: str, rows: Sequence[Row]) -> list[tuple[str, Any]]:
    return [(row["module"].removeprefix(part), row["shapes"]) for row in rows]


def _stem(part: str) -> str:
    """A name without its number."""
    found = _NUMBERED.fullmatch(part)
    return found[1] if found else part
