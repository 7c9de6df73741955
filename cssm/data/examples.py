"""Examples that are read one by one, when they are needed; what becomes of one that cannot be read."""

import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np

from cssm.config import UserError

# What reading and decoding raise where a file is missing, damaged, or not what it should be.
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, LookupError, ArithmeticError, struct.error, zlib.error)
Read = Callable[[int, int | None], tuple[np.ndarray, int]]


class BadExamples:
    """Those that cannot be read: each named once on stderr; UserError where there are more than `most` of them."""

    def __init__(self, most: int) -> None:
        self._most, self._found, self._lock = most, dict[str, str](), Lock()

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._found)

    def add(self, name: str, reason: str) -> None:
        """Count an example, however often it is met."""
        with self._lock:
            known = name in self._found
            self._found[name] = reason
            count = len(self._found)
        if count > self._most:
            many = f"{count} examples cannot be read, among them {name}" if self._most else f"{name} cannot be read"
            raise UserError(
                f"{many} ({reason}): repair or remove what is damaged, or type --max_bad_examples {count} "
                "or more to go on without"
            )
        if not known:
            most = f"number {count} of at most {self._most}"
            print(f"warning: {name} cannot be read and is left out, {most}: {reason}", file=sys.stderr, flush=True)


class FileSource:
    """A Source of n examples. read(index, epoch) -> (uint8 image, label), or raises one of UNREADABLE.

    name(index): what to call an example. In training an example that cannot be read gives way to the next one in the
    order of the split that can (after the last comes the first), whatever the step, the thread or the process; in
    evaluation it is left out.
    """

    decodes = True

    def __init__(
        self,
        n: int,
        read: Read,
        name: Callable[[int], str],
        *,
        num_classes: int,
        image_shape: tuple[int, ...],
        most_bad: int,
    ) -> None:
        self._n, self._read, self._name = n, read, name
        self.num_classes, self.image_shape = num_classes, image_shape
        self._bad = BadExamples(most_bad)

    @property
    def bad(self) -> Sequence[str]:
        return self._bad.names

    def __len__(self) -> int:
        return self._n

    def gather(
        self, indices: np.ndarray, epoch: int | None = None, out: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See Source. Each image is put in its place as soon as it is there, so that no two are held at once."""
        images = np.empty((len(indices), *self.image_shape), np.uint8) if out is None else out
        labels = []
        for index in indices:
            if (found := self._example(int(index), epoch)) is not None:
                images[len(labels)], label = found
                labels.append(label)
        return images[: len(labels)], np.array(labels, np.int32)

    def _example(self, index: int, epoch: int | None) -> tuple[np.ndarray, int] | None:
        for further in range(1 if epoch is None else self._n):
            i = (index + further) % self._n
            try:
                image, label = self._read(i, epoch)
                check_shape(image, self.image_shape)
                if not 0 <= label < self.num_classes:
                    raise ValueError(f"its label is {label}, and labels go from 0 to {self.num_classes - 1}")
            except UNREADABLE as error:
                self._bad.add(self._name(i), reason(error))
            else:
                return image, label
        if epoch is None:
            return None
        raise UserError(f"none of the {self._n} training examples can be read")


def reason(error: BaseException) -> str:
    """Why something could not be read, in a line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def check_shape(image: np.ndarray, wanted: tuple[int, ...]) -> None:
    """ValueError for an image of another shape."""
    if image.shape != wanted:
        found, expected = ("x".join(map(str, shape)) for shape in (image.shape, wanted))
        raise ValueError(f"its shape is {found}, not {expected}")
