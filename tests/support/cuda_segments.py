"""Runs the graphs of a core's cuda file without a device: its kernels, in Triton's interpreter, on segments of ordinary memory.

No cubin is needed, since a kernel says what it was compiled from. A pointer is a tensor from its offset to the end of what the
graph says it may touch; the pool's, to the end of the pool. Memory begins as NaN (all ones), so that what nobody wrote shows.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

import tests.support.triton_interpreter  # noqa: F401  makes the interpreter right for bf16
from flare.core.cuda_graph import Bucket, CopyNode, CudaGraphs, FillNode, Kernel, Pointer, Scalar, TensorMap
from flare.core.tensor_maps import MapType

ELEMENTS = {
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


class Segments:
    """A graph file's memory. sizes: bytes by segment; kv of one page, of which there are `pages`."""

    def __init__(self, graphs: CudaGraphs, sizes: dict[str, int], pages: int, weights: bytes) -> None:
        self.graphs = graphs
        self.bytes = {
            name: torch.full((size * (pages if name == "kv" else 1),), 0xFF, dtype=torch.uint8)
            for name, size in sizes.items()
        }
        self.bytes["weights"] = torch.tensor(bytearray(weights), dtype=torch.uint8)

    def array(self, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        """A named array of io, or its twin "host.<name>"."""
        return self._bytes(self.graphs.io[name]).view(dtype)

    def run(self, bucket: Bucket) -> None:
        """Runs a bucket's nodes in order, each of which must wait for nodes before it."""
        for number, node in enumerate(bucket.nodes):
            assert all(edge.node < number for edge in node.after)
            match node:
                case CopyNode(source=source, target=target):
                    self._bytes(target).copy_(self._bytes(source))
                case FillNode(target=target, value=value):
                    self._bytes(target).fill_(value)
                case _:
                    self._launch(self.graphs.kernels[node.kernel], node.grid, node.args)

    def _launch(self, kernel: Kernel, grid: tuple[int, int, int], args: list[Pointer | Scalar | TensorMap]) -> None:
        *given, global_scratch, profile_scratch = args
        assert global_scratch.segment == profile_scratch.segment == "none"
        named: dict[str, Any] = {}
        for (name, kind), arg in zip(kernel.signature.items(), given, strict=True):
            match arg:
                case Scalar(value=value):
                    named[name] = value
                case Pointer():
                    named[name] = self._bytes(arg).view(ELEMENTS[kind[1:]])
                case TensorMap(base=base, shape=shape):
                    type_ = MapType.read(kind)
                    assert type_ is not None and type_.wrong_tensor(arg) is None, arg
                    tensor = self._bytes(base).view(ELEMENTS[type_.element])
                    steps = [*(stride // tensor.itemsize for stride in arg.strides), 1]
                    named[name] = TensorDescriptor(tensor, list(shape), steps, list(type_.block))
        file, _, function = kernel.source.rpartition(".")
        run = getattr(import_module(f"ignition.targets.cuda.kernels.{file}"), function)
        with np.errstate(all="ignore"):  # of padding, which may be anything
            run[tuple(grid)](**named, **kernel.constants)

    def _bytes(self, pointer: Pointer) -> Tensor:
        memory = self.bytes[pointer.segment]
        if pointer.segment == "kv":
            return memory[pointer.offset :]
        found = memory[pointer.offset : pointer.offset + pointer.bytes]
        assert len(found) == pointer.bytes, pointer
        return found
