"""How many bytes a function holds at once, estimated from its jaxpr.

Its operations are taken in their order: a result lives from the operation that makes it to the last that reads it, and
an element-wise one takes the place of an operand of its size that ends there. Reshapes and broadcasts hold nothing of
their own. What a called function, or one run of a loop's body, holds comes on top while it runs. A compiler may hold
less, since it fuses operations and need not store what lies between, or more, since it may change their order.
"""

import math
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from cssm.flops import ELEMENTWISE, SCATTERS
from cssm.jaxprs import inner

# Their result is a view of their operand, or made where it is read.
VIEWS = frozenset("broadcast_in_dim copy iota pbroadcast pvary reshape squeeze stop_gradient".split())
IN_PLACE = ELEMENTWISE | SCATTERS | {"dynamic_update_slice"}


@dataclass
class _Buffer:
    """start, end: the first and the last operation that needs it."""

    size: int
    start: int
    end: int = -1


def size_bytes(aval: Any) -> int:
    """Of an array, or of its shape."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def peak_bytes(jaxpr: Any) -> int:
    """The most bytes that are held at once besides the arguments and the results."""
    after, last = len(jaxpr.eqns), _last_reads(jaxpr)
    buffers: list[_Buffer] = []
    place: dict[Any, _Buffer] = {}  # of variables that are neither arguments nor views of such
    held = [0] * (after + 2)
    for i, equation in enumerate(jaxpr.eqns):
        used = [variable for variable in equation.outvars if variable in last]
        operands = [place[atom] for atom in _variables(equation.invars) if atom in place]
        if used:
            held[i] += max(map(peak_bytes, inner(equation)), default=0)
        for variable in used:
            if equation.primitive.name in VIEWS:
                found = operands[0] if operands else None
            else:
                size = size_bytes(variable.aval)
                ending = [b for b in operands if b.size == size and b.end == i]
                if equation.primitive.name not in IN_PLACE or not ending:
                    buffers.append(_Buffer(size, i))
                    ending = buffers[-1:]
                found = ending[0]
            if found is not None:
                found.end = max(found.end, last[variable])
                place[variable] = found
    changes = [0] * (after + 2)
    for buffer in buffers:
        if buffer.end < after:  # the others hold results
            changes[buffer.start] += buffer.size
            changes[buffer.end + 1] -= buffer.size
    now = most = 0
    for change, within in zip(changes, held, strict=True):
        now += change
        most = max(most, now + within)
    return most


def _last_reads(jaxpr: Any) -> dict[Any, int]:
    """The operation that reads a variable last, if any does that matters; after all of them for results."""
    last = dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    for i, equation in reversed([*enumerate(jaxpr.eqns)]):
        if any(variable in last for variable in equation.outvars):
            for variable in _variables(equation.invars):
                last.setdefault(variable, i)
    return last


def _variables(atoms: Any) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
