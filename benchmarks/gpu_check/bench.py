"""Runs single launches of a core's graphs on memory of their own: given inputs in, outputs and whatever else was written out.

The launches are the graph file's, with pointers and tensor maps led elsewhere, and run from the core's cubins as one small CUDA
graph, made by the runtime's own builder. Around and between the arrays lies a filling that nobody may write, and that no map
reads: NaN would get into every sum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from flare.core.cuda_graph import Bucket, CudaGraphs, Edge, KernelNode, Pointer, Scalar, TensorMap
from flare.core.tensor_maps import MapType
from flare.replay.cuda_driver import CudaDevice
from flare.replay.cuda_executables import GraphBuilder, load_functions

FILLING = 0xFF
"""Every byte of memory that was not given: NaN in every float type, -1 as an integer."""

GAP = 256
"""Bytes between arrays, which begin at multiples of it."""

TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8e4nv": torch.float8_e4m3fn,
    "i64": torch.int64,
    "i32": torch.int32,
    "u32": torch.uint32,
    "i8": torch.int8,
    "u8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Unit:
    """Launches of one bucket that follow each other and compute one thing. arguments: by parameter, of all launches; those of
    one name are the same. tokens, rows: the bucket's."""

    nodes: tuple[KernelNode, ...]
    kernels: tuple[int, ...]
    sources: tuple[str, ...]
    arguments: Mapping[str, Pointer | TensorMap | Scalar]
    types: Mapping[str, torch.dtype]
    constants: Mapping[str, Any]
    label: str
    tokens: int
    rows: int

    def count(self, parameter: str, width: int) -> int:
        """Rows of `width` elements that a parameter's array has."""
        return self.memory(parameter).bytes // (self.types[parameter].itemsize * width)

    def memory(self, parameter: str) -> Pointer:
        """Where a parameter that is a pointer or a tensor map leads."""
        given = self.arguments[parameter]
        assert not isinstance(given, Scalar)
        return given.base if isinstance(given, TensorMap) else given

    def same(self, one: str, other: str) -> bool:
        """Whether two parameters are one array."""
        return one in self.arguments and self.arguments.get(one) == self.arguments.get(other)

    def scalar(self, name: str) -> float:
        """A parameter that is no pointer."""
        found = self.arguments[name]
        assert isinstance(found, Scalar)
        return found.value


def units(graphs: CudaGraphs, bucket: Bucket) -> list[Unit]:
    """The units of a bucket, in order: single launches, but for the two of attention over few tokens."""
    groups: list[list[KernelNode]] = []
    for node in bucket.nodes:
        if isinstance(node, KernelNode):
            if groups and graphs.kernels[node.kernel].source == "attention_decode.attention_combine":
                groups[-1].append(node)
            else:
                groups.append([node])
    return [_unit(graphs, bucket, nodes) for nodes in groups]


def _unit(graphs: CudaGraphs, bucket: Bucket, nodes: Sequence[KernelNode]) -> Unit:
    kernels = [graphs.kernels[node.kernel] for node in nodes]
    arguments: dict[str, Pointer | TensorMap | Scalar] = {}
    types: dict[str, torch.dtype] = {}
    constants: dict[str, Any] = {}
    for node, kernel in zip(nodes, kernels, strict=True):
        arguments |= dict(zip(kernel.signature, node.args, strict=False))
        types |= {name: TYPES[element] for name, kind in kernel.signature.items() if (element := _element(kind))}
        constants |= kernel.constants
    return Unit(
        tuple(nodes),
        tuple(node.kernel for node in nodes),
        tuple(kernel.source for kernel in kernels),
        arguments,
        types,
        constants,
        nodes[-1].label,
        bucket.tokens,
        bucket.rows,
    )


def _element(kind: str) -> str | None:
    """Triton's name of what a pointer or a tensor map leads to, None for a scalar."""
    map_type = MapType.read(kind)
    return map_type.element if map_type else kind[1:] if kind[0] == "*" else None


class Bench:
    """A device with a core's kernels, and memory for the arrays of one unit at a time."""

    def __init__(self, device: CudaDevice, graphs: CudaGraphs, cubins: Mapping[str, bytes]) -> None:
        self._device = device
        self._graphs = graphs
        self._functions = load_functions(device, graphs, cubins)
        self._size = 0
        self._base = self._staging = 0

    def run(self, unit: Unit, inputs: Mapping[str, Tensor], outputs: Mapping[str, int]) -> dict[str, Tensor]:
        """Runs a unit and returns its outputs, on the cpu and flat.

        inputs: by parameter, on the cpu; `pool` is where pointers into `kv` lead. outputs: elements by parameter, beside those
        inputs that they are one array with; `pool` may be among them, which then is returned as it was left. Parameters that
        are neither get as many bytes as the graph gives them. Raises ValueError where anything else was written to.
        """
        places, size = self._places(unit, inputs, outputs)
        self._reserve(size)
        image = torch.full((size,), FILLING, dtype=torch.uint8)
        for name, tensor in inputs.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8)
            image[places[name] : places[name] + len(data)] = data
        self._view(size).copy_(image)
        self._device.upload(self._base, self._staging, size)
        self._launch(unit, places)
        self._device.download(self._staging, self._base, size)
        self._device.synchronise()
        left = self._view(size)
        found, spans = {}, []
        for name in self._written(unit, inputs, outputs):
            begin, length = places[name], self._bytes(unit, name, inputs, outputs)
            spans.append((begin, begin + length))
            if name in outputs:
                element = inputs[name].dtype if name in inputs else unit.types[name]
                found[name] = left[begin : begin + length].clone().view(element)
        end = 0
        for begin, following in [*sorted(spans), (size, size)]:
            if not torch.equal(left[end:begin], image[end:begin]):
                raise ValueError(f"{unit.label}: memory beside its outputs was written to")
            end = max(end, following)
        return found

    def _written(self, unit: Unit, inputs: Mapping[str, Tensor], outputs: Mapping[str, int]) -> list[str]:
        others = [n for n in unit.types if n not in inputs and unit.memory(n).segment != "kv"]
        return [*outputs, *(name for name in others if name not in outputs)]

    def _bytes(self, unit: Unit, name: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, int]) -> int:
        if name in inputs:
            return inputs[name].nbytes
        if name in outputs:
            return outputs[name] * unit.types[name].itemsize
        return unit.memory(name).bytes

    def _places(
        self, unit: Unit, inputs: Mapping[str, Tensor], outputs: Mapping[str, int]
    ) -> tuple[dict[str, int], int]:
        """Where each array lies, and the bytes of all."""
        places, end = {}, GAP
        for name in dict.fromkeys([*inputs, *outputs, *self._written(unit, inputs, outputs)]):
            twin = next((other for other in places if unit.same(name, other)), None)
            if twin is not None:
                places[name] = places[twin]
                continue
            places[name] = end
            end += -(-self._bytes(unit, name, inputs, outputs) // GAP) * GAP + GAP
        return places, end

    def _launch(self, unit: Unit, places: Mapping[str, int]) -> None:
        nodes: list[Any] = []
        for index, (node, number) in enumerate(zip(unit.nodes, unit.kernels, strict=True)):
            args: list[Pointer | TensorMap | Scalar] = []
            for name, given in zip(self._graphs.kernels[number].signature, node.args, strict=False):
                if isinstance(given, Scalar):
                    args.append(given)
                    continue
                memory = unit.memory(name)
                at = places["pool"] + memory.offset if memory.segment == "kv" else places[name]
                moved = Pointer(segment="arena", offset=at, bytes=memory.bytes)
                args.append(structs.replace(given, base=moved) if isinstance(given, TensorMap) else moved)
            after = [Edge(node=index - 1)] if index else []
            nodes.append(
                KernelNode(kernel=number, grid=node.grid, args=[*args, *node.args[-2:]], label=node.label, after=after)
            )
        addresses = {"arena": self._base, "none": 0}
        builder = GraphBuilder(self._device, self._graphs, self._functions, addresses)
        self._device.launch(builder.build(Bucket(tokens=unit.tokens, rows=unit.rows, nodes=nodes), unit.label))

    def _reserve(self, size: int) -> None:
        if size > self._size:
            if self._size:
                self._device.call("cuMemFree", self._base)
                self._device.unpin(self._staging)
            self._size = size
            self._base = int(self._device.call("cuMemAlloc", size))
            self._staging = self._device.pin(size, "arrays of a unit")

    def _view(self, size: int) -> Tensor:
        return torch.frombuffer((ctypes.c_char * size).from_address(self._staging), dtype=torch.uint8)
