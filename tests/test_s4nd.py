"""s4nd: direct float64 convolution with kernels of state spaces that are run, causality, and its shortcuts."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracle
import pytest

from cssm.cells.core import CellOptions
from cssm.cells.s4nd import S4ND

AXES = ("t", "t_reverse", "h", "h_reverse", "w", "w_reverse")


def make(bidirectional=True, **changes):
    return S4ND(CellOptions(**{"channels": 4, "backend": "fft", **changes}), 4, bidirectional)


def shapes():
    leaves = {"D": (4,)} | oracle.dense_shapes("output_proj", 4, 4)
    for axis in AXES:
        leaves |= {f"kernel_{axis}/{name}": (4, 2) for name in ("log_rate", "frequency")}
        leaves |= {f"kernel_{axis}/log_dt": (4, 1), f"kernel_{axis}/read": (2, 4, 2)}
    return leaves


def impulse_response(p, axis, length):
    """[length, C] of h <- exp(dt A) h + (exp(dt A) - 1) / A u, y = Re C h with both of each conjugate pair, run."""
    leaf = {name: p[f"kernel_{axis}/{name}"] for name in ("log_dt", "log_rate", "frequency", "read")}
    a = -np.exp(leaf["log_rate"]) + 1j * leaf["frequency"]
    decay = np.exp(np.exp(leaf["log_dt"]) * a)
    state, response = 0, []
    for t in range(length):
        state = decay * state + (decay - 1) / a * (t == 0)
        pair = (leaf["read"][0] + 1j * leaf["read"][1]) * state
        response.append((pair + pair.conj()).sum(-1).real)
    return np.array(response)


def matrix(p, axis, length, both):
    """[C, length, length] that convolves along an axis."""
    ahead, behind = impulse_response(p, axis, length), impulse_response(p, f"{axis}_reverse", length)
    out = np.zeros((4, length, length))
    for i in range(length):
        for j in range(length):
            out[:, i, j] = ahead[i - j] if j <= i else behind[j - i - 1] * both
    return out


def s4nd(x, p, bidirectional=True):
    along = [
        matrix(p, axis, side, both) for axis, side, both in zip("thw", x.shape[1:4], (bidirectional, 1, 1), strict=True)
    ]
    y = np.einsum("cst,chi,cwj,btijc->bshwc", *along, x) + p["D"] * x
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return oracle.dense(y, p, "output_proj")


@pytest.mark.parametrize("bidirectional,backend", [(True, "dft"), (False, "fft")])
def test_values_are_those_of_direct_convolution_with_the_run_state_space(bidirectional, backend):
    p, x = oracle.wave_parameters(shapes()), oracle.wave_input((2, 4, 5, 6, 4)).astype(float)
    with jax.enable_x64(True):
        y = laws.run(make(bidirectional, backend=backend), laws.nest(p), jnp.asarray(x))
        np.testing.assert_allclose(y, s4nd(x, p, bidirectional), atol=1e-9)


def test_gradients_are_slopes_of_direct_convolution_and_agree_between_backends():
    p, x = oracle.wave_parameters(shapes()), oracle.wave_input((1, 3, 3, 4, 4)).astype(float)
    with jax.enable_x64(True):
        loss = lambda params: jnp.sum(jnp.sin(make().apply({"params": params}, jnp.asarray(x))))
        laws.gradient_is_the_slope(loss, lambda p: np.sin(s4nd(x, p)).sum(), p, laws.nest)
        laws.agree(make, [{}, {"backend": "dft"}], laws.nest(p), jnp.asarray(x))


def test_a_shifted_input_gives_the_shifted_output_inside_the_map(key):
    x = jnp.asarray(oracle.wave_input((1, 3, 8, 8, 4))).at[:, :, 5:].set(0.0).at[:, :, :, 5:].set(0.0)
    params = laws.init(make(), key, x)
    y, shifted = (laws.run(make(), params, z) for z in (x, jnp.roll(x, (3, 2), (2, 3))))
    np.testing.assert_allclose(shifted[:, :, 3:, 2:], y[:, :, :-3, :-2], atol=1e-5)


def test_later_frames_change_earlier_outputs_only_if_bidirectional(key):
    laws.causal(make(False), key, (1, 4, 6, 6, 4))
    with pytest.raises(AssertionError):
        laws.causal(make(True), key, (1, 4, 6, 6, 4))


@pytest.mark.parametrize("bidirectional,rope_mode", [(True, "none"), (False, "mrope")])
def test_a_still_image_is_the_clip_of_its_copies(bidirectional, rope_mode, key):
    laws.still(make(bidirectional, rope_mode=rope_mode), key, (2, 4, 5, 6, 4))


def test_every_parameter_learns(key):
    laws.learns(make(False), key, (1, 4, 5, 6, 4))


def test_bf16_is_near_float32(key):
    laws.bf16_is_near(make, key, (2, 4, 8, 10, 4))


def test_states_come_in_pairs(key):
    with pytest.raises(ValueError, match="state_dim 3 is not even"):
        S4ND(CellOptions(channels=4), 3).init(key, jnp.zeros((1, 2, 4, 4, 4)))
