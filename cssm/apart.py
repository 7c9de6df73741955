"""Calls in processes of their own, started anew: what they hold, a GPU's memory above all, ends with them."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from cssm.config import UserError
from parallel.launch import follow

DEVICES = 4


def apart(fn: Callable, *args: Any) -> Any:
    """fn(*args) in another process, which does not share this one's modules; its errors are raised here.

    UserError with exit code 4 where the process ends without an answer.
    """
    return _answers([fn], args)[0]


def ranks(fn: Callable, number: int, *args: Any) -> list[Any]:
    """fn(rank, *args) in as many processes at once, for ranks 0 .. number - 1, as `apart`; fn must be importable."""
    return _answers([fn] * number, args, ranked=True)


def _answers(fns: list[Callable], args: tuple, ranked: bool = False) -> list[Any]:
    spawn = multiprocessing.get_context("spawn")
    # Of a process that is killed, those that it started would wait for more to do, and keep their devices.
    with ProcessPoolExecutor(len(fns), spawn, follow, (os.getpid(),)) as pool:
        calls = [pool.submit(fn, *((rank,) if ranked else ()), *args) for rank, fn in enumerate(fns)]
        try:
            return [call.result() for call in calls]
        except BrokenProcessPool as error:
            raise UserError(
                "a process of the benchmark ended without an answer: it stood still, which is told above, or was "
                "killed, as systems do that run out of memory, or crashed",
                DEVICES,
            ) from error
