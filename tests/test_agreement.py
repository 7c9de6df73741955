"""The parity that `devices --parity` measures: it passes where training is right, and mistakes fail it."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import parallel.sync
from cssm import agreement
from cssm.agreement import compare
from cssm.config import parse_args
from cssm.report import Reporter
from parallel.devices import AXIS


def agree(monkeypatch, *argv: str, devices: int = 2, model: str | None = None):
    """The comparison on the first devices, of all models unless one is named."""
    if model:
        monkeypatch.setattr(agreement, "MODELS", {model: agreement.MODELS[model]})
    with Reporter(None, headless_stream=io.StringIO()) as report:
        return compare(parse_args(["devices", *argv]).config, jax.devices()[:devices], report)


COMPLEX = "vit hgru_bi, complex kernels"


@pytest.mark.slow
def test_two_devices_do_what_one_does(monkeypatch):
    result = agree(monkeypatch, model=COMPLEX)
    assert [row["ok"] for row in result["models"]] == [True], result
    assert (result["devices"], result["effective_batch"], result["tolerance"]) == (2, 4, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--shard=none", "--shard=optimizer", "--shard=params", "--sync_backend=cpu"])
def test_so_does_every_strategy_with_every_model(monkeypatch, flags):
    result = agree(monkeypatch, flags, devices=4)
    assert [row["model"] for row in result["models"]] == list(agreement.MODELS)
    assert all(row["ok"] for row in result["models"]), result


def total(tree, *_):
    return jax.tree.map(lambda x: jax.lax.psum(x, AXIS), tree)


def one_strays(tree, *_):
    """All devices average, but one of them, not the first, reads something else."""
    strayed = jax.lax.axis_index(AXIS) == 1
    return jax.tree.map(lambda x: jax.lax.pmean(x, AXIS) * jnp.where(strayed, 1.1, 1.0), tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [one_strays, total, lambda tree, *_: tree], ids=["one device strays", "sum", "no mean"]
)
def test_a_mistake_in_the_mean_fails(monkeypatch, mistake):
    monkeypatch.setattr(parallel.sync, "pmean_complex_safe", mistake)
    (row,) = agree(monkeypatch, model=COMPLEX)["models"]
    assert not row["ok"]
    assert row["parameters"] > 1e-4


@pytest.mark.parametrize(
    "given,expected,off",
    [
        ([np.array([[1.0, 2.0], [1.0, 2.5]])], [np.array([[1.0, 2.0]])], 0.25),
        ([np.array([[1j]])], [np.array([[2j]])], 0.5),
        ([np.array([[1.0]]), np.array([[3.0]])], [np.array([[1.0]]), np.array([[2.0]])], 0.5),
        ([np.array([[0.0]])], [np.array([[0.0]])], 0.0),
        ([np.array([[np.nan]])], [np.array([[1.0]])], np.inf),
    ],
)
def test_the_largest_difference_is_that_of_any_device_and_array(given, expected, off):
    assert agreement._largest_difference(given, expected) == off
