"""RoPE: published fingerprints, and the laws of a rotation."""

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import wave_input

from cssm.positions import ROPE_MODES, _axis_frequencies, rope, time_code

FINGERPRINTS = {
    "spatiotemporal_legacy": (29.024258, [-2.23681, -0.56455, 1.10449, -0.74774]),
    "spatial_only": (-63.524472, [-0.60102, -2.22728, 1.12714, -0.71315]),
    "mrope": (19.276976, [-2.29703, 0.21371, 1.27496, -0.39177]),
    "temporal": (23.388265, [-2.29703, 0.21371, 1.22948, -0.51710]),
}


@pytest.mark.parametrize("mode", FINGERPRINTS)
def test_published_fingerprints(mode):
    total, values = FINGERPRINTS[mode]
    y = np.asarray(rope(jnp.asarray(wave_input()), mode), np.float64)
    np.testing.assert_allclose((y.ravel() * np.cos(np.arange(y.size))).sum(), total, rtol=1e-5)
    np.testing.assert_allclose(y[1, 2, 3, 4, :4], values, atol=6e-6)


@pytest.mark.parametrize("mode", ROPE_MODES)
def test_rotation_keeps_the_length_of_every_pair(mode):
    x = jnp.asarray(wave_input())
    y = rope(x, mode)
    length = lambda v: np.square(np.asarray(v)).reshape(*v.shape[:-1], -1, 2).sum(-1)
    np.testing.assert_allclose(length(y), length(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [8, 32, 34])
@pytest.mark.parametrize("mode", ["spatiotemporal", "mrope"])
def test_every_pair_turns_with_exactly_one_axis(mode, channels):
    axes = np.stack(_axis_frequencies(mode, channels))
    assert ((axes > 0).sum(axis=0) == 1).all()
    assert ((axes > 0).sum(axis=1) > 0).all()


def test_spatiotemporal_gives_time_the_slow_frequencies():
    per_t, per_h, per_w = _axis_frequencies("spatiotemporal", 32)
    assert per_t.max() < min(per_h[per_h > 0].min(), per_w[per_w > 0].min())


@pytest.mark.parametrize("mode", ROPE_MODES)
def test_a_still_image_is_the_clip_of_its_copies(mode):
    x = jnp.asarray(wave_input((2, 1, 4, 6, 8)))
    clip = jnp.repeat(x, 3, axis=1)
    still = rope(x, mode, num_steps=3)
    np.testing.assert_allclose(jnp.broadcast_to(still, clip.shape), rope(clip, mode), atol=1e-6)


def test_time_code_holds_sine_and_cosine_of_each_frequency():
    code = np.asarray(time_code(4, 8, jnp.float32))
    np.testing.assert_allclose(code[0], [0, 1] * 4, atol=1e-7)
    np.testing.assert_allclose(code[3, 2:4], [np.sin(3 * 10000 ** (-2 / 8)), np.cos(3 * 10000 ** (-2 / 8))], rtol=1e-6)
