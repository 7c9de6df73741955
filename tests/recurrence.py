"""Float64 recurrences for tests of cells, from this package's parameters: matrices formed, np.fft, a loop over time."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle

from cssm.positions import rope

SHAPE = (2, 4, 5, 6, 4)


def parameters(cell, x):
    """Random float64 leaves of the shapes that the cell has for x."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: cell.init(jax.random.key(0), x))["params"]
    return jax.tree.map(lambda leaf: 0.5 * rng.normal(size=leaf.shape), shapes)


def leaves(tree):
    """Path -> leaf, such as "gates/dense/kernel"."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in flat}


def context(x):
    return x.mean(axis=(2, 3)) + oracle.time_code(x.shape[1], x.shape[-1])


def gates(x, p, names):
    """Squashed gates name -> [B, T, 1, H, Wf]: those called decay_* lie in 0.1 .. 0.99."""
    (batch, steps, height), columns = x.shape[:3], x.shape[3] // 2 + 1
    if "gates/dense/kernel" in p:
        raw = oracle.dense(context(x), p, "gates/dense").reshape(batch, steps, len(names), height, columns)
    else:
        both = oracle.dense(context(x), p, "gates/factors").reshape(batch, steps, len(names), height + columns)
        raw = both[..., :height, None] + both[..., None, height:]
    squashed = {name: oracle.sigmoid(raw[:, :, i : i + 1]) for i, name in enumerate(names)}
    return {name: 0.1 + 0.89 * g if name.startswith("decay") else g for name, g in squashed.items()}


def inputs(x, p, count):
    """`count` projected inputs, spectra [B, T, C, H, Wf]."""
    return [oracle.to_frequency(part) for part in np.split(oracle.dense(x, p, "input_proj"), count, axis=-1)]


def scan(matrix, drive):
    """h_t = A_t h_{t-1} + u_t; rows of the matrix and the drive broadcast to [B, T, C, H, Wf], as states are."""
    drive = np.stack(np.broadcast_arrays(*drive), -1)
    matrix = np.stack([np.stack([np.broadcast_to(a, drive.shape[:-1]) for a in row], -1) for row in matrix], -2)
    state, states = np.zeros_like(drive[:, 0]), []
    for t in range(drive.shape[1]):
        state = np.einsum("...ij,...j->...i", matrix[:, t], state) + drive[:, t]
        states.append(state)
    return list(np.moveaxis(np.stack(states, 1), -1, 0))


def project(maps, p):
    """Dense of n concatenated maps [B, T, H, W, C] by a kernel [n, C, C]."""
    return p["output_proj/bias"] + sum(y @ k for y, k in zip(maps, p["output_proj/kernel"], strict=True))


def standardise(spectrum, p, name):
    """[B, T, C, H, Wf] with its log magnitude standardised over (H, Wf), its phase kept."""
    log = np.log(np.sqrt(np.abs(spectrum) ** 2 + 1e-6))
    mean, variance = log.mean((-2, -1), keepdims=True), log.var((-2, -1), keepdims=True)
    gain, bias = (p[f"{name}/{leaf}"][:, None, None] for leaf in ("scale", "bias"))
    return np.sqrt(SHAPE[2] * SHAPE[3]) * np.exp(gain * (log - mean) / np.sqrt(variance + 1e-6) + bias - log) * spectrum


def matches(cell, reference):
    """Values of the cell are those of reference(x, p), its gradients their slopes, leaf by leaf, none of them zero."""
    x = oracle.wave_input(SHAPE).astype(np.float64)
    with jax.enable_x64(True):
        tree = parameters(cell, x)

        def loss(tree, x):
            y = cell.apply({"params": tree}, x)
            return jnp.sum(jnp.sin(y)), y

        (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(tree, x)
    p = leaves(tree)
    want = reference(x, p)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, want, atol=1e-9 * np.abs(want).max())
    rng, slopes = np.random.default_rng(2), leaves(grads[0]) | {"x": np.asarray(grads[1])}
    for name, at in (p | {"x": x}).items():
        along, ends = rng.normal(size=at.shape), []
        along /= np.linalg.norm(along)
        for h in (1e-5, -1e-5):
            moved = p | {"x": x, name: at + h * along}
            ends.append(np.sin(reference(moved.pop("x"), moved)).sum())
        got = np.vdot(slopes[name], along)
        assert abs(got) > 1e-6, name
        np.testing.assert_allclose(got, (ends[0] - ends[1]) / 2e-5, rtol=1e-5, atol=1e-7, err_msg=name)


def equivariant(cell):
    """Shifting the input around the map shifts the output: context and gates do not see where things are."""
    x = oracle.wave_input(SHAPE).astype(np.float64)
    with jax.enable_x64(True):
        params = parameters(cell, x)
        apply = jax.jit(lambda x: cell.apply({"params": params}, x))
        y, shifted = np.asarray(apply(x)), np.asarray(apply(np.roll(x, (2, 3), axis=(2, 3))))
    np.testing.assert_allclose(shifted, np.roll(y, (2, 3), axis=(2, 3)), atol=1e-11 * np.abs(y).max())
    assert np.abs(shifted - y).max() > 1e-3 * np.abs(y).max()


def turns_its_input(make):
    """With a rotary code the cell does what it does without one to an input that was turned before."""
    still = jnp.asarray(oracle.wave_input((SHAPE[0], 1, *SHAPE[2:])))
    turned = rope(jnp.repeat(still, SHAPE[1], axis=1), "mrope")
    params = jax.tree.map(jnp.float32, parameters(make(), turned))
    want = laws.run(make(), params, turned)
    np.testing.assert_allclose(laws.run(make(rope_mode="mrope"), params, still, SHAPE[1]), want, atol=2e-5)
