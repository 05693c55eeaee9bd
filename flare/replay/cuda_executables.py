"""Buckets of a graph file -> executable CUDA graphs: each node's arguments get the addresses of this process's memory.

A load has thousands of nodes, so the driver's structures are made once and filled anew for each, and all arguments of a bucket
lie in one buffer: a pointer or a scalar takes eight bytes, and the driver reads as many of them as the kernel declares. Only
tensor maps lie elsewhere, since buckets share them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from flare.core.cuda_graph import Bucket, CopyNode, CudaGraphs, FillNode, KernelNode, Pointer, Scalar, TensorMap, pieces
from flare.errors import CoreError
from flare.replay.cuda_driver import CudaDevice, DeviceError
from flare.replay.cuda_tensor_maps import TensorMaps, map_arguments

Addresses = Mapping[str, int]
"""Where each segment lies; `kv` is that of page 0, "none" is 0."""


def load_functions(device: CudaDevice, graphs: CudaGraphs, cubins: Mapping[str, bytes]) -> list[Any]:
    """Loads every cubin once; returns the function of each of the graphs' kernels. Raises CoreError when the driver refuses
    one, or a cubin is missing."""
    wanted: dict[str, dict[str, int]] = {}
    for kernel in graphs.kernels:
        names = wanted.setdefault(kernel.cubin, {})
        names[kernel.name] = max(kernel.shared, names.get(kernel.name, 0))
    if missing := sorted(wanted.keys() - cubins.keys()):
        raise CoreError(f"{missing[0]}: the cubin of a kernel is missing; export the core again")
    found = {file: device.load_kernels(cubins[file], names, file) for file, names in wanted.items()}
    return [found[kernel.cubin][kernel.name] for kernel in graphs.kernels]


class GraphBuilder:
    """Makes executable graphs of buckets. The device owns what it makes."""

    def __init__(self, device: CudaDevice, graphs: CudaGraphs, functions: Sequence[Any], addresses: Addresses) -> None:
        self._device = device
        self._kernels = graphs.kernels
        self._functions = functions
        self._addresses = addresses
        self._maps = TensorMaps(device, addresses)
        self._mapped = [map_arguments(kernel) for kernel in graphs.kernels]
        api = device.api
        kinds = api.CUgraphNodeType
        self._kernel = api.CUgraphNodeParams()
        self._kernel.type = kinds.CU_GRAPH_NODE_TYPE_KERNEL
        self._copy = api.CUgraphNodeParams()
        self._copy.type = kinds.CU_GRAPH_NODE_TYPE_MEMCPY
        self._copy.memcpy.copyCtx = device.context
        self._fill = api.CUgraphNodeParams()
        self._fill.type = kinds.CU_GRAPH_NODE_TYPE_MEMSET
        fill = self._fill.memset
        fill.ctx, fill.elementSize, fill.height = device.context, 1, 1
        self._host, self._on_device = api.CUmemorytype.CU_MEMORYTYPE_HOST, api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        self._full_edge = api.CUgraphEdgeData()
        self._programmatic_edge = api.CUgraphEdgeData()
        self._programmatic_edge.from_port = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, a macro of the driver's header
        self._programmatic_edge.type = api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC

    def build_pieces(self, bucket: Bucket, name: str) -> list[Any]:
        """Returns an executable graph for each piece of the bucket, None for one without nodes. Raises as `build` does."""
        if not bucket.host:
            return [self.build(bucket, name)]
        return [
            self.build(piece, f"{name} piece {number}") if piece.nodes else None
            for number, piece in enumerate(pieces(bucket))
        ]

    def build(self, bucket: Bucket, name: str) -> Any:
        """Returns the bucket's executable graph. Raises CoreError naming the node that the driver refuses."""
        device = self._device
        values, counts, maps = self._values(bucket, name)
        arguments = (ctypes.c_uint64 * len(values))(*values)
        begin = ctypes.addressof(arguments)
        pointers = (ctypes.c_uint64 * len(values))(*range(begin, begin + 8 * len(values), 8))
        for number, address in maps.items():
            pointers[number] = address
        at = ctypes.addressof(pointers)
        graph = device.call("cuGraphCreate", 0)
        try:
            made: list[Any] = []
            for index, node in enumerate(bucket.nodes):
                match node:
                    case KernelNode():
                        params = self._kernel_params(node, at)
                        at += 8 * counts[index]
                    case CopyNode():
                        params = self._copy_params(node)
                    case FillNode():
                        params = self._fill_params(node)
                before, edges = [made[edge.node] for edge in node.after], None
                if any(edge.programmatic for edge in node.after):
                    edges = [self._programmatic_edge if edge.programmatic else self._full_edge for edge in node.after]
                try:
                    made.append(device.call("cuGraphAddNode", graph, before, edges, len(before), params))
                except DeviceError as error:
                    raise _refused(name, index, node, "it", error) from None
            return device.instantiate(graph)
        finally:
            device.call("cuGraphDestroy", graph)

    def _values(self, bucket: Bucket, name: str) -> tuple[list[int], list[int], dict[int, int]]:
        """All arguments of a bucket's kernels, as the bits of eight bytes each; how many each node has; and the addresses of
        those that are tensor maps, by number."""
        addresses, values, counts, maps = self._addresses, [], [], {}
        for index, node in enumerate(bucket.nodes):
            before = len(values)
            if isinstance(node, KernelNode):
                for number, arg in enumerate(node.args):
                    if isinstance(arg, Pointer):
                        values.append(addresses[arg.segment] + arg.offset)
                    elif isinstance(arg, TensorMap):
                        try:
                            address, numbers = self._maps.parameters(arg, *self._mapped[node.kernel][number])
                        except DeviceError as error:
                            raise _refused(name, index, node, f"the tensor map of argument {number}", error) from None
                        maps[len(values)] = address
                        values.append(0)
                        values += numbers
                    else:
                        values.append(_bits(arg))
            counts.append(len(values) - before)
        return values, counts, maps

    def _kernel_params(self, node: KernelNode, pointers: int) -> Any:
        kernel, params = self._kernels[node.kernel], self._kernel.kernel
        params.func = self._functions[node.kernel]
        params.gridDimX, params.gridDimY, params.gridDimZ = node.grid
        params.blockDimX, params.blockDimY, params.blockDimZ = kernel.threads, 1, 1
        params.sharedMemBytes = kernel.shared
        params.kernelParams = pointers
        return self._kernel

    def _copy_params(self, node: CopyNode) -> Any:
        params = self._copy.memcpy.copyParams
        source, target = (self._addresses[end.segment] + end.offset for end in (node.source, node.target))
        if node.source.segment == "host":
            params.srcMemoryType, params.srcHost = self._host, source
        else:
            params.srcMemoryType, params.srcDevice = self._on_device, source
        if node.target.segment == "host":
            params.dstMemoryType, params.dstHost = self._host, target
        else:
            params.dstMemoryType, params.dstDevice = self._on_device, target
        params.WidthInBytes, params.Height, params.Depth = node.source.bytes, 1, 1
        return self._copy

    def _fill_params(self, node: FillNode) -> Any:
        params = self._fill.memset
        params.dst = self._addresses[node.target.segment] + node.target.offset
        params.value, params.width = node.value, node.target.bytes
        return self._fill


def _refused(name: str, index: int, node: KernelNode | CopyNode | FillNode, what: str, error: DeviceError) -> CoreError:
    where = f"{name}: node {index} ({node.label[:60]!r})"
    return CoreError(f"{where}: the driver refuses {what}: {error}; export the core again")


def _bits(scalar: Scalar) -> int:
    if scalar.type == "f32":
        return struct.unpack("<I", struct.pack("<f", scalar.value))[0]
    return int(scalar.value) & (0xFFFFFFFF if scalar.type == "i32" else 0xFFFFFFFFFFFFFFFF)
