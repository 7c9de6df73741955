"""What takes steps: the same ones as the halves of a step by hand, some of them ahead of the devices."""

import itertools
from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import pytest

from cssm import engine as module
from cssm.config import resolve
from cssm.engine import Engine
from cssm.meter import Meter
from cssm.report import Reporter
from cssm.runs import Run
from cssm.setup import set_up
from cssm.step import Totals
from parallel import devices as par

TINY = {"cssm": "gated", "embed_dim": 4, "image_size": 8, "kernel_size": 3, "seq_len": 2, "max_train_examples": 40}
TINY |= {"max_eval_examples": 21, "global_batch_size": 8, "epochs": 1}


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("run"), resolve(TINY, {}), resumed=False)
    with Reporter(None, primary=False) as silent:
        return set_up(run, jax.devices()[:2], silent)


@pytest.fixture
def engine(setup):
    engine = Engine(setup, Meter())
    engine.initialise()
    return engine


def test_every_batch_makes_a_step_and_the_window_sums_them(engine):
    with closing(engine.batches(1, 3)) as batches:
        engine.take_first(engine.next_of(batches))
        first = Totals.of(engine.window, engine.setup.devices)
        for _ in range(2):
            engine.take(engine.next_of(batches))
    all_three = Totals.of(engine.window, engine.setup.devices)
    assert (first.steps, first.count, all_three.steps, all_three.count) == (1, 8, 3, 24)
    assert engine.taken == int(par.unreplicate(engine.state.step)) == 3
    engine.reset()
    assert Totals.of(engine.window, engine.setup.devices).count == 0
    assert engine.meter.seconds["compile"] > 0 and "data_wait" in engine.meter.seconds


def test_a_fresh_state_is_drawn_by_a_gpus_kernel(setup, monkeypatch):
    """Without it the program of a fresh state takes nearly as long to compile as that of a step."""
    drawn = []
    monkeypatch.setattr(
        par, "spmd", lambda fn, devices: lambda index: drawn.append(jax.config.values[par.DRAWN_BY_KERNEL])
    )
    module.fresh_state(setup)
    assert drawn == [True]


def test_threads_and_batches_made_ahead_change_no_loss(engine, setup):
    """The same losses, to the bit, from one program; 10 steps are two epochs."""
    fresh, runs = jax.device_get(engine.state), set()
    for prefetch, workers in itertools.product((0, 2, 8), (0, 2)):
        config = replace(setup.config, prefetch=prefetch, num_workers=workers)
        engine.setup = replace(setup, run=replace(setup.run, config=config))
        engine.state, losses = par.per_device(fresh, setup.devices), []
        with closing(engine.batches(1, 10)) as batches:
            for batch in batches:
                engine.reset()
                engine.take(batch)
                losses.append(Totals.of(engine.window, setup.devices).loss)
        runs.add(tuple(losses))
    assert len(runs) == 1 and len(set(losses)) == 10


def test_the_host_is_no_more_than_so_many_steps_ahead(engine, monkeypatch):
    waited = []

    class Sums:
        def __init__(self, number):
            self.number, self.steps = number, self

        def block_until_ready(self):
            waited.append(self.number)

    def program(state, window, batch):
        return state, Sums(batch)

    engine.program = program
    for number in range(7):
        engine.take(number)
        assert waited == list(range(number + 1 - module.STEPS_AHEAD)), "the oldest first, and none too early"


def test_noise_has_the_form_of_the_batches_that_training_takes(engine):
    with closing(engine.batches(1, 1)) as batches:
        real = next(batches)
    noise = engine.random_batch()
    form = lambda batch: {name: (x.shape, x.dtype, x.sharding) for name, x in batch.items()}
    assert form(noise) == form(real)
    assert len(np.unique(noise["image"])) > 100 and set(np.unique(noise["label"])) <= set(range(10))
    shapes = engine.setup.batch_shapes(4)
    assert {name: x.shape[1:] for name, x in real.items()} == {name: x.shape for name, x in shapes.items()}
