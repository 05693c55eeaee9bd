"""Tensor maps as kernels declare them and nodes give them, and whether the driver would make them.

A kernel's signature says "tensordesc<bf16[64,128]>": the element and the block that its code asks for at once. The compiler
cuts a block into boxes, whose rows are the span that swizzling works in, and the map must have exactly those boxes.
What a map may be is said by the driver's header, at cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flare.core.cuda_graph import Box, Kernel, TensorMap

MAP_BYTES = 128
"""Of a map, on the host and among a kernel's parameters."""

ELEMENT_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2}
"""Of the elements that maps may have, by Triton's names."""

SEGMENTS = ("weights", "arena", "io")
"""Where a tensor may lie: a map knows one place, but pages of `kv` may lie anywhere, and kernels do not reach `host`."""

MAX_RANK, MAX_BOX, MAX_SIZE, MAX_STRIDE = 5, 256, 2**31 - 1, 2**40 - 16
"""The header allows sizes up to 2^32, but kernels take each as an i32 too."""

LEAST_WITH_GAPS = 1 << 17
"""Bytes of a tensor whose rows do not touch. Drivers before CUDA 13.2 make wrong maps of smaller ones for compute capability 10
and 12 (release notes of driver 595.71)."""

_SIGNATURE = re.compile(r"tensordesc<(\w{1,16})\[(\d{1,5}(?:,\d{1,5}){0,7})\]>", re.ASCII)


@dataclass(frozen=True, slots=True)
class MapType:
    """The type of a parameter that is a tensor map. element: Triton's name. block: elements that the kernel asks for at once,
    in each dimension, the outermost first."""

    element: str
    block: tuple[int, ...]

    @classmethod
    def read(cls, kind: str) -> MapType | None:
        """Returns the type of a signature's spelling, None for one that is of no tensor map."""
        found = _SIGNATURE.fullmatch(kind)
        return found and cls(found[1], tuple(map(int, found[2].split(","))))

    def parameter_bytes(self) -> list[int]:
        """Bytes of the kernel's parameters: the map, its sizes (i32), its strides (i64)."""
        rank = len(self.block)
        return [MAP_BYTES, *[4] * rank, *[8] * rank]

    def wrong_type(self) -> str | None:
        """What is wrong with the type, or None."""
        if self.element not in ELEMENT_BYTES:
            return f"has elements of {self.element}, wanted {' or '.join(ELEMENT_BYTES)}"
        if len(self.block) > MAX_RANK:
            return f"has {len(self.block)} dimensions, wanted at most {MAX_RANK}"
        if any(size < 1 or size & (size - 1) for size in self.block):
            return f"has a block of {' x '.join(map(str, self.block))}, wanted powers of two"
        return None

    def wrong_box(self, box: Box) -> str | None:
        """What is wrong with the box that the kernel copies, or None."""
        if len(box.shape) != len(self.block):
            return f"a box of {len(box.shape)} dimensions, its signature has {len(self.block)}"
        *outer, last = self.block
        width = ELEMENT_BYTES[self.element]
        if box.swizzle > last * width:
            return f"a swizzle of {box.swizzle} bytes, its signature has rows of {last * width}"
        wanted = [*outer, box.swizzle // width or last]
        for size, whole, part in zip(box.shape, self.block, wanted, strict=True):
            if size != min(part, MAX_BOX):
                return f"a box of {size} elements in a dimension of {whole}, wanted {min(part, MAX_BOX)}"
        if last * width < 16:
            return f"a box with rows of {last * width} bytes, wanted at least 16"
        return None

    def wrong_tensor(self, tensor: TensorMap) -> str | None:
        """What is wrong with the tensor of a map, whose base lies in its segment, or None."""
        shape, strides = tensor.shape, tensor.strides
        if tensor.base.segment not in SEGMENTS:
            return f"a tensor map of segment {tensor.base.segment}, wanted one of {', '.join(SEGMENTS)}"
        if len(shape) != len(self.block) or len(strides) != len(shape) - 1:
            found = f"a tensor of {len(shape)} dimensions and {len(strides)} strides"
            return f"{found}, wanted {len(self.block)} and {len(self.block) - 1}"
        for size in shape:
            if not 1 <= size <= MAX_SIZE:
                return f"a tensor of {size} elements in a dimension, wanted 1 to {MAX_SIZE}"
        extent, gaps = shape[-1] * ELEMENT_BYTES[self.element], False
        below = extent  # what one step of the dimension at hand must skip at least
        for size, stride in zip(reversed(shape[:-1]), reversed(strides), strict=True):
            if stride % 16 or not below <= stride <= MAX_STRIDE:
                return f"a stride of {stride} bytes, wanted a multiple of 16 from {below} to {MAX_STRIDE}"
            gaps |= stride != below
            below = size * stride
            extent += (size - 1) * stride
        if extent != tensor.base.bytes:
            return f"a tensor of {extent} bytes in {tensor.base.bytes}, wanted as many"
        if gaps and extent < LEAST_WITH_GAPS:
            return f"a tensor of {extent} bytes with gaps, wanted none or at least {LEAST_WITH_GAPS}"
        return None


def wrong_boxes(kernel: Kernel) -> str | None:
    """What is wrong with the boxes of a kernel's tensor maps, or None. The types of its signature are good."""
    maps = {name: found for name, kind in kernel.signature.items() if (found := MapType.read(kind)) is not None}
    if differing := sorted(maps.keys() ^ kernel.boxes.keys()):
        missing = "is a tensor map without a box" if differing[0] in maps else "has a box and is no tensor map"
        return f"parameter {differing[0][:40]!r} {missing}"
    for name, kind in maps.items():
        if (problem := kind.wrong_box(kernel.boxes[name])) is not None:
            return f"parameter {name[:40]!r} has {problem}"
    return None
