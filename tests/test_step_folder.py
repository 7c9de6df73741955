"""The format of one checkpoint: what goes in comes out, bit for bit, or is found to be damaged."""

import gc
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from cssm.checkpoint import step_folder
from cssm.checkpoint.step_folder import DamagedError
from cssm.config import UserError

STATE = {
    "params": {
        "w": np.array([[1.5, -0.0, np.nan], [np.inf, 1e-42, 3]], np.float32),
        "z": np.array([1 + 2j, complex(np.nan, -0.0)], np.complex64),
        "block_0": {"half": jnp.arange(7, dtype=jnp.bfloat16), "scalar": np.float32(0.1)},
    },
    "wide": [np.full(3, 1 / 3), np.full(3, 1j / 3)],
    "opt_state": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)).init({"w": jnp.ones(3)}),
    "batch_stats": {},
    "rng": np.array([7, 2**32 - 1], np.uint32),
    "step": np.int64(2**40),
    "flags": np.array([True, False]),
    "no elements": np.zeros((0, 3), np.int8),
    "number": 5,
}


@pytest.fixture(scope="module")
def checkpointer():
    with step_folder.open_checkpointer() as checkpointer:
        yield checkpointer


def record_of(leaves):
    arrays = {name: step_folder.array_record(leaf) for name, leaf in leaves.items()}
    return {"meta": {}, "metric": None, "arrays": arrays}


def test_every_dtype_comes_back_bit_for_bit(checkpointer, tmp_path):
    leaves = step_folder.host_copies(STATE)
    step_folder.write(checkpointer, tmp_path / "1", leaves, record_of(leaves))
    moved = (tmp_path / "1").rename(tmp_path / "elsewhere")
    step_folder.check_files(moved)
    record = step_folder.read_record(moved)
    step_folder.check_model(moved, record["arrays"], step_folder.by_path(STATE))
    read = step_folder.read_arrays(checkpointer, moved, record["arrays"])
    assert set(read) == set(leaves)
    for name, leaf in leaves.items():
        assert isinstance(read[name], np.ndarray)
        assert (read[name].dtype, read[name].shape) == (leaf.dtype, leaf.shape), name
        assert read[name].tobytes() == leaf.tobytes(), name


@pytest.mark.slow
def test_a_save_and_what_reads_it_keep_no_memory(checkpointer, tmp_path):
    """A run saves without end. Orbax's default format lost some eight objects of each array with each save."""
    leaves = {f"params/block_{i}/w": np.ones((2, 2), np.float32) for i in range(60)}

    def save():
        step_folder.write(checkpointer, tmp_path / "1", leaves, record_of(leaves))
        shutil.rmtree(tmp_path / "1")

    def kept(saves):
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(saves):
            save()
        gc.collect()
        return sys.getallocatedblocks() - before

    kept(saves=2)  # what is made once
    assert kept(saves=3) < 3 * 5 * len(leaves)


def test_what_orbax_writes_by_default_is_read_too(checkpointer, tmp_path):
    """Earlier checkpoints of this program are of that format (OCDBT)."""
    leaves = {"params/w": np.arange(6.0).reshape(2, 3), "step": np.int64(3)}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as default:
        step_folder.write(default, tmp_path / "1", leaves, record_of(leaves))
    assert (tmp_path / "1" / "state" / "manifest.ocdbt").exists()
    read = step_folder.read_arrays(checkpointer, tmp_path / "1", record_of(leaves)["arrays"])
    assert read["params/w"].tolist() == leaves["params/w"].tolist() and read["step"] == 3


def test_leaves_are_named_by_their_path():
    names = set(step_folder.by_path(STATE))
    assert {"params/block_0/half", "opt_state/1/0/mu/w", "opt_state/1/0/count", "wide/1", "step"} <= names
    with pytest.raises(ValueError, match="slash"):
        step_folder.by_path({"a/b": 1, "a": {"b": 2}})


def test_copies_are_independent_of_what_may_be_written():
    array = np.ones(3)
    view = jnp.ones(3)
    copies = step_folder.host_copies({"array": array, "view": view})
    array[:] = 2
    assert copies["array"].tolist() == [1, 1, 1]
    assert not copies["view"].flags.writeable


@pytest.mark.parametrize("leaf", ["text", None.__class__, np.array(["a"])], ids=["str", "type", "array"])
def test_what_is_no_number_is_refused(leaf):
    with pytest.raises(TypeError, match="params/name"):
        step_folder.host_copies({"params": {"name": leaf}})


@pytest.fixture(scope="module")
def small(checkpointer, tmp_path_factory):
    """A written folder and the bytes of its files."""
    folder = tmp_path_factory.mktemp("small") / "1"
    leaves = {f"params/w{i}": np.random.default_rng(i).normal(size=(20, 30)) for i in range(3)}
    step_folder.write(checkpointer, folder, leaves, record_of(leaves))
    return folder, {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [flip, lambda content: content[:-1], lambda content: b"", None],
    ids=["flipped", "truncated", "emptied", "missing"],
)
def test_damage_to_any_file_is_found(small, damage):
    folder, files = small
    assert len(files) > 8
    for path, content in files.items():
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(content))
        with pytest.raises(DamagedError, match=r"is not what was written|cannot be read"):
            step_folder.check_files(folder)
        path.write_bytes(content)
        step_folder.check_files(folder)


def test_an_array_that_comes_out_different_is_found(checkpointer, small):
    folder, _ = small
    arrays = json.loads(json.dumps(step_folder.read_record(folder)["arrays"]))
    arrays["params/w1"]["sha256"] = "0" * 64
    with pytest.raises(DamagedError, match="params/w1 is not what was saved"):
        step_folder.read_arrays(checkpointer, folder, arrays)


def test_what_cannot_be_read_back_is_not_taken_as_written(checkpointer, tmp_path):
    leaves = {"params/w": np.ones(3)}
    record = record_of({"params/w": np.zeros(3)})
    with pytest.raises(DamagedError, match="params/w"):
        step_folder.write(checkpointer, tmp_path / "1", leaves, record)


MODEL = {"params": {"a": np.zeros((2, 3), np.float32)}, "opt_state": {"a": np.zeros((2, 3), np.float32)}}


@pytest.mark.parametrize(
    "params, words",
    [
        ({"a": np.zeros((2, 4), np.float32)}, "params/a is (2, 3) float32 there and (2, 4) float32 here"),
        ({"a": np.zeros((2, 3), np.complex64)}, "params/a is (2, 3) float32 there and (2, 3) complex64 here"),
        ({}, "params/a is (2, 3) float32 there and missing here"),
        ({**MODEL["params"], "b": np.ones(1)}, "params/b is missing there and (1,) float64 here"),
    ],
    ids=["shape", "dtype", "missing", "extra"],
)
def test_another_model_is_refused_by_the_name_of_its_parameter(tmp_path, params, words):
    arrays = record_of(step_folder.host_copies(MODEL))["arrays"]
    with pytest.raises(UserError) as caught:
        step_folder.check_model(tmp_path, arrays, step_folder.by_path({"params": params, "opt_state": params}))
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_same_model_is_accepted_from_arrays_and_from_shapes(tmp_path):
    arrays = record_of(step_folder.host_copies(MODEL))["arrays"]
    step_folder.check_model(tmp_path, arrays, step_folder.by_path(MODEL))
    step_folder.check_model(tmp_path, arrays, step_folder.by_path(jax.eval_shape(lambda: MODEL)))
