"""Evaluation during a run, and what the model answered: collected on the way, looked into when the run ends."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np

from cssm.data.pipeline import Source, eval_batches
from cssm.engine import Engine
from cssm.report.examined import Examined, Sample
from cssm.step import Totals, make_eval_step
from parallel import devices as par
from parallel import job

SAMPLES = 12  # of the right ones, and of the wrong ones


class Evaluation:
    """Evaluates splits on the devices of a run; compiled once. beat: called after each batch."""

    def __init__(self, engine: Engine, beat: Callable[[], None]) -> None:
        self.setup, self.beat = engine.setup, beat
        self.own_share, self.no_sums = engine.own_share, engine.no_sums
        setup = engine.setup
        self.step = par.spmd(make_eval_step(setup.step_model, setup.strategy, setup.config), setup.devices)

    def run(self, split: str, params: Any, batch_stats: Any, at_step: int) -> "tuple[Totals, Answers]":
        """Every example of the split once, whatever the number of devices. All processes must call it."""
        setup, sums = self.setup, self.no_sums
        batch_size = setup.batching.batch_size * setup.batching.devices
        answers = Answers(split, at_step, batch_size)
        workers = setup.config.num_workers or 0
        ragged = eval_batches(setup.sources[split], batch_size, workers=workers, **self.own_share)
        padded = (par.pad_and_mask(batch, batch_size // jax.process_count()) for batch in ragged)
        with closing(par.prefetch_to_device(padded, setup.devices, setup.config.prefetch)) as batches:
            for batch in batches:
                sums, given = self.step(params, batch_stats, sums, batch)
                answers.add(batch, given)
                self.beat()
        return Totals.of(sums, setup.devices), answers


class Answers:
    """Of one evaluation. Arrays stay where they are until `examine` asks for them: an evaluation waits for nothing.

    batch_size: examples of a batch of all processes together.
    """

    def __init__(self, split: str, step: int, batch_size: int) -> None:
        self.split, self.step, self.batch_size = split, step, batch_size
        self._batches: list[dict[str, Any]] = []

    def add(self, batch: dict[str, Any], given: dict[str, Any]) -> None:
        """One batch {label, mask, ...} with what the evaluation step gave for it, each [D, b]."""
        self._batches.append({"label": batch["label"], "mask": batch["mask"], **given})

    def examine(self, source: Source, classes: Sequence[str] = ()) -> Examined:
        """Count and choose. All processes must call it; samples are from the first one's part of the examples.

        source: of the split. classes: names of the labels, their numbers where there are none.
        """
        rows = [_unpadded(batch) for batch in self._batches]
        labels, answers = (np.concatenate([row[name] for row in rows]) for name in ("label", "answer"))
        counts = np.zeros((source.num_classes,) * 2, np.int64)
        np.add.at(counts, (labels, answers), 1)
        # Pairs that occur, which are few where classes are many.
        pairs = [[int(i), int(j), int(counts[i, j])] for i, j in np.argwhere(counts)]
        confusion = np.zeros_like(counts)
        for i, j, count in (pair for part in job.gather("answers", pairs) for pair in part):
            confusion[i, j] += count
        names = tuple(classes) or tuple(map(str, range(source.num_classes)))
        right, wrong = self._samples(source, rows) if jax.process_index() == 0 else ((), ())
        return Examined(self.split, self.step, confusion, names, right, wrong)

    def _samples(self, source: Source, rows: Sequence[dict[str, np.ndarray]]) -> tuple[tuple[Sample, ...], ...]:
        """(right, wrong). A batch in which something could not be read is passed over: which its rows are is not
        known.
        """
        found = []
        own = self.batch_size // jax.process_count()
        for number, row in enumerate(rows):
            start = number * self.batch_size
            if len(row["label"]) == min(max(len(source) - start, 0), own):
                values = zip(row["label"].tolist(), row["answer"].tolist(), row["confidence"].tolist(), strict=True)
                found += [(start + i, *value) for i, value in enumerate(values)]
        right = [entry for entry in found if entry[1] == entry[2]]
        wrong = sorted((entry for entry in found if entry[1] != entry[2]), key=lambda entry: -entry[3])
        spread = [right[i] for i in sorted(set(np.linspace(0, len(right) - 1, SAMPLES).astype(int)))] if right else []
        return tuple(tuple(_sample(source, *entry) for entry in part) for part in (spread, wrong[:SAMPLES]))


def _unpadded(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    host = {name: np.ravel(value) for name, value in jax.device_get(batch).items()}
    real = host.pop("mask") > 0
    return {name: value[real] for name, value in host.items()}


def _sample(source: Source, index: int, label: int, answer: int, confidence: float) -> Sample:
    (image,), _ = source.gather(np.array([index], np.int64))
    image = image[len(image) // 2] if image.ndim == 4 else image
    return Sample(np.asarray(image), label, answer, confidence)
