"""spatial_attn, spatiotemporal_attn: float64 attention by loops over heads, who sees whom, and shortcuts."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest

from cssm.cells import attention
from cssm.cells.attention import AttentionBlock
from cssm.cells.core import CellOptions

SHAPE = (2, 3, 4, 5, 8)


def make(over_time=True, heads=2, **changes):
    return AttentionBlock(CellOptions(**{"channels": 8, **changes}), heads, 2.0, 1.0, over_time)


def shapes(over_time, height=4, width=5):
    leaves = {"pos_embed": (1, 1, height, width, 8)}
    leaves |= oracle.dense_shapes("mlp/up", 8, 16) | oracle.dense_shapes("mlp/down", 16, 8)
    for part in ("space", "time", "mlp") if over_time else ("space", "mlp"):
        leaves |= {f"norm_{part}/scale": (8,), f"norm_{part}/bias": (8,), f"scale_{part}/gamma": (8,)}
        if part != "mlp":
            leaves |= oracle.dense_shapes(f"attn_{part}/qkv", 8, 24) | oracle.dense_shapes(f"attn_{part}/proj", 8, 8)
    return leaves


def block(x, p, over_time, turn=lambda z: z, heads=2):
    """turn: applied to queries and keys."""

    def norm(z, name):
        z = z - z.mean(-1, keepdims=True)
        return z / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-6) * p[f"{name}/scale"] + p[f"{name}/bias"]

    h = x + p["pos_embed"]
    for name, seen in (("space", "bthwc,btijc->bthwij"), ("time", "bthwc,bshwc->bthws"))[: 1 + over_time]:
        q, k, v = np.split(oracle.dense(norm(h, f"norm_{name}"), p, f"attn_{name}/qkv"), 3, axis=-1)
        q, k, outputs, size = turn(q), turn(k), [], 8 // heads
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = np.exp(np.einsum(seen, q[..., part], k[..., part]) / np.sqrt(size))
            scores /= scores.sum(axis=(-2, -1) if name == "space" else -1, keepdims=True)
            read = "bthwij,btijc->bthwc" if name == "space" else "bthws,bshwc->bthwc"
            outputs.append(np.einsum(read, scores, v[..., part]))
        h = h + p[f"scale_{name}/gamma"] * oracle.dense(np.concatenate(outputs, -1), p, f"attn_{name}/proj")
    z = oracle.dense(norm(h, "norm_mlp"), p, "mlp/up")
    z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    return h + p["scale_mlp/gamma"] * oracle.dense(z, p, "mlp/down") - x


def turn_in_time(z):
    """Rotary code "temporal", pair by pair as complex numbers."""
    pairs = z[..., 0::2] + 1j * z[..., 1::2]
    for t in range(z.shape[1]):
        pairs[:, t] *= np.exp(1j * t * 10000.0 ** (-np.arange(0, 8, 2) / 8))
    return np.stack([pairs.real, pairs.imag], -1).reshape(z.shape)


@pytest.mark.parametrize("over_time,rope_mode", [(True, "temporal"), (True, "none"), (False, "none")])
def test_values_are_those_of_the_float64_loops(over_time, rope_mode):
    p, x = oracle.wave_parameters(shapes(over_time)), oracle.wave_input(SHAPE).astype(float)
    with jax.enable_x64(True):
        y = laws.run(make(over_time, rope_mode=rope_mode), laws.nest(p), jnp.asarray(x))
        turn = turn_in_time if rope_mode == "temporal" else lambda z: z
        # jax.nn.dot_product_attention takes its softmax in float32.
        np.testing.assert_allclose(y, block(x, p, over_time, turn), atol=2e-7)


def test_gradients_are_slopes_of_the_loops():
    p, x = oracle.wave_parameters(shapes(True, 2, 3)), oracle.wave_input((1, 3, 2, 3, 8)).astype(float)
    with jax.enable_x64(True):
        loss = lambda params: jnp.sum(jnp.sin(make().apply({"params": params}, jnp.asarray(x))))
        laws.gradient_is_the_slope(loss, lambda p: np.sin(block(x, p, True)).sum(), p, laws.nest)


def test_frames_see_each_other_only_over_time(key):
    laws.causal(make(False), key, SHAPE)
    with pytest.raises(AssertionError):
        laws.causal(make(True), key, SHAPE)


@pytest.mark.parametrize("over_time,rope_mode", [(True, "mrope"), (False, "mrope"), (False, "none")])
def test_a_still_image_is_the_clip_of_its_copies(over_time, rope_mode, key):
    laws.still(make(over_time, rope_mode=rope_mode), key, SHAPE)


def test_every_parameter_learns(key):
    laws.learns(make(), key, SHAPE)


def test_bf16_is_near_float32(key):
    laws.bf16_is_near(make, key, SHAPE)


def test_heads_must_divide_the_channels(key):
    with pytest.raises(ValueError, match="3 heads do not divide the 8 channels"):
        make(heads=3).init(key, jnp.zeros(SHAPE))


def test_cudnn_computes_attention_over_pixels_in_16_bits_on_a_gpu(monkeypatch):
    choose = lambda dtype=jnp.bfloat16, channels=64, over="space": attention.kernel_of(dtype, channels, over)
    assert choose() is None
    monkeypatch.setattr(attention, "available", lambda: True)
    assert choose() == "cudnn"
    assert choose(dtype=jnp.float32) is choose(channels=36) is choose(channels=136) is choose(over="time") is None


def test_a_scaled_mlp_keeps_what_a_plain_one_keeps_for_the_backward_pass(key):
    """What it gives is the largest thing that the scale's gradient might want."""
    x, mlp = oracle.wave_input(SHAPE), attention.MLP(2.0)
    params = mlp.init(key, x)

    def kept(scale):
        residuals = jax.tree.leaves(jax.vjp(mlp.apply, params, x, scale)[1])
        return sorted(leaf.size for leaf in residuals if leaf.size >= x.size)

    assert kept(jnp.full(8, 0.5)) == kept(None)
