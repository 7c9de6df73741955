"""A saved run goes on with its own configuration and with what is typed anew."""

import pytest

from cssm.config import Config, UserError, parse_args, resolve
from cssm.resume import resume_config, resume_record


def refusal(function, *args) -> str:
    with pytest.raises(UserError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SAVED = resume_record(Config(arch="vit", max_steps=100, lr=0.003, gpus="0,1", headless=True), 64, 1)


@pytest.mark.parametrize(
    "typed, changes",
    [
        ({}, []),
        ({"lr": 0.001}, ["lr: was 0.003, now 0.001"]),
        ({"lr": 0.003}, []),
        ({"max_steps": 200, "log_every": 1}, ["max_steps: was 100, now 200", "log_every: was 10, now 1"]),
        ({"epochs": 3}, ["epochs: was None, now 3", "max_steps: was 100, now None"]),
        ({"global_batch_size": 128}, ["global_batch_size: was 64, now 128", "grad_accum: was 1, now None"]),
        ({"arch": "vit", "embed_dim": 32, "seed": 0, "dtype": "bf16"}, ["dtype: was f32, now bf16"]),
        ({"num_workers": 0, "num_devices": 1, "quiet": True}, []),
    ],
)
def test_a_run_goes_on_with_what_is_typed_anew(typed, changes):
    config, found = resume_config(SAVED, typed | {"resume": "auto"})
    assert found == changes
    assert config.resume == "auto"
    assert all(getattr(config, name) == value for name, value in typed.items())


def test_the_settings_of_the_invocation_are_not_saved():
    config, _ = resume_config(SAVED, {"resume": "runs/a", "headless": False})
    assert (config.gpus, config.headless, config.resume) == (None, False, "runs/a")


def test_a_run_goes_on_with_the_same_effective_batch_unless_typed():
    config, _ = resume_config(SAVED, {})
    assert (config.global_batch_size, config.batch_size, config.grad_accum) == (64, None, 1)
    smaller, _ = resume_config(SAVED, {"batch_size": 8})
    assert (smaller.global_batch_size, smaller.batch_size, smaller.grad_accum) == (64, 8, None)
    # Saved again and resumed again, nothing has drifted.
    assert resume_config(resume_record(config, 64, 1), {}) == (config, [])


@pytest.mark.parametrize(
    "name, value",
    [("embed_dim", 64), ("arch", "simple"), ("dataset", "pathfinder"), ("seed", 1), ("optimizer", "sgd")],
)
def test_what_must_stay_is_refused_by_name(name, value):
    sentence = refusal(resume_config, SAVED, {name: value})
    assert sentence.startswith(f"--{name} {value}: the run to resume has {getattr(Config(arch='vit'), name)}")


def test_a_saved_setting_that_is_unknown_is_refused():
    assert "unknown setting colour" in refusal(resume_config, SAVED | {"colour": 1}, {})


def test_resuming_leaves_the_model_to_the_saved_run():
    # --mlp_ratio means nothing to the default architecture, but the saved run's is not known yet.
    parsed = parse_args(["--resume", "runs/a", "--mlp_ratio", "2", "--headless", "--gpus", "1"])
    assert parsed.typed == {"resume": "runs/a", "mlp_ratio": 2.0, "headless": True, "gpus": "1"}
    assert (parsed.config.resume, parsed.config.headless, parsed.config.gpus) == ("runs/a", True, "1")
    assert resume_config(SAVED, parsed.typed)[0].mlp_ratio == 2.0
    assert "does not apply" in refusal(resolve, parsed.typed, {})


def test_a_batch_size_is_not_looked_for_again():
    """--resume auto is typed for a first start and for later ones alike, the path of a run is not."""
    saved = resume_record(Config(batch_size=16), 64, 1)
    config, changes = resume_config(saved, {"resume": "auto", "find_batch_size": True})
    assert (config.find_batch_size, config.global_batch_size, changes) == (False, 64, [])
    with pytest.raises(UserError, match="the one to resume keeps its effective batch: leave it out"):
        resume_config(saved, {"resume": "runs/a", "find_batch_size": True})
