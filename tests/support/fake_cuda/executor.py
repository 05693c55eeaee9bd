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

import tests.support.triton_interpreter  # noqa: F401  makes the interpreter right for bf16
from flare.core.cuda_graph import CudaGraphs, Kernel
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
SCALARS = {"fp32": "<f", "i32": "<i", "i64": "<q"}


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
        fake.library.fake_set_hook(self._hook)

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
        *given, global_scratch, profile_scratch = raw
        if len(given) != len(kernel.signature) or any(global_scratch) or any(profile_scratch):
            raise ValueError(
                f"{kernel.source}: {len(raw)} parameters for {len(kernel.signature)} and two null pointers"
            )
        args = {
            name: self._argument(kind, data) for (name, kind), data in zip(kernel.signature.items(), given, strict=True)
        }
        file, _, function = kernel.source.rpartition(".")
        getattr(import_module(f"{self._package}.{file}"), function)[grid](**args, **kernel.constants)
        self.launched.append(kernel.source)

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
