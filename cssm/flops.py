"""Floating-point operations of a function, counted from its jaxpr.

A multiply-add is 2. Products, convolutions and transforms are counted exactly (a real FFT over n points as
2.5 n log2 n, a complex one as 5 n log2 n), element-wise operations as one each; loops count as often as they run,
which XLA's own estimate does not do.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

ELEMENTWISE = frozenset(
    "add sub mul div neg max min exp log log1p expm1 logistic tanh erf sqrt rsqrt sin cos pow integer_pow square "
    "abs sign select_n exp2 cbrt".split()
)
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod argmax argmin cumsum".split())


def count_flops(fn: Callable, *args: Any) -> int:
    """FLOPs of fn(*args); args are arrays or jax.ShapeDtypeStruct, nothing is computed."""
    return round(_count(jax.make_jaxpr(fn)(*args).jaxpr))


def _count(jaxpr) -> float:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"] * _count(params["jaxpr"].jaxpr)
    if name == "cond":
        return max(_count(branch.jaxpr) for branch in params["branches"])
    inner = [value for value in params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
    if inner and name not in REDUCTIONS:
        return sum(_count(getattr(value, "jaxpr", value)) for value in inner)

    out = equation.outvars[0].aval
    size = float(np.prod(out.shape))
    if np.issubdtype(out.dtype, np.complexfloating) and name in ("mul", "add", "sub"):
        size *= 6 if name == "mul" else 2
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        return 2.0 * size * math.prod(equation.invars[0].aval.shape[d] for d in contracting)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        spec = params["dimension_numbers"].rhs_spec
        return 2.0 * size * math.prod(kernel[d] for d in spec[1:])
    if name == "fft":
        points = math.prod(params["fft_lengths"])
        kind = params["fft_type"].name
        real = kind.endswith("RFFT")
        transformed = out.shape if kind == "IRFFT" else equation.invars[0].aval.shape
        return float(np.prod(transformed)) * (2.5 if real else 5.0) * math.log2(max(points, 2))
    if name in ELEMENTWISE:
        return size
    if name in REDUCTIONS:
        return float(np.prod(equation.invars[0].aval.shape))
    return 0.0
