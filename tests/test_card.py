"""A card says what the model is; what it tells people to type works."""

import re

import numpy as np
import pytest
from trained import make_run

from cssm import load_trained
from cssm.inference.card import card
from cssm.inference.export import export_parameters, export_program


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return load_trained(make_run(tmp_path_factory.mktemp("card") / "run"))


def test_a_card_tells_what_the_model_is_and_takes(trained):
    text = card(trained, {"lr": 0.5, "warmup_steps": None}, program=False)
    for said in ("# simple hgru_bi, trained on digits", "uint8 [N, 8, 8, 1]", "10 classes: 0, 1", "step 3"):
        assert said in text
    assert "0.7500 of 20" in text and "    lr: 0.5" in text and "warmup" not in text


@pytest.mark.parametrize("write", [export_parameters, export_program])
def test_the_program_of_a_card_runs(trained, tmp_path, write):
    write(trained, tmp_path)
    text = (tmp_path / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    images = np.zeros((8, 8, 8, 1), np.uint8)
    names = {"images": images}
    exec(compile(program.replace("FOLDER", str(tmp_path)), "card", "exec"), names)
    np.testing.assert_allclose(names["logits"], trained.logits(images), atol=1e-5)
