"""The recipes in configs/: each loads, says how to run it, and sets nothing that does not apply."""

from pathlib import Path

import pytest

from cssm import train
from cssm.config import applicable, parse_args, read_yaml

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(ROOT.glob("configs/*"))


def test_there_are_recipes_and_nothing_else():
    assert len(RECIPES) >= 3
    assert {path.suffix for path in RECIPES} == {".yaml"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_sets_only_what_applies(path):
    parsed = parse_args(["--config", str(path)])
    assert parsed.typed == read_yaml(path)
    assert parsed.typed.items() <= applicable(parsed.config).items()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_header_is_the_command_and_the_hardware(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert header[0] == f"# python main.py --config configs/{path.name}"
    assert "Hardware: " in " ".join(header)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_takes_two_steps(path, tmp_path):
    short = ["--max_steps", "2", "--max_train_examples", "128", "--max_eval_examples", "16", "--num_devices", "1"]
    parsed = parse_args(["--config", str(path), "--checkpoint_dir", str(tmp_path), "--quiet", *short])
    assert train(parsed.config, parsed.typed)["step"] == 2
