"""The checks that the functions which make launches share. All raise InputError with the kernel's name in front."""

from __future__ import annotations

from collections.abc import Iterable

from flare.core.cuda_checks import MAX_GRID
from flare.errors import InputError
from ignition.targets.cuda.launch import Element, Pointer

FLOATS: tuple[Element, ...] = ("f32", "bf16", "f16")
"""What activations and unquantised weights may be stored as."""

GRID_LIMIT = MAX_GRID[1]
"""Programs along y."""


def require(condition: bool, kernel: str, problem: str) -> None:
    """Raises InputError with the kernel's name in front unless the condition holds."""
    if not condition:
        raise InputError(f"kernel {kernel}: {problem}")


def require_element(kernel: str, name: str, pointer: Pointer | None, allowed: Iterable[Element]) -> None:
    """An operand that is there holds one of these elements."""
    if pointer is not None and pointer.element not in (allowed := tuple(allowed)):
        raise InputError(f"kernel {kernel}: {name} is {pointer.element}, must be {' or '.join(allowed)}")


def require_size(kernel: str, name: str, value: int, low: int = 1, high: int = 2**31 - 1) -> None:
    """A size within its limits; the upper one of an i32 where nothing else bounds it."""
    if not low <= value <= high:
        raise InputError(f"kernel {kernel}: {name} is {value}, must be in [{low}, {high}]")


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
