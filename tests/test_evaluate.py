"""The verb eval: exact, the same on any number of devices, on the run's own data or on others."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from trained import make_run

from cssm import data, load_trained
from cssm.cli import main
from cssm.config import parse_args
from cssm.inference.evaluate import data_config, evaluate
from cssm.inference.export import export

rng = np.random.default_rng(0)


def asked(run, *more):
    parsed = parse_args(["eval", "--checkpoint", str(run), "--quiet", "--no_compile_cache", *map(str, more)])
    return evaluate(parsed.config, parsed.typed)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("eval") / "run", (7,), kernel_domain="spectral", ema_decay=0.9)


def test_all_numbers_are_those_of_numpy(run, tmp_path):
    found = asked(run, "--split", "val", "--output", tmp_path / "out")
    trained = load_trained(run)
    images, labels = data.load(trained.config, "val").gather(np.arange(21))
    logits = trained.logits(images).astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    right = logits.argmax(axis=1) == labels
    assert 0 < right.mean() < 1 and len(set(logits.argmax(axis=1))) > 2
    assert found["count"] == 21 and found["accuracy"] == right.mean()
    assert found["loss"] == pytest.approx(-np.log(p[np.arange(21), labels]).mean(), rel=1e-5)
    order = np.argsort(-logits, axis=1)[:, :5]
    assert found["top5_accuracy"] == np.mean([label in row for label, row in zip(labels, order, strict=True)])
    for c, row in enumerate(found["per_class"]):
        assert (row["class"], row["count"], row["correct"]) == (str(c), (labels == c).sum(), right[labels == c].sum())
    bins = [(p.max(axis=1) > b["low"]) & (p.max(axis=1) <= b["high"]) for b in found["calibration"]["rows"]]
    gaps = [inside.mean() * abs(right[inside].mean() - p.max(axis=1)[inside].mean()) for inside in bins if inside.any()]
    assert found["calibration"]["ece"] == pytest.approx(sum(gaps), rel=1e-5)
    assert json.loads((tmp_path / "out" / "eval.json").read_text()) == found
    for name in ("confusion.png", "reliability.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert picture.width > 400


@pytest.mark.parametrize("examples, devices", [(13, 3), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_any_number_of_examples_on_any_number_of_devices_gives_the_same_bytes(run, tmp_path, examples, devices):
    found = []
    for number in (1, devices):
        folder = tmp_path / str(number)
        asked(run, "--max_eval_examples", examples, "--num_devices", number, "--batch_size", 4, "--output", folder)
        found.append((folder / "eval.json").read_bytes())
    assert found[0] == found[1]
    assert json.loads(found[0])["count"] == examples


@pytest.mark.slow
def test_all_splits_together_are_their_sum(run, tmp_path):
    more = ["--max_train_examples", 10]
    parts = [asked(run, "--split", s, *more, "--output", tmp_path / s) for s in ("train", "val", "test", "all")]
    assert [part["count"] for part in parts] == [10, 21, 21, 52]
    assert np.array_equal(np.sum([part["confusion"] for part in parts[:3]], axis=0), parts[3]["confusion"])


def test_the_table_says_what_the_file_holds(run, capfd):
    argv = ["eval", "--checkpoint", str(run), "--num_devices", "2", "--no_compile_cache"]
    assert main(argv) == 0
    told = capfd.readouterr().out
    found = json.loads((run / "eval_test" / "eval.json").read_text())
    assert "Running on 2 devices (multi-CPU enabled)" in told
    assert f"accuracy  {found['accuracy']:.4f}   95% interval" in told and "ECE" in told
    assert "the averaged parameters of step 7" in told
    assert main([*argv, "--headless"]) == 0
    event = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert event["event"] == "evaluation" and event["accuracy"] == found["accuracy"] and event["devices"] == 2


def photos(root, classes, size=12):
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(12):
            pixels = np.full((size, size, 3), 20 * c, np.uint8) + rng.integers(0, 20, (size, size, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def of_photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    return make_run(root / "run", dataset="folder", data_dir=str(photos(root / "data", ["cat", "dog", "fox"])))


def test_classes_of_other_data_are_matched_by_name(of_photos, tmp_path):
    """Two of three classes, in which a label means another class than in training."""
    own = asked(of_photos, "--split", "all", "--output", tmp_path / "a")
    assert [row["class"] for row in own["per_class"]] == ["cat", "dog", "fox"]
    for name in ("dog", "fox"):
        (tmp_path / "some" / name).mkdir(parents=True)
        for path in sorted((of_photos.parent / "data" / name).iterdir()):
            (tmp_path / "some" / name / path.name).symlink_to(path)
    found = asked(of_photos, "--split", "all", "--data_dir", tmp_path / "some", "--output", tmp_path / "b")
    assert [row["count"] for row in found["per_class"]] == [0, 12, 12] and found["per_class"][0]["accuracy"] is None
    assert found["confusion"][1:] == own["confusion"][1:]


@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--data_dir", "DATA"], "has the class owl, which the model does not know; it knows cat, dog, fox"),
        (["--dataset", "digits"], "has images 8x8x1, and the model takes 8x8x3"),
        (["--dataset", "npz"], "type --data_dir"),
        (["--data_dir", "nowhere"], "nowhere"),
        (["--cabc_difficulty", "hard"], "--cabc_difficulty hard does not apply with --dataset folder"),
        (["--split", "tset"], "did you mean test?"),
        (["--arch", "vit"], "--arch does not apply to the verb eval"),
        (["--checkpoint_step", "7"], "holds steps 3"),
    ],
)
def test_what_does_not_fit_is_refused(of_photos, tmp_path, more, sentence, capsys):
    other = photos(tmp_path / "other", ["cat", "owl"])
    argv = [str(other) if word == "DATA" else word for word in more]
    assert main(["eval", "--checkpoint", str(of_photos), "--no_compile_cache", *argv]) == 2
    assert sentence in capsys.readouterr().err


def test_arrays_without_names_take_the_labels_as_they_are(of_photos, tmp_path):
    labels = np.arange(30) % 2
    np.savez(tmp_path / "x.npz", images=rng.integers(0, 256, (30, 20, 20, 3), np.uint8), labels=labels)
    more = ["--dataset", "npz", "--data_dir", tmp_path / "x.npz", "--split", "all", "--num_devices", 2]
    found = asked(of_photos, *more, "--output", tmp_path / "o")
    assert found["dataset"] == "npz" and [row["count"] for row in found["per_class"]] == [15, 15, 0]
    assert asked(of_photos, *more)["count"] == 30 and (of_photos / "eval_npz_all" / "eval.json").exists()


def test_unreadable_images_are_left_out_where_that_is_allowed(of_photos, tmp_path, capsys):
    data_dir = photos(tmp_path / "data", ["cat", "dog"])
    (data_dir / "cat" / "3.png").write_bytes(b"x")
    more = ["--data_dir", data_dir, "--split", "all", "--output", tmp_path / "o"]
    found = asked(of_photos, *more, "--max_bad_examples", 1)
    assert found["count"] == 23 and found["bad_examples"] == 1
    assert "3.png cannot be read and is left out" in capsys.readouterr().err


def test_an_exported_model_asks_where_its_data_is(of_photos, tmp_path, capsys):
    folder = export(parse_args(["export", "--checkpoint", str(of_photos), "--quiet"]).config)
    assert main(["eval", "--checkpoint", str(folder), "--no_compile_cache"]) == 2
    assert "does not tell where its data lies: type --data_dir" in capsys.readouterr().err
    more = ["--data_dir", of_photos.parent / "data", "--split", "all"]
    found = asked(folder, *more, "--output", tmp_path / "a")
    assert found == asked(of_photos, *more, "--output", tmp_path / "b")


def test_data_is_the_runs_at_the_size_of_the_model(run):
    parsed = parse_args(["eval", "--checkpoint", str(run), "--dataset", "pathfinder"])
    config = data_config(load_trained(run), parsed.config, parsed.typed)
    assert (config.dataset, config.image_size, config.data_dir) == ("pathfinder", 8, None)
    assert Path(str(config.cache_dir)) == Path(str(parsed.config.cache_dir))
