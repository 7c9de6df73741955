"""s4nd: convolution with a separable state-space kernel over time, height and width.

docs/math.md. After S4ND (Nguyen et al. 2022) with the diagonal kernels of S4D-Lin (Gu et al. 2022): along each axis
a kernel is the impulse response of a diagonal linear state space, in closed form; the filter is their product.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from cssm import spectral
from cssm.activations import gelu
from cssm.cells.core import CellOptions
from cssm.positions import rope
from cssm.spectral import multiply


class DiagonalKernel(nn.Module):
    """Impulse response [length, C] of N / 2 pairs of conjugate states, time step `dt` learned.

    state_dim N even. A starts at -1/2 + i pi n, dt log-uniform in 0.001 .. 0.1 (S4D-Lin), read-out C ~ CN(0, 1).
    """

    channels: int
    state_dim: int

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        shape = (self.channels, self.state_dim // 2)

        def init_log_dt(key, shape):
            return jax.random.uniform(key, shape, minval=math.log(0.001), maxval=math.log(0.1))

        dt = jnp.exp(self.param("log_dt", init_log_dt, (self.channels, 1)))
        log_rate = self.param("log_rate", nn.initializers.constant(math.log(0.5)), shape)
        frequency = self.param("frequency", lambda _, shape: jnp.full(shape, math.pi) * jnp.arange(shape[1]), shape)
        read = self.param("read", nn.initializers.normal(math.sqrt(0.5)), (2, *shape))
        a = jax.lax.complex(-jnp.exp(log_rate), frequency)
        gain = jax.lax.complex(read[0], read[1]) * jnp.expm1(dt * a) / a
        powers = jnp.exp(dt * a * jnp.arange(length)[:, None, None])
        return 2.0 * jnp.sum(gain * powers, axis=-1).real


class S4ND(nn.Module):
    """x [B, T or 1, H, W, C] -> [B, T, H, W, C].

    Space is always filtered both ways, with zeros beyond the border; bidirectional: time too, so that earlier outputs
    depend on later frames. state_dim N: real states along each axis and direction, even.
    Of options, only channels, rope_mode, backend and dtype are used.
    """

    options: CellOptions
    state_dim: int = 64
    bidirectional: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, num_steps: int | None = None, last_only: bool = False) -> jax.Array:
        o = self.options
        steps = num_steps or x.shape[1]
        if self.state_dim % 2:
            raise ValueError(f"state_dim {self.state_dim} is not even")
        if o.rope_mode != "none":
            x = rope(x, o.rope_mode, steps)
        skip = self.param("D", nn.initializers.normal(1.0), (o.channels,)).astype(x.dtype)

        # The filter is separable, so a still image meets space once, and a clip has only the steps that are read left.
        if x.shape[1] == 1:
            y = self._over_time(self._over_space(x), steps, last_only)
        else:
            y = self._over_space(self._over_time(x, steps, last_only))
        y = y + skip * (x[:, -1:] if last_only else x)
        return nn.Dense(o.channels, dtype=o.dtype, name="output_proj")(gelu(y))

    def _kernel(self, name: str, length: int) -> jax.Array:
        return DiagonalKernel(self.options.channels, self.state_dim, name=name)(length)

    def _two_sided(self, axis: str, length: int) -> jax.Array:
        """[2 length, C]: lags 0 .. length - 1, then -length .. -1."""
        ahead, behind = self._kernel(f"kernel_{axis}", length), self._kernel(f"kernel_{axis}_reverse", length)
        return jnp.concatenate([ahead, behind[::-1]])

    def _over_space(self, x: jax.Array) -> jax.Array:
        height, width = x.shape[2:4]
        backend = self.options.backend
        kernel = self._two_sided("h", height)[:, None] * self._two_sided("w", width)
        # Twice the side holds all lags, and zeros beyond the border keep opposite ones apart.
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, height), (0, width), (0, 0)))
        (k_hat,), (x_hat,) = (spectral.unpack(spectral.rfft2(part, backend)) for part in (kernel, padded))
        y_hat = spectral.pack(multiply(k_hat, x_hat)).astype(x.dtype)
        return spectral.irfft2(y_hat, 2 * width, backend)[:, :, :height, :width]

    def _over_time(self, x: jax.Array, steps: int, last_only: bool) -> jax.Array:
        """[B, T, H, W, C], or only its last step; x has one step or all."""
        ahead = self._kernel("kernel_t", steps)
        behind = self._kernel("kernel_t_reverse", steps) if self.bidirectional else jnp.zeros_like(ahead)
        if x.shape[1] == 1:
            future = jnp.cumsum(behind[:-1], axis=0)[::-1]  # of the T - 1 - t steps that follow step t
            weights = jnp.cumsum(ahead, axis=0) + jnp.pad(future, ((0, 1), (0, 0)))
            weights = weights[-1:] if last_only else weights
            y = weights[:, None, None, :] * x
        elif last_only:
            y = jnp.einsum("tc,bthwc->bhwc", ahead[::-1], x)[:, None]
        else:
            kernel_hat = jnp.fft.rfft(jnp.concatenate([ahead, behind[::-1]]), axis=0)[:, None, None, :]
            x_hat = jnp.fft.rfft(x.astype(ahead.dtype), n=2 * steps, axis=1)
            y = jnp.fft.irfft(kernel_hat * x_hat, n=2 * steps, axis=1)[:, :steps]
        return y.astype(x.dtype)
