"""Tensor maps as the driver makes them, where kernels' arguments are copied from; each recipe once, as buckets repeat them.

The function is taken from the driver, since the place that `cuda.bindings` (13.4) gives it for the result is at any multiple of
16, where the driver's header demands 64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from flare.core.cuda_graph import Box, Kernel, TensorMap
from flare.core.tensor_maps import ELEMENT_BYTES, MAP_BYTES, MapType
from flare.replay.cuda_driver import CudaDevice

ALIGNMENT = 128
"""Of a map on the host: that of the header's structure since CUDA 13, twice what its text asks for."""

_TYPES = {"bf16": "BFLOAT16", "fp16": "FLOAT16"}
_NAME = "cuTensorMapEncodeTiled"
_PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # the map
    ctypes.c_int,  # elements' type
    ctypes.c_uint32,  # rank
    ctypes.c_void_p,  # the tensor; of what follows, the innermost dimension comes first
    ctypes.POINTER(ctypes.c_uint64),  # sizes
    ctypes.POINTER(ctypes.c_uint64),  # strides
    ctypes.POINTER(ctypes.c_uint32),  # the box
    ctypes.POINTER(ctypes.c_uint32),  # steps between elements
    ctypes.c_int,  # interleave
    ctypes.c_int,  # swizzle
    ctypes.c_int,  # L2 promotion
    ctypes.c_int,  # what is read out of bounds: 0 for zeros
)


def map_arguments(kernel: Kernel) -> dict[int, tuple[str, Box]]:
    """Returns the element (Triton's name) and the box of each argument that is a tensor map, by its number."""
    types = {number: (name, MapType.read(kind)) for number, (name, kind) in enumerate(kernel.signature.items())}
    return {n: (kind.element, kernel.boxes[name]) for n, (name, kind) in types.items() if kind is not None}


class TensorMaps:
    """The maps of tensors in memory whose segments lie at `addresses`. They live as long as this."""

    def __init__(self, device: CudaDevice, addresses: Mapping[str, int]) -> None:
        self._device = device
        self._addresses = addresses
        self._encode: Any = None
        self._made: dict[tuple[TensorMap, str, Box], tuple[int, list[int]]] = {}
        self._memory: list[Any] = []

    def parameters(self, tensor: TensorMap, element: str, box: Box) -> tuple[int, list[int]]:
        """Returns a kernel's parameters for a tensor: where its map lies, and the numbers behind the map, its sizes and its
        strides in elements. Raises DeviceError when the driver refuses the map."""
        key = (tensor, element, box)
        if key not in self._made:
            strides = (stride // ELEMENT_BYTES[element] for stride in tensor.strides)
            self._made[key] = self._make(tensor, element, box), [*tensor.shape, *strides, 1]
        return self._made[key]

    def _make(self, tensor: TensorMap, element: str, box: Box) -> int:
        if self._encode is None:
            self._encode = self._device.function(_NAME, _PROTOTYPE)
        api, rank = self._device.api, len(tensor.shape)
        memory = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
        address = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
        swizzle, promotion = (f"{size}B" if size else "NONE" for size in (box.swizzle, box.promotion))
        levels = api.CUtensorMapL2promotion
        self._encode(
            address,
            getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[element]}").value,
            rank,
            self._addresses[tensor.base.segment] + tensor.base.offset,
            (ctypes.c_uint64 * rank)(*reversed(tensor.shape)),
            (ctypes.c_uint64 * rank)(*reversed(tensor.strides)),
            (ctypes.c_uint32 * rank)(*reversed(box.shape)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE.value,
            getattr(api.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}").value,
            getattr(levels, f"CU_TENSOR_MAP_L2_PROMOTION_{'L2_' if box.promotion else ''}{promotion}").value,
            api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE.value,
        )
        self._memory.append(memory)
        return address
