"""The checks that the functions which make launches share. All raise InputError with the kernel's name in front."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Size:
    """One of a call's sizes, and those that its kernel takes: multiples of `multiple` from `low` to `high`, which is the
    largest i32 where nothing else bounds them."""

    name: str
    value: int
    low: int = 1
    high: int = 2**31 - 1
    multiple: int = 1

    @property
    def taken(self) -> bool:
        """Whether the kernel takes it."""
        return self.low <= self.value <= self.high and self.value % self.multiple == 0

    @property
    def wanted(self) -> str:
        """What the kernel takes, in words."""
        if self.multiple == 1:
            return f"in [{self.low}, {self.high}]"
        return f"a multiple of {self.multiple} from {self.low} to {self.high}"


def require_sizes(kernel: str, *sizes: Size) -> None:
    """The kernel takes all of these."""
    for size in sizes:
        require(size.taken, kernel, f"{size.name} is {size.value}, must be {size.wanted}")


def require_size(kernel: str, name: str, value: int, low: int = 1, high: int = 2**31 - 1) -> None:
    """A size within its limits, as `Size` has it."""
    require_sizes(kernel, Size(name, value, low, high))


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
