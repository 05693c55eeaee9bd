"""The cpu target's part in an export: its step lowered and placed, its kernel libraries, and its files of the core."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flare.core.graph import check_graph, without_kernel
from flare.core.manifest import CpuSegments, CpuTarget, KernelLibrary, Limits
from flare.errors import InputError
from flare.replay.cpu_interface import ABI_VERSION
from ignition.graph import Graph
from ignition.lowered import Lowered
from ignition.pack import CoreWriter
from ignition.packed_weights import place_weights
from ignition.plan import plan
from ignition.progress import Progress
from ignition.targets.cpu import packing
from ignition.targets.cpu.compile import compile_libraries
from ignition.targets.cpu.lower import lower
from ignition.targets.cpu.source import generate, headers
from ignition.weights import QUANTISED_FORMATS, Stored


@dataclass(frozen=True, slots=True)
class Files:
    """The names of an export's files; `libraries` is what those of the libraries begin with."""

    graph: str
    weights: str
    libraries: str


TARGET = Files("graphs/step.msgpack", "weights.safetensors", "kernels/cpu")


class CpuExport:
    """One export for the cpu: lowered when it is made, then compiled, then packed."""

    def __init__(
        self,
        graph: Graph,
        storage: Mapping[str, Stored],
        limits: Limits,
        *,
        cpu_fallback: bool = True,
        files: Files = TARGET,
        logits_bytes: int = 0,
    ) -> None:
        """`logits_bytes` are those of `io` where the graph itself makes no logits, since libraries want room for them.

        Raises InputError for ops without a kernel where `cpu_fallback` is off, and for weights that no kernel takes.
        """
        formats = {name: stored.format for name, stored in storage.items()}
        narrow = (QUANTISED_FORMATS | {"f16", "bf16"}) & set(formats.values())
        self.kv_format = "f16" if narrow else "f32"
        self.weights = place_weights(storage, packing)
        lowered = lower(graph, formats, self.kv_format, limits)
        self.plan = plan(lowered, self.weights.spans, limits)
        self.kernels = lowered.kernels
        self.notices = interpreted_notices(lowered, allowed=cpu_fallback)
        self.files = files
        self.io_bytes = max(self.plan.io_bytes, logits_bytes)
        self.libraries: list[KernelLibrary] = []
        check_graph(self.plan.graph, self.segments(), set(self.kernels), "graph step")

    def segments(self) -> CpuSegments:
        """The sizes of its memory."""
        return CpuSegments(
            weights_bytes=self.weights.bytes,
            weights_offset=len(self.weights.header),
            arena_bytes=self.plan.arena_bytes,
            io_bytes=self.io_bytes,
            kv_page_bytes=self.plan.kv_page_bytes,
        )

    def compile(self, isas: Sequence[str], writer: CoreWriter, progress: Progress) -> None:
        """Compiles the kernels once for each instruction set level, and writes the libraries."""
        sources = {isa: generate(self.kernels, isa) for isa in isas}
        for isa, compiled in compile_libraries(sources, headers(), progress.advance).items():
            file = f"{self.files.libraries}-{isa}.so"
            writer.add(file, compiled.data)
            self.libraries.append(
                KernelLibrary(
                    file=file,
                    isa=isa,
                    machine=platform.machine(),
                    compiler=compiled.compiler,
                    flags=list(compiled.flags),
                )
            )

    def pack(self, option: str, writer: CoreWriter, progress: Progress) -> CpuTarget:
        """Writes graph and weights, and returns what the manifest says of the target. option: what `--weights` said."""
        writer.add(self.files.graph, self.plan.graph.encode())
        self.weights.write(self.files.weights, writer, progress)
        return CpuTarget(
            abi=ABI_VERSION,
            libraries=self.libraries,
            graphs={"step": self.files.graph},
            segments=self.segments(),
            weights=self.weights.facts(self.files.weights, option, self.kv_format, self.decode_weight_bytes()),
        )

    def decode_weight_bytes(self) -> int:
        """Bytes of weights that one decode step of one request reads: all that its nodes bind, but of an embedding one row."""
        total = 0
        seen: set[int] = set()
        for node in self.plan.graph.nodes:
            for arg in node.args:
                if arg.segment != "weights":
                    continue
                if node.kernel.startswith("Embed<") or (node.op is not None and node.op.name == "embed"):
                    total += arg.bytes // self.weights.storage[node.label].spec.shape[0]
                elif arg.offset not in seen:
                    seen.add(arg.offset)
                    total += arg.bytes
        return total


def interpreted_notices(lowered: Lowered, *, allowed: bool) -> list[str]:
    """A line for each op that flare will interpret. Raises InputError where that is not allowed and there is one."""
    found = [without_kernel(name, count, "cpu") for name, count in lowered.interpreted.items()]
    if found and not allowed:
        raise InputError(f"--no-cpu-fallback: {'; '.join(found)}; leave the option out to have it interpreted, slowly")
    return [f"{line}: flare interprets it with numpy, slowly" for line in found]
