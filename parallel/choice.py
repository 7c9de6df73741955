"""Which of the visible devices a run uses: the rules of --gpus and --num_devices. Loads no jax."""

import re
from collections.abc import Sequence
from typing import TypeVar

Device = TypeVar("Device")


class DeviceError(ValueError):
    """A mistake of the user about devices or batch sizes: one sentence, fit to be printed."""


def count(devices: int) -> str:
    """`1 device`, `4 devices`."""
    return "1 device" if devices == 1 else f"{devices} devices"


def narrowed(visible: Sequence[Device], gpus: str | Sequence[int] | None, num_devices: int | None) -> list[Device]:
    """Those of the visible devices that are chosen; all, unless told otherwise.

    gpus: indices, "0,2" or a sequence, kept in that order. num_devices: the first so many. Raises DeviceError, naming
    what exists, for an index that is not there, a repeated one, a number that is too large, and where the two disagree.
    """
    chosen = list(visible) if gpus is None else [visible[i] for i in _indices(gpus, len(visible))]
    if num_devices is None:
        return chosen
    if gpus is not None and num_devices != len(chosen):
        raise DeviceError(f"--num_devices {num_devices} contradicts the {len(chosen)} of --gpus: type one of them")
    if not 1 <= num_devices <= len(chosen):
        raise DeviceError(f"--num_devices {num_devices}: {count(len(chosen))} visible, type 1 to {len(chosen)}")
    return chosen[:num_devices]


def _indices(gpus: str | Sequence[int], visible: int) -> list[int]:
    words = gpus.split(",") if isinstance(gpus, str) else [str(i) for i in gpus]
    typed = f"--gpus {','.join(words)}"
    if not words or not all(re.fullmatch(r"\s*\d+\s*", word) for word in words):
        raise DeviceError(f"{typed}: not a list of device indices, type for example --gpus 0,1")
    indices = [int(word) for word in words]
    exist = "0" if visible == 1 else f"0 to {visible - 1}"
    if missing := [i for i in indices if i >= visible]:
        raise DeviceError(f"{typed}: there is no device {missing[0]}, the visible devices are {exist}")
    if len(set(indices)) != len(indices):
        raise DeviceError(f"{typed}: a device is named twice, type each index once ({exist} are visible)")
    return indices
