"""The cuda target's part in an export: its step lowered for each architecture, its cubins, and its files of the core.

Weights, pages and arrays of io are the same for all architectures; kernels and buffers are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from flare.core.architectures import Architecture
from flare.core.cuda_checks import check_cuda_graphs
from flare.core.cuda_graph import CudaGraphs
from flare.core.host_checks import check_host_graph
from flare.core.manifest import CudaSegments, CudaTarget, Limits, Manifest
from flare.errors import CoreError, InputError
from ignition.graph import Graph
from ignition.pack import CoreWriter
from ignition.packed_weights import place_weights
from ignition.patterns import Patterns, matrix_names
from ignition.plan import Span
from ignition.progress import Progress
from ignition.report import ArchitectureReport
from ignition.targets.cuda import packing
from ignition.targets.cuda.compile import Compiled, compile_launches
from ignition.targets.cuda.compile_worker import Cubin
from ignition.targets.cuda.graphs import all_launches, cubin_file, make_graphs, place
from ignition.targets.cuda.host import HostExport
from ignition.targets.cuda.lower import compute_dtype, linear_weights, lower
from ignition.targets.cuda.operands import QUANTISED
from ignition.targets.cuda.pieces import cut, reasons
from ignition.targets.cuda.places import KERNELS, find_places
from ignition.targets.cuda.sizes import Sizes
from ignition.weights import VECTOR, Stored

WEIGHTS_FILE = "weights-cuda.safetensors"


class CudaExport:
    """One export for cuda: lowered when it is made, then compiled, then packed. notices: what people should know."""

    def __init__(
        self,
        graph: Graph,
        storage: Mapping[str, Stored],
        limits: Limits,
        vocabulary: int,
        architectures: Sequence[Architecture],
        *,
        cpu_fallback: bool = True,
        kernels: Collection[str] | None = None,
    ) -> None:
        """`kernels` are the ops that have kernels, KERNELS unless told otherwise. Raises InputError for nodes without one where
        `cpu_fallback` is off."""
        kernels = KERNELS if kernels is None else kernels
        self.limits = limits
        self.vocabulary = vocabulary
        storage = packed_matrices(graph, storage)
        self.compute = compute_dtype(graph, {name: stored.format for name, stored in storage.items()})
        given = storage
        storage, self.notices = widened(graph, storage, self.compute)
        formats = {name: stored.format for name, stored in storage.items()}
        self.host: HostExport | None = None
        places = find_places(Patterns(graph), Sizes(graph, formats, self.compute, architectures), kernels)
        self.layers = linear_weights(graph, places.apart)
        if places.apart:
            cuts = cut(graph, places)
            self.notices += host_notices(reasons(graph, cuts, places), allowed=cpu_fallback)
            self.host = HostExport(graph, cuts, given, limits, vocabulary)
            self.notices += self.host.notices
        self.lowered = {
            name: lower(graph, formats, self.compute, limits, name, kernels, architectures) for name in architectures
        }
        self.placements = {name: place(lowered, limits, vocabulary) for name, lowered in self.lowered.items()}
        self.any = next(iter(self.lowered.values()))
        self.weights = place_weights(
            {name: joined(name, [storage[one] for one in names]) for name, names in self.any.weights.items()}, packing
        )
        self.compiled: Compiled | None = None
        self.reports: list[ArchitectureReport] = []
        self.graphs: dict[str, CudaGraphs] = {}  # by the core's file

    def segments(self) -> CudaSegments:
        """The sizes of its memory; the arena is what the architecture that needs most of it needs."""
        placements = list(self.placements.values())
        return CudaSegments(
            weights_bytes=self.weights.bytes,
            weights_offset=len(self.weights.header),
            arena_bytes=max(placement.arena_bytes for placement in placements),
            io_bytes=placements[0].io_bytes,
            host_bytes=placements[0].host_bytes,
            kv_page_bytes=self.any.kv_page_bytes,
        )

    def compile(self, isas: Sequence[str], writer: CoreWriter, progress: Progress) -> None:
        """Compiles every kernel that the graphs of an architecture launch; for the host part, also for instruction set
        levels."""
        if self.host is not None:
            self.host.compile(isas, writer, progress)
        launches = {
            name: list(all_launches(lowered, self.limits, self.vocabulary)) for name, lowered in self.lowered.items()
        }
        self.compiled = compile_launches(launches, progress.advance)

    def pack(self, option: str, writer: CoreWriter, progress: Progress) -> CudaTarget:
        """Writes all files, and returns what the manifest says of the target. option: what `--weights` said."""
        assert self.compiled is not None
        arrays = {name: self._arrays(name) for name in self.weights.storage}
        files: dict[Architecture, str] = {}
        for name, lowered in self.lowered.items():
            graphs = make_graphs(
                name, lowered, self.placements[name], arrays, self.compiled, self.limits, self.vocabulary
            )
            cubins = {cubin_file(name, cubin): cubin for cubin in self.compiled.cubins[name].values()}
            for file in sorted(cubins):
                writer.add(file, cubins[file].data)
            files[name] = f"graphs/cuda-{name}.msgpack"
            self.graphs[files[name]] = graphs
            writer.add(files[name], graphs.encode())
            self.reports.append(_report(graphs, cubins.values(), self.compiled.cubins[name].values()))
        self.weights.write(WEIGHTS_FILE, writer, progress)
        return CudaTarget(
            architectures=files,
            compute_dtype=self.compute,
            compiler=self.compiled.versions(),
            segments=self.segments(),
            weights=self.weights.facts(WEIGHTS_FILE, option, self.compute, self.decode_weight_bytes()),
            host=self.host and self.host.pack(option, writer, progress),
        )

    def check(self, manifest: Manifest) -> None:
        """Checks the graphs as opening the core does. Raises InputError, such as for a kernel that needs more shared memory
        than its architecture has."""
        assert self.compiled is not None
        for file, graphs in self.graphs.items():
            compiled = self.compiled.cubins[graphs.arch].values()
            cubins = {cubin_file(graphs.arch, cubin): cubin.data for cubin in compiled}
            try:
                check_cuda_graphs(graphs, manifest, cubins, file)
                if self.host is not None:
                    check_host_graph(self.host.graph, graphs, manifest, file)
            except CoreError as error:
                reason = str(error).removesuffix("; export the core again")
                raise InputError(f"the graphs for {graphs.arch} cannot run: {reason}; please report this") from None

    def _arrays(self, name: str) -> list[Span]:
        """Where a packed weight's arrays lie in the segment."""
        stored, whole = self.weights.storage[name], self.weights.spans[name]
        if stored.format == VECTOR:
            return [whole]
        return [
            Span(whole.offset + span.offset, span.bytes) for span in packing.arrays(stored.format, *stored.spec.shape)
        ]

    def decode_weight_bytes(self) -> int:
        """Bytes of weights that one decode step of one request reads: of a table the row that is looked up, and all of it where
        a linear layer has it too."""
        total = 0
        for name, stored in self.weights.storage.items():
            size = self.weights.spans[name].bytes
            if name in self.any.tables:
                total += size // stored.spec.shape[0]
            if name not in self.any.tables or name in self.layers:
                total += size
        return total


def host_notices(found: Sequence[str], *, allowed: bool) -> list[str]:
    """A line for each kind of node that the processor will run. Raises InputError where that is not allowed."""
    if not allowed:
        raise InputError(
            f"--no-cpu-fallback: {'; '.join(found)}; leave the option out to have the processor run it, slowly"
        )
    return [f"{line}: the processor runs it, slowly" for line in found]


def packed_matrices(graph: Graph, storage: Mapping[str, Stored]) -> Mapping[str, Stored]:
    """The storage with all matrices packed: in f32 where the cpu target of the same export keeps one plain for want of a
    kernel."""
    matrices = matrix_names(graph)
    return {
        name: replace(stored, format="f32") if name in matrices and stored.format == VECTOR else stored
        for name, stored in storage.items()
    }


def widened(graph: Graph, storage: Mapping[str, Stored], compute: str) -> tuple[Mapping[str, Stored], list[str]]:
    """The storage with float weights of linear layers in the compute dtype: f32 where they were of several, without loss."""
    layers = linear_weights(graph)
    others = sorted({storage[name].format for name in layers} - QUANTISED - {compute})
    if not others:
        return storage, []
    found = {
        name: replace(stored, format=compute) if name in layers and stored.format in others else stored
        for name, stored in storage.items()
    }
    return found, [f"linear layers are stored in {', '.join(others)}; cuda widens them and computes in {compute}"]


def joined(name: str, parts: Sequence[Stored]) -> Stored:
    """Weights joined along their first dimension, as one."""
    if len(parts) == 1:
        return parts[0]
    rows = sum(part.spec.shape[0] for part in parts)
    spec = replace(
        parts[0].spec,
        shape=(rows, *parts[0].spec.shape[1:]),
        sources=tuple(source for part in parts for source in part.spec.sources),
    )
    return Stored(name, spec, parts[0].format, tuple(tensor for part in parts for tensor in part.tensors))


def _report(graphs: CudaGraphs, cubins: Collection[Cubin], compiled: Iterable[Cubin]) -> ArchitectureReport:
    kinds = {"step": graphs.step, "sample": graphs.sample, "score": graphs.score}
    return ArchitectureReport(
        architecture=graphs.arch,
        kernels=len(graphs.kernels),
        cubins=len(cubins),
        cubin_bytes=sum(len(cubin.data) for cubin in cubins),
        nodes={
            kind: {bucket.tokens or bucket.rows: len(bucket.nodes) for bucket in buckets}
            for kind, buckets in kinds.items()
        },
        seconds=sum(cubin.seconds for cubin in compiled),
    )
