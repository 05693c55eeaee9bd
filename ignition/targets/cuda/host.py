"""The host part of a cuda target: what has no kernel there, as a program of the cpu target beside the graphs of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flare.core.graph import Graph as HostGraph
from flare.core.manifest import HostPart, Limits
from ignition.checkpoint.tensors import LazyTensor
from ignition.graph import Graph
from ignition.pack import CoreWriter
from ignition.patterns import matrix_names
from ignition.progress import Progress
from ignition.quantize import convert, decode
from ignition.targets.cpu import lower as cpu_lowering
from ignition.targets.cpu.export import CpuExport, Files
from ignition.targets.cuda.pieces import Cuts, host_graph, ops
from ignition.weights import VECTOR, Stored

FILES = Files("graphs/host.msgpack", "weights-host.safetensors", "kernels/host")


class HostExport:
    """The host part of one export: lowered when it is made, then compiled, then packed. notices: what people should know."""

    def __init__(
        self, graph: Graph, cuts: Cuts, storage: Mapping[str, Stored], limits: Limits, vocabulary: int
    ) -> None:
        made = host_graph(graph, cuts)
        self.ops = ops(cuts)
        logits_bytes = 4 * limits.max_rows * vocabulary
        self.export = CpuExport(made, host_storage(made, storage), limits, files=FILES, logits_bytes=logits_bytes)
        self.notices = self.export.notices

    @property
    def graph(self) -> HostGraph:
        """The graph as it is written."""
        return self.export.plan.graph

    def compile(self, isas: Sequence[str], writer: CoreWriter, progress: Progress) -> None:
        """Compiles its kernels once for each instruction set level, and writes the libraries."""
        self.export.compile(isas, writer, progress)

    def pack(self, option: str, writer: CoreWriter, progress: Progress) -> HostPart:
        """Writes its graph and weights, and returns what the manifest says of it. option: what `--weights` said."""
        return HostPart(ops=self.ops, program=self.export.pack(option, writer, progress))


@dataclass(frozen=True, kw_only=True)
class HeldTensor(LazyTensor):
    """`source` with the values that `held` keeps of it."""

    source: LazyTensor
    held: str

    def float32(self, first: int = 0, last: int | None = None) -> np.ndarray:
        return decode(convert(self.source, self.held, first, last))


def host_storage(graph: Graph, storage: Mapping[str, Stored]) -> dict[str, Stored]:
    """The weights that the host's nodes read, as cpu kernels take them: fp8 matrices, for which there are none, become bf16,
    and those of ops that are interpreted plain f32, both from the values that the core stores, which are the reference's."""
    matrices = matrix_names(graph, cpu_lowering.KERNELS)
    used = {value.name for value in graph.of_kind("weight")}
    found = {}
    for name, stored in storage.items():
        format = VECTOR if name not in matrices else "bf16" if stored.format == "fp8" else stored.format
        if format != stored.format:
            stored = replace(
                stored, format=format, tensors=tuple(_held(each, stored.format) for each in stored.tensors)
            )
        if name in used:
            found[name] = stored
    return found


def _held(tensor: LazyTensor, format: str) -> HeldTensor:
    return HeldTensor(tensor.name, tensor.shape, "f32", tensor.data, source=tensor, held=format)
