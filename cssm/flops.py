"""Floating-point operations of a function, counted from its jaxpr.

A multiply-add is 2. Products, convolutions and transforms are counted exactly (a real FFT over n points as
2.5 n log2 n, a complex one as 5 n log2 n; of a convolution what meets the image, not its padding), element-wise
operations and reductions as one for each number, a complex number by its parts. Loops count as often as they run,
which XLA's own estimate does not do. An operation on whole numbers or truth values counts nothing, and so does what
only moves or makes numbers (FREE). What is in none of these lists is an error, and never silently nothing.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from cssm.jaxprs import inner, trace

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma div eq erf erf_inv erfc "
    "exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg "
    "nextafter one_minus_square pow rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh".split()
)
REDUCTIONS = frozenset(
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_max reduce_min reduce_prod reduce_sum".split()
)
WINDOWS = frozenset("reduce_window_max reduce_window_min reduce_window_sum".split())
SCATTERS = frozenset("scatter-add scatter-max scatter-min scatter-mul scatter-sub".split())
# Operations on real numbers that one on complex numbers takes, where they are not two.
COMPLEX = {"mul": 6, "div": 11, "abs": 4, "integer_pow": 6}
# They move numbers, make them from nothing, look at their bits, or send them to other devices.
FREE = frozenset(
    "all_gather all_to_all and axis_index bitcast_convert_type broadcast_in_dim complex concatenate conj "
    "convert_element_type copy device_put dynamic_slice dynamic_update_slice gather get imag iota masked_load "
    "masked_swap name not optimization_barrier or pad pbroadcast pmax pmin population_count ppermute program_id "
    "psum psum_invariant pvary random_bits random_clone random_fold_in random_gamma random_seed random_split "
    "random_unwrap random_wrap real reduce_and reduce_or reduce_precision reduce_scatter reshape rev scatter "
    "shift_left shift_right_arithmetic shift_right_logical slice sort split squeeze stack stop_gradient swap "
    "transpose unstack xor".split()
)
# They count as what is within them.
CALLS = frozenset("closed_call custom_jvp_call custom_vjp_call eval_jaxpr jit remat2 shard_map".split())


class UncountedError(Exception):
    """A function has an operation of which nothing is known here; the message names it."""


def count_flops(fn: Callable, *args: Any) -> int:
    """FLOPs of fn(*args); args are arrays or jax.ShapeDtypeStruct, nothing is computed. Raises UncountedError."""
    return flops_of(trace(fn, *args))


def flops_of(jaxpr: Any) -> int:
    """FLOPs of what was traced. Raises UncountedError."""
    return round(_count(jaxpr))


def _count(jaxpr: Any) -> float:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"] * sum(map(_count, inner(equation)))
    if name == "cond":
        return max(map(_count, inner(equation)))
    if name == "pallas_call":  # as often as there are programs
        return math.prod(params["grid_mapping"].grid) * sum(map(_count, inner(equation)))
    if name in CALLS:
        return sum(map(_count, inner(equation)))
    if name in FREE:
        return 0.0
    operands = [atom.aval for atom in equation.invars]
    out = equation.outvars[0].aval if equation.outvars else None
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        return _multiply_adds(out, _size(out) * math.prod(operands[0].shape[d] for d in contracting))
    if name.startswith("dot_product_attention"):  # cuDNN's: two products forward, four backward
        batch, queries, heads, channels = operands[0].shape
        products = 2 if "_fwd" in name else 4
        return products * 2.0 * batch * heads * queries * operands[1].shape[1] * channels
    if name == "conv_general_dilated":
        return _multiply_adds(out, _taps(params, operands[0], operands[1], out))
    if name == "fft":
        kind, points = params["fft_type"].name, math.prod(params["fft_lengths"])
        transformed = out if kind == "IRFFT" else operands[0]
        return _size(transformed) * (2.5 if kind.endswith("RFFT") else 5.0) * math.log2(max(points, 2))
    if name in ELEMENTWISE:
        return _size(out) * _cost(name, operands)
    if name in REDUCTIONS:
        return _size(operands[0]) * _cost(name, operands)
    if name in WINDOWS:
        return _size(out) * math.prod(params["window_dimensions"]) * _cost(name, operands)
    if name in SCATTERS:
        return _size(operands[2]) * _cost(name, operands)
    why = "a loop that runs nobody knows how often" if name == "while" else "an operation that is not known here"
    raise UncountedError(f"{name} is {why}")


def _size(aval: Any) -> float:
    return float(math.prod(aval.shape))


def _cost(name: str, operands: list[Any]) -> float:
    """Of one element: 0 for whole numbers and truth values."""
    if any(_is(operand, jnp.complexfloating) for operand in operands):
        return COMPLEX.get(name, 2)
    return 1.0 if any(_is(operand, jnp.inexact) for operand in operands) else 0.0


def _is(aval: Any, kind: Any) -> bool:
    return jnp.issubdtype(aval.dtype, kind)


def _multiply_adds(out: Any, number: float) -> float:
    return number * (8.0 if _is(out, jnp.complexfloating) else 2.0)


def _taps(params: Any, image: Any, kernel: Any, out: Any) -> float:
    """Products of a convolution: for each pair of output and kernel element that meet an element of the image."""
    numbers = params["dimension_numbers"]
    pairs = 1
    for dim, (low, _) in enumerate(params["padding"]):
        side = image.shape[numbers.lhs_spec[2 + dim]]
        spread = params["lhs_dilation"][dim]
        starts = np.arange(out.shape[numbers.out_spec[2 + dim]]) * params["window_strides"][dim] - low
        steps = np.arange(kernel.shape[numbers.rhs_spec[2 + dim]]) * params["rhs_dilation"][dim]
        at = starts[:, None] + steps
        pairs *= int(((at >= 0) & (at <= (side - 1) * spread) & (at % spread == 0)).sum())
    maps = math.prod(out.shape[d] for d in numbers.out_spec[:2])
    return float(maps * kernel.shape[numbers.rhs_spec[1]] * pairs)
