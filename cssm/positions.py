"""Position codes: rotary (RoPE) over time, height and width, and the sinusoidal time code of the gates.

Channel pairs (2i, 2i + 1), i = 0 .. C/2 - 1, have frequencies w_i = base^(-2i / C): index 0 is the fastest.
"""

import jax
import jax.numpy as jnp
import numpy as np

ROPE_MODES = ("temporal", "spatial_only", "spatiotemporal", "spatiotemporal_legacy", "mrope")
TEMPORAL_MODES = ("temporal", "spatiotemporal", "spatiotemporal_legacy", "mrope")


def frequencies(channels: int, base: float = 10000.0) -> np.ndarray:
    """w_i = base^(-2i / C), float64 [C / 2]."""
    return base ** (-2.0 * np.arange(channels // 2) / channels)


def time_code(num_steps: int, channels: int, dtype) -> jax.Array:
    """Sinusoidal code [T, C]: sin(t w_i) on even channels, cos(t w_i) on odd ones."""
    angle = np.outer(np.arange(num_steps), frequencies(channels))
    return jnp.asarray(np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(num_steps, channels), dtype)


def rope(x: jax.Array, mode: str, num_steps: int | None = None) -> jax.Array:
    """Rotate the channel pairs of x [B, T, H, W, C] by angles that depend on (t, h, w); docs/math.md, section 4.

    temporal                all pairs by t
    spatial_only            even-numbered pairs of w by h, odd ones by w, summed on the first half of the pairs
    spatiotemporal          every pair by exactly one axis; time takes the slow third of the frequencies
    spatiotemporal_legacy   the published form: three axes summed on the first third, the others never rotate
    mrope                   every pair by one axis, interleaved t, h, w

    A still image [B, 1, H, W, C] is repeated num_steps times if the mode depends on time.
    """
    if mode not in ROPE_MODES:
        raise ValueError(f"rope mode {mode!r} is not one of {', '.join(ROPE_MODES)}")
    _, time, height, width, channels = x.shape
    steps = num_steps or time
    if mode not in TEMPORAL_MODES:
        steps = 1
    per_t, per_h, per_w = _axis_frequencies(mode, channels)
    angle = (
        np.arange(steps)[:, None, None, None] * per_t
        + np.arange(height)[None, :, None, None] * per_h
        + np.arange(width)[None, None, :, None] * per_w
    )  # [T, H, W, C/2]
    cos, sin = jnp.asarray(np.cos(angle), x.dtype), jnp.asarray(np.sin(angle), x.dtype)
    pairs = x.reshape(*x.shape[:-1], channels // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(*rotated.shape[:-2], channels)


def _axis_frequencies(mode: str, channels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Frequency of each pair along t, h and w (zero where the pair does not turn with that axis)."""
    w, n = frequencies(channels), channels // 2
    per_t, per_h, per_w = np.zeros(n), np.zeros(n), np.zeros(n)
    if mode == "temporal":
        per_t = w
    elif mode == "spatial_only":
        per_h[: len(w[0::2])], per_w[: len(w[1::2])] = w[0::2], w[1::2]
    elif mode == "spatiotemporal_legacy":
        third = n // 3
        for target, values in ((per_t, w[:third]), (per_h, w[third::2]), (per_w, w[third + 1 :: 2])):
            target[: len(values)] = values
    elif mode == "spatiotemporal":
        spatial = n - n // 3
        per_t[spatial:] = w[spatial:]
        per_h[:spatial:2], per_w[1:spatial:2] = w[:spatial:2], w[1:spatial:2]
    else:
        third = n // 3
        wide = list(w[2 * third :])
        for i in range(third):
            per_t[3 * i], per_h[3 * i + 1], per_w[3 * i + 2] = w[i], w[third + i], wide[i]
        per_w[3 * third :] = wide[third:]
    return per_t, per_h, per_w
