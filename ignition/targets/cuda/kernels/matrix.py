"""A weight matrix in device memory, in any of the formats that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ignition.targets.cuda.kernels.checks import require, require_element, require_size
from ignition.targets.cuda.launch import Element, Pointer

Format = Literal["f32", "bf16", "f16", "q8", "q4", "fp8"]
FORMATS: tuple[Format, ...] = get_args(Format)

GROUP = 32
"""Elements along K that share a scale (q8, q4) and a minimum (q4)."""

_VALUES: dict[Format, Element] = {"f32": "f32", "bf16": "bf16", "f16": "f16", "q8": "i8", "q4": "u8", "fp8": "fp8"}
_SCALES: dict[Format, Element] = {"q8": "f16", "q4": "f16", "fp8": "f32"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """[n, k], row-major. f32, bf16, f16: values [n, k]. q8: values i8 [n, k], scale f16 [n, k/32]. q4: values u8 [n, k/2],
    scale and minimum f16 [n, k/32]; byte j of a group's 16 holds element j in its low half and element 16 + j in its high
    half. fp8: values e4m3 [n, k], scale f32 [n]."""

    format: Format
    n: int
    k: int
    values: Pointer
    scale: Pointer | None = None
    minimum: Pointer | None = None

    def require(self, kernel: str, name: str, formats: tuple[Format, ...]) -> None:
        """Raises InputError with the kernel's and the operand's name where the matrix is not whole, or of another format."""
        require(
            self.format in formats, kernel, f"{name} is stored as {self.format}, must be one of {', '.join(formats)}"
        )
        require_size(kernel, f"{name}'s n", self.n)
        require_size(kernel, f"{name}'s k", self.k, high=2**30)
        require_element(kernel, f"{name}'s values", self.values, (_VALUES[self.format],))
        for part, pointer, wanted in (
            ("scale", self.scale, self.format in _SCALES),
            ("minimum", self.minimum, self.format == "q4"),
        ):
            have = "has a" if pointer is not None else "has no"
            require((pointer is not None) == wanted, kernel, f"{name} is stored as {self.format} and {have} {part}")
        if self.scale is not None:
            require_element(kernel, f"{name}'s scale", self.scale, (_SCALES[self.format],))
        require_element(kernel, f"{name}'s minimum", self.minimum, ("f16",))
        if self.format in ("q8", "q4"):
            require(
                self.k % GROUP == 0,
                kernel,
                f"{name} is stored as {self.format} in groups of {GROUP} along k, which is {self.k}; use bf16 or f32",
            )
