"""Pictures of an evaluation, for few classes and many, with names of any kind."""

import numpy as np
import pytest
from PIL import Image

from cssm.inference.charts import save_confusion, save_reliability
from cssm.inference.scores import calibration

rng = np.random.default_rng(0)


@pytest.mark.parametrize("classes", [2, 10, 45, 200])
def test_a_confusion_matrix_is_drawn(tmp_path, classes):
    table = rng.integers(0, 9, (classes, classes)) + 90 * np.eye(classes, dtype=int)
    names = [f"$x_{i} <&> % a rather long name of a class" for i in range(classes)]
    save_confusion(tmp_path / "x.png", table.tolist(), names, "tfds:$x$ test")
    with Image.open(tmp_path / "x.png") as picture:
        assert 400 < picture.width <= 2100 and picture.width > picture.height
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50


def test_a_class_without_examples_is_blank(tmp_path):
    save_confusion(tmp_path / "x.png", [[0, 0], [0, 5]], ["a", "b"], "x")
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_a_reliability_diagram_is_drawn(tmp_path):
    confidence = rng.random(300)
    save_reliability(tmp_path / "x.png", calibration(confidence, rng.random(300) < confidence), "x")
    save_reliability(tmp_path / "y.png", calibration(np.ones(2), np.ones(2, bool)), "y")
    assert (tmp_path / "x.png").read_bytes() != (tmp_path / "y.png").read_bytes()
