"""Functions of rows as one GPU kernel, forward and backward: a norm over channels, a bias and its activation, a
convolution over time, the maximum over windows of pixels.

XLA computes their backward pass in several sweeps over the same numbers: the gradient of the input, and again all of it
for the sums that are the gradients of the parameters. Here a program reads each number once, and derives what it needs
by jax.vjp of the function, in registers. Sums are taken in a fixed order. Triton through Pallas; off a GPU the same
program is interpreted, which is for tests.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from cssm.fused import available

COLUMNS = 512  # of a program, where a row may be cut
WARP = 32  # threads


class Share(NamedTuple):
    """Of the rows: numbers of a program at a time, and its warps. In the backward pass: how many programs share all
    rows, each of which leaves a partial sum for every parameter, and whether a program reads the next rows before it
    works on those it has.
    """

    numbers: int
    warps: int
    programs: int = 1
    ahead: bool = False


# Forward, and backward. Of whole rows of up to WIDEST columns: several warps would have parts of one row, and wait for
# each other at every sum over it.
WHOLE, WIDEST = (Share(1024, 1), Share(1024, 1, 8192, ahead=True)), 1024
# Of rows that may be cut, at one place.
CUT = Share(1024, 1), Share(1024, 2, 4096, ahead=True)
# Of all others, as the steps of a clip: registers hold no second set of rows.
OTHER = Share(4096, 4), Share(4096, 4, 2048)

# (rows [R, C], which of their columns are there [C], parameters [C] or [R, C] ...) -> rows
Rows = Callable[..., jax.Array]
# The same of several places at once, as the steps of a clip: their rows in, those of as many or fewer places out.
Places = Callable[..., tuple[jax.Array, ...]]


def fused_rows(
    function: Rows, x: jax.Array, parameters: tuple[jax.Array, ...], whole: bool, interpret: bool | None = None
) -> jax.Array:
    """function(x, ones, *parameters), x [..., C], in the dtype of x; inside, all is float32 (float64 for float64).

    function sees rows [R, n] of some of the numbers at a time. whole: with all channels, and zeros beyond the last one,
    where its second argument is 0; otherwise it must treat every number by itself. interpret None: where there is no
    GPU.
    """
    (y,) = _fused(_alone(function), x.reshape(1, 1, -1, 1, x.shape[-1]), parameters, whole, interpret)
    return y.reshape(x.shape)


def fused_steps(
    function: Places, x: jax.Array, parameters: tuple[jax.Array, ...], whole: bool, interpret: bool | None = None
) -> jax.Array:
    """As fused_rows, of x [B, S, ..., C] and a function that sees the rows of all S steps at once, [R, n] of each."""
    rows = x.reshape(*x.shape[:2], -1, 1, x.shape[-1])
    return _fused(function, rows, parameters, whole, interpret)[0].reshape(x.shape)


def fused_windows(
    function: Places, x: jax.Array, parameters: tuple[jax.Array, ...], whole: bool, interpret: bool | None = None
) -> jax.Array:
    """As fused_rows, of maps x [..., H, W, C], H and W even, and a function that sees the rows of the four pixels of
    each window of 2 x 2, line by line, and gives one: [..., H / 2, W / 2, C].
    """
    *lead, height, width, channels = x.shape
    windows = x.reshape(-1, 2, width // 2, 2, channels)
    (y,) = _fused(function, windows, parameters, whole, interpret)
    return y.reshape(*lead, height // 2, width // 2, channels)


def by_rows(function: Rows, x: jax.Array, parameters: tuple[jax.Array, ...], whole: bool) -> jax.Array:
    """What fused_rows computes: by it where there is such a GPU, elsewhere as XLA likes it."""
    if available() and x.dtype != jnp.float64:
        return fused_rows(function, x, parameters, whole)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    y = function(x.astype(dtype), jnp.ones((x.shape[-1],), dtype), *(p.astype(dtype) for p in parameters))
    return y.astype(x.dtype)


def beside_rows(
    function: Rows, x: jax.Array, parameters: tuple[jax.Array, ...], whole: bool, interpret: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """(x, by_rows(function, x, ...)), for a residual sum: the kernel of the backward pass adds up both gradients."""
    if interpret is None and (not available() or x.dtype == jnp.float64):
        return x, by_rows(function, x, parameters, whole)
    y, x_ = _fused(_alone(function), x.reshape(1, 1, -1, 1, x.shape[-1]), parameters, whole, interpret, beside=True)
    return x_.reshape(x.shape), y.reshape(x.shape)


def pooled_rows(
    function: Rows, x: jax.Array, parameters: tuple[jax.Array, ...], whole: bool, interpret: bool | None = None
) -> jax.Array:
    """max_pool_2x2(by_rows(function, x, ...)) of maps x [..., H, W, C], as one kernel where H and W are even."""
    odd = x.shape[-3] % 2 or x.shape[-2] % 2
    if odd or (interpret is None and (not available() or x.dtype == jnp.float64)):
        return max_pool_2x2(by_rows(function, x, parameters, whole))

    def window(pixels, *arguments):
        a, b, c, d = (function(pixel, *arguments) for pixel in pixels)
        return (jnp.maximum(jnp.maximum(a, c), jnp.maximum(b, d)),)

    return fused_windows(window, x, parameters, whole, interpret)


def max_pool_2x2(x: jax.Array) -> jax.Array:
    """2x2 max-pool, stride 2, SAME, over H and W of [..., H, W, C].

    By pairs, whose gradient is a choice and never 0 / 0, as that of x.max() can be; on a CPU several times faster than
    nn.max_pool's.
    """
    height, width = x.shape[-3:-1]
    if height % 2 or width % 2:
        pad = [(0, 0)] * (x.ndim - 3) + [(0, height % 2), (0, width % 2), (0, 0)]
        x = jnp.pad(x, pad, constant_values=-jnp.inf)
    x = jnp.maximum(x[..., 0::2, :, :], x[..., 1::2, :, :])
    return jnp.maximum(x[..., 0::2, :], x[..., 1::2, :])


def _alone(function: Rows) -> Places:
    return lambda rows, *arguments: (function(rows[0], *arguments),)


def _fused(
    function: Places,
    x: jax.Array,
    parameters: tuple[jax.Array, ...],
    whole: bool,
    interpret: bool | None,
    beside: bool = False,
) -> tuple[jax.Array, ...]:
    """(y,), or (y, x) if beside; x [B, S, N, V, C]: N rows at each of S V places. y: at as many, or [B, 1, N, 1, C]."""
    interpret = jax.default_backend() != "gpu" if interpret is None else interpret
    columns = 1 << (x.shape[-1] - 1).bit_length()
    shares = WHOLE if whole else CUT if x.shape[1] * x.shape[3] == 1 else OTHER
    if whole and columns > WIDEST:
        shares = OTHER
    columns = columns if whole else min(columns, COLUMNS)
    tiles, tiles_back = (_Tiles(x.shape, columns, share, interpret) for share in shares)

    @jax.custom_vjp
    def apply(x, parameters):
        return _forward(tiles, function, x, parameters), *((x,) if beside else ())

    def forward(x, parameters):
        return apply(x, parameters), (x, parameters)

    def backward(residuals, gradients):
        x, parameters = residuals
        return _backward(tiles_back, function, x, parameters, *gradients)

    apply.defvjp(forward, backward)
    return apply(x, parameters)


class _Tiles:
    """How [B, S, N, V, C] is cut: `rows` x `columns` numbers of all places at a time."""

    def __init__(self, shape: tuple[int, ...], columns: int, share: Share, interpret: bool):
        batch, steps, self.number, beside, self.channels = shape
        self.places = steps * beside
        self.columns, self.share, self.interpret = columns, share, interpret
        self.rows = max(1, share.numbers // columns // (1 << (self.places - 1).bit_length()))
        self.down, self.across = -(-self.number // self.rows), -(-self.channels // columns)
        self.blocks = batch * self.down

    def call(self, kernel: Callable, programs: int, out_shape: Any, *operands: Any, over: dict[int, int]) -> Any:
        """over: which result is written over which operand."""
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            grid=(programs, self.across),
            input_output_aliases=over,
            compiler_params=plt.CompilerParams(num_warps=self.share.warps, num_stages=1),
            interpret=self.interpret,
        )(*operands)

    def across_at(self, block: jax.Array) -> tuple[Any, jax.Array]:
        """(where this block of columns lies, 1 for those that are there and else 0)."""
        there = block * self.columns + jnp.arange(self.columns) < self.channels
        if self.channels % self.columns == 0:  # a constant saves a selection and a product for every number
            there = jnp.ones(self.columns, bool)
        return pl.ds(block * self.columns, self.columns), there.astype(jnp.int32)

    def down_at(self, block: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        """(which example, where this block of rows lies in it, 1 for those that are there and else 0)."""
        example, place = block // self.down, block % self.down
        there = (place * self.rows + jnp.arange(self.rows) < self.number) & (block < self.blocks)
        return example, pl.ds(place * self.rows, self.rows), there.astype(jnp.int32)


class _Block:
    """A block of rows and of columns, at every place of an array [B, S, N, V, C]."""

    def __init__(self, down: tuple[jax.Array, Any, jax.Array], across: tuple[Any, jax.Array]):
        self.example, self.rows, rows_there = down
        self.across, columns_there = across
        self.there = rows_there[:, None] * columns_there[None, :] > 0

    def load(self, ref: Any) -> tuple[jax.Array, ...]:
        return tuple(plt.load(ref.at[at], mask=self.there, other=0.0) for at in self._places(ref))

    def store(self, ref: Any, values: tuple[jax.Array, ...]) -> None:
        for at, value in zip(self._places(ref), values, strict=True):
            plt.store(ref.at[at], value.astype(ref.dtype), mask=self.there)

    def _places(self, ref: Any) -> list[Any]:
        zero = self.example * 0  # Pallas' interpreter wants traced indices
        _, steps, _, beside, _ = ref.shape
        return [
            (self.example, zero + step, self.rows, zero + place, self.across)
            for step in range(steps)
            for place in range(beside)
        ]


def _parameter(ref: Any, across: tuple[Any, jax.Array], dtype: jnp.dtype) -> jax.Array:
    at, there = across
    return plt.load(ref.at[at], mask=there > 0, other=0.0).astype(dtype)


def _forward(tiles: _Tiles, function: Places, x: jax.Array, parameters: tuple[jax.Array, ...]) -> jax.Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)

    def apply(values: tuple[jax.Array, ...], there: jax.Array, parameters: list[jax.Array]) -> tuple[jax.Array, ...]:
        return function(values, there, *parameters)

    def kernel(x_ref, parameter_refs, y_ref):
        across = tiles.across_at(pl.program_id(1))
        block = _Block(tiles.down_at(pl.program_id(0)), across)
        values = [_parameter(ref, across, dtype) for ref in parameter_refs]
        rows = tuple(row.astype(dtype) for row in block.load(x_ref))
        block.store(y_ref, apply(rows, across[1].astype(dtype), values))

    row = [jax.ShapeDtypeStruct((1, x.shape[-1]), dtype)] * tiles.places
    given = jax.eval_shape(apply, tuple(row), jax.ShapeDtypeStruct(x.shape[-1:], dtype), list(parameters))
    batch, steps, number, beside, channels = x.shape
    places = (steps, number, beside) if len(given) == tiles.places else (1, number, 1)
    y = jax.ShapeDtypeStruct((batch, *places, channels), x.dtype)
    return tiles.call(kernel, tiles.blocks, y, x, parameters, over={})


def _backward(
    tiles: _Tiles, function: Places, x: jax.Array, parameters: tuple[jax.Array, ...], dy: jax.Array, *beside: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Gradients of x and the parameters; beside: a gradient of x that is added to its own, or none."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    each = -(-tiles.blocks // min(tiles.share.programs, tiles.blocks))
    programs = -(-tiles.blocks // each)

    def kernel(x_ref, parameter_refs, dy_ref, beside_refs, dx_ref, partial_refs):
        program, across = pl.program_id(0), tiles.across_at(pl.program_id(1))
        columns = across[1]
        # As large as the rows, so that a gradient is summed over them once, however often its parameter is used.
        shape = (tiles.rows, tiles.columns)
        values = [jnp.broadcast_to(_parameter(ref, across, dtype), shape) for ref in parameter_refs]
        apply = lambda rows, *values: function(rows, columns.astype(dtype), *values)
        # With several places there are few rows: adding them up at the end takes fewer registers than time.
        late = tiles.places > 1

        def at(i):
            # Programs that run together work on neighbouring rows.
            return _Block(tiles.down_at(i * programs + program), across)

        def read(i):
            block = at(i)
            return [block.load(ref) for ref in (x_ref, dy_ref, *beside_refs)]

        def one(i, sums, loaded):
            rows, dy, *others = jax.tree.map(lambda part: part.astype(dtype), loaded)
            dx, *grads = jax.vjp(apply, rows, *values)[1](dy)
            for other in others:
                dx = tuple(map(jnp.add, dx, other))
            at(i).store(dx_ref, dx)
            return tuple(sum_ + (d if late else d.sum(0)) for sum_, d in zip(sums, grads, strict=True))

        def ahead(i, carry):
            sums, loaded = carry
            i = i.astype(jnp.int32)
            following = read(i + 1)
            return one(i, sums, loaded), following

        def at_once(i, sums):
            i = i.astype(jnp.int32)
            return one(i, sums, read(i))

        sums = (jnp.zeros(shape if late else shape[1:], dtype),) * len(parameters)
        if tiles.share.ahead:
            sums, _ = jax.lax.fori_loop(0, each, ahead, (sums, read(program * 0)))
        else:
            sums = jax.lax.fori_loop(0, each, at_once, sums)
        for ref, sum_ in zip(partial_refs, sums, strict=True):
            plt.store(ref.at[program, across[0]], sum_.sum(0) if late else sum_, mask=columns > 0)

    partial = jax.ShapeDtypeStruct((programs, tiles.channels), dtype)
    out_shape = (jax.ShapeDtypeStruct(x.shape, x.dtype), (partial,) * len(parameters))
    # Where the gradient of what the rows give was, that of x takes its place: both at once are the peak of a step. Not
    # where several threads read a number: one could be late, and find what another has written.
    alone = tiles.rows * tiles.columns >= tiles.share.warps * WARP
    over = {1 + len(parameters): 0} if alone and dy.shape == x.shape else {}
    dx, partials = tiles.call(kernel, programs, out_shape, x, parameters, dy, beside, over=over)
    return dx, tuple(p.sum(0).astype(q.dtype) for p, q in zip(partials, parameters, strict=True))
