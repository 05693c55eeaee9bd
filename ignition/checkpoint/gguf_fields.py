"""Typed access to a GGUF file's metadata: a value of the right kind and range, or one line that says what is wrong
with it.
"""

from __future__ import annotations

import numpy as np

from flare.errors import InputError
from ignition.checkpoint.gguf_file import GgufFile


class Fields:
    """Typed access to a file's metadata; every complaint names the file and the key."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self.stored = file.tensors

    def fail(self, key: str, problem: str) -> InputError:
        """The error for a key, with the value that it has; the caller raises it."""
        return InputError(f"{self.path}: {key} is {str(self.metadata.get(key))[:80]!r}: {problem}")

    def text(self, key: str, default: str | None) -> str | None:
        value = self.metadata.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, "a string is needed")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false is needed")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer from `least` to 2^31 - 1. An array, one number a layer, is accepted when all are equal."""
        value = self.metadata.get(key, default)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu" and (value == value[0]).all():
            value = int(value[0])
        if value is None:
            raise InputError(f"{self.path}: {key} is missing")
        if type(value) is not int or not least <= value < 1 << 31:
            raise self.fail(key, f"one integer from {least} to 2147483647 is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero. A stored float32 becomes the shortest decimal that names it: 1e-05, not
        9.99999975e-06.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise InputError(f"{self.path}: {key} is missing")
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.fail(key, "a finite number above zero is needed")
        return shortest(value)


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32; the value itself where it is no float32."""
    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else float(value)
