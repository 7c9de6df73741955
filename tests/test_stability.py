"""--stable_transition and --scan goom: what bounds the transition of each cell, and 1024 steps that stay finite."""

import importlib
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest
import recurrence

from cssm.cells import CELLS, core
from cssm.cells.core import CellOptions
from cssm.rules import CONTRACTIONS
from cssm.scan import linear_scan, shown, stable_step
from cssm.settings.family import RECURRENT
from cssm.spectral import Spectrum

METHODS = ("reference", "chunked", "associative", "goom", "fused")
NAMES = RECURRENT["cssm"]
COUPLED = tuple(name for name in NAMES if name not in CONTRACTIONS)
# Whose products grow without bound; the matrices of add_kqv are triangular, and their diagonals are below 1.
GROWING = tuple(name for name in COUPLED if name != "add_kqv")


def every(names, fast="hgru"):
    """All of them, but one in the slow tests alone."""
    return [pytest.param(name, marks=() if name == fast else pytest.mark.slow) for name in names]


def make(name, ablations=(), **changes):
    defaults = {"channels": 4, "kernel_size": 3, "backend": "fft"}
    return CELLS[name](CellOptions(**{**defaults, **changes}), **dict(ablations))


def large(cell, x, opened=0.0):
    """Parameters under which bounded kernels are near 1 and gates near 0 or 1, most of them open where told so."""
    shapes = jax.eval_shape(lambda: cell.init(jax.random.key(0), x))["params"]

    def enlarge(path, leaf, shape):
        name = jax.tree_util.keystr(path)
        return (8.0 * leaf + opened * ("gate" in name and "bias" in name)).astype(shape.dtype)

    return jax.tree_util.tree_map_with_path(enlarge, recurrence.parameters(cell, x), shapes)


@contextmanager
def spied(name, found):
    """Append to `found` the matrices [T, B, F, C, row, column] of every recurrence that the cell runs."""

    def spy(make_step, constants, counts, gates, inputs, method="auto", last_only=False, stable=False, *read, **named):
        first = lambda a: jnp.moveaxis(a, 1, 0)
        n, (batch, _, _, frequencies, channels) = counts[0], inputs.shape
        steps = jax.tree.leaves(gates)[0].shape[1]
        zero = jnp.zeros((steps, batch, frequencies, channels // (counts[1] * named.get("copies", 1))))
        state = lambda j: tuple(Spectrum(zero + (i == j), zero) for i in range(n))
        step = make_step(*constants)
        run = stable_step(step) if stable else step
        at_steps = shown(jax.tree.map(first, gates))
        columns = [run(state(j), at_steps, (Spectrum(zero, zero),) * counts[1]) for j in range(n)]
        stack = lambda part: jnp.stack([jnp.stack([getattr(h, part) for h in c], -1) for c in columns], -1)
        found.append((stack("re"), stack("im")))
        return linear_scan(make_step, constants, counts, gates, inputs, method, last_only, stable, *read, **named)

    module = importlib.import_module(CELLS[name].__module__)
    places = [place for place in (core, module) if hasattr(place, "linear_scan")]
    for place in places:
        place.linear_scan = spy
    try:
        yield
    finally:
        for place in places:
            place.linear_scan = linear_scan


def matrices(name, ablations, **changes):
    """Those of the cell without and with stable_transition, under large parameters, and kernels with zeros."""
    x = oracle.wave_input((1, 3, 4, 4, 4))
    params = large(make(name, ablations, **changes), x)
    found = []

    def both(params, x):
        for stable in (False, True):
            make(name, ablations, stable_transition=stable, **changes).apply({"params": params}, x)
        return found

    with spied(name, found):
        pairs = jax.jit(both)(params, x)
    plain, stable = (np.asarray(re, np.float64) + 1j * np.asarray(im, np.float64) for re, im in pairs)
    return plain, stable


UNBOUNDED = {"spectral_clip": False}
VARIANTS = [
    *((name, {}, {}) for name in COUPLED),
    ("hgru_bi", {}, {"kernel_domain": "spectral", "gate_type": "dense"}),
    ("opponent", {"gate_activation": "softplus_clamped"}, {}),
    ("transformer", {"asymmetric_qk": True, **UNBOUNDED}, {}),
    ("mult_transformer", UNBOUNDED, {}),
]


@pytest.mark.parametrize("name,ablations,changes", VARIANTS)
def test_rows_above_one_are_divided_by_their_sum_and_others_stay(name, ablations, changes):
    plain, stable = matrices(name, ablations, **changes)
    rows = np.abs(plain).sum(-1, keepdims=True)
    assert rows.max() > 1.5 and rows.min() < 0.95
    assert np.abs(stable).sum(-1).max() < 1 + 1e-6
    np.testing.assert_allclose(stable, plain / np.maximum(rows, 1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name,ablations",
    [*((name, {}) for name in CONTRACTIONS), ("standard", {"transition": "scalar"}), ("gdn", {"delta_key_dim": 4})],
)
def test_a_contraction_is_one_and_stays_as_it_is(name, ablations):
    plain, stable = matrices(name, ablations)
    assert np.linalg.norm(plain, 2, axis=(-2, -1)).max() < 1 + 1e-6
    np.testing.assert_array_equal(stable, plain)


def test_the_unbounded_kernels_of_gdn_are_held_below_one_in_the_two_norm():
    """Its rows may sum up to more than 1 and lengthen nothing all the same."""
    plain, stable = matrices("gdn", {"delta_key_dim": 4, **UNBOUNDED})
    long = np.linalg.norm(plain, 2, axis=(-2, -1))
    assert long.max() > 1.5 and long.min() < 0.95
    assert np.abs(stable).sum(-1).max() > 1.1
    np.testing.assert_allclose(stable, plain / np.maximum(long, 1)[..., None, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", every(NAMES, fast="conv_ssm"))
def test_every_scan_gives_the_same_values_and_gradients(name):
    x = oracle.wave_input((1, 5, 2, 4, 4)).astype(np.float64)
    with jax.enable_x64(True):
        params = recurrence.parameters(make(name), x)
        laws.agree(lambda **scan: make(name, **scan), [{"scan": method} for method in METHODS], params, x)


def thousand(name, value_alone=False, **changes):
    """Outputs after 1024 steps of a still image, and gradients of the sum of their sines, under large parameters."""
    cell = make(name, **changes)
    x = oracle.wave_input((1, 1, 2, 4, 4))
    params = large(cell, x, opened=8.0)

    def loss(params, x):
        y = cell.apply({"params": params}, x, 1024, True)
        return jnp.sum(jnp.sin(y)), y

    if value_alone:
        return jax.jit(loss)(params, x)[1], None
    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    return y, grads


@pytest.mark.parametrize("name", every(NAMES))
@pytest.mark.parametrize("way", [{"stable_transition": True}, {"scan": "goom"}])
def test_a_thousand_steps_stay_finite(name, way):
    y, grads = thousand(name, **way)
    assert np.isfinite(y).all() and np.abs(y).max() > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", every(GROWING))
def test_a_thousand_steps_of_the_plain_cell_overflow(name):
    y, _ = thousand(name, value_alone=True)
    assert not np.isfinite(y).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", COUPLED)
def test_bf16_is_near_with_a_stable_transition(name, key):
    laws.bf16_is_near(lambda **changes: make(name, stable_transition=True, **changes), key, recurrence.SHAPE)
