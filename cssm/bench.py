"""The verb bench: how fast training is, on which devices, with which batch: a table, and the files that hold it.

Each row is measured in a process of its own (cssm.measure), so that the peak of its memory is its own and nothing of
another row is left on a device. This process uses no device.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from cssm import data, input_rate, peer
from cssm.apart import apart
from cssm.config import Config, UserError
from cssm.data.pipeline import Outline, steps_per_epoch
from cssm.ledger import Ledger
from cssm.measure import BURN_IN, measure, survey
from cssm.report import Reporter
from cssm.report.replaced import check_folder
from cssm.runs import named_by_time, unused_directory
from cssm.setup import load_split
from cssm.stages import numbers
from parallel.devices import resolve_batch

Row = dict[str, Any]
OUT_OF_MEMORY = 3


def bench(config: Config, command: str = "", json_stream: IO[str] | None = None) -> list[Row]:
    """Measure every row that the configuration asks for and write bench.json and bench.md after each; the rows.

    With json_stream one `bench` event a row is all that is printed. Raises UserError for a mistake, before anything
    is measured, and with exit code 3 where memory runs out before there is a row.
    """
    outline = data.outline(config)
    if config.peer != "none":
        if len(outline.image_shape) != 3:
            raise UserError(
                f"--peer torch takes still images, and --dataset {config.dataset} holds clips: leave it out"
            )
        peer.check_installed(input_rate.NEEDED if config.input == "data" else peer.NEEDED)
    facts = apart(survey, config)
    points = input_plan(config, outline) if config.input == "data" else plan(config, facts["num_devices"], outline)
    directory = new_directory(config)
    with Reporter(None, headless_stream=json_stream, quiet=config.quiet) as report:
        ledger = Ledger(directory, config, facts, command)
        why = None

        def record(row: Row) -> None:
            report.event("bench", **ledger.add(row))
            report.line(ledger.sentence(row))

        try:
            if config.input == "data":  # what is generated is made once, and shown
                load_split(config, "train", report)
            for point in points:
                why = _record_rows(point, facts["platform"], outline, json_stream is None, record)
                if why:
                    break
            if why and not ledger.rows:
                raise UserError(why, OUT_OF_MEMORY)
            if why:
                ledger.note(f"{why}; rows after that were not measured")
        finally:
            if not ledger.rows:
                directory.rmdir()
        for text in ("", *ledger.lines()):
            report.line(text)
    return ledger.rows


def plan(config: Config, visible: int, outline: Outline) -> list[Config]:
    """The configuration of every row: batch by batch, and for each the numbers of devices in the order given.

    weak: every device keeps its batch. strong: all together keep that of the first number of devices. Raises UserError
    or DeviceError for what is not there or does not divide.
    """
    counts = numbers(config.devices) if config.devices else [visible]
    sizes = numbers(config.batch_sizes) if config.batch_sizes else [config.batch_size]
    assert counts and sizes, "checked with the configuration"
    if config.scaling == "weak" and config.global_batch_size:
        raise UserError(
            f"--global_batch_size {config.global_batch_size} is that of all devices, which --scaling weak lets grow: "
            f"type --batch_size, or --scaling strong"
        )
    if too_many := [count for count in counts if count > visible]:
        raise UserError(
            f"--devices {config.devices}: {too_many[0]} are not there, type at most {visible} "
            f"(--xla_flags=--xla_force_host_platform_device_count={too_many[0]} simulates them on a CPU)"
        )
    points = []
    for size in sizes:
        first = resolve_batch(counts[0], size, config.global_batch_size, config.grad_accum, 1)
        for count in counts:
            total = first.effective if config.scaling == "strong" else None
            point = replace(
                config,
                devices=None,
                batch_sizes=None,
                num_devices=count,
                gpus=config.gpus and ",".join(config.gpus.split(",")[:count]),
                batch_size=None if total else first.batch_size,
                global_batch_size=total,
                profile=config.profile and str(Path(config.profile, f"{count}_devices_batch_{first.batch_size}")),
            )
            batching = resolve_batch(count, point.batch_size, total, config.grad_accum, 1)
            steps_per_epoch(outline.examples["train"], batching.effective)
            points.append(point)
    return points


def input_plan(config: Config, outline: Outline) -> list[Config]:
    """Of --input data: batch by batch, and for each the numbers of workers in the order given."""
    sizes = numbers(config.batch_sizes) if config.batch_sizes else [config.batch_size]
    counts = numbers(config.worker_counts) if config.worker_counts else [config.num_workers]
    assert counts and sizes, "checked with the configuration"
    points = []
    for size in sizes:
        total = resolve_batch(1, size, config.global_batch_size, config.grad_accum, 1).effective
        steps_per_epoch(outline.examples["train"], total)
        open_ = {"batch_sizes": None, "worker_counts": None, "batch_size": None, "grad_accum": None}
        points += [replace(config, **open_, global_batch_size=total, num_workers=count) for count in counts]
    return points


def new_directory(config: Config) -> Path:
    """Made for the files; UserError where --output names one that holds something."""
    if config.output is None:
        return unused_directory(Path(config.checkpoint_dir), named_by_time("bench", config.arch, config.cell))
    directory = Path(config.output)
    check_folder("--output", directory)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _record_rows(
    point: Config, platform: str, outline: Outline, speak: bool, record: Callable[[Row], None]
) -> str | None:
    """Record a row of ours and, if asked for, the peer's; why there are no more, if there are none.

    Ours is recorded whatever becomes of the peer.
    """
    if point.input == "data":
        row, other = apart(input_rate.measure, point), partial(apart, input_rate.measure_peer, point)
    else:
        row = apart(measure, point, point.profile, speak)
        if why := row.get("out_of_memory"):
            return f"with --devices {point.num_devices}: {why}"
        other = lambda: peer.measure(_task(point, row, platform, outline))
    ours, theirs = {"program": "cssm", **row}, {}
    try:
        theirs = other() if point.peer != "none" else {}
    finally:
        if "images_per_s" in theirs:
            ours["ratio_to_peer"] = row["images_per_s"] / theirs["images_per_s"]
        record(ours)
    if theirs and "out_of_memory" not in theirs:
        record({"program": "torch", **theirs})
    return theirs.get("out_of_memory")


def _task(point: Config, row: Row, platform: str, outline: Outline) -> peer.Task:
    height, width, channels = outline.image_shape
    visible = point.gpus or ",".join(map(str, range(row["devices"])))
    return peer.Task(
        config=point,
        image_shape=(height, width, channels),
        num_classes=outline.num_classes,
        batch_size=row["batch_size"],
        devices=row["devices"],
        indices=tuple(numbers(visible) or ()) if platform == "gpu" else (),
        burn_in=BURN_IN,
    )
