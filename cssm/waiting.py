"""Waiting for data: from which share of the time on it is worth a word, and what makes it less."""

from collections.abc import Mapping
from typing import Any

from cssm.knobs import choice_of
from cssm.settings.data import FOLDERS, GENERATED, ONE_BY_ONE

# The share of a step spent waiting for data from which on its time no longer tells what it computes.
MUCH = 0.05
LEAST_STEPS = 20  # fewer may be one hiccup
ENOUGH_AHEAD = 8


def waited(share: float) -> str:
    """How much, in words."""
    return f"{share:.0%} of the time was spent waiting for data"


def advice(settings: Mapping[str, Any], cores: int) -> str:
    """What to type for less of it. settings: dataset, data_dir, num_workers, prefetch; cores: of this machine."""
    dataset, workers, prefetch = settings["dataset"], settings["num_workers"] or 0, settings["prefetch"]
    decodes = choice_of(dataset) in ONE_BY_ONE and settings.get("data_dir") is not None
    ways = []
    if not workers or (decodes and workers < cores):
        ways.append(f"--num_workers {cores} (now {workers})")
    if prefetch < ENOUGH_AHEAD:
        ways.append(f"--prefetch {max(2, 2 * prefetch)} (now {prefetch})")
    if dataset in FOLDERS:
        ways += ["a smaller --image_size", "a larger --crop_scale", "files that are hardly larger than what is cropped"]
        ways.append(f"images decoded once (main.py prepare {dataset})")
    elif decodes:
        ways.append("the images as arrays (--dataset npz)")
    if dataset in GENERATED and not decodes:
        ways.append("a --cache_dir on a local disk")
    return f"less with {', '.join(ways)}" if ways else "this host prepares batches too slowly, or does other work too"


class Waiting:
    """Of a run so far, told once; an interval in which something was compiled does not count."""

    def __init__(self) -> None:
        self._steps, self._busy_ms, self._waited_ms, self._compile_s, self._told = 0, 0.0, 0.0, 0.0, False

    def share(self, steps: int, rates: Mapping[str, float], compile_s: float) -> float | None:
        """The share of the time, the first time that it is much; otherwise None.

        steps, rates: of the interval that ended (Meter.window); compile_s: spent compiling so far.
        """
        compiled, self._compile_s = compile_s > self._compile_s, compile_s
        if not rates or compiled or self._told:
            return None
        self._steps += steps
        self._busy_ms += steps * rates["step_ms"]
        self._waited_ms += steps * rates["data_wait_ms"]
        self._told = self._steps >= LEAST_STEPS and self._waited_ms > MUCH * self._busy_ms
        return self._waited_ms / self._busy_ms if self._told else None
