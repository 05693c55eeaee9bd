"""Steps of a cuda core with a host part, run without a driver or cubins: the host's program is compiled and runs natively, the
device is ordinary memory and its kernels run in Triton's interpreter."""

from __future__ import annotations

import ctypes
from ctypes import memmove
from pathlib import Path
from typing import Any

import torch

from flare.core.cuda_graph import Bucket, pieces
from flare.fallbacks import Fallbacks
from flare.replay.cpu import CpuArg, CpuNode, CpuProgram
from flare.replay.cuda_host import HostPart, HostProgram
from flare.replay.step_arrays import ReplayLimits, StepArrays
from tests.support.cuda_exports import Exported
from tests.support.cuda_segments import Segments
from tests.support.fake_library import aligned


def host_program(exported: Exported, library: Path) -> HostProgram:
    """The program of an export's host part, over a library that has its kernels."""
    host, limits = exported.target.host, exported.export.limits
    assert host is not None and exported.export.host is not None
    target = host.program
    data = exported.files[target.weights.file][target.segments.weights_offset :]
    nodes = [
        CpuNode(n.kernel, n.phase, tuple(CpuArg(a.segment, a.offset, a.bytes) for a in n.args), n.op)
        for n in exported.export.host.graph.nodes
    ]
    program = CpuProgram(
        library=library,
        nodes=nodes,
        weights=aligned(bytearray(data) + bytes(63)) if data else b"",
        weights_offset=0,
        weights_bytes=target.segments.weights_bytes,
        arena_bytes=target.segments.arena_bytes,
        io_bytes=target.segments.io_bytes,
        logits_offset=0,
        kv_page_bytes=target.segments.kv_page_bytes,
        vocabulary=exported.export.vocabulary,
        limits=limits,
        kv_format=target.weights.kv_format,
    )
    return HostProgram(program, host.ops)


class SegmentsDevice:
    """A device that is ordinary memory, as far as a host part asks for one. launched: the pieces' first nodes' labels."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.launched: list[str] = []
        self._pinned: list[Any] = []

    def attach(self) -> None:
        pass

    def allocate_host(self, size: int, what: str) -> int:
        self._pinned.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(self._pinned[-1])

    def upload(self, target: int, source: int, size: int) -> None:
        memmove(target, source, size)

    def download(self, target: int, source: int, size: int) -> None:
        memmove(target, source, size)

    def launch(self, piece: Bucket) -> None:
        self.launched.append(piece.nodes[0].label)
        self.segments.run(piece)

    def synchronise(self) -> None:
        pass


class HostStep(StepArrays):
    """Runs steps of an export that has a host part, as `CudaReplay` does; logits are those of the last one."""

    def __init__(
        self,
        exported: Exported,
        library: Path,
        *,
        kv_pages: int = 12,
        threads: int = 2,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        limits = exported.export.limits
        super().__init__(
            ReplayLimits.of(limits, exported.export.vocabulary, kv_pages, exported.target.segments.kv_page_bytes)
        )
        self.segments = exported.segments(kv_pages)
        self.device = SegmentsDevice(self.segments)
        self.buckets = self.segments.graphs.step
        addresses = {name: memory.data_ptr() for name, memory in self.segments.bytes.items()}
        self.host = HostPart(
            host_program(exported, library),
            self.buckets[-1].host,
            self.device,
            addresses,
            self,
            threads=threads,
            huge_pages=False,
            fallbacks=fallbacks or Fallbacks(told=False),
        )

    def step(self, n_tokens: int, n_rows: int, meanwhile: Any = None) -> None:
        bucket = next(b for b in self.buckets if b.tokens >= n_tokens and b.rows >= n_rows)
        given = {"tokens": (self.tokens, n_tokens, 0), "positions": (self.positions, n_tokens, -1)}
        given |= {"slots": (self.slots, n_tokens, 0), "rows": (self.rows, n_rows, 0)}
        for name, (values, count, padding) in given.items():
            array = self.segments.array(f"host.{name}")
            array[:count] = torch.tensor(values[:count], dtype=torch.int32)
            array[count:] = padding
        self.segments.array("page_table")[:] = torch.tensor(self.page_table[:], dtype=torch.int32)
        self.host.step([piece if piece.nodes else None for piece in pieces(bucket)], n_tokens, n_rows, meanwhile)

    def logits(self, row: int) -> torch.Tensor:
        return self.segments.array("logits", torch.float32).view(-1, self.vocabulary)[row].clone()

    def __enter__(self) -> HostStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.host.close()
