"""Checkpoints: asynchronous, verified, the newest and the best kept, none lost to a kill or a bad disk."""

import threading

import jax
import numpy as np
import optax
import pytest

from cssm.checkpoint import Checkpoints, saved_meta, step_folder
from cssm.config import UserError
from parallel.devices import replicate, spmd, unreplicate


def state_at(step):
    rng = np.random.default_rng(step)
    params = {"w": rng.normal(size=(4, 3)).astype(np.float32), "z": np.array([step * 1j], np.complex64)}
    return {
        "params": params,
        "opt_state": optax.adam(0.1).init(params),
        "batch_stats": {},
        "rng": np.array([step, 1], np.uint32),
        "step": np.int32(step),
    }


TARGET = jax.eval_shape(lambda: state_at(0))


def fill(directory, metrics, **options):
    """Save steps 1, 2, ... with these metrics, one at a time."""
    with Checkpoints(directory, **options) as checkpoints:
        for step, metric in enumerate(metrics, start=1):
            checkpoints.save(step, state_at(step), {"epoch": step}, metric)
    return checkpoints


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def damage(directory, step, how):
    """Spoil the largest data file of a step."""
    path = max((directory / str(step) / "state" / "params").rglob("[0-9]*"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path.write_bytes({"flip": flipped, "truncate": content[:middle]}[how])


def test_a_state_comes_back_bit_for_bit(tmp_path):
    with Checkpoints(tmp_path / "a" / "b") as checkpoints:
        checkpoints.save(5, state_at(5), {"best": 0.25, "names": ["x"]}, metric=0.5)
        state, meta, step, notes = checkpoints.restore(TARGET)
    assert_same(state, state_at(5))
    assert isinstance(state["opt_state"][0], optax.ScaleByAdamState)
    assert (meta, step, notes) == ({"best": 0.25, "names": ["x"]}, 5, [])
    assert (checkpoints.latest(), checkpoints.best(), checkpoints.steps()) == (5, 5, [5])


def test_saving_happens_in_the_background_and_closing_waits(tmp_path, monkeypatch):
    release, write = threading.Event(), step_folder.write

    def slow(*args):
        assert release.wait(timeout=30)
        write(*args)

    monkeypatch.setattr(step_folder, "write", slow)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_at(1), {})
        assert checkpoints.drain() == []
        assert checkpoints.latest() is None
        threading.Timer(0.2, release.set).start()
    assert checkpoints.latest() == 1
    assert checkpoints.drain() == [1]
    assert checkpoints.drain() == []


def test_a_save_under_way_is_finished_when_the_program_fails(tmp_path):
    def run():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state_at(1), {})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert Checkpoints(tmp_path).latest() == 1


def test_what_is_saved_is_the_state_at_the_call(tmp_path, monkeypatch):
    """Not what a donating step, or the caller, makes of the same memory before it is written."""
    release, array_record = threading.Event(), step_folder.array_record

    def later(leaf):
        assert release.wait(timeout=30)
        return array_record(leaf)

    monkeypatch.setattr(step_folder, "array_record", later)
    devices = jax.devices()
    increment = spmd(lambda x: x + 1, devices, donate_argnums=0)
    on_devices, mine = replicate(np.zeros((64, 64), np.float32), devices), np.zeros((64, 64), np.float32)
    meta = {"k": 1}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"theirs": unreplicate(on_devices), "mine": mine}, meta)
        for _ in range(5):
            on_devices = increment(on_devices)
        mine += 1
        meta["k"] = 2
        release.set()
        state, meta, *_ = checkpoints.restore({"theirs": mine, "mine": mine})
    assert unreplicate(on_devices).all()
    assert not state["theirs"].any()
    assert not state["mine"].any()
    assert meta == {"k": 1}


@pytest.mark.parametrize("step", [None, 7])
def test_what_is_not_there_is_told(tmp_path, step):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(UserError, match="no checkpoint") as caught:
            checkpoints.restore(TARGET, step)
        assert caught.value.exit_code == 2
        checkpoints.save(3, state_at(3), {})
        if step:
            with pytest.raises(UserError, match=r"of step 7 .* holds steps 3"):
                checkpoints.restore(TARGET, step)


def test_another_model_is_refused_and_no_older_step_is_tried(tmp_path):
    fill(tmp_path, [0.1, 0.2])
    target = {**state_at(0), "params": {**state_at(0)["params"], "w": np.zeros((4, 5), np.float32)}}
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(target)
    assert "/2 is of another model: params/w is (4, 3) float32 there and (4, 5)" in str(caught.value)


@pytest.mark.parametrize(
    "metrics, kept, best",
    [
        ([0.1, 0.9, 0.3, 0.5, 0.2], [2, 4, 5], 2),
        ([0.1, 0.2, 0.3, 0.4], [3, 4], 4),
        ([0.9, 0.1, 0.1, 0.1], [1, 3, 4], 1),
        ([0.5, 0.5, 0.1, 0.1], [2, 3, 4], 2),
        ([None, None, None], [2, 3], None),
        ([None, 0.1, None, None], [2, 3, 4], 2),
        ([float("nan"), 0.1, 0.05, float("nan")], [2, 3, 4], 2),
        ([-5, -9, -7, -8], [1, 3, 4], 1),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, metrics, kept, best):
    checkpoints = fill(tmp_path, metrics, max_checkpoints=2)
    assert checkpoints.steps() == kept
    assert checkpoints.best() == best
    assert checkpoints.latest() == len(metrics)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == kept, "and nothing else is left"


def test_a_metric_may_be_any_scalar(tmp_path):
    checkpoints = fill(tmp_path, [np.float32(0.25), jax.numpy.float32(0.75), np.array(0.5)])
    assert checkpoints.best() == 2


def test_the_same_step_again(tmp_path):
    """A finished run that is resumed saves its last step again."""
    fill(tmp_path, [0.1, 0.2])

    def written():
        stat = (tmp_path / "2" / "files.json").stat()
        return stat.st_ino, stat.st_mtime_ns

    before = written()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(TARGET)
        checkpoints.save(2, state_at(2), {"epoch": 2}, 0.2)
        checkpoints.save(2, state_at(2), {"epoch": 2})
        checkpoints.wait()
        assert written() == before, "equal content is left alone"
        checkpoints.save(2, state_at(2), {"epoch": 3})
        assert checkpoints.restore(TARGET)[1] == {"epoch": 3}
        assert checkpoints.best() == 2, "a metric once measured for this state is kept"
        checkpoints.save(2, state_at(9), {"epoch": 3}, 0.0)
        assert_same(checkpoints.restore(TARGET)[0], state_at(9))
        assert checkpoints.best() == 1
        damage(tmp_path, 2, "flip")
        checkpoints.save(2, state_at(9), {"epoch": 3}, 0.0)
        assert checkpoints.restore(TARGET)[2:] == (2, [])


def test_going_on_from_an_older_step_leaves_no_later_ones(tmp_path):
    fill(tmp_path, [0.1, 0.2, 0.3, 0.4], max_checkpoints=4)
    with Checkpoints(tmp_path, max_checkpoints=4) as checkpoints:
        with pytest.raises(ValueError, match="step 3 is older than step 4"):
            checkpoints.save(3, state_at(3), {})
        *_, notes = checkpoints.restore(TARGET, step=2)
        assert "next save removes newer steps: 3, 4" in notes[0]
        checkpoints.save(3, state_at(30), {}, 0.05)
    assert checkpoints.steps() == [1, 2, 3]
    assert checkpoints.best() == 2


def test_a_reader_writes_nothing(tmp_path):
    fill(tmp_path, [0.1])
    (tmp_path / "2.partial").mkdir()
    with Checkpoints(tmp_path, primary=False) as checkpoints:
        checkpoints.save(2, state_at(2), {})
        assert checkpoints.restore(TARGET)[2] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.partial"]
    with Checkpoints(tmp_path / "nothing", primary=False) as checkpoints:
        assert checkpoints.latest() is None
    assert not (tmp_path / "nothing").exists()


def test_mistakes_of_the_caller_are_told_at_once(tmp_path):
    with pytest.raises(ValueError, match="at least 2"):
        Checkpoints(tmp_path, max_checkpoints=1)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match="JSON"):
            checkpoints.save(1, state_at(1), {"array": np.ones(2)})
        with pytest.raises(TypeError, match="params"):
            checkpoints.save(1, {"params": "text"}, {})
    assert checkpoints.steps() == []


def test_the_newest_readable_meta(tmp_path):
    fill(tmp_path, [None, None])
    assert saved_meta(tmp_path) == {"epoch": 2}
    (tmp_path / "2" / "record" / "metadata").write_text("{")
    assert saved_meta(tmp_path) == {"epoch": 1}
    with pytest.raises(UserError, match="no readable checkpoint"):
        saved_meta(tmp_path / "nothing")
