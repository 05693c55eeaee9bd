"""Runs the fake driver's kernel nodes: each kernel's own source, in Triton's interpreter, on the bytes packed into the node."""

from __future__ import annotations

import ctypes
import struct
import sys
import traceback
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_void_p
from hashlib import sha256
from importlib import import_module
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

import tests.support.triton_interpreter  # noqa: F401  makes the interpreter right for bf16
from flare.core.cuda_graph import Box, CudaGraphs, Kernel
from flare.core.tensor_maps import MapType
from tests.support.fake_cuda.library import FakeCuda

HOOK = CFUNCTYPE(c_int, c_void_p, c_size_t, c_char_p, POINTER(c_uint), c_int, POINTER(c_void_p), POINTER(c_uint32))

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
FAKE_MAP = struct.Struct("<QQ4Q5I5H4B46x")  # FakeMap of tensor_maps.h
MAP_TYPES = {"fp16": 6, "bf16": 9}  # CUtensorMapDataType
SCALARS = {"fp32": "<f", "i32": "<i", "i64": "<q"}


def by_name(kernel: Kernel, raw: list[bytes]) -> dict[str, list[bytes]]:
    """A node's parameters by those of the signature: one each, but a map's sizes and strides come behind it. Raises ValueError
    unless two null pointers are left."""
    found, rest = {}, iter(raw)
    for name, kind in kernel.signature.items():
        map_type = MapType.read(kind)
        found[name] = [next(rest) for _ in (map_type.parameter_bytes() if map_type else [1])]
    if [any(data) for data in rest] != [False, False]:
        raise ValueError(f"{kernel.source}: {len(raw)} parameters for {list(kernel.signature)} and two null pointers")
    return found


class Executor:
    """Installed in the fake driver, it runs what is launched. `launched` are the sources of the kernels that ran, in order, and
    `failures` the tracebacks of those that did not."""

    def __init__(self, fake: FakeCuda, *graphs: CudaGraphs, package: str = "ignition.targets.cuda.kernels") -> None:
        """`package` holds the modules that the kernels' `source` names."""
        self.launched: list[str] = []
        self.failures: list[str] = []
        self._fake = fake
        self._package = package
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._hashes: dict[int, str] = {}
        self._hook = HOOK(self._run)
        for each in graphs:
            self.add(each)
        self.install()

    def install(self) -> None:
        """Has the driver call this one, in the place of another, until `remove`: as long as this object lives at most."""
        self._fake.library.fake_set_hook(self._hook)

    def remove(self) -> None:
        """Leaves the driver with nothing that runs kernels."""
        self._fake.library.fake_set_hook(HOOK())

    def add(self, graphs: CudaGraphs) -> None:
        """Makes the kernels of a graph file known."""
        for kernel in graphs.kernels:
            digest = kernel.cubin.rpartition("/")[2].removesuffix(".cubin")
            self._kernels[digest, kernel.name] = kernel

    def _run(self, image: int, image_bytes: int, name: bytes, grid: Any, count: int, values: Any, sizes: Any) -> int:
        try:
            digest = sha256(ctypes.string_at(image, image_bytes)).hexdigest()[:16]
            kernel = self._kernels[digest, name.decode()]
            raw = [ctypes.string_at(values[i], sizes[i]) for i in range(count)]
            self._launch(kernel, tuple(grid[:3]), raw)
        except BaseException:
            # The caller is C code, which cannot take an exception on.
            self.failures.append(traceback.format_exc())
            sys.stderr.write(self.failures[-1])
            return 1
        return 0

    def _launch(self, kernel: Kernel, grid: tuple[int, ...], raw: list[bytes]) -> None:
        args: dict[str, Any] = {}
        for name, parameters in by_name(kernel, raw).items():
            if (kind := MapType.read(kernel.signature[name])) is not None:
                args[name] = self._descriptor(kind, kernel.boxes[name], parameters)
            else:
                args[name] = self._argument(kernel.signature[name], parameters[0])
        file, _, function = kernel.source.rpartition(".")
        getattr(import_module(f"{self._package}.{file}"), function)[grid](**args, **kernel.constants)
        self.launched.append(kernel.source)

    def _descriptor(self, kind: MapType, box: Box, parameters: list[bytes]) -> TensorDescriptor:
        """The tensor of a map as the fake driver encoded it (tensor_maps.h), for the blocks that the kernel's source asks for.
        Raises ValueError unless the map and what follows it are what the kernel's code counts on."""
        fields = FAKE_MAP.unpack(parameters[0])
        base, strides, last, boxes = fields[1], fields[2:6], fields[6:11], fields[11:16]
        rank, type_, swizzle, _ = fields[16:]
        shape = [size + 1 for size in reversed(last[:rank])]
        width = ELEMENTS[kind.element].itemsize
        steps = [*(stride // width for stride in reversed(strides[: rank - 1])), 1]
        found = (tuple(reversed(boxes[:rank])), (0, 32, 64, 128)[swizzle], type_)
        if found != (box.shape, box.swizzle, MAP_TYPES[kind.element]):
            raise ValueError(f"a tensor map of {found}, the kernel copies {box} of {kind}")
        told = [int.from_bytes(data, "little") for data in parameters[1:]]
        if told != [*shape, *steps]:
            raise ValueError(f"a tensor map of {shape} by {steps}, the kernel is told {told}")
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        whole = self._argument(f"*{kind.element}", base.to_bytes(8, "little"))[:extent]
        return TensorDescriptor(whole, shape, steps, list(kind.block))

    def _argument(self, kind: str, data: bytes) -> Any:
        if not kind.startswith("*"):
            return struct.unpack(SCALARS[kind], data)[0]
        address, element = int.from_bytes(data, "little"), ELEMENTS[kind[1:]]
        for begin, size in self._fake.blocks():
            if begin <= address < begin + size:
                left = (begin + size - address) // element.itemsize * element.itemsize
                memory = (c_char * left).from_address(address)
                return torch.frombuffer(memory, dtype=torch.uint8).view(element)
        raise ValueError(f"pointer {address:#x} leads to no allocation")
