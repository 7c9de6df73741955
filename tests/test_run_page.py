"""report.html: every number that a run told and what it answered, however it ended."""

import io
import re

import numpy as np
import pytest
from PIL import Image
from test_page import Reader
from test_plots import EVENTS
from test_report import INFO

from cssm.report import run_page as module
from cssm.report.examined import Examined, Sample
from cssm.report.run_page import heat_png, pictures, run_page

CONFIG = {"event": "config", **INFO, "total_steps": 30, "config": {"arch": "vit", "data_dir": "<b>&", "gpus": None}}
STEP = {"event": "step", "step": 30, "loss": 0.1, "accuracy": 0.9, "learning_rate": 1e-3, "grad_norm": 2.0,
        "images_per_s": 1234.4, "step_ms": 20.0, "data_wait_ms": 0.5}  # fmt: skip
SUMMARY = {"event": "summary", "step": 30, "test": {"accuracy": 0.9}, "compile_s": 12.34, "goodput": 0.5}


def sample(label, answer, confidence=0.75):
    return Sample(np.full((8, 8, 1), 20 * label, np.uint8), label, answer, confidence)


def examined(classes=3):
    confusion = np.diag(np.arange(1, classes + 1))
    confusion[0, 2], confusion[1, 0] = 7, 3
    names = tuple(f"<{i}$>" for i in range(classes))
    return Examined("test", 30, confusion, names, (sample(1, 1),), (sample(0, 2, 0.99), sample(1, 0)))


def test_the_page_tells_all_that_is_known():
    text = run_page("my <run>", [CONFIG, *EVENTS[1:], STEP, SUMMARY], "finished after 30 steps", examined())
    read = Reader(text)
    said = " ".join(read.texts)
    titles = "Curves|Confusion matrix|Answers on the test split|Summary|Model, data, devices|Environment|Configuration"
    assert re.findall(f"(?:{titles})", " ".join(t for t in read.texts if t in titles.split("|"))) == titles.split("|")
    for word in ("my <run>", "finished after 30 steps", "30 of 30", "1,234", "12.3 s", "123,456 parameters", "<b>&"):
        assert word in said, word
    for version in module.environment().values():
        assert version in said
    svgs = [tag for tag, _ in read.tags if tag == "svg"]
    assert len(svgs) == len(module.CURVES)
    assert len([tag for tag, _ in read.tags if tag == "img"]) == 3
    assert "6 of 16 right" in said
    assert not re.search(r"https?:", text)


def test_the_matrix_has_every_count_and_each_class_its_accuracy():
    rows = re.findall(r"<tr>(.*?)</tr>", run_page("x", [CONFIG], "", examined()).partition("Confusion")[2])
    cells = [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[dh].*?</t[dh]>", row)] for row in rows[:4]]
    names = [f"&lt;{i}$&gt;" for i in range(3)]
    assert cells[0] == ["", *names, "right"]
    assert [row[1:] for row in cells[1:]] == [["1", "", "7", "12.5%"], ["3", "2", "", "40.0%"], ["", "", "3", "100.0%"]]


def test_of_many_classes_the_most_confused_pairs_are_listed():
    read = Reader(run_page("x", [CONFIG], "", examined(30)))
    cells = read.texts[read.texts.index("how often") + 1 :][:6]
    assert cells == ["<0$>", "<2$>", "7", "<1$>", "<0$>", "3"]


@pytest.mark.parametrize("events", [[], [CONFIG], [CONFIG, STEP]])
def test_a_run_that_hardly_began_has_a_page(events):
    read = Reader(run_page("x", events, "stopped by SIGTERM after step 1", None))
    assert "Confusion matrix" not in read.texts and "stopped by SIGTERM after step 1" in read.texts


def test_values_that_are_not_finite_and_dollars_in_names_are_drawn():
    odd = [{**STEP, "step": step, "loss": value} for step, value in enumerate(["nan", "inf", 1.0], 1)]
    Reader(run_page("a$b$", [CONFIG, *odd], "", None))


def test_pictures_for_others():
    found = pictures(examined())
    assert list(found) == ["test/confusion", "test/wrong", "test/right"]
    assert Image.open(io.BytesIO(found["test/wrong"])).size == (16, 8)
    assert Image.open(io.BytesIO(heat_png(np.eye(1000, dtype=np.int64)))).size == (1000, 1000)
    heat = np.asarray(Image.open(io.BytesIO(heat_png(np.array([[4, 0], [1, 3]])))))
    assert heat[0, -1].tolist() == [255] * 3 and heat[0, 0].sum() < heat[-1, -1].sum() < heat[-1, 0].sum()
