"""What every cell must fulfil, each law once; a test calls it with its cell."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle


def run(cell, params, x, *args):
    """cell(x, *args) compiled, since operation by operation takes several times longer than the cell itself."""
    return np.asarray(jax.jit(lambda p, x: cell.apply({"params": p}, x, *args))(params, x))


def init(cell, key, x):
    """Parameters about as large as at the start, moved off zeros and ones, which may hide what depends on them.

    They are drawn here, since a start that is compiled takes as long as the cell itself.
    """
    shapes = jax.eval_shape(cell.init, key, x)["params"]
    rng = np.random.default_rng(0)

    def drawn(path, leaf):
        spread = 1 / np.sqrt(np.prod(leaf.shape[:-1])) if leaf.ndim > 1 else 0.1
        value = spread * rng.normal(size=leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            value = value + 1j * spread * rng.normal(size=leaf.shape)
        return jnp.asarray(value + (path[-1].key in ("scale", "gamma")), leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, shapes)


def nest(p):
    """Leaves "module/leaf" -> the nested parameters of Flax, float64 where that is enabled."""
    tree = {}
    for path, leaf in p.items():
        *modules, name = path.split("/")
        place = tree
        for module in modules:
            place = place.setdefault(module, {})
        place[name] = jnp.asarray(leaf)
    return tree


def causal(cell, key, shape=(2, 4, 8, 10, 8), last=2):
    """Frames from `last` on change no output before it, but those after."""
    x = jnp.asarray(oracle.wave_input(shape))
    params = init(cell, key, x)
    changed, want = run(cell, params, x.at[:, last:].multiply(0.5)), run(cell, params, x)
    np.testing.assert_allclose(changed[:, :last], want[:, :last], atol=1e-6 * np.abs(want).max())
    assert np.abs(changed[:, last:] - want[:, last:]).max() > 1e-3 * np.abs(want).max()


def still(cell, key, shape=(2, 4, 8, 10, 8)):
    """A still image gives what the clip of its copies does; last_only gives the last step of either."""
    image = jnp.asarray(oracle.wave_input((shape[0], 1, *shape[2:])))
    clip = jnp.asarray(oracle.wave_input(shape))
    params = init(cell, key, clip)

    @jax.jit
    def calls(params, image, clip):
        apply = lambda *args: cell.apply({"params": params}, *args)
        still = apply(image, shape[1]), apply(image, shape[1], True)
        return apply(jnp.repeat(image, shape[1], axis=1)), *still, apply(clip), apply(clip, None, True)

    whole, all_steps, last, moving, moving_last = (np.asarray(y) for y in calls(params, image, clip))
    assert whole.shape == shape
    near = {"rtol": 0, "atol": 1e-5 * max(1.0, np.abs(whole).max())}
    np.testing.assert_allclose(all_steps, whole, **near)
    np.testing.assert_allclose(last, whole[:, -1:], **near)
    np.testing.assert_allclose(moving_last, moving[:, -1:], **near)


def learns(cell, key, shape=(2, 4, 8, 10, 8)):
    """The last output has a gradient for every parameter."""
    x = jnp.asarray(oracle.wave_input(shape))
    params = init(cell, key, x)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(cell.apply({"params": p}, x, None, True)))))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 1e-7, jax.tree_util.keystr(path)


def bf16_is_near(make, key, shape=(2, 4, 8, 10, 8)):
    """make(dtype=...) in bf16 stays within 2% (root mean square) of float32."""
    x = jnp.asarray(oracle.wave_input(shape), jnp.bfloat16)
    params = init(make(dtype=jnp.float32), key, x)
    want, got = run(make(dtype=jnp.float32), params, x.astype(jnp.float32)), run(make(dtype=jnp.bfloat16), params, x)
    assert got.dtype == jnp.bfloat16
    assert np.linalg.norm(got.astype(np.float32) - want) < 0.02 * np.linalg.norm(want)


def gradient_is_the_slope(loss, reference, params, publish=lambda p: p):
    """In float64 `jax.grad(loss)` at publish(params) is the slope of `reference(params)` along random directions.

    params: dict of numpy arrays. publish: their (linear) map to the parameters that loss takes.
    """
    grads = jax.tree.leaves(jax.jit(jax.grad(loss))(publish(params)))
    rng = np.random.default_rng(0)
    for _ in range(3):
        along = {path: rng.normal(size=leaf.shape) for path, leaf in params.items()}
        ends = [reference({k: v + h * along[k] for k, v in params.items()}) for h in (1e-6, -1e-6)]
        got = sum(np.vdot(g, a) for g, a in zip(grads, jax.tree.leaves(publish(along)), strict=True))
        np.testing.assert_allclose(got, (ends[0] - ends[1]) / 2e-6, rtol=1e-5)


def agree(make, variants, params, x):
    """Values and gradients in float64 of make(**variant) are one for all variants; call it with x64 enabled."""

    def both(variant):
        loss = lambda p, x: jnp.sum(jnp.sin(make(**variant).apply({"params": p}, x)))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)

    want = both(variants[0])
    for variant in variants[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), want, both(variant))
