"""--find_batch_size: the search, what it is asked of, and what becomes of what it found.

No machine of the tests has devices that run out of memory, so the step is made to: `full_from` puts an error of jax in
the place of a step that is larger than a limit.
"""

import jax
import pytest

from cssm import batch_size as module
from cssm import train
from cssm.batch_size import largest
from cssm.config import Config, UserError, parse_args
from cssm.engine import Engine
from cssm.report import Reporter
from cssm.runs import Run

TINY = {"cssm": "gated", "embed_dim": 4, "image_size": 8, "kernel_size": 3, "seq_len": 2, "max_train_examples": 40}
TINY |= {"max_eval_examples": 8, "num_devices": 1, "max_steps": 1, "quiet": True}


@pytest.mark.parametrize("most", [1, 2, 5, 8, 31, 64])
@pytest.mark.parametrize("fitting", [0, 1, 2, 3, 7, 8, 9, 16, 40, 64, 99])
def test_the_largest_power_of_two_is_found_and_nothing_is_tried_twice(fitting, most):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= fitting

    sizes = [2**i for i in range(7) if 2**i <= min(fitting, most)]
    assert largest(fits, most) == max(sizes, default=0)
    assert len(tried) == len(set(tried)) and max(tried) <= most


@pytest.fixture
def full_from(monkeypatch):
    """Called with n: steps with n images a device or more are out of memory, here, where memory counts as limited."""
    monkeypatch.setattr(module, "ENDLESS", ())
    trials = []

    def limit(number):
        def take(self, batch):
            trials.append(self.setup.batching.batch_size)
            assert batch["image"].shape[:2] == (2, trials[-1] * self.setup.batching.grad_accum)
            if trials[-1] >= number:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
            self.window = self.no_sums

        monkeypatch.setattr(Engine, "take", take)
        monkeypatch.setattr(Engine, "initialise", lambda self: setattr(self, "state", ()))
        return trials

    return limit


def found(tmp_path, capsys, **settings):
    """(batch_size, what was said)."""
    config = Config(**{**TINY, "find_batch_size": True, **settings})
    with Reporter(None, quiet=True) as report:
        run = module.with_found_batch_size(Run(tmp_path, config, resumed=False), jax.devices()[:2], report)
    assert not run.config.find_batch_size
    return run.config.batch_size, capsys.readouterr().out


def test_the_real_setup_is_tried_at_each_size(tmp_path, capsys, full_from):
    trials = full_from(16)
    size, said = found(tmp_path, capsys)
    assert (size, sorted(set(trials))) == (8, [8, 16])
    assert said == "note: --find_batch_size found --batch_size 8: 16 does not fit\n"


def test_a_step_takes_no_more_than_the_training_set_has(tmp_path, capsys, full_from):
    """40 images, on two devices: 16 each are 32, 32 each are too many; with accumulation still fewer."""
    full_from(1000)
    assert found(tmp_path, capsys) == (
        16,
        "note: --find_batch_size found --batch_size 16: the training set has no more for a step\n",
    )
    assert found(tmp_path, capsys, grad_accum=3)[0] == 4


def test_where_not_one_image_fits_the_end_is_that_of_a_lack_of_memory(tmp_path, capsys, full_from):
    trials = full_from(1)
    with pytest.raises(UserError, match="out of memory with one image per device: type ") as refused:
        found(tmp_path, capsys)
    assert refused.value.exit_code == 3 and trials == [8, 4, 2, 1]


def test_all_processes_take_what_fits_everywhere(tmp_path, capsys, full_from, monkeypatch):
    full_from(1000)
    monkeypatch.setattr(module.job, "gather", lambda name, fit, timeout_s: [fit, len(name) > 99])
    with pytest.raises(UserError, match="out of memory"):
        found(tmp_path, capsys)


def test_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path, capsys, full_from, monkeypatch):
    full_from(1000)
    wrong = jax.errors.JaxRuntimeError("INTERNAL: another matter")
    monkeypatch.setattr(Engine, "take", lambda self, batch: (_ for _ in ()).throw(wrong))
    with pytest.raises(jax.errors.JaxRuntimeError, match="another matter"):
        found(tmp_path, capsys)


def test_on_a_cpu_it_is_refused(tmp_path):
    with pytest.raises(UserError, match="which a CPU never is: type --batch_size N"):
        train(Config(**TINY, find_batch_size=True, checkpoint_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_was_found_is_saved_and_kept(tmp_path, monkeypatch):
    """With the real steps of this machine, whose memory ends nowhere near: the size is that of the training set."""
    monkeypatch.setattr(module, "ENDLESS", ())
    few = {**TINY, "max_train_examples": 15}
    train(Config(**few, find_batch_size=True, checkpoint_dir=str(tmp_path), run_name="run"))
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "\nbatch_size: 8\n" in saved and "find_batch_size" not in saved
    argv = ["--checkpoint_dir", str(tmp_path), "--max_steps", "2", "--quiet", "--num_devices", "1", "--find_batch_size"]
    auto = parse_args([*argv, "--resume", "auto"])
    assert train(auto.config, auto.typed)["step"] == 2
    by_path = parse_args([*argv, "--resume", str(tmp_path / "run")])
    with pytest.raises(UserError, match="--find_batch_size is for a new run"):
        train(by_path.config, by_path.typed)
