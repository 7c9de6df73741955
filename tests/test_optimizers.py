"""Every optimizer against numpy in double precision, with complex leaves, on many devices, and through a checkpoint.

The fit is of |p - target|^2, weighted; `uphill` is its derivative 2 w (p - target), of complex numbers too.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cssm
from cssm.checkpoint import step_folder
from cssm.config import KNOBS, Config, parse_args
from cssm.optimizers import MUON_RMS, RULES, make_optimizer, make_schedule
from cssm.recipes import OPTIMIZERS
from parallel import devices as par
from parallel.sharded import fetch, gather, make_strategy
from parallel.sync import Replicated

NAMES = KNOBS["optimizer"].choices
SPLITTABLE = ("adamw", "sgd", "lion")
LR, DECAY, STEPS = 0.1, 0.01, 400
# None of them a default, so that one that does not arrive is seen.
OWN = {"momentum": 0.85, "beta1": 0.8, "beta2": 0.97}
KERNEL, BIAS, SPECTRUM = ("layer", "kernel"), ("layer", "bias"), ("filter", "spectrum")


def config_of(name, **settings):
    own = {key: value for key, value in OWN.items() if key in OPTIMIZERS[name]}
    return Config(optimizer=name, lr=LR, weight_decay=DECAY, **own, **settings)


def numbers(seed):
    """A matrix, a vector, and complex numbers."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(2, 3)) + 1j * rng.normal(size=(2, 3))
    return {"layer": {"kernel": rng.normal(size=(5, 3)), "bias": rng.normal(size=3)}, "filter": {"spectrum": z}}


def leaf_of(tree, path):
    return np.asarray(functools.reduce(lambda node, key: node[key], path, tree))


def optimizer_of(name):
    config = config_of(name)
    schedule = make_schedule(config, STEPS, 3)
    return make_optimizer(config, schedule), schedule


@functools.cache
def program(name):
    """The compiled descent of one optimizer: (params, target, weight) -> params after each step."""
    tx, strategy = optimizer_of(name)[0], Replicated()

    def loss(params, target, weight):
        parts = jax.tree.map(lambda p, t, w: jnp.sum(w * jnp.abs(p - t) ** 2), params, target, weight)
        return sum(jax.tree.leaves(parts))

    def run(params, target, weight):
        def step(carry, _):
            grads = jax.grad(loss)(carry[0], target, weight)
            carry = strategy.apply(tx, grads, *carry)[:2]
            return carry, carry[0]

        return jax.lax.scan(step, (params, tx.init(params)), length=STEPS)[1]

    return jax.jit(run)


@functools.cache
def rates(name):
    with jax.enable_x64(True):
        schedule = optimizer_of(name)[1]
        return [float(rate) for rate in jax.vmap(schedule)(jnp.arange(STEPS, dtype=jnp.int32))]


def descend(name, start, target, weight):
    """All of the steps, in double precision."""
    with jax.enable_x64(True):
        return jax.device_get(program(name)(*jax.tree.map(jnp.asarray, (start, target, weight))))


def problem():
    weight = jax.tree.map(lambda x: 0.5 + np.abs(x), numbers(2))
    return numbers(0), numbers(1), weight


# The rules as they are published, for one leaf: uphill -> step, at t = 1, 2, ...


def adam(t, g, state):
    b1, b2 = OWN["beta1"], OWN["beta2"]
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * (g.real**2 + g.imag**2)
    return state["m"] / (1 - b1**t) / (np.sqrt(state["v"] / (1 - b2**t)) + 1e-8)


def sgd(t, g, state):
    state["m"] = OWN["momentum"] * state.get("m", 0) + g
    return state["m"]


def lion(t, g, state):
    b1, b2, m = OWN["beta1"], OWN["beta2"], state.get("m", 0)
    state["m"] = b2 * m + (1 - b2) * g
    c = b1 * m + (1 - b1) * g
    length = np.hypot(c.real, c.imag)
    return np.divide(c, length, out=np.zeros_like(c), where=length > 0)


def muon(t, g, state):
    """The iteration of Newton and Schulz acts on singular values alone: five times s -> a s + b s^3 + c s^5."""
    b = OWN["momentum"]
    state["m"] = b * state.get("m", 0) + (1 - b) * g
    nesterov = b * state["m"] / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
    u, s, v = np.linalg.svd(nesterov, full_matrices=False)
    s = s / (np.linalg.norm(s) + 1e-8)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert (s == 0).all() or (s.min() > 0.6 and s.max() < 1.3), "not orthogonal"
    return MUON_RMS * np.sqrt(max(g.shape)) * (u * s) @ v


ORACLES = {"adamw": adam, "sgd": sgd, "lion": lion, "lamb": adam, "muon": adam}


def oracle(name, path, steps):
    """One leaf after each of the first steps."""
    p, target, weight = (leaf_of(tree, path) for tree in problem())
    decayed, state, history = path != BIAS, {}, []
    rule = muon if (name, path) == ("muon", KERNEL) else ORACLES[name]
    for t in range(1, steps + 1):
        step = rule(t, 2 * weight * (p - target), state) + DECAY * decayed * p
        if name == "lamb" and decayed:
            step = step * np.sqrt(np.sum(np.abs(p) ** 2) / np.sum(np.abs(step) ** 2))
        p = p - rates(name)[t - 1] * step
        history.append(p)
    return history


@pytest.mark.parametrize("path", [KERNEL, BIAS, SPECTRUM], ids="/".join)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_steps_equal_numpy(name, path):
    got = leaf_of(descend(name, *problem()), path)[:5]
    np.testing.assert_allclose(got, oracle(name, path, 5), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_fit_converges_in_both_parts_of_complex_numbers(name):
    start, target, weight = problem()
    end = jax.tree.map(lambda history: history[-1], descend(name, start, target, weight))
    for path in (KERNEL, BIAS, SPECTRUM):
        distance = np.abs(leaf_of(end, path) - leaf_of(target, path)).max()
        assert distance < 0.05 * np.abs(leaf_of(start, path) - leaf_of(target, path)).max(), path


@pytest.mark.parametrize("name", NAMES)
def test_no_phase_is_special(name):
    """A start and a target turned by an angle take the same way, turned."""
    start, target, weight = problem()
    turned = [{**tree, "filter": {"spectrum": np.exp(1j) * tree["filter"]["spectrum"]}} for tree in (start, target)]
    way, other = (leaf_of(descend(name, *ends, weight), SPECTRUM)[:50] for ends in ((start, target), turned))
    np.testing.assert_allclose(other, np.exp(1j) * way, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_complex_number_on_the_real_axis_moves_as_a_real_one(name):
    """Two leaves of one optimizer, alike but for their type."""
    *ends, weight = problem()
    real, on_axis = (
        [{**t, "filter": {"spectrum": t["filter"]["spectrum"].real + zero}} for t in ends] for zero in (0, 0j)
    )
    real_way, complex_way = (leaf_of(descend(name, *ends, weight), SPECTRUM)[:50] for ends in (real, on_axis))
    assert np.iscomplexobj(complex_way) and not np.iscomplexobj(real_way)
    np.testing.assert_allclose(complex_way, real_way, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_decay_shrinks_both_parts_alike_and_spares_what_it_must(name):
    """Without a gradient there is nothing but decay, which LAMB's trust ratio makes lr long."""
    start, target, weight = problem()
    history = descend(name, start, target, jax.tree.map(np.zeros_like, weight))
    shrunk = np.cumprod([1 - rate * (1 if name == "lamb" else DECAY) for rate in rates(name)])[:20]
    for path in (KERNEL, SPECTRUM):
        want = np.multiply.outer(shrunk, leaf_of(start, path))
        np.testing.assert_allclose(leaf_of(history, path)[:20], want, rtol=1e-9)
    np.testing.assert_array_equal(leaf_of(history, BIAS)[-1], leaf_of(start, BIAS))


def test_every_optimizer_of_the_command_line_has_a_rule_and_an_oracle():
    assert tuple(RULES) == tuple(OPTIMIZERS) == tuple(ORACLES) == NAMES


# On many devices


def train(shard, num_devices, names):
    """Three steps of each optimizer, in one program: whole (params, optimizer state) by name."""
    chosen = jax.devices()[:num_devices]
    strategy, txs = make_strategy(shard, "auto", chosen, 0.0), {name: optimizer_of(name)[0] for name in names}

    def backward(state, batch):
        def loss(params, x):
            whole = gather(params)
            y = jnp.tanh(x @ whole["layer"]["kernel"]) + whole["layer"]["bias"]
            return jnp.mean(jnp.abs(y @ whole["filter"]["spectrum"].T) ** 2)

        return {name: jax.grad(loss)(params, batch) for name, (params, _) in state.items()}, {}, ()

    def finish(state, sums, grads, shared, own):
        return {n: strategy.apply(tx, grads[n], *state[n])[:2] for n, tx in txs.items()}, sums

    def init(index):
        params = jax.tree.map(jnp.asarray, numbers(0))
        return {name: strategy.init(tx, params, index) for name, tx in txs.items()}

    step, sums = strategy.program(backward, finish, chosen), par.replicate(np.zeros(()), chosen)
    state = par.spmd(init, chosen)(par.device_indices(chosen))
    for batch in np.random.default_rng(5).normal(size=(3, 16, 5)):
        state, sums = step(state, sums, par.per_device(batch.reshape(num_devices, -1, 5), chosen))
    return fetch(state, chosen)


@functools.cache
def one_device():
    with jax.enable_x64(True):
        return train("none", 1, NAMES)


@pytest.mark.parametrize(
    "shard,num_devices,names", [("none", 8, NAMES), ("optimizer", 8, SPLITTABLE), ("params", 8, SPLITTABLE)]
)
def test_many_devices_take_the_steps_of_one(shard, num_devices, names):
    """Also with the state in parts; lion too, whose sign would differ only where it acts on rounding alone."""
    with jax.enable_x64(True):
        got = train(shard, num_devices, names)
    for name in names:
        want = one_device()[name]
        assert jax.tree.structure(got[name]) == jax.tree.structure(want)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), got[name], want)


def test_a_checkpoint_holds_the_state_of_every_optimizer_bit_for_bit(tmp_path):
    leaves = step_folder.host_copies(one_device())
    record = {"arrays": {path: step_folder.array_record(leaf) for path, leaf in leaves.items()}}
    with step_folder.open_checkpointer() as checkpointer:
        step_folder.write(checkpointer, tmp_path / "1", leaves, record)
        read = step_folder.read_arrays(checkpointer, tmp_path / "1", record["arrays"])
    assert read.keys() == leaves.keys() and any("muon" in path and "/mu/" in path for path in read)
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(read[path], leaf, strict=True)


TINY = {"cssm": "hgru_bi", "kernel_domain": "spectral", "embed_dim": 4, "image_size": 8, "kernel_size": 3, "seq_len": 2}
TINY |= {"max_train_examples": 40, "max_eval_examples": 10, "global_batch_size": 8, "ema_decay": 0.9}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(name, tmp_path):
    """Complex parameters on two devices: parameters, their average and the optimizer's state, bit for bit."""

    def run(folder, steps, *more):
        flags = {"checkpoint_dir": tmp_path, "quiet": True, "max_steps": steps, "num_devices": 2}
        if more:
            parsed = parse_args([*more, *(f"--{key}={value}" for key, value in flags.items())])
            cssm.train(parsed.config, parsed.typed)
        else:
            cssm.train(config_of(name, **TINY, **flags, run_name=folder, schedule="constant", warmup_steps=0))
        last = tmp_path / folder / "checkpoints" / str(steps)
        with step_folder.open_checkpointer() as checkpointer:
            return step_folder.read_arrays(checkpointer, last, step_folder.read_record(last)["arrays"])

    whole, first = run("whole", 4), run("parts", 2)
    parts = run("parts", 4, "--resume", str(tmp_path / "parts"))
    assert any(path.startswith("opt_state") for path in whole) and any(np.iscomplexobj(leaf) for leaf in whole.values())
    assert parts.keys() == whole.keys() == first.keys()
    for path, leaf in whole.items():
        np.testing.assert_array_equal(parts[path], leaf, err_msg=path)


def test_schedule_warms_up_from_the_first_step_and_ends_at_one_percent():
    config = Config(lr=1.0)
    schedule = make_schedule(config, 100, 10)
    rates = [float(schedule(step)) for step in range(101)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert max(rates) == pytest.approx(1.0) and rates[100] == pytest.approx(0.01)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert float(make_schedule(config, 10, 0)(0)) == pytest.approx(1.0)
    constant = make_schedule(dataclasses.replace(config, schedule="constant"), 10, 0)
    assert float(constant(9)) == pytest.approx(1.0)
