"""Time: h_t = A_t h_{t-1} + u_t for every frequency and channel, states before t = 0 being zero.

Letters: B batch, T time, F = H * Wf frequencies, C channels, n coupled states. A cell describes its recurrence by one
function, `step(h, gates_t, inputs_t) -> h`, linear in (h, inputs_t) together; both methods below are made from it:

    reference     lax.scan over T, the n x n matrices are never formed: O(T) time, O(1) extra memory forward
    associative   prefix products of the matrices (columns of A_t = step of unit vectors): O(log T) depth, n^2 memory

Both give the same numbers to rounding; the carry is float32 (float64 for float64 inputs) whatever the inputs are.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from cssm.spectral import Spectrum, add, multiply

States = tuple[Spectrum, ...]
Step = Callable[[States, Any, States], States]
Method = Literal["auto", "reference", "associative"]


def linear_scan(
    step: Step, num_states: int, gates: Any, inputs: States, method: Method = "auto", last_only: bool = False
):
    """Run the recurrence over time.

    step: (h, gates_t, inputs_t) -> h. h: `num_states` spectra [B, F, C].
    gates: pytree of real arrays [B, T, F, 1].
    inputs: spectra [B, T, F, C], or [B, 1, F, C] where the input is the same at every t.
    Returns `num_states` spectra [B, T, F, C]; with last_only, [B, 1, F, C] holding t = T - 1.
    """
    dtype = jnp.promote_types(inputs[0].re.dtype, jnp.float32)
    num_steps = jax.tree.leaves(gates)[0].shape[1]
    gates = jax.tree.map(lambda g: jnp.moveaxis(g, 1, 0), gates)  # [T, B, F, 1]
    inputs = jax.tree.map(lambda u: jnp.moveaxis(u, 1, 0), inputs)  # [T or 1, B, F, C]
    still = inputs[0].re.shape[0] == 1 and num_steps > 1
    run = _associative if method == "associative" else _reference
    states = run(step, num_states, gates, inputs, still, dtype, last_only)
    return jax.tree.map(lambda s: jnp.moveaxis(s, 0, 1), states)


def _reference(step, num_states, gates, inputs, still, dtype, last_only):
    num_steps = jax.tree.leaves(gates)[0].shape[0]
    shape = inputs[0].re.shape[1:]
    zeros = jnp.zeros(shape, dtype)
    start: States = tuple(Spectrum(zeros, zeros) for _ in range(num_states))
    constant = jax.tree.map(lambda u: u[0], inputs) if still else None

    def body(h, at_t):
        gates_t, inputs_t = at_t
        h = step(h, gates_t, constant if still else inputs_t)
        h = jax.tree.map(lambda s: s.astype(dtype), h)
        return h, None if last_only else h

    # Only the states are kept for the backward pass; what lies between them is computed again.
    body = jax.checkpoint(body, prevent_cse=False)
    # A GPU wants the loop unrolled (one fused program); on a CPU a rolled loop is many times faster.
    unroll = num_steps if jax.default_backend() == "gpu" and num_steps <= 16 else 1
    last, states = jax.lax.scan(body, start, (gates, None if still else inputs), unroll=unroll)
    return jax.tree.map(lambda s: s[None], last) if last_only else states


def _associative(step, num_states, gates, inputs, still, dtype, last_only):
    num_steps = jax.tree.leaves(gates)[0].shape[0]
    if still:
        inputs = jax.tree.map(lambda u: jnp.broadcast_to(u, (num_steps, *u.shape[1:])), inputs)
    zero = jnp.zeros(inputs[0].re.shape, dtype)
    nothing = tuple(Spectrum(zero, zero) for _ in inputs)
    origin = tuple(Spectrum(zero, zero) for _ in range(num_states))

    def column(j: int) -> States:
        unit = tuple(Spectrum(zero + 1 if i == j else zero, zero) for i in range(num_states))
        return step(unit, gates, nothing)

    columns = [column(j) for j in range(num_states)]
    matrix = [[columns[j][i] for j in range(num_states)] for i in range(num_states)]  # [row][column]
    vector = list(step(origin, gates, inputs))
    matrix, vector = jax.tree.map(lambda s: s.astype(dtype), (matrix, vector))
    _, states = jax.lax.associative_scan(_compose, (matrix, vector), axis=0)
    states = tuple(states)
    return jax.tree.map(lambda s: s[-1:], states) if last_only else states


def _compose(earlier, later):
    """(A2, u2) after (A1, u1) is (A2 A1, A2 u1 + u2)."""
    (a1, u1), (a2, u2) = earlier, later
    n = len(u1)
    product = [[add(*(multiply(a2[i][r], a1[r][j]) for r in range(n))) for j in range(n)] for i in range(n)]
    vector = [add(*(multiply(a2[i][r], u1[r]) for r in range(n)), u2[i]) for i in range(n)]
    return product, vector
