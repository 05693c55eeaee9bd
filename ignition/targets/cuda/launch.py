"""A launch: one call of a kernel, before its memory has addresses.

Kernels' files make launches, lowering binds them to buffers, and tests run them on tensors; what a pointer's operand is
depends on who asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Element = Literal["f32", "bf16", "f16", "fp8", "i32", "u32", "i64", "i8", "u8"]

BYTES: Mapping[str, int] = {"f32": 4, "bf16": 2, "f16": 2, "fp8": 1, "i32": 4, "u32": 4, "i64": 8, "i8": 1, "u8": 1}
"""Bytes of an element."""

TRITON_NAMES: Mapping[str, str] = {"f32": "fp32", "f16": "fp16", "fp8": "fp8e4nv"}
"""Triton's names of elements, where they differ from ours."""

Constant = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class Pointer:
    """The first of some elements in memory, 64-byte aligned. `operand` is whatever stands for the memory: a buffer of a lowered
    graph, a weight, a tensor."""

    element: Element
    operand: Any


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A row-major tensor without gaps, of which a kernel copies blocks. shape, block: elements in each dimension, the outermost
    first; elements behind an end of the shape are read as zeros."""

    pointer: Pointer
    shape: tuple[int, ...]
    block: tuple[int, ...]

    def strides(self) -> tuple[int, ...]:
        """Returns the bytes from an element to the next in every dimension but the last."""
        row = BYTES[self.pointer.element]
        return tuple(row * math.prod(self.shape[axis:]) for axis in range(1, len(self.shape)))


@dataclass(frozen=True, slots=True)
class Launch:
    """kernel: "file.function" below `ignition.targets.cuda.kernels`. args: every run-time parameter in the kernel's order; an
    int is an i32, a float an f32, None an absent optional pointer. constants: every constexpr but PROGRAMMATIC, which is the
    architecture's. grid: programs along x, y, z. label: what it computes, in the recipe's names. warps: of 32 threads, a
    program. stages: of loads that run ahead."""

    kernel: str
    args: Mapping[str, Pointer | TensorMap | int | float | None]
    constants: Mapping[str, Constant]
    grid: tuple[int, int, int]
    label: str
    warps: int = 4
    stages: int = 2

    def signature(self) -> dict[str, str]:
        """Returns the run-time parameters that are there, in order, with Triton's types."""
        found = {}
        for name, value in self.args.items():
            match value:
                case Pointer():
                    found[name] = "*" + TRITON_NAMES.get(value.element, value.element)
                case TensorMap(pointer=Pointer(element=element), block=block):
                    sizes = ",".join(map(str, block))
                    found[name] = f"tensordesc<{TRITON_NAMES.get(element, element)}[{sizes}]>"
                case int():
                    found[name] = "i32"
                case float():
                    found[name] = "fp32"
        return found

    def all_constants(self) -> dict[str, Constant]:
        """Returns the constexprs, and with them the optional pointers that are absent."""
        return {name: None for name, value in self.args.items() if value is None} | dict(self.constants)
