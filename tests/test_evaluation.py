"""Evaluation: answers counted once each, on any number of devices, and samples that are what is said of them."""

import jax
import numpy as np
import pytest
from test_engine import TINY
from test_loop import stop_after_two
from test_page import Reader
from test_training import start

from cssm import models
from cssm.config import resolve
from cssm.data.records import ArraySource
from cssm.engine import Engine
from cssm.evaluation import SAMPLES, Answers, Evaluation
from cssm.meter import Meter
from cssm.report import Reporter
from cssm.runs import Run
from cssm.setup import set_up
from cssm.signals import Stopped
from cssm.step import normalise
from parallel import devices as par


@pytest.mark.parametrize("devices", [1, 4])
def test_what_is_counted_is_what_the_model_answers(devices, tmp_path):
    """21 examples, in padded batches of 8, against plain numpy."""
    run = Run(tmp_path, resolve(TINY, {}), resumed=False)
    with Reporter(None, primary=False) as silent:
        setup = set_up(run, jax.devices()[:devices], silent)
    engine, beats = Engine(setup, Meter()), []
    engine.initialise()
    evaluation = Evaluation(engine, lambda: beats.append(1))
    totals, answers = evaluation.run("val", engine.state.params, engine.state.batch_stats, 5)
    images, labels = setup.sources["val"].gather(np.arange(21))
    variables = {"params": par.unreplicate(engine.state.params)}
    logits = np.asarray(jax.jit(models.build(setup.config, 10).apply)(variables, normalise(images)))
    wanted = np.zeros((10, 10), int)
    np.add.at(wanted, (labels, logits.argmax(-1)), 1)
    found = answers.examine(setup.sources["val"])
    np.testing.assert_array_equal(found.confusion, wanted)
    assert (totals.count, totals.correct, len(beats)) == (21, np.trace(wanted), 3)
    assert (found.split, found.step, found.classes) == ("val", 5, tuple("0123456789"))
    chances = np.asarray(jax.nn.softmax(logits))
    for sample in (*found.right, *found.wrong):
        (index,) = (i for i in range(21) if np.array_equal(images[i], sample.image))
        assert (sample.label, sample.answer) == (labels[index], logits[index].argmax())
        assert sample.confidence == pytest.approx(chances[index].max(), rel=1e-4)


def answers_of(labels, answers, confidence, sizes=(8, 8, 8)):
    """In batches of 8, of which so many could be read, padded."""
    found, start = Answers("val", 1, 8), 0
    for size in sizes:
        part = slice(start, start + size)
        rows = {"label": labels[part], "answer": answers[part], "confidence": confidence[part], "mask": np.ones(size)}
        found.add({k: np.pad(rows[k], (0, 8 - size)) for k in ("label", "mask")}, {
            k: np.pad(rows[k], (0, 8 - size)) for k in ("answer", "confidence")
        })  # fmt: skip
        start += size
    return found


def test_samples_are_bounded_and_the_most_confident_mistakes_come_first():
    labels = np.zeros(24, np.int32)
    answers = (np.arange(24) < 18).astype(np.int32)
    confidence = np.linspace(0.5, 0.9, 24).astype(np.float32)
    images = np.arange(24, dtype=np.uint8).reshape(-1, 1, 1, 1, 1) + np.array([0, 100, 200], np.uint8).reshape(
        3, 1, 1, 1
    )
    found = answers_of(labels, answers, confidence).examine(ArraySource(images, labels, 2), ("a", "b"))
    assert [s.image.item() for s in found.wrong] == [100 + i for i in range(17, 17 - SAMPLES, -1)], "the middle frame"
    assert [s.image.item() for s in found.right] == [100 + i for i in range(18, 24)]
    assert found.confusion.tolist() == [[6, 18], [0, 0]] and found.classes == ("a", "b")


def test_a_batch_with_an_unreadable_example_is_counted_and_not_shown():
    """Its rows are no longer known by their number."""
    labels = np.zeros(23, np.int32)
    found = answers_of(labels, labels, np.ones(23, np.float32), (8, 7, 8))
    source = ArraySource(np.arange(24, dtype=np.uint8).reshape(-1, 1, 1, 1), np.zeros(24, np.int32), 2)
    shown = found.examine(source)
    assert shown.confusion[0, 0] == 23
    assert {s.image.item() for s in shown.right} <= {*range(8), *range(16, 24)}


def test_a_run_that_was_stopped_has_a_page_with_its_last_evaluation(tmp_path, monkeypatch):
    stop_after_two(monkeypatch)
    with pytest.raises(Stopped):
        start(tmp_path, "run", eval_every=1)
    texts = Reader((tmp_path / "run" / "report.html").read_text()).texts
    assert any(text.startswith("stopped by SIGTERM after step 2") for text in texts)
    assert any(text.startswith("val split at step 2: ") and " of 21 right" in text for text in texts)
