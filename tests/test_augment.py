"""Augmentation: what it does to an example, that the loss fits it, and that only seed, step and position decide."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cssm import train
from cssm.augment import ERASED_AREA, check_pairs, make_augment, mean_level, partner, unaugmented
from cssm.checkpoint import step_folder
from cssm.config import Config, UserError, parse_args
from cssm.step import TrainState, make_backward, score
from parallel import devices as par
from parallel.sync import Replicated

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = {"mixup": 0.3, "cutmix": 1.0, "random_erasing": 0.5, "rand_augment": "m9-n1", "label_smoothing": 0.1}
PIXELS = np.random.default_rng(0).integers(0, 256, (400, 6, 8, 1), np.uint8)


@functools.cache
def augmented(n=400, clips=False, mask=False, **settings):
    """(what came in, what came out) of n examples whose label is their position."""
    images = np.repeat(PIXELS[:n, None], 3, 1) if clips else PIXELS[:n]
    batch = {"image": images, "label": np.arange(n, dtype=np.int32)}
    batch |= {"mask": np.resize(np.float32([1, 0, 1, 1]), n)} if mask else {}
    augment = make_augment(Config(**settings))
    return batch, jax.device_get(jax.jit(augment)(jax.random.key(3), jnp.arange(n), batch))


def test_unless_asked_for_there_is_none():
    assert make_augment(Config()) is None and make_augment(unaugmented(Config(**EVERYTHING))) is None
    assert make_augment(Config(dataset="folder", data_dir="x")) is None, "photographs are mirrored when decoded"


def test_mixup_mixes_neighbours_in_shares_of_a_beta_distribution():
    before, after = augmented(mixup=0.4)
    own = np.where(after["label"] == before["label"], after["share"], 1 - after["share"])[:, None, None, None]
    wanted = own * PIXELS + (1 - own) * partner(PIXELS)
    np.testing.assert_allclose(after["image"], wanted, atol=1e-3)
    assert abs(own.mean() - 0.5) < 0.06 and abs(own.var() - 1 / (4 * (2 * 0.4 + 1))) < 0.02
    assert len(set(own.ravel().tolist())) > 390, "each has a share of its own"
    assert (after["share"] >= 0.5).all()
    assert (
        np.sort([after["label"], after["other_label"]], 0) == np.sort([range(400), partner(np.arange(400))], 0)
    ).all()


def test_cutmix_takes_a_box_and_counts_its_pixels():
    before, after = augmented(cutmix=1.0)
    theirs = (after["image"] == partner(PIXELS)) & (partner(PIXELS) != PIXELS)
    assert ((after["image"] == PIXELS) | theirs).all()
    own = np.where(after["label"] == before["label"], after["share"], 1 - after["share"])
    equal = (partner(PIXELS) == PIXELS).any((1, 2, 3))
    np.testing.assert_allclose(own[~equal], 1 - theirs.mean((1, 2, 3))[~equal], atol=1e-6)
    rows, columns = theirs.any((2, 3)), theirs.any((1, 3))
    boxes = rows[:, :, None] & columns[:, None, :]
    assert (boxes == theirs[..., 0])[~equal].all() and 0.05 < theirs.mean() < 0.6


def test_with_both_a_coin_decides_for_each_example():
    after = augmented(mixup=1.0, cutmix=1.0)[1]
    cut = ((after["image"] == PIXELS) | (after["image"] == partner(PIXELS))).all((1, 2, 3))
    assert abs(cut.mean() - 0.5) < 0.1


def test_erasing_puts_the_mean_into_a_rectangle_of_some():
    after = augmented(random_erasing=0.6)[1]["image"]
    erased = after != PIXELS
    assert (after[erased] == 128).all() == (mean_level(Config()) == 128)
    hit = erased.any((1, 2, 3))
    assert abs(hit.mean() - 0.6) < 0.1
    boxes = erased.any((2, 3))[:, :, None] & erased.any((1, 3))[:, None, :]
    assert (boxes.mean((1, 2))[hit] < ERASED_AREA[1] + 0.15).all()
    assert (erased[..., 0] | ~boxes | (PIXELS[..., 0] == 128)).all()
    np.testing.assert_array_equal(mean_level(Config(dataset="imagenet", data_dir="x")), [124, 116, 104])


def test_arrays_are_mirrored_on_the_device_if_asked():
    npz = {"dataset": "npz", "data_dir": "x"}
    assert make_augment(Config(**npz)) is None
    after = augmented(n=100, **npz, flip=True)[1]["image"]
    mirrored, same = ((after == other).all((1, 2, 3)) for other in (PIXELS[:100, :, ::-1], PIXELS[:100]))
    assert (mirrored ^ same).all() and 30 < mirrored.sum() < 70


def test_the_frames_of_a_clip_are_treated_alike():
    settings = {"cutmix": 1.0, "random_erasing": 0.5}
    still, clip = augmented(n=32, **settings)[1], augmented(n=32, clips=True, **settings)[1]
    for frame in range(3):
        np.testing.assert_array_equal(clip["image"][:, frame], still["image"])


def test_what_is_left_out_is_mixed_into_nothing():
    after = augmented(n=40, mask=True, mixup=1.0)[1]
    np.testing.assert_array_equal(after["image"][::4], PIXELS[:40:4])
    assert (after["share"][::4] == 1).all() and (after["share"][2::4] < 1).all()


def test_the_loss_is_that_of_soft_targets_and_the_heavier_label_counts():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 5)), jnp.float32)
    best = jnp.argmax(logits, -1)
    first, second, share = jnp.stack([best[0], 0, best[2], 1]), jnp.stack([2, best[1], best[2], 1]), jnp.full(4, 0.7)
    targets = share[:, None] * jax.nn.one_hot(first, 5) + (1 - share[:, None]) * jax.nn.one_hot(second, 5)
    want = optax.softmax_cross_entropy(logits, optax.smooth_labels(targets, 0.1))
    loss, correct, count = score(logits, first, None, 0.1, (second, share))
    np.testing.assert_allclose(loss, want.sum(), rtol=1e-6)
    assert (int(correct), int(count)) == (int((best == first).sum()), 4)
    np.testing.assert_allclose(
        score(logits, first, jnp.asarray([1, 0, 0, 1.0]), 0.1, (second, share))[0], want[0] + want[3]
    )


def gradient(num_devices, grad_accum, step=7, seed=0, **settings):
    """Of a linear model on 16 examples: it sees every pixel and label that the loss is taken of."""
    config, devices = Config(**settings), jax.devices()[:num_devices]
    linear = lambda variables, images, **_: (images.reshape(len(images), -1) @ variables["params"], {})
    backward = make_backward(SimpleNamespace(apply=linear), Replicated(), config, grad_accum)
    params = np.random.default_rng(2).normal(0, 0.1, (48, 10)).astype(np.float32)
    rng = jax.random.key_data(jax.random.key(seed))
    state = TrainState(np.int32(step), params, {}, {}, {}, rng)
    batch = {"image": PIXELS[:16], "label": np.arange(16, dtype=np.int32) % 10}
    program = par.spmd(lambda s, b: jax.lax.pmean(backward(s, b)[0], par.AXIS), devices)
    return par.unreplicate(program(par.replicate(state, devices), par.shard_batch(batch, devices)))


@pytest.mark.parametrize("left_out", ["rand_augment", pytest.param("", marks=pytest.mark.slow, id="nothing")])
def test_neither_devices_nor_passes_change_anything(left_out):
    settings = {name: value for name, value in EVERYTHING.items() if name != left_out}
    np.testing.assert_allclose(gradient(4, 2, **settings), gradient(1, 1, **settings), atol=1e-6)


def test_seed_and_step_decide():
    """The next step and another seed differ, the same ones do not."""
    few = {"mixup": 1.0}
    plain, mixed = gradient(1, 1), gradient(1, 1, **few)
    others = [gradient(1, 1, step=8, **few), gradient(1, 1, seed=1, **few)]
    assert all(np.abs(a - b).max() > 1e-3 for a, b in [(plain, mixed), (mixed, others[0]), (mixed, others[1])])
    np.testing.assert_array_equal(gradient(1, 1, **few), mixed)


def test_half_a_pair_is_refused():
    check_pairs(Config(mixup=0.2), 4)
    check_pairs(Config(random_erasing=0.2), 3)
    with pytest.raises(UserError, match=r"--cutmix mixes .* a pass of a device has 3 images: type --batch_size 4"):
        check_pairs(Config(cutmix=0.2), 3)
    with pytest.raises(UserError, match="--mixup mixes"):
        train(Config(mixup=0.2, global_batch_size=10, num_devices=2, dry_run=True, quiet=True))


@pytest.mark.parametrize("flag", ["--mixup=0.2", "--rand_augment=m9-n2", "--random_erasing=0.1"])
def test_it_belongs_to_training(flag):
    with pytest.raises(UserError, match="does not apply to the verb devices: it is for train or bench"):
        parse_args(["devices", flag])
    assert parse_args(["bench", flag]).config != Config()


def test_pixels_of_digits_are_not_mirrored():
    for dataset in ("digits", "cabc", "pathtracker"):
        with pytest.raises(UserError, match=f"--flip does not apply with --dataset {dataset}"):
            Config(dataset=dataset, flip=True)


@pytest.mark.parametrize(
    "source", [{"dataset": "cabc"}, {"dataset": "pathtracker"}, {"dataset": "tfds:x", "data_dir": "x"}], ids=str
)
def test_every_data_set_can_be_augmented(source):
    assert make_augment(Config(**source)) is None and make_augment(unaugmented(Config(**source, **EVERYTHING))) is None
    assert make_augment(Config(**source, **EVERYTHING))


def test_what_tfds_holds_is_mirrored_when_decoded():
    assert make_augment(Config(dataset="tfds:x", data_dir="x", flip=True)) is None


@pytest.mark.parametrize("text", ["9", "m11-n2", "m9-n0", "m9", "n2-m9", "m-1-n2", "rand-m9-n2"])
def test_other_forms_of_rand_augment_are_refused(text):
    with pytest.raises(UserError, match=f"--rand_augment {text}: must be a magnitude from 0 to 10"):
        Config(rand_augment=text)


@pytest.mark.slow
def test_a_run_that_goes_on_sees_the_same(tmp_path):
    """One device throughout, against two processes that stop after two steps, and two devices that accumulate."""
    settings = {"embed_dim": 4, "image_size": 8, "kernel_size": 3, "seq_len": 2, "cssm": "gated", "optimizer": "sgd"}
    settings |= {"global_batch_size": 16, "max_train_examples": 32, "max_eval_examples": 10, "warmup_steps": 0}
    settings |= {"schedule": "constant", "lr": 0.01, "checkpoint_dir": str(tmp_path)}
    settings |= {name: value for name, value in EVERYTHING.items() if name != "rand_augment"}  # quicker to compile
    train(Config(**settings, num_devices=1, max_steps=4, run_name="through", quiet=True))
    flags = [f"--{name}={value}" for name, value in settings.items()]
    flags += ["--nproc_per_node=2", "--max_steps=2", "--run_name=halves"]
    environ = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"}
    command = [sys.executable, "main.py", *flags]
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    more = {"max_steps": 4, "num_devices": 2, "grad_accum": 2, "batch_size": 4, "global_batch_size": None}
    train(Config(**{**settings, **more}, resume=str(tmp_path / "halves")), {"max_steps": 4, "grad_accum": 2})
    arrays = []
    for name in ("through", "halves"):
        folder = tmp_path / name / "checkpoints" / "4"
        with step_folder.open_checkpointer() as checkpointer:
            arrays.append(step_folder.read_arrays(checkpointer, folder, step_folder.read_record(folder)["arrays"]))
    for path in (path for path in arrays[0] if path.startswith("params/")):
        np.testing.assert_allclose(arrays[1][path], arrays[0][path], rtol=1e-5, atol=1e-5, err_msg=path)
