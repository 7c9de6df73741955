"""A function over batches gives the same, in order, on any number of devices, for any number of examples."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from cssm.inference.spread import Spread

WEIGHTS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
TRAINED = SimpleNamespace(variables={"w": WEIGHTS})
traces = []


def product(variables, batch):
    traces.append(batch["x"].shape)
    return {"y": batch["x"] @ variables["w"], "rows": {"x": batch["x"][:, 0]}}


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 7, 24, 50])
def test_any_number_of_examples_on_any_number_of_devices(n, devices):
    x = np.random.default_rng(n).normal(size=(n, 5)).astype(np.float32)
    spread = Spread(TRAINED, product, jax.devices()[:devices], 4, prefetch=2)
    traces.clear()
    spread.warm_up({"x": x[:0]})
    size = spread.batch
    found = list(spread.run((start, {"x": x[start : start + size]}) for start in range(0, n, size)))
    assert traces == [(4, 5)], "compiled once"
    assert [label for label, _ in found] == list(range(0, n, size))
    np.testing.assert_allclose(np.concatenate([part["y"] for _, part in found]), x @ WEIGHTS, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.concatenate([part["rows"]["x"] for _, part in found]), x[:, 0])


def test_an_error_of_the_batches_is_raised_in_its_place():
    def batches():
        yield 0, {"x": np.zeros((4, 5), np.float32)}
        raise OSError("gone")

    spread = Spread(TRAINED, product, jax.devices()[:1], 4, prefetch=2)
    with pytest.raises(OSError, match="gone"):
        list(spread.run(batches()))
