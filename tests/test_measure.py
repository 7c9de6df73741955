"""A row of a benchmark: which steps are taken and timed, what is counted, and a lack of memory as an answer."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import cast

import jax
import pytest

from cssm import measure as module
from cssm.config import resolve
from cssm.engine import Engine
from cssm.measure import measure, model_flops, survey
from cssm.report import Reporter
from cssm.runs import Run
from cssm.setup import set_up

TINY = {"cssm": "gated", "embed_dim": 4, "image_size": 8, "kernel_size": 3, "seq_len": 2, "max_train_examples": 40}
TINY |= {"batch_size": 4, "steps": 6, "num_devices": 2, "quiet": True, "compile_cache": False}


@pytest.fixture
def steps(monkeypatch):
    """Of each step that is taken: on how many devices, whether its batch is the one before, and when it is waited for.

    Steps take no time and compute nothing here, but the clock: each takes 0.5 s until it is waited for.
    """
    taken = []
    clock = SimpleNamespace(now=0.0)

    def take(self, batch):
        taken.append({"batch": id(batch), "waited": False})
        clock.now += 0.5
        self.taken += 1

    def wait(self):
        if taken:
            taken[-1]["waited"] = True

    monkeypatch.setattr(Engine, "take", take)
    monkeypatch.setattr(Engine, "wait", wait)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return taken


def made(tmp_path, **settings):
    config = resolve({**TINY, **settings}, {})
    devices = jax.devices()[: config.num_devices]
    with Reporter(None, primary=False) as silent:
        return set_up(Run(tmp_path, config, resumed=False), devices, silent, load=False)


@pytest.mark.parametrize("input_, batches", [("pipeline", 17), ("resident", 1)])
def test_the_schedule_is_burn_in_then_one_by_one_then_ahead(steps, monkeypatch, input_, batches):
    kept = []  # so that no two batches are of one address
    for name in ("batches", "random_batch"):
        original = getattr(Engine, name)
        monkeypatch.setattr(Engine, name, lambda self, *a, _original=original: kept_in(kept, _original(self, *a)))
    monkeypatch.setattr(module.Totals, "of", lambda *_: SimpleNamespace(means={"loss": 1.5}, nonfinite=0))
    begun = []
    monkeypatch.setattr(Engine, "reset", lambda self: begun.append(len(steps)))
    row = measure(resolve({**TINY, "input": input_}, {}), speak=False)
    assert begun == [11], "the loss is that of the steps whose rate is told"
    assert [step["waited"] for step in steps] == [True] * 11 + [False] * 5 + [True], (
        "5 and 6 waited for, then 6 at once"
    )
    assert len({step["batch"] for step in steps}) == batches
    assert (row["devices"], row["batch_size"], row["grad_accum"], row["effective_batch"]) == (2, 4, 1, 8)
    assert (row["step_ms"], row["step_ms_quartiles"], row["loss"]) == (500.0, [500.0, 500.0], 1.5)
    assert row["images_per_s"] > 0 and row["data_wait_ms"] >= 0
    assert row["peak_bytes_per_device"] is row["mfu"] is None, "a CPU does not tell the one, the other is not known"


def kept_in(kept, made_):
    """The batch, or those of a generator, each of them kept."""
    if isinstance(made_, dict):
        kept.append(made_)
        return made_

    def every():
        for batch in made_:
            kept.append(batch)
            yield batch

    return every()


def test_real_steps_are_timed(tmp_path):
    """Nothing stands in for anything; the rate is that of the second half, by the clock of training."""
    row = measure(resolve({**TINY, "steps": 3, "num_devices": 1}, {}), speak=False)
    low, high = row["step_ms_quartiles"]
    assert 0 < low <= row["step_ms"] <= high
    assert row["images_per_s"] > 0 and 0 < row["loss"] < 10 and row["compile_s"] > 0


def test_flops_are_those_of_the_plain_model(tmp_path):
    """A dry run counts the same, except that it counts what is computed again, too."""
    plain, again = (made(tmp_path, cssm="hgru_bi", arch="vit", depth=1, remat=remat) for remat in (False, True))
    count, why = model_flops(plain)
    assert why is None and model_flops(again) == (count, None)
    assert plain.costs(plain.layout)["train_flops_per_image"] == count
    assert again.costs(again.layout)["train_flops_per_image"] > 1.2 * count
    split = made(tmp_path, cssm="hgru_bi", arch="vit", depth=1, shard="params")
    assert model_flops(split) == (count, None)


def test_utilisation_is_the_share_of_the_peak_of_all_devices(steps, monkeypatch):
    monkeypatch.setattr(module.Totals, "of", lambda *_: SimpleNamespace(means={"loss": 1.5}, nonfinite=1))
    monkeypatch.setattr(module, "peak_flops", lambda kind, dtype: 1e9 if (kind, dtype) == ("cpu", "f32") else None)
    row = measure(resolve(TINY, {}), speak=False)
    assert row["mfu"] == pytest.approx(row["flops_per_image"] * row["images_per_s"] / 2e9)
    assert math.isnan(row["loss"]), "one of the steps was not finite"


def test_operations_that_nobody_counted_are_told(tmp_path, monkeypatch):
    def flops_of(jaxpr):
        raise module.UncountedError("x is an operation that is not known here")

    monkeypatch.setattr(module, "flops_of", flops_of)
    assert model_flops(made(tmp_path)) == (None, "x is an operation that is not known here")


def test_a_lack_of_memory_is_an_answer_and_another_error_is_not(monkeypatch):
    def failing(kind):
        def take(self, batch):
            raise jax.errors.JaxRuntimeError(f"{kind}: x")

        return take

    monkeypatch.setattr(Engine, "initialise", lambda self: None)
    monkeypatch.setattr(Engine, "take", failing("RESOURCE_EXHAUSTED"))
    answer = measure(resolve(TINY, {}), speak=False)
    assert answer["out_of_memory"].startswith("out of memory with 4 images per device: type --batch_size 2")
    monkeypatch.setattr(Engine, "take", failing("INTERNAL"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        measure(resolve(TINY, {}), speak=False)


HANGS = f"""
import time
from cssm.config import resolve
from cssm.engine import Engine
from cssm.measure import measure
def take_that_hangs(self, batch):
    time.sleep(120)
Engine.initialise = lambda self: None
Engine.take = take_that_hangs
measure(resolve({{**{TINY}, "num_devices": 1, "stall_timeout": 2}}, {{}}), speak=False)
"""


def test_steps_that_do_not_end_are_ended():
    """A sweep over numbers of devices goes unattended."""
    root = Path(__file__).resolve().parents[1]
    result = subprocess.run([sys.executable, "-c", HANGS], cwd=root, capture_output=True, text=True, timeout=100)
    assert result.returncode == 4 and "take_that_hangs" in result.stderr
    said = "error: nothing has moved for 2 s, the program waits for the compilation and the first step: rows before"
    assert result.stderr.splitlines()[-1].startswith(said), result.stderr


@pytest.mark.parametrize("now, what", [("data_wait", "the batch of step 4"), ("", "the devices, which take step 3 or")])
def test_what_a_row_waits_for_is_named(now, what):
    engine = SimpleNamespace(taken=3, meter=SimpleNamespace(now=now))
    assert module._awaited(cast(Engine, engine)).startswith(what)


@pytest.mark.parametrize("input_", ["pipeline", "resident"])
def test_every_batch_that_is_asked_for_is_a_sign_of_life(steps, monkeypatch, input_):
    monkeypatch.setattr(module.Totals, "of", lambda *_: SimpleNamespace(means={"loss": 1.5}, nonfinite=0))
    beats = []
    monkeypatch.setattr(module.Watchdog, "beat", lambda self: beats.append(len(steps)))
    measure(resolve({**TINY, "input": input_}, {}), speak=False)
    assert beats == list(range(17))


def test_the_survey_tells_what_there_is():
    facts = survey(resolve({}, {}))
    assert (facts["platform"], facts["num_devices"]) == ("cpu", len(jax.devices()))
    assert {"python", "jax", "jaxlib"} <= facts["versions"].keys()
    assert survey(replace(resolve({}, {}), gpus="1,2"))["num_devices"] == 2


def test_the_median_is_that_of_the_steps_alone(steps, monkeypatch):
    """An outlier moves neither it nor the quartiles much."""
    monkeypatch.setattr(module.Totals, "of", lambda *_: SimpleNamespace(means={"loss": 1.5}, nonfinite=0))
    times = [1.0, 2.0, 3.0, 4.0, 5.0, 99.0]
    alone = iter([0.1] * 4 + times)
    monkeypatch.setattr(module, "_take_alone", lambda engine, batches: next(alone))
    row = measure(resolve(TINY, {}), speak=False)
    assert row["step_ms"] == 1e3 * median(times) and row["step_ms_quartiles"] == [2250.0, 4750.0]
