"""Whether cuda graphs can run as they say, found without a device: against the manifest, the cubins and each other.

A launch with a wrong argument does not fail, it overwrites memory; so everything that can be known is compared before a
graph is built. What a kernel does with its pointers cannot be, nor what it does before it waits behind a programmatic edge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from flare.core.architectures import ABILITIES, Architecture
from flare.core.checksums import sha256_bytes
from flare.core.cubin import Cubin, CubinKernel, read_cubin
from flare.core.cuda_graph import (
    DEVICE_ONLY,
    Bucket,
    CopyNode,
    CudaGraphs,
    FillNode,
    Kernel,
    KernelNode,
    Pointer,
    Scalar,
    TensorMap,
    io_arrays,
)
from flare.core.host_checks import check_cuts, check_host_graph, cut_begins
from flare.core.launch_checks import check_launches
from flare.core.manifest import CudaTarget, Manifest
from flare.core.tensor_maps import MapType, wrong_boxes
from flare.errors import CoreError

if TYPE_CHECKING:
    from flare.core.directory import Core

ALIGNMENT: Mapping[str, int] = {"weights": 64, "arena": 64, "io": 64, "kv": 64, "host": 16}
"""Of offsets into each segment. Kernels are compiled for pointers that are multiples of 16."""

MAX_THREADS = 1024
MAX_REGISTERS = 1 << 16
"""Of a block, on every architecture (the same table); each warp's share is a multiple of 256."""

MAX_GRID = (2**31 - 1, 65535, 65535)
ELEMENTS = frozenset({"fp32", "bf16", "fp16", "fp8e4nv", "i64", "i32", "u32", "i8", "u8"})
SCALARS: Mapping[str, str] = {"i32": "i32", "i64": "i64", "fp32": "f32"}
"""Types of scalars, by Triton's names of them."""

_SCALAR_BYTES = {"i32": 4, "i64": 8, "f32": 4}
_POINTER, _SCRATCH = "pointer", "scratch"
_LARGEST_F32 = (2 - 2**-23) * 2.0**127

_COPIES = {("host", "io"), ("io", "host"), ("io", "io")}
_FILLED = {"arena", "io"}

_IN: Mapping[str, Mapping[str, str]] = {
    "step": {"tokens": "tokens", "positions": "tokens", "slots": "tokens", "rows": "rows"},
}
_OUT: Mapping[str, Mapping[str, str]] = {"sample": {"sampled": "rows", "logprobs": "rows"}}
"""What each kind of graph copies from or to the host by itself, and whether it has one for a token or for a row."""


def open_cuda_graphs(core: Core, architecture: Architecture) -> tuple[CudaGraphs, dict[str, bytes]]:
    """Returns the checked graphs of a core for one of its architectures, and the bytes of their cubins by file.

    Raises CoreError as `check_cuda_graphs` does, and for a host part whose graph does not fit them.
    """
    target = core.manifest.cuda
    assert target is not None
    graphs = core.cuda_graphs(architecture)
    known = core.manifest.files.keys() - {part.weights.file for part in core.manifest.parts}
    cubins = {file: core.read(file) for file in {kernel.cubin for kernel in graphs.kernels} & known}
    file = target.architectures[architecture]
    check_cuda_graphs(graphs, core.manifest, cubins, file)
    if target.host is not None:
        check_host_graph(core.host_graph(), graphs, core.manifest, file)
    return graphs, cubins


def check_cuda_graphs(graphs: CudaGraphs, manifest: Manifest, cubins: Mapping[str, bytes], where: str) -> None:
    """Checks the graphs of the file `where` against the manifest, which has a cuda target, and the bytes of their cubins.

    `cubins` are by file of the core. Raises CoreError naming the file, the node, the value and what it may be.
    """
    target = manifest.cuda
    assert target is not None
    if target.architectures.get(graphs.arch) != where:
        named = [name for name, file in target.architectures.items() if file == where]
        _refuse(
            where, f"its arch is {graphs.arch[:20]!r}, the manifest says {', '.join(named) or 'nothing'} for the file"
        )
    _Check(graphs, manifest, target, where).run(cubins)


def _refuse(where: str, what: str) -> NoReturn:
    raise CoreError(f"{where}: {what}; export the core again")


def _carries(copy: CopyNode, source: Pointer, target: Pointer, size: int) -> bool:
    """Whether a copy takes the first bytes of one array to another."""
    skipped = source.offset - copy.source.offset
    return (
        (copy.source.segment, copy.target.segment) == (source.segment, target.segment)
        and target.offset - copy.target.offset == skipped
        and 0 <= skipped <= copy.source.bytes - size
    )


def _behind(bucket: Bucket, copies: Mapping[str, int]) -> list[frozenset[str]]:
    """Which of the copies, by name, each node comes behind: by its edges, or in an earlier piece. A copy's own name is among
    its."""
    found: list[frozenset[str]] = []
    for index, (node, begin) in enumerate(zip(bucket.nodes, cut_begins(bucket), strict=True)):
        own = frozenset(name for name, copy in copies.items() if copy == index or copy < begin)
        found.append(own.union(*(found[edge.node] for edge in node.after)))
    return found


def _before(nodes: Sequence[KernelNode | CopyNode | FillNode], copies: Mapping[str, int]) -> list[frozenset[str]]:
    """Which of the copies, by name, wait for each node; a copy's own name is among its."""
    found = [frozenset(name for name, copy in copies.items() if copy == index) for index in range(len(nodes))]
    for index in reversed(range(len(nodes))):
        for edge in nodes[index].after:
            found[edge.node] |= found[index]
    return found


class _Check:
    """The check of one file of graphs."""

    def __init__(self, graphs: CudaGraphs, manifest: Manifest, target: CudaTarget, where: str) -> None:
        segments = target.segments
        self.graphs = graphs
        self.limits = manifest.limits
        self.arrays = io_arrays(manifest.limits, manifest.model.vocabulary)
        self.where = where
        self.host = target.host is not None
        self.parameters: list[Sequence[str | MapType]] = []
        self.waits: list[bool] = []
        self.sizes = {
            "weights": segments.weights_bytes,
            "arena": segments.arena_bytes,
            "io": segments.io_bytes,
            "host": segments.host_bytes,
            "kv": segments.kv_page_bytes,
        }

    def run(self, cubins: Mapping[str, bytes]) -> None:
        read: dict[str, Cubin] = {}
        for index, kernel in enumerate(self.graphs.kernels):
            self.parameters.append(
                self._kernel(kernel, f"{self.where}: kernel {index} ({kernel.source[:60]!r})", cubins, read)
            )
        self._io()
        most = min(self.limits.max_step_tokens, self.limits.max_rows)
        check_cuts(self.graphs.step, self.host, self.graphs.io["logits"], self._outside, self.where)
        self._buckets("step", self.graphs.step, [bucket.tokens for bucket in self.graphs.step], "tokens", most)
        check_launches("step", self.graphs.step, self.graphs, self.limits, self.where)
        for kind, buckets in (("sample", self.graphs.sample), ("score", self.graphs.score)):
            self._buckets(kind, buckets, [bucket.rows for bucket in buckets], "rows", self.limits.max_rows)
            check_launches(kind, buckets, self.graphs, self.limits, self.where)

    def _kernel(
        self, kernel: Kernel, where: str, cubins: Mapping[str, bytes], read: dict[str, Cubin]
    ) -> Sequence[str | MapType]:
        """Checks a kernel against its cubin; returns what its arguments are: "pointer", a map's or scalar's type, "scratch"."""
        file, arch = kernel.cubin, self.graphs.arch
        if file not in cubins:
            _refuse(where, f"its cubin {file[:80]!r} is no file of the core")
        if file not in read:
            named = f"kernels/{arch}/{sha256_bytes(cubins[file])[:16]}.cubin"
            if file != named:
                _refuse(where, f"its cubin is {file[:80]!r}, by its bytes it would be {named}")
            read[file] = read_cubin(cubins[file], file)
            if read[file].architecture != arch:
                _refuse(where, f"its cubin {file} is for {read[file].architecture}, wanted {arch}")
        found = read[file].kernels.get(kernel.name)
        if found is None:
            there = ", ".join(read[file].kernels)[:80]
            _refuse(where, f"{file} has no kernel {kernel.name[:80]!r}, it has {there!r}")
        arguments = [*(self._parameter(where, *item) for item in kernel.signature.items()), _SCRATCH, _SCRATCH]
        wanted: list[int] = []
        for kind in arguments:
            wanted += kind.parameter_bytes() if isinstance(kind, MapType) else [_SCALAR_BYTES.get(kind, 8)]
        if len(found.parameters) != len(wanted):
            by_cubin = f"{len(found.parameters)} by its cubin"
            _refuse(where, f"it has {len(wanted)} parameters by its signature, scratch included, and {by_cubin}")
        for number, ((_, size), by_signature) in enumerate(zip(found.parameters, wanted, strict=True)):
            if size != by_signature:
                _refuse(where, f"parameter {number} has {by_signature} bytes by its signature and {size} by its cubin")
        if (problem := wrong_boxes(kernel)) is not None:
            _refuse(where, problem)
        if doubled := kernel.signature.keys() & kernel.constants.keys():
            _refuse(where, f"{min(doubled)[:40]!r} is in its signature and among its constants")
        self._block(kernel, found, where)
        self.waits.append(found.waits)
        return arguments

    def _parameter(self, where: str, name: str, kind: str) -> str | MapType:
        if kind[:1] == "*" and kind[1:] in ELEMENTS:
            return _POINTER
        if (map_type := MapType.read(kind)) is not None:
            if (problem := map_type.wrong_type()) is not None:
                _refuse(where, f"parameter {name[:40]!r}, a tensor map, {problem}")
            if not ABILITIES[self.graphs.arch].tensor_maps:
                _refuse(where, f"parameter {name[:40]!r} is a tensor map, {self.graphs.arch} has none")
            return map_type
        if kind not in SCALARS:
            known = f"wanted {', '.join(SCALARS)}, a pointer or a tensor map"
            _refuse(where, f"parameter {name[:40]!r} is of type {kind[:20]!r}, {known}")
        return SCALARS[kind]

    def _block(self, kernel: Kernel, found: CubinKernel, where: str) -> None:
        """Checks that a block is what the cubin was compiled for, and fits a processor of the architecture."""
        threads, limit = kernel.threads, ABILITIES[self.graphs.arch].shared_bytes
        if not 1 <= threads <= MAX_THREADS or threads % 32:
            _refuse(where, f"it has {threads} threads, wanted a multiple of 32 up to {MAX_THREADS}")
        if found.block not in (None, (threads, 1, 1)):
            _refuse(where, f"it has blocks of {threads} threads, its cubin needs {found.block}")
        if found.cluster not in (None, (1, 1, 1)):
            _refuse(where, f"its cubin needs clusters of {found.cluster} blocks, graphs launch single ones")
        if kernel.shared < 0 or kernel.shared + found.shared > limit:
            shared = f"{kernel.shared} bytes of dynamic and {found.shared} of static shared memory"
            _refuse(where, f"it has {shared}, {self.graphs.arch} gives a block {limit}")
        registers = threads // 32 * -(-found.registers * 32 // 256) * 256
        if registers > MAX_REGISTERS:
            _refuse(where, f"{threads} threads take {registers} registers, a block has {MAX_REGISTERS}")

    def _io(self) -> None:
        """Checks that every array has its place in device memory, and all but some one on the host, apart from the others'."""
        wanted = {name: ("io", size) for name, size in self.arrays.items()}
        wanted |= {f"host.{name}": ("host", size) for name, size in self.arrays.items() if name not in DEVICE_ONLY}
        if differing := sorted(wanted.keys() ^ self.graphs.io.keys()):
            missing = "is missing" if differing[0] in wanted else "is none that graphs know"
            _refuse(self.where, f"io: {differing[0][:40]!r} {missing}")
        ends = {"io": 0, "host": 0}
        for name, pointer in sorted(self.graphs.io.items(), key=lambda item: item[1].offset):
            segment, size = wanted[name]
            if (pointer.segment, pointer.bytes) != (segment, size):
                found = f"{pointer.bytes} bytes of {pointer.segment}"
                _refuse(self.where, f"io: {name} has {found}, wanted {size} of {segment}")
            if (problem := self._outside(pointer)) is not None:
                _refuse(self.where, f"io: {name}: {problem}")
            if pointer.offset < ends[segment]:
                _refuse(
                    self.where, f"io: {name} begins at byte {pointer.offset}, another array ends at {ends[segment]}"
                )
            ends[segment] = pointer.offset + size
        for segment, end in ends.items():
            if self.sizes[segment] != -(-end // 64) * 64:
                what = f"io: arrays of {segment} end at byte {end}, the manifest has {self.sizes[segment]} bytes of it"
                _refuse(self.where, f"{what}, wanted the next multiple of 64")

    def _outside(self, pointer: Pointer) -> str | None:
        """What is wrong with where a pointer leads, or None."""
        segment, offset, size = pointer.segment, pointer.offset, pointer.bytes
        if segment == "none":
            return "a null pointer"
        if offset < 0 or size < 1 or offset + size > self.sizes[segment]:
            return f"bytes {offset}..{offset + size} of segment {segment}, which has {self.sizes[segment]}"
        if offset % ALIGNMENT[segment]:
            return f"byte {offset} of segment {segment}, wanted a multiple of {ALIGNMENT[segment]}"
        return None

    def _buckets(self, kind: str, buckets: list[Bucket], sizes: list[int], unit: str, rows: int) -> None:
        """Checks a kind of graph: its buckets' order, that the last one is large enough, and every node."""
        limits, last = self.limits, self.limits.max_step_tokens if kind == "step" else self.limits.max_rows
        ascending = sizes == sorted(set(sizes))
        if not ascending or not sizes or sizes[0] < 1 or sizes[-1] != last:
            _refuse(self.where, f"{kind}: its buckets hold {sizes[:20]} {unit}, wanted ascending ones up to {last}")
        if buckets[-1].rows < rows:
            _refuse(self.where, f"{kind}: its last bucket holds {buckets[-1].rows} rows, wanted {rows}")
        previous = 0
        for index, bucket in enumerate(buckets):
            where = f"{self.where}: {kind}[{index}]"
            if kind != "step" and bucket.tokens:
                _refuse(where, f"it holds {bucket.tokens} tokens, wanted none")
            if kind != "step" and bucket.host:
                _refuse(where, f"it has {len(bucket.host)} cuts for the host, which steps alone have")
            if not max(1, previous) <= bucket.rows <= limits.max_rows:
                _refuse(where, f"it holds {bucket.rows} rows, wanted {max(1, previous)} to {limits.max_rows}")
            previous = bucket.rows
            self._bucket(kind, bucket, where)

    def _bucket(self, kind: str, bucket: Bucket, where: str) -> None:
        """Checks every node of a bucket, and that what goes in is copied before its kernels, and what comes out behind them."""
        nodes = bucket.nodes
        for index, (node, begin) in enumerate(zip(nodes, cut_begins(bucket), strict=True)):
            problem = self._node(node) or self._edges(nodes, index, begin)
            if problem is not None:
                _refuse(f"{where} node {index} ({node.label[:60]!r})", problem)
        copied_in = self._copies(bucket, _IN.get(kind, {}), where, inward=True)
        copied_out = self._copies(bucket, _OUT.get(kind, {}), where, inward=False)
        if copied_out and max(copied_out.values()) != len(nodes) - 1:
            _refuse(where, "it does not end with a copy of its results to the host")
        came, taken = _behind(bucket, copied_in), _before(nodes, copied_out)
        for index, node in enumerate(nodes):
            what = None
            if isinstance(node, KernelNode) and (missed := copied_in.keys() - came[index]):
                what = f"it waits for no copy of {min(missed)} from the host"
            elif index not in copied_out.values() and (missed := copied_out.keys() - taken[index]):
                what = f"the copy of {min(missed)} to the host does not wait for it"
            if what is not None:
                _refuse(f"{where} node {index} ({node.label[:60]!r})", what)

    def _copies(self, bucket: Bucket, names: Mapping[str, str], where: str, *, inward: bool) -> dict[str, int]:
        """Returns which node copies each of the named arrays from or to the host; there must be one."""
        found = {}
        for name, unit in names.items():
            most = self.limits.max_step_tokens if unit == "tokens" else self.limits.max_rows
            size = self.arrays[name] // most * getattr(bucket, unit)
            source, target = (f"host.{name}", name) if inward else (name, f"host.{name}")
            copying = [
                index
                for index, node in enumerate(bucket.nodes)
                if isinstance(node, CopyNode) and _carries(node, self.graphs.io[source], self.graphs.io[target], size)
            ]
            if len(copying) != 1:
                many = f"{len(copying)} nodes copy" if copying else "no node copies"
                _refuse(where, f"{many} the {size} bytes of {source} to {target}")
            found[name] = copying[0]
        return found

    def _node(self, node: KernelNode | CopyNode | FillNode) -> str | None:
        """What is wrong with a node by itself, or None."""
        if isinstance(node, KernelNode):
            return self._launch(node)
        if (problem := self._outside(node.target)) is not None:
            return f"target: {problem}"
        if isinstance(node, FillNode):
            if node.target.segment not in _FILLED:
                return f"it fills segment {node.target.segment}, wanted one of {', '.join(sorted(_FILLED))}"
            return None if 0 <= node.value <= 255 else f"its value is {node.value}, wanted 0 to 255"
        source, target = node.source, node.target
        if (problem := self._outside(source)) is not None:
            return f"source: {problem}"
        if (source.segment, target.segment) not in _COPIES:
            return f"it copies from {source.segment} to {target.segment}, wanted host to io, io to host, or within io"
        if source.bytes != target.bytes:
            return f"it copies {source.bytes} bytes to {target.bytes}"
        if source.segment == target.segment and abs(source.offset - target.offset) < source.bytes:
            return f"it copies bytes {source.offset}.. to {target.offset}.., which overlap"
        return None

    def _launch(self, node: KernelNode) -> str | None:
        if not 0 <= node.kernel < len(self.parameters):
            return f"it launches kernel {node.kernel}, there are {len(self.parameters)}"
        for size, most, axis in zip(node.grid, MAX_GRID, "xyz", strict=True):
            if not 1 <= size <= most:
                return f"its grid has {size} blocks in {axis}, wanted 1 to {most}"
        parameters = self.parameters[node.kernel]
        if len(node.args) != len(parameters):
            return f"it has {len(node.args)} arguments, its kernel takes {len(parameters)}"
        for number, (arg, wanted) in enumerate(zip(node.args, parameters, strict=True)):
            if (problem := self._argument(arg, wanted)) is not None:
                return f"argument {number}: {problem}"
        return None

    def _argument(self, arg: Pointer | Scalar | TensorMap, wanted: str | MapType) -> str | None:
        if isinstance(wanted, MapType):
            if not isinstance(arg, TensorMap):
                return f"a {'pointer' if isinstance(arg, Pointer) else 'scalar'}, wanted a tensor map"
            return self._outside(arg.base) or wanted.wrong_tensor(arg)
        if isinstance(arg, TensorMap):
            return f"a tensor map, wanted {'a pointer' if wanted in (_POINTER, _SCRATCH) else f'a scalar of type {wanted}'}"
        if isinstance(arg, Pointer):
            if wanted is _POINTER:
                unreached = "a pointer to segment host, which kernels do not reach"
                return unreached if arg.segment == "host" else self._outside(arg)
            if wanted is not _SCRATCH:
                return f"a pointer, wanted a scalar of type {wanted}"
            null = (arg.segment, arg.offset, arg.bytes) == ("none", 0, 0)
            return None if null else f"a pointer to segment {arg.segment}, wanted a null pointer for Triton's scratch"
        if arg.type != wanted:
            return f"a scalar of type {arg.type}, wanted {'a pointer' if wanted in (_POINTER, _SCRATCH) else wanted}"
        value = arg.value
        if wanted == "f32":
            fits = math.isfinite(value) and abs(value) <= _LARGEST_F32
        else:
            half = 1 << (8 * _SCALAR_BYTES[wanted] - 1)
            fits = isinstance(value, int) and -half <= value < half
        return None if fits else f"{value!r}, which is no {wanted}"

    def _edges(self, nodes: Sequence[KernelNode | CopyNode | FillNode], index: int, begin: int) -> str | None:
        """What is wrong with the edges to a node of the piece that begins with node `begin`, or None.

        A kernel behind a programmatic edge may be launched early, and then waits until all that its edges lead from has ended.
        So it uses memory, and ends, behind them, as a node behind full edges does. If every such kernel waits, all that lies
        before a node has ended when it begins to use memory, however many edges away and of whatever kind. A graph's order
        needs no more: nothing is asked of the earlier kernel, and `_behind` and `_before` take all edges alike.
        """
        node, seen = nodes[index], set()
        for edge in node.after:
            if not 0 <= edge.node < index:
                return f"it waits for node {edge.node}, wanted an earlier one"
            if edge.node < begin:
                return f"it waits for node {edge.node}, which is before the cut at {begin}"
            if edge.node in seen:
                return f"it waits for node {edge.node} twice"
            seen.add(edge.node)
            if edge.programmatic:
                if not ABILITIES[self.graphs.arch].programmatic:
                    return f"its edge from node {edge.node} is programmatic, {self.graphs.arch} has no such edges"
                if not (isinstance(node, KernelNode) and isinstance(nodes[edge.node], KernelNode)):
                    return f"its edge from node {edge.node} is programmatic, wanted a kernel at both ends"
                if not self.waits[node.kernel]:
                    return f"its edge from node {edge.node} is programmatic, but its kernel does not wait for that one's end"
        return None
