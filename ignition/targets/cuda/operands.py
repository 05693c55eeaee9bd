"""What the cuda target's launches are given: buffers, packed weights and arrays of `io`, as the operands of pointers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flare.core.manifest import Limits
from flare.errors import InputError
from ignition.graph import Graph
from ignition.patterns import Patterns, matrix_names
from ignition.targets.cuda.kernels.matrix import Matrix
from ignition.targets.cuda.launch import BYTES, Element, Pointer
from ignition.targets.cuda.places import read_by_layers

QUANTISED = frozenset({"q8", "q4", "fp8"})
_ARRAYS: Mapping[str, tuple[Element, ...]] = {
    "q8": ("i8", "f16"),
    "q4": ("u8", "f16", "f16"),
    "fp8": ("fp8", "f32"),
}
"""Elements of a packed matrix's arrays (packing.py); those of floats have one, of their own name."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A temporary of `width` elements for each token ("T") or row ("R"); `most`: of the buckets with up to so many tokens."""

    id: int
    count: str
    width: int
    element: Element
    output: bool = False
    most: int | None = None

    def used(self, tokens: int, rows: int) -> int:
        """Returns the bytes that a bucket of so many tokens and rows uses."""
        return self.width * BYTES[self.element] * (tokens if self.count == "T" else rows)

    def bytes(self, limits: Limits) -> int:
        return self.used(min(limits.max_step_tokens, self.most or limits.max_step_tokens), limits.max_rows)


@dataclass(frozen=True, slots=True)
class WeightArray:
    """An array of a packed weight: values, scales, minimums."""

    name: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class IoArray:
    """A named array of `io`."""

    name: str


class Operands:
    """The operands of one lowered graph. buffers: by id. weights: the packed ones, and what each joins."""

    def __init__(self, graph: Graph, patterns: Patterns, formats: Mapping[str, str], compute: Element) -> None:
        self.graph = graph
        self.patterns = patterns
        self.formats = formats
        self.compute = compute
        self.matrices = matrix_names(graph)
        self.buffers: list[Buffer] = []
        self.weights: dict[str, tuple[str, ...]] = {}
        self.made: dict[int, Buffer] = {}  # root value -> buffer

    def buffer(
        self, count: str, width: int, element: Element, *, output: bool = False, most: int | None = None
    ) -> Buffer:
        """A new buffer, of no value of the graph."""
        buffer = Buffer(len(self.buffers), count, width, element, output, most)
        self.buffers.append(buffer)
        return buffer

    def make(self, value: int, *, rounded: bool = False) -> Buffer:
        """A new buffer for a value of shape [count, ...]; trailing dimensions are one row. rounded: in the compute dtype if
        only linear layers read it; else f32."""
        root = self.graph.root(value)
        output = root.id in self.patterns.output_roots
        element = self.compute if rounded and read_by_layers(self.patterns, root.id) else "f32"
        width = math.prod(int(dim) for dim in root.shape[1:])
        buffer = self.buffer(str(root.shape[0]), width, element, output=output)
        self.hold(value, buffer)
        return buffer

    def hold(self, value: int | None, buffer: Buffer) -> None:
        """Says that a buffer holds a value."""
        self.made[self.graph.root(value).id] = buffer

    def get(self, value: int | None) -> Buffer:
        """The buffer that holds `value`."""
        root = self.graph.root(value)
        if root.id not in self.made:
            raise InputError(f"value %{root.id} is used before it is made; the recipe's step is not in order")
        return self.made[root.id]

    def weight_name(self, value: int | None) -> str:
        """The recipe's name of a weight."""
        root = self.graph.root(value)
        if root.kind != "weight":
            raise InputError(f"a weight is {root.kind} %{root.id}; the cuda target wants a named weight")
        return root.name

    def _packed(self, names: Sequence[str]) -> str:
        """The name of the packed weight that joins these."""
        shared = len(os.path.commonprefix(names).rpartition(".")[0]) + 1 if len(names) > 1 else 0
        name = names[0] + "".join(f"+{other[shared:]}" for other in names[1:])
        self.weights[name] = tuple(names)
        return name

    def vector(self, *values: int | None) -> Pointer | None:
        """A vector, or several joined; None where the op has none."""
        if values[0] is None:
            return None
        return Pointer("f32", WeightArray(self._packed([self.weight_name(value) for value in values])))

    def matrix(self, *values: int | None) -> Matrix:
        """A matrix, or several joined along their rows."""
        names = [self.weight_name(value) for value in values]
        shapes = [[int(dim) for dim in self.matrices[name].shape] for name in names]
        packed, format = self._packed(names), self.formats[names[0]]
        arrays = [Pointer(e, WeightArray(packed, i)) for i, e in enumerate(_ARRAYS.get(format, (format,)))]
        return Matrix(format, sum(rows for rows, _ in shapes), shapes[0][1], *arrays)

    def io(self, name: str) -> Pointer:
        """An array of `io`, of int32."""
        return Pointer("i32", IoArray(name))


def at(buffer: Buffer) -> Pointer:
    """A pointer to a buffer."""
    return Pointer(buffer.element, buffer)


def count(buffer: Buffer, tokens: int, rows: int) -> int:
    """The rows of a buffer in a bucket of so many tokens and rows."""
    return tokens if buffer.count == "T" else rows
