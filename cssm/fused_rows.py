"""Functions of rows as one GPU kernel, forward and backward: a norm over channels, a bias and its activation.

XLA computes their backward pass in several sweeps over the same numbers: the gradient of the input, and again all of it
for the sums that are the gradients of the parameters. Here a program reads each number once, and derives what it needs
by jax.vjp of the function, in registers. Sums are taken in a fixed order. Triton through Pallas; off a GPU the same
program is interpreted, which is for tests.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from cssm.fused import available

# Numbers of a program at a time, and columns of it where a row may be cut.
TILE, COLUMNS = 4096, 512
# Programs that share the rows in the backward pass: each leaves a partial sum for every parameter.
PROGRAMS = 2048

# (rows [R, C], which of their columns are there [C], parameters [C] ...) -> rows
Rows = Callable[..., jax.Array]


def fused_rows(
    function: Rows, x: jax.Array, parameters: tuple[jax.Array, ...], whole: bool, interpret: bool | None = None
) -> jax.Array:
    """function(x, ones, *parameters), x [..., C], in the dtype of x; inside, all is float32 (float64 for float64).

    function sees rows [R, n] of some of the numbers at a time. whole: with all channels, and zeros beyond the last one,
    where its second argument is 0; otherwise it must treat every number by itself. interpret None: where there is no
    GPU.
    """
    channels = x.shape[-1]
    interpret = jax.default_backend() != "gpu" if interpret is None else interpret
    columns = 1 << (channels - 1).bit_length()
    tiles = _Tiles(channels, columns if whole else min(columns, COLUMNS), interpret)

    @jax.custom_vjp
    def apply(x, parameters):
        return _forward(tiles, function, x, parameters)

    def forward(x, parameters):
        return apply(x, parameters), (x, parameters)

    def backward(residuals, dy):
        x, parameters = residuals
        return _backward(tiles, function, x, parameters, dy)

    apply.defvjp(forward, backward)
    return apply(x.reshape(-1, channels), parameters).reshape(x.shape)


def by_rows(function: Rows, x: jax.Array, parameters: tuple[jax.Array, ...], whole: bool) -> jax.Array:
    """What fused_rows computes: by it where there is such a GPU, elsewhere as XLA likes it."""
    if available() and x.dtype != jnp.float64:
        return fused_rows(function, x, parameters, whole)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    y = function(x.astype(dtype), jnp.ones((x.shape[-1],), dtype), *(p.astype(dtype) for p in parameters))
    return y.astype(x.dtype)


class _Tiles:
    """How [N, C] is cut: `rows` x `columns` numbers at a time."""

    def __init__(self, channels: int, columns: int, interpret: bool):
        self.channels, self.columns, self.interpret = channels, columns, interpret
        self.rows = max(1, TILE // columns)
        self.across = -(-channels // columns)

    def call(self, kernel: Callable, programs: int, out_shape: Any, *operands: Any) -> Any:
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            grid=(programs, self.across),
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=self.interpret,
        )(*operands)

    def across_at(self, block: jax.Array) -> tuple[Any, jax.Array]:
        """(where this block of columns lies, 1 for those that are there and else 0)."""
        there = block * self.columns + jnp.arange(self.columns) < self.channels
        return pl.ds(block * self.columns, self.columns), there.astype(jnp.int32)

    def down_at(self, block: jax.Array, number: int) -> tuple[Any, jax.Array]:
        """The same of a block of `number` rows."""
        there = block * self.rows + jnp.arange(self.rows) < number
        return pl.ds(block * self.rows, self.rows), there.astype(jnp.int32)


def _load(ref: Any, at: Any, there: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return plt.load(ref.at[at], mask=there > 0, other=0.0).astype(dtype)


def _forward(tiles: _Tiles, function: Rows, x: jax.Array, parameters: tuple[jax.Array, ...]) -> jax.Array:
    dtype, number = jnp.promote_types(x.dtype, jnp.float32), x.shape[0]

    def kernel(x_ref, parameter_refs, y_ref):
        (across, columns), (down, rows) = tiles.across_at(pl.program_id(1)), tiles.down_at(pl.program_id(0), number)
        there = rows[:, None] * columns[None, :]
        values = [_load(ref, across, columns, dtype) for ref in parameter_refs]
        y = function(_load(x_ref, (down, across), there, dtype), columns.astype(dtype), *values)
        plt.store(y_ref.at[down, across], y.astype(y_ref.dtype), mask=there > 0)

    out_shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return tiles.call(kernel, -(-number // tiles.rows), out_shape, x, parameters)


def _backward(
    tiles: _Tiles, function: Rows, x: jax.Array, parameters: tuple[jax.Array, ...], dy: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    dtype, number = jnp.promote_types(x.dtype, jnp.float32), x.shape[0]
    blocks = -(-number // tiles.rows)
    each = -(-blocks // min(PROGRAMS, blocks))
    programs = -(-blocks // each)

    def kernel(x_ref, parameter_refs, dy_ref, dx_ref, partial_refs):
        program, (across, columns) = pl.program_id(0), tiles.across_at(pl.program_id(1))
        values = [_load(ref, across, columns, dtype) for ref in parameter_refs]
        apply = lambda rows, *values: function(rows, columns.astype(dtype), *values)

        def block(i, sums):
            # Programs that run together work on neighbouring rows.
            down, rows = tiles.down_at(i.astype(jnp.int32) * programs + program, number)
            there = rows[:, None] * columns[None, :]
            load = lambda ref: _load(ref, (down, across), there, dtype)
            dx, *grads = jax.vjp(apply, load(x_ref), *values)[1](load(dy_ref))
            plt.store(dx_ref.at[down, across], dx.astype(dx_ref.dtype), mask=there > 0)
            return tuple(map(jnp.add, sums, grads))

        sums = jax.lax.fori_loop(0, each, block, tuple(jnp.zeros((tiles.columns,), dtype) for _ in parameters))
        for ref, total in zip(partial_refs, sums, strict=True):
            plt.store(ref.at[program, across], total, mask=columns > 0)

    partial = jax.ShapeDtypeStruct((programs, tiles.channels), dtype)
    out_shape = (jax.ShapeDtypeStruct(x.shape, x.dtype), (partial,) * len(parameters))
    dx, partials = tiles.call(kernel, programs, out_shape, x, parameters, dy)
    return dx, tuple(p.sum(0).astype(q.dtype) for p, q in zip(partials, parameters, strict=True))


def layer_norm_rows(x: jax.Array, there: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) scale + bias over whole rows, the variance taken about the mean."""
    count = jnp.sum(there)
    centred = (x - jnp.sum(x, -1, keepdims=True) / count) * there
    variance = jnp.sum(centred * centred, -1, keepdims=True) / count
    return centred * jax.lax.rsqrt(variance + epsilon) * scale + bias


def activated_rows(x: jax.Array, there: jax.Array, bias: jax.Array, act: Callable) -> jax.Array:
    """act(x + bias), number by number."""
    return act(x + bias)
