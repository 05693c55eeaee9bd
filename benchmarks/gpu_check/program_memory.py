"""A core's memory on a device, without a replay: any bucket's graph, or a part of one, runs on what was put there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from flare.core.cuda_graph import Bucket, Edge, FillNode, KernelNode, Pointer
from flare.replay.cuda_arrays import DeviceArrays
from flare.replay.cuda_driver import CudaDevice
from flare.replay.cuda_executables import GraphBuilder, load_functions
from flare.replay.cuda_program import CudaProgram
from flare.replay.cuda_weights import load_weights


class ProgramMemory:
    """The segments of a program, its weights loaded and its pool zero. The device owns them."""

    def __init__(self, device: CudaDevice, program: CudaProgram, kv_pages: int) -> None:
        segments = program.segments
        self.device = device
        self.addresses = {
            "none": 0,
            "weights": device.allocate(segments.weights_bytes, "weights"),
            "arena": device.allocate(segments.arena_bytes, "arena"),
            "io": device.allocate(segments.io_bytes, "io"),
            "kv": device.allocate(segments.kv_page_bytes * kv_pages, "kv"),
            "host": device.allocate_host(segments.host_bytes, "host"),
        }
        load_weights(
            device, program.weights, segments.weights_offset, segments.weights_bytes, self.addresses["weights"]
        )
        self.graphs = program.graphs
        functions = load_functions(device, program.graphs, program.cubins)
        self.builder = GraphBuilder(device, program.graphs, functions, self.addresses)
        self.arrays = DeviceArrays(device, program.graphs.io, self.addresses)
        pool = Pointer(segment="kv", offset=0, bytes=segments.kv_page_bytes * kv_pages)
        self.run(self.build([FillNode(target=pool, value=0, label="pool", after=[])]))

    def build(self, nodes: Sequence[Any], tokens: int = 0, rows: int = 0) -> Any:
        """Returns the executable graph of nodes."""
        return self.builder.build(Bucket(tokens=tokens, rows=rows, nodes=list(nodes)), "checked graph")

    def chain(self, nodes: Sequence[KernelNode]) -> Any:
        """Returns the executable graph of launches, one behind the other."""
        return self.build(
            [
                KernelNode(
                    kernel=node.kernel,
                    grid=node.grid,
                    args=node.args,
                    label=node.label,
                    after=[Edge(node=number - 1)] if number else [],
                )
                for number, node in enumerate(nodes)
            ]
        )

    def run(self, executable: Any, times: int = 1) -> None:
        """Launches a graph so often, and waits for it."""
        for _ in range(times):
            self.device.launch(executable)
        self.device.synchronise()

    def put(self, name: str, data: bytes, offset: int = 0) -> None:
        """Writes to an array on the device, by way of its side on the host where it has one."""
        if f"host.{name}" in self.arrays.address:
            ctypes.memmove(self.arrays.host(name) + offset, data, len(data))
            self.arrays.send(name, offset, len(data))
            self.device.synchronise()
            return
        staging = self.device.pin(len(data), name)
        try:
            ctypes.memmove(staging, data, len(data))
            self.device.upload(self.arrays.address[name] + offset, staging, len(data))
            self.device.synchronise()
        finally:
            self.device.unpin(staging)

    def get(self, name: str, offset: int, size: int) -> bytes:
        """Reads from an array on the device."""
        found = ctypes.create_string_buffer(size)
        self.device.read(ctypes.addressof(found), self.arrays.address[name] + offset, size)
        return found.raw
