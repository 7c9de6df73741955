"""State split over devices takes the steps of state that is whole, in less memory, and reads back whole."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parallel import sharded
from parallel.devices import (
    AXIS,
    DeviceError,
    device_indices,
    per_device,
    replicate,
    spmd,
    unreplicate,
)
from parallel.sharded import ShardedOptimizer, ShardedParams, Slice, fetch, gather, make_strategy, place, whole_shapes
from parallel.sync import HostMean, Replicated

STRATEGIES = ("none", "optimizer", "params")


def mixed(seed=0):
    """Sizes that divide by no number of devices, a scalar, and complex numbers."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(3, 5)) + 1j * rng.normal(size=(3, 5))
    return {
        "block_0": {"w": rng.normal(size=(7, 3)).astype(np.float32), "z": z.astype(np.complex64)},
        "head": {"b": np.float32(rng.normal()), "w": rng.normal(size=2).astype(np.float32)},
    }


def same(a, b, tolerance=0.0):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_what_is_split_and_gathered_is_what_it_was(devices):
    tree, chosen = mixed(), jax.devices()[:devices]

    def there_and_back(tree):
        slices = sharded.split(tree, jax.lax.axis_index(AXIS), devices)
        return slices, gather(slices)

    slices, back = spmd(there_and_back, chosen)(replicate(tree, chosen))
    same(tree, unreplicate(back))
    assert slices["block_0"]["w"].piece.shape == (devices, -(-21 // devices))
    same(tree, fetch(slices, chosen))
    layout = jax.eval_shape(lambda: sharded.split(tree, 0, devices))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), whole_shapes(layout)) == jax.tree.map(
        lambda x: (np.shape(x), np.asarray(x).dtype), tree
    )
    placed = place(tree, layout, chosen)
    jax.tree.map(np.testing.assert_array_equal, placed, slices)
    assert placed["head"]["w"].piece.sharding == slices["head"]["w"].piece.sharding, "or the step compiles twice"


def test_no_collective_is_complex():
    devices = jax.devices()

    def there_and_back(tree):
        return gather(sharded._scatter_mean(tree, 8))

    text = spmd(there_and_back, devices).lower(replicate(mixed(), devices)).as_text()
    found = re.findall(r"(?:all_gather|reduce_scatter|all_reduce)\".*?-> (\S+)$", text, re.MULTILINE)
    assert "complex" in text and not [kind for kind in found if "complex" in kind]


def widened(x):
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def loss_of(params, x):
    """A real loss of all parameters that differs between examples x [b, 7]."""
    y = jnp.tanh(x @ params["block_0"]["w"])  # [b, 3]
    y = jnp.abs(y @ params["block_0"]["z"]) ** 2
    return jnp.mean(y[:, :2] @ params["head"]["w"] + params["head"]["b"] ** 2)


def train(shard, devices, steps=3, tx=None, grad_clip=0.1, grad_accum=1):
    """Steps on one sequence of global batches: (parameters, optimizer state, norms), whole."""
    tx, chosen = tx or optax.sgd(0.1, momentum=0.9), jax.devices()[:devices]
    strategy = make_strategy(shard, "auto", chosen, grad_clip)

    def backward(state, batch):
        def loss(params, x):
            return loss_of(gather(strategy.whole(params, spared=lambda name: name == "block_0")), x)

        parts = batch.reshape(grad_accum, -1, 7)
        grads = [jax.grad(loss)(state[0], part) for part in parts]
        return jax.tree.map(lambda *g: sum(g) / grad_accum, *grads), {}, ()

    def finish(state, sums, grads, shared, own):
        *state, norm = strategy.apply(tx, grads, *state)
        return tuple(state), norm

    step = strategy.program(backward, finish, chosen)
    x, norms = np.random.default_rng(5).normal(size=(steps, 48, 7)), []
    wide = jax.config.jax_enable_x64
    x, params = (x, jax.tree.map(widened, mixed())) if wide else (x.astype(np.float32), mixed())
    state = spmd(lambda i: strategy.init(tx, jax.tree.map(jnp.asarray, params), i), chosen)(device_indices(chosen))
    for batch in x:
        state, norm = step(state, None, per_device(batch.reshape(devices, -1, 7), chosen))
        norms.append(float(unreplicate(norm)))
    return *fetch(state, chosen), norms


@pytest.mark.parametrize("shard", ["optimizer", "params"])
def test_split_state_takes_the_same_steps(shard):
    """Clipped SGD with momentum, on any number of devices, also where arrays are smaller than the devices are many."""
    want = train("none", 1)
    assert min(want[2]) > 0.1, "or nothing is clipped"
    for devices in (1, 3, 8):
        jax.tree.map(lambda a, b: same(a, b, 1e-5), want, train(shard, devices))
    jax.tree.map(lambda a, b: same(a, b, 1e-5), want, train(shard, 2, grad_accum=4))


@pytest.mark.parametrize("shard", ["optimizer", "params"])
def test_under_adamw_with_masked_decay_in_double_precision(shard):
    """The mask is a function of names, which a slice must not hide; padding must stay out of everything."""

    def decays(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "'w'" in jax.tree_util.keystr(path), params)

    tx = optax.adamw(0.01, weight_decay=0.3, mask=decays)
    with jax.enable_x64(True):
        want = train("none", 1, tx=tx, grad_clip=0.0)
        jax.tree.map(lambda a, b: same(a, b, 1e-9), want, train(shard, 8, tx=tx, grad_clip=0.0))


@pytest.mark.parametrize("strategy", [ShardedOptimizer, ShardedParams])
def test_a_sum_in_place_of_the_mean_breaks_parity(strategy, monkeypatch):
    reduce = strategy.reduce
    monkeypatch.setattr(strategy, "reduce", lambda self, grads: jax.tree.map(lambda g: g * 2, reduce(self, grads)))
    shard = "optimizer" if strategy is ShardedOptimizer else "params"
    with pytest.raises(AssertionError):
        same(train("none", 1, grad_clip=0.0, steps=1)[0], train(shard, 2, grad_clip=0.0, steps=1)[0], 1e-5)


def test_a_block_that_gathers_for_itself_is_the_plain_block():
    """Same names, same values, same gradients; the whole array is no residual of the forward pass."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(6, name="dense")(nn.tanh(x))

    class Trunk(nn.Module):
        block: type[nn.Module]

        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = self.block(name=f"block_{i}")(x)
            return x

    x = np.random.default_rng(0).normal(size=(8, 4, 6)).astype(np.float32)
    params = Trunk(Block).init(jax.random.key(0), x[0])["params"]
    wrapped = Trunk(nn.remat(nn.map_variables(Block, "params", trans_in_fn=gather)))

    def grads(model, params, x):
        return jax.grad(lambda p: jnp.mean(model.apply({"params": p}, x) ** 2))(params)

    def split_grads(params, x):
        return grads(wrapped, sharded.split(params, jax.lax.axis_index(AXIS), 8), x)

    devices = jax.devices()
    got = fetch(spmd(split_grads, devices)(replicate(params, devices), x), devices)
    want = jax.tree.map(lambda g: g * 8, grads(Trunk(Block), params, x.reshape(-1, 6)))
    same(want, got, 1e-5)


def test_strategies_by_name():
    devices = jax.devices()
    kinds = [type(make_strategy(shard, "auto", devices, 1.0)) for shard in STRATEGIES]
    assert kinds == [Replicated, ShardedOptimizer, ShardedParams]
    assert make_strategy("none", "cpu", devices, 2.0) == HostMean(2.0)
    with pytest.raises(DeviceError, match="--sync_backend nccl needs NVIDIA GPUs, these are cpu devices"):
        make_strategy("none", "nccl", devices, 1.0)
    with pytest.raises(DeviceError, match="--sync_backend cpu does without collectives, --shard cannot"):
        make_strategy("params", "cpu", devices, 1.0)


def test_a_slice_is_a_tree_with_its_shape():
    piece = Slice(jnp.ones(3), (5,))
    doubled = jax.tree.map(lambda x: 2 * x, piece)
    assert doubled.shape == (5,) and float(doubled.piece.sum()) == 6
