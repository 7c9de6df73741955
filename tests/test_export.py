"""An exported folder is the model, bit for bit, and tells nothing of where it was made."""

import jax
import numpy as np
import pytest
from PIL import Image
from trained import make_run

from cssm import load_trained
from cssm.cli import main
from cssm.config import UserError, parse_args
from cssm.inference import export as module
from cssm.inference.export import export

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), np.uint8)


def exported(run, *more):
    return export(parse_args(["export", "--checkpoint", str(run), "--quiet", *more]).config)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("secret-place")
    return make_run(root / "alice", kernel_domain="spectral", norm_type="batch", ema_decay=0.9, data_dir=None)


def test_what_comes_back_is_bit_for_bit_what_was_trained(run, tmp_path):
    folder = exported(run, "--output", str(tmp_path / "model"))
    before, after = load_trained(run), load_trained(folder)
    leaves = [jax.tree_util.tree_leaves_with_path(trained.variables) for trained in (before, after)]
    assert any(leaf.dtype == np.complex64 for _, leaf in leaves[0])
    for (path, a), (same_path, b) in zip(*leaves, strict=True):
        assert path == same_path and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    assert before.logits(IMAGES).tobytes() == after.logits(IMAGES).tobytes()
    assert after.exported and not before.exported
    for name in ("image_shape", "num_classes", "classes", "step", "averaged", "best", "effective_batch"):
        assert getattr(before, name) == getattr(after, name), name


def test_an_exported_model_can_be_exported_again(run, tmp_path):
    first = exported(run, "--output", str(tmp_path / "a"))
    second = exported(first, "--output", str(tmp_path / "b"))
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


@pytest.mark.parametrize("kind", ["safetensors", "stablehlo"])
def test_no_place_is_told(run, tmp_path, kind):
    data_dir = run.parent / "photos"
    for name in ("cat", "dog"):
        (data_dir / name).mkdir(parents=True, exist_ok=True)
        for i in range(8):
            Image.new("RGB", (9, 9), (i, i, i)).save(data_dir / name / f"{i}.png")
    places = {"data_dir": str(data_dir), "run_name": "alice", "checkpoint_dir": str(run.parent)}
    of_photos = make_run(run.parent / "alice_2", dataset="folder", **places)
    folder = exported(of_photos, "--format", kind, "--output", str(tmp_path / "model"))
    for path in folder.iterdir():
        content = path.read_bytes()
        assert not [word for word in (b"secret-place", b"alice", str(tmp_path).encode()) if word in content], path.name


def test_the_default_folder_lies_in_the_run_and_may_be_written_again(run):
    assert exported(run) == run / "export_safetensors"
    assert exported(run) == run / "export_safetensors"
    assert {path.name for path in exported(run).iterdir()} == {
        "README.md",
        "config.yaml",
        "model.json",
        "model.safetensors",
    }


def test_the_files_of_others_are_left_alone(run, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    assert main(["export", "--checkpoint", str(run), "--output", str(tmp_path)]) == 2
    assert "thesis.tex" in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 1


def test_what_is_not_what_was_written_is_noticed(run, tmp_path, monkeypatch):
    spoilt = load_trained(run)
    spoilt.variables["params"]["head"]["bias"] = spoilt.variables["params"]["head"]["bias"] + 1
    monkeypatch.setattr(module, "load_trained", lambda *args: spoilt)
    trained = load_trained(run)
    with pytest.raises(UserError, match="does not hold what was written") as error:
        module.export_parameters(trained, tmp_path / "model")
    assert error.value.exit_code == 6


def test_onnx_is_refused_with_the_reason(run, capsys):
    assert main(["export", "--checkpoint", str(run), "--format", "onnx"]) == 2
    assert "type --format stablehlo" in capsys.readouterr().err
    assert main(["export", "--checkpoint", str(run), "--format", "array_record"]) == 2
    assert "export writes safetensors or stablehlo or onnx" in capsys.readouterr().err


def test_an_export_takes_no_settings_of_training(run, capsys):
    assert main(["export", "--checkpoint", str(run), "--lr", "1"]) == 2
    assert "--lr does not apply to the verb export" in capsys.readouterr().err
