"""The table of parameters, and the lines about cost."""

import io

import pytest
from rich.console import Console

from cssm.report import Reporter
from cssm.report.costs import cost_lines, memory_lines, parameter_table, totals_line


def module(name, complex_params=0, **shapes):
    number = 1
    for shape in shapes.values():
        for side in shape:
            number *= side if isinstance(side, int) else 1
    return {"module": name, "shapes": shapes, "params": number, "complex_params": complex_params}


MODULES = [
    module("stem/conv", kernel=[3, 3, 1, 20]),
    module("positions", table=[4, 4, 20]),
    *(module(f"block_{i}/{name}", kernel=[20, width]) for i in range(3) for name, width in (("up", 5), ("down", 7))),
    module("block_3/up", kernel=[20, 6]),
    module("block_3/down", kernel=[20, 7]),
    module("spectrum", 40, k=[10, 4, "complex"]),
    module("head", scale=[]),
]
TOTAL = 180 + 320 + 3 * 240 + 260 + 40 + 1

FACTS = {
    "device_table": [{"id": i, "kind": "x", "platform": "gpu", "process": 0, "memory_bytes": 2**34} for i in (0, 1)],
    "devices": 2, "batch_size": 32, "grad_accum": 1, "effective_batch": 64, "shard": "none", "arch": "vit",
    "cssm": "gdn", "dataset": "digits", "image_shape": [8, 8, 1], "train_examples": 5, "val_examples": 4,
    "test_examples": 3, "num_params": TOTAL, "num_complex_params": 40, "modules": MODULES, "flops_per_image": 1.5e6,
    "train_flops_per_image": 4.5e6, "total_steps": 1200, "steps_per_epoch": 40, "parameter_bytes": 2 * 2**20,
    "gradient_bytes": 2 * 2**20, "optimizer_bytes": 4 * 2**20, "average_bytes": 0, "activation_bytes": 3 * 2**30,
    "batch_bytes": 1536, "total_bytes": 3 * 2**30 + 8 * 2**20 + 1536,
}  # fmt: skip


def rendered(width: int) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(parameter_table(MODULES))
    return [line.split() for line in console.file.getvalue().splitlines() if line.strip()]


def test_parts_that_are_alike_are_one_and_all_add_up():
    rows = rendered(100)
    assert ["block_0..2", "3", "alike,", "of", "which", "each", "has", "720", f"{720 / TOTAL:.1%}"] in rows
    assert ["up", "kernel", "20x5", "3", "x", "100", f"{300 / TOTAL:.1%}"] in rows
    assert ["block_3", "260", f"{260 / TOTAL:.1%}"] in rows, "which has another width"
    assert ["up", "kernel", "20x6", "120", f"{120 / TOTAL:.1%}"] in rows
    assert ["positions", "table", "4x4x20", "320", f"{320 / TOTAL:.1%}"] in rows
    assert ["spectrum", "k", "10x4", "complex", "40", f"{40 / TOTAL:.1%}"] in rows
    assert ["head", "scale", "scalar", "1", "0.1%"] in rows
    assert rows[-1] == ["total", f"{TOTAL:,}", "100.0%"]
    order = [row[0] for row in rows]
    assert order.index("stem") < order.index("positions") < order.index("block_0..2") < order.index("head")


@pytest.mark.parametrize("width", [30, 40, 60])
def test_a_narrow_table_keeps_its_numbers(width):
    words = [word for row in rendered(width) for word in row]
    assert f"{TOTAL:,}" in words and "720" in words and "100.0%" in words


def test_costs_in_words():
    assert cost_lines(FACTS) == [
        f"complex parameters: 40 of {TOTAL:,}; each counts once and takes 8 bytes",
        "FLOPs per image: 1.5 M forward, 4.5 M forward and backward",
        "steps: 1,200, 40 an epoch",
    ]
    assert cost_lines({**FACTS, "step": 300})[-1] == "steps: 1,200, 40 an epoch, going on from step 300"
    rest = {**FACTS, "num_complex_params": 0, "train_flops_per_image": None}
    assert cost_lines(rest) == ["steps: 1,200, 40 an epoch"]


def test_memory_in_words():
    assert memory_lines(FACTS) == [
        "memory of each device: about 3.0 GiB of 16.0 GiB",
        "  parameters: 2.0 MiB",
        "  gradients: 2.0 MiB",
        "  optimizer state: 4.0 MiB",
        "  activations: 3.0 GiB of 32 images, estimated",
        "  batches made ahead: 1.5 KiB",
    ]
    assert "  optimizer state: 4.0 MiB, one of 2 parts" in memory_lines({**FACTS, "shard": "optimizer"})
    split = memory_lines({**FACTS, "shard": "params", "average_bytes": 512})
    assert [line.endswith("one of 2 parts") for line in split[1:5]] == [True, True, True, False]
    assert "  averaged parameters: 0.5 KiB" in split
    assert memory_lines({**FACTS, "total_bytes": 2**35})[0] == (
        "memory of each device: about 32.0 GiB of 16.0 GiB, more than it has"
    )
    unknown = {**FACTS, "device_table": [{**row, "memory_bytes": None} for row in FACTS["device_table"]]}
    assert memory_lines(unknown)[0] == "memory of each device: about 3.0 GiB"


def test_a_rehearsal_is_a_banner_a_table_and_costs_or_a_line(capsys):
    totals = f"{TOTAL:,} parameters, 1.5 MFLOPs per image, about 3.0 GiB on each device"
    assert totals_line(FACTS) == totals
    with Reporter(None, quiet=True) as report:
        report.rehearsal(FACTS)
    assert capsys.readouterr().out == totals + "\n"
    with Reporter(None) as report:
        report.rehearsal(FACTS)
    out = capsys.readouterr().out
    places = [out.index(text) for text in ("DEVICE CONFIGURATION", "effective batch 64", "block_0..2", "COST", "steps")]
    assert places == sorted(places)
    assert out.endswith("dry run: no step was taken, nothing was written\n")
