"""Settings of the verb bench."""

import dataclasses
from functools import partial

from cssm.knobs import knob
from cssm.settings.data import FOLDERS

# What takes steps, and so has devices; data alone has none.
TAKES_STEPS = {"input": ("pipeline", "resident")}

_ATTENTION = {"arch": ("baseline",), "stem_mode": ("patch",), "optimizer": ("adamw",), "shard": ("none",)}

_bench = partial(knob, group="bench", resume="fresh", verbs=("bench",))


@dataclasses.dataclass(frozen=True)
class MeasuringSettings:
    """What a benchmark measures besides what the settings of training say."""

    # fmt: off
    devices: str | None = _bench(None, "numbers of devices to measure on, such as 1,2,4", applies=TAKES_STEPS,
        unset="all in one row")
    batch_sizes: str | None = _bench(None, "a row for each of these, in place of batch_size, such as 16,32,64; stops "
        "where memory runs out", unset="batch_size alone")
    scaling: str = _bench("weak", "with more devices keep the batch of each (weak), or of all together (strong)",
        choices=("weak", "strong"), applies=TAKES_STEPS)
    steps: int = _bench(20, "steps that are timed, once one by one and once running ahead", bounds="[2,)")
    input: str = _bench("pipeline", "where batches come from: the data set as in training, or one batch of noise that "
        "stays on the devices; data: time the data set alone, without a model",
        choices=("pipeline", "resident", "data"))
    worker_counts: str | None = _bench(None, "a row for each of these, in place of num_workers, such as 0,1,2,4",
        applies={"input": ("data",)}, unset="num_workers alone")
    peer: str = _bench("none", "time the same in PyTorch beside each row: the attention model, or the data set",
        choices=("none", "torch"), applies=({**TAKES_STEPS, **_ATTENTION}, {"input": ("data",), "dataset": FOLDERS}))
    output: str | None = _bench(None, "of bench: folder for bench.json and bench.md; of compare: HTML page to write",
        verbs=("bench", "compare"), unset="checkpoint_dir/TIME_bench_ARCH_CSSM; no page")
    # fmt: on
