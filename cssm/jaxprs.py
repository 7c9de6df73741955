"""A function as the list of its operations (a jaxpr), traced from shapes: nothing is computed, nothing is compiled."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax


def trace(fn: Callable, *args: Any, axes: Sequence[tuple[str, int]] = ()) -> Any:
    """The jaxpr of fn(*args), whose args are pytrees of arrays or of jax.ShapeDtypeStruct.

    axes: name and size of the device axes that fn uses, as inside of `parallel.devices.spmd`.
    """
    return jax.make_jaxpr(fn, axis_env=list(axes))(*args).jaxpr


def inner(equation: Any) -> Iterator[Any]:
    """The jaxprs within an operation: bodies of loops, branches, functions that it calls."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(part, "jaxpr"):
                yield part.jaxpr
            elif hasattr(part, "eqns"):
                yield part
