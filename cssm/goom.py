"""Numbers in log space, as (log magnitude, phase): a product over 1024 steps cannot leave their range.

After the generalised orders of magnitude (GOOM) of the published CSSM code. An oracle, and a way out where the plain
recurrence overflows; slow, since every term of a sum takes an exponential, a sine and a cosine, and the sum a
logarithm and an angle.

    floor     a number below sqrt(smallest normal number), 1.1e-19 in float32 and 1.5e-154 in float64, counts as that
              much. The published floor is 1e-7, below which phase and gradient are lost; here both stay right: the
              logarithm's slope at 0 is 1 / floor, which is what the weight of such a term, floor, asks for
    shift     sums are taken relative to their largest term, a constant in the backward pass: what cancels to less than
              the floor of that term counts as the floor
    ceiling   a result above exp(0.45 log(largest number)), 2.2e17 in float32, is returned with that magnitude and its
              own phase, so that squares and sums of it stay finite; a gradient then reaches its phase alone

Relative error of a result v: about (10 + |log |v||) eps from rounding, where no sum cancels.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cssm import spectral
from cssm.spectral import Spectrum


class Goom(NamedTuple):
    """exp(log + i phase), two real arrays of one shape."""

    log: jax.Array
    phase: jax.Array


def ceiling(dtype: jnp.dtype) -> float:
    """The largest log magnitude that `from_goom` returns as it is."""
    return 0.45 * math.log(jnp.finfo(dtype).max)


@jax.custom_vjp
def to_goom(v: Spectrum) -> Goom:
    """Logarithm of complex numbers, its phase in -pi .. pi; magnitudes below the floor count as the floor.

    Its derivative is that of the logarithm, dv / v, with v as floored: finite everywhere, also at 0.
    """
    return Goom(jnp.log(_magnitude(v)), jnp.arctan2(v.im, v.re))


def _magnitude(v: Spectrum) -> jax.Array:
    return jnp.maximum(jnp.hypot(v.re, v.im), math.sqrt(jnp.finfo(v.re.dtype).tiny))


def _to_goom_forward(v: Spectrum) -> tuple[Goom, tuple[jax.Array, jax.Array]]:
    z = to_goom(v)
    return z, (_magnitude(v), z.phase)


def _to_goom_backward(kept: tuple[jax.Array, jax.Array], g: Goom) -> tuple[Spectrum]:
    magnitude, phase = kept
    cos, sin = jnp.cos(phase) / magnitude, jnp.sin(phase) / magnitude
    return (Spectrum(g.log * cos - g.phase * sin, g.log * sin + g.phase * cos),)


to_goom.defvjp(_to_goom_forward, _to_goom_backward)


def from_goom(z: Goom) -> Spectrum:
    """Exponential; magnitudes above the ceiling are returned as the ceiling."""
    magnitude = jnp.exp(jnp.minimum(z.log, ceiling(z.log.dtype)))
    return Spectrum(magnitude * jnp.cos(z.phase), magnitude * jnp.sin(z.phase))


def multiply(a: Goom, b: Goom) -> Goom:
    """Product."""
    return Goom(a.log + b.log, a.phase + b.phase)


def add(*terms: Goom) -> Goom:
    """Sum; its phase lies in -pi .. pi."""
    shift = jax.lax.stop_gradient(functools.reduce(jnp.maximum, (z.log for z in terms)))
    log, phase = to_goom(spectral.add(*(from_goom(Goom(z.log - shift, z.phase)) for z in terms)))
    return Goom(log + shift, phase)
