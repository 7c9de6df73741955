"""Arrays leave and come back bit for bit, and a folder that was changed is refused."""

import json

import numpy as np
import pytest
import safetensors.numpy

from cssm.config import UserError
from cssm.inference.exported import nested, read_folder, read_tensors, write_folder, write_tensors

rng = np.random.default_rng(0)
# Not-a-number with a payload, and zeros of both signs: what a conversion would lose.
ODD = np.array([0x7FC12345, 0x80000000, 0, 0x00000001], np.uint32).view(np.float32)
LEAVES = {
    "params/head/kernel": rng.normal(size=(3, 4)).astype(np.float32),
    "params/cell_0/kernel": (ODD + 1j * ODD[::-1]).astype(np.complex64).reshape(2, 1, 2),
    "params/cell_0/odd": ODD,
    "params/cell_0/scalar": np.float32(3).reshape(()),
    "params/cell_0/complex_scalar": np.array(1 - 2j, np.complex64),
    "params/cell_0/turned": rng.normal(size=(4, 5)).astype(np.complex64).T,
    "params/cell_0/none": np.zeros((0, 3), np.complex64),
    "batch_stats/norm/mean": rng.normal(size=3).astype(np.float32),
}
FACTS = {"image_shape": [8, 8, 1], "num_classes": 4, "classes": [], "step": 3, "averaged": False, "best": {}}
FACTS |= {"from_files": False}


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path, nested(LEAVES), {"arch": "simple", "lr": 1e-3}, FACTS, "# card\n")
    return tmp_path


def test_arrays_come_back_bit_for_bit(tmp_path):
    write_tensors(tmp_path / "x.safetensors", LEAVES)
    found = read_tensors(tmp_path / "x.safetensors")
    assert found.keys() == LEAVES.keys()
    for name, leaf in LEAVES.items():
        assert (found[name].dtype, found[name].shape) == (leaf.dtype, leaf.shape), name
        assert found[name].tobytes() == leaf.tobytes(), name


def test_the_layout_of_complex_arrays_is_the_documented_one(tmp_path):
    """As a reader without this package sees it."""
    write_tensors(tmp_path / "x.safetensors", LEAVES)
    found = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    pairs = found["params/cell_0/turned"]
    assert pairs.dtype == np.float32 and pairs.shape == (5, 4, 2)
    np.testing.assert_array_equal(pairs[..., 0], LEAVES["params/cell_0/turned"].real)
    np.testing.assert_array_equal(pairs[..., 1], LEAVES["params/cell_0/turned"].imag)


def test_a_folder_comes_back(folder):
    found = read_folder(folder)
    assert found.settings == {"arch": "simple", "lr": "0.001"} or found.settings["lr"] == 1e-3
    assert {name: found.facts[name] for name in FACTS} == FACTS
    assert found.variables["params"]["cell_0"]["odd"].tobytes() == ODD.tobytes()
    assert read_folder(folder).variables["batch_stats"]["norm"]["mean"].shape == (3,)


def changed(folder, **facts):
    found = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({k: v for k, v in {**found, **facts}.items() if v is not None}))


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "model.safetensors is not what was exported"),
        (lambda f: (f / "config.yaml").write_text("arch: vit\n"), "config.yaml is not what was exported"),
        (lambda f: (f / "config.yaml").unlink(), "No such file"),
        (lambda f: (f / "model.json").write_text("[" * 100_000), "cannot be read"),
        (lambda f: (f / "model.json").write_text("[]"), "of another version"),
        (lambda f: changed(f, schema=2), "of another version"),
        (lambda f: changed(f, step=None), "has no step"),
        (lambda f: changed(f, num_classes="4"), "has no num_classes"),
        (lambda f: changed(f, image_shape=[8, "8", 1]), "has no image_shape"),
        (lambda f: changed(f, sha256=3), "cannot be read"),
    ],
)
def test_a_folder_that_was_changed_is_refused(folder, change, sentence):
    change(folder)
    with pytest.raises(UserError, match=sentence) as error:
        read_folder(folder)
    assert error.value.exit_code == 6


def test_a_complex_array_that_is_stored_otherwise_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(3, np.float32)}, path, metadata={"complex": '["a"]'})
    with pytest.raises(ValueError, match="a is not stored as real and imaginary parts"):
        read_tensors(path)
