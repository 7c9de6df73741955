"""A trained model is found where it lies, and is the one that was saved."""

import jax
import numpy as np
import pytest
from trained import make_run, variables_of

from cssm import load_trained
from cssm.config import UserError


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    return make_run(root / "run", steps=(3, 6, 9), metrics={3: 0.7, 6: 0.9, 9: 0.8}, ema_decay=0.9)


def refusal(*args):
    with pytest.raises(UserError) as error:
        load_trained(*args)
    return error.value


def test_the_best_step_is_taken_unless_another_is_named(run):
    found = {step: load_trained(run, step) for step in ("best", "latest", "3")}
    assert [trained.step for trained in found.values()] == [6, 9, 3]
    for trained in found.values():
        drawn = variables_of(trained.config, 10, (8, 8, 1), 100 + trained.step)
        same(trained.variables["params"], drawn["params"])
        assert trained.averaged and trained.image_shape == (8, 8, 1) and trained.num_classes == 10


def test_a_run_may_be_named_by_any_of_its_folders(run):
    for path, step in ((run / "checkpoints", 6), (run / "checkpoints" / "3", 3), (str(run), 6)):
        assert load_trained(path).step == step
    assert load_trained(run / "checkpoints" / "3", "3").step == 3


def test_the_newest_step_is_taken_where_none_was_evaluated(tmp_path):
    run = make_run(tmp_path / "run", steps=(1, 2))
    trained = load_trained(run)
    assert trained.step == 2 and not trained.averaged and trained.class_names == tuple("0123456789")
    same(trained.variables["params"], variables_of(trained.config, 10, (8, 8, 1), 2)["params"])


def test_reading_leaves_a_run_as_it_is(run):
    partial = run / "checkpoints" / "12.partial"
    partial.mkdir()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    load_trained(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    partial.rmdir()


@pytest.mark.parametrize(
    "path, step, sentence",
    [
        ("nowhere", "best", "there is no such path"),
        (".", "best", "there is no checkpoint in it"),
        ("run", "4", "holds steps 3, 6, 9; type one of them, best or latest"),
        ("run", "newest", "holds steps 3, 6, 9"),
        ("run/checkpoints/3", "6", "is step 3, and --checkpoint_step 6 another"),
    ],
)
def test_what_is_not_there_is_refused(run, path, step, sentence):
    assert sentence in str(refusal(run.parent / path, step))


def test_settings_of_how_it_is_computed_may_be_typed(run):
    trained = load_trained(run, "best", {"scan": "associative", "batch_size": 3, "seed": 5, "lr": 1.0})
    assert (trained.config.scan, trained.config.batch_size, trained.config.seed) == ("associative", 3, 5)
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1), np.uint8)
    np.testing.assert_allclose(trained.logits(images), load_trained(run).logits(images), atol=1e-5)


def test_what_cannot_apply_is_refused(tmp_path):
    run = make_run(tmp_path / "run", arch="baseline", num_heads=1, kernel_size=None, seq_len=None, stem_stride=2)
    assert "does not apply with --arch baseline" in str(refusal(run, "best", {"scan": "auto"}))


def test_a_kernel_of_gpus_is_not_replaced_silently(tmp_path):
    run = make_run(tmp_path / "run", scan="fused")
    assert "type --scan auto" in str(refusal(run))
    assert load_trained(run, "best", {"scan": "auto"}).step == 3


def test_a_damaged_checkpoint_is_refused_and_others_are_named(tmp_path):
    run = make_run(tmp_path / "run", steps=(3, 6), metrics={3: 0.9})
    for file in (run / "checkpoints" / "3" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1] + b"x")
    error = refusal(run)
    assert error.exit_code == 6 and "step 3" in str(error) and "there is 6" in str(error)
    assert load_trained(run, "latest").step == 6


def test_a_checkpoint_of_an_older_version_takes_shapes_from_the_data(tmp_path):
    run = make_run(tmp_path / "run", data_facts={"classes": [], "train_examples": 7})
    assert load_trained(run).image_shape == (8, 8, 1) and load_trained(run).num_classes == 10


def test_parameters_that_do_not_fit_their_configuration_are_refused(tmp_path):
    facts = {"classes": [], "train_examples": 7, "num_classes": 11, "image_shape": [8, 8, 1]}
    error = refusal(make_run(tmp_path / "run", data_facts=facts))
    assert error.exit_code == 6 and "does not fit its configuration: params/head" in str(error)


@pytest.mark.parametrize("facts", [{"image_shape": ["8"]}, {"image_shape": 8}, {"num_classes": None}])
def test_a_record_of_another_form_is_refused(tmp_path, facts):
    run = make_run(tmp_path / "run", data_facts={"classes": [], "train_examples": 7, "num_classes": 10} | facts)
    assert "were not made by a run" in str(refusal(run))
