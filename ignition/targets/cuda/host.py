"""The host part of a cuda target: what has no kernel there, as a program of the cpu target beside the graphs of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flare.core.graph import Graph as HostGraph
from flare.core.manifest import HostPart, Limits
from ignition.graph import Graph
from ignition.pack import CoreWriter
from ignition.patterns import matrix_names
from ignition.progress import Progress
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


def host_storage(graph: Graph, storage: Mapping[str, Stored]) -> dict[str, Stored]:
    """The weights that the host's nodes read, as cpu kernels take them: fp8 matrices, for which there are none, are bf16, and
    those of ops that are interpreted are plain."""
    matrices = matrix_names(graph, cpu_lowering.KERNELS)
    used = {value.name for value in graph.of_kind("weight")}
    found = {}
    for name, stored in storage.items():
        if name not in used:
            continue
        format = stored.format if name in matrices else VECTOR
        found[name] = replace(stored, format="bf16" if format == "fp8" else format)
    return found
