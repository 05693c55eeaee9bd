"""The graph file of an architecture: works become nodes, bucket by bucket, over one placement of memory.

Buffers are placed once, for the largest bucket, so all buckets use the same addresses. A step's nodes come in phases, as they
were placed: a node waits for all nodes of the phase before its own, in its piece of the step. The graphs of draws and scores
use the arena as well, since they run when no step does; each of their nodes waits for the one before it.

Where the architecture has such edges, that between two kernels is programmatic (kernels/programmatic.py) if no other node waits
for the earlier one, nor the later one for another. So it is with kernels that follow each other in a stream, which is what such
edges were made for, and forks and joins are few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from flare.core.architectures import ABILITIES
from flare.core.checksums import sha256_bytes
from flare.core.cuda_graph import (
    DEVICE_ONLY,
    Bucket,
    CopyNode,
    CudaGraphs,
    Edge,
    FillNode,
    HostCut,
    HostRows,
    Kernel,
    KernelNode,
    Pointer,
    Scalar,
    TensorMap,
    io_arrays,
)
from flare.core.manifest import Limits
from ignition.lowered import PageRange
from ignition.plan import Span, assign_phases, padded, place_buffers
from ignition.targets.cuda import launch
from ignition.targets.cuda.compile import Compiled, job
from ignition.targets.cuda.compile_worker import Cubin
from ignition.targets.cuda.launch import BYTES, Launch
from ignition.targets.cuda.operands import Buffer, IoArray, WeightArray
from ignition.targets.cuda.sample_graph import sample_launches, sample_scratch, score_launches, score_scratch
from ignition.targets.cuda.works import Cut, Lowered

STEP_INPUTS = ("tokens", "positions", "slots", "rows")
"""Arrays that a step's graph copies from the host: they lie side by side in both segments."""

SAMPLE_OUTPUTS = ("sampled", "logprobs")
"""Arrays that a draw's graph copies to the host."""

_IO_ELEMENTS: Mapping[str, launch.Element] = {"logits": "f32"}
"""Of arrays that kernels do not read as int32."""

_NULL = Pointer(segment="none", offset=0, bytes=0)


@dataclass(frozen=True, slots=True)
class Scratch:
    """`bytes` bytes of the arena at `offset`, between the launches of a draw or score."""

    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a lowered step's memory lies. buffers: offsets in the arena by id. phases: of the works. io: the named arrays, and
    their twins "host.<name>". Sizes in bytes."""

    buffers: Mapping[int, int]
    phases: tuple[int, ...]
    arena_bytes: int
    io: Mapping[str, Pointer]
    io_bytes: int
    host_bytes: int


def bucket_sizes(most: int) -> list[int]:
    """Returns the powers of two below `most`, and `most`."""
    return [1 << power for power in range((most - 1).bit_length())] + [most]


def place(lowered: Lowered, limits: Limits, vocabulary: int) -> Placement:
    """Places a lowered step's buffers, the arrays of io and the scratch of draws and scores."""
    phases = assign_phases(lowered.works)
    buffers, arena_bytes = place_buffers(lowered.works, lowered.buffers, phases, limits)
    scratch = lay_out_scratch(limits.max_rows, vocabulary)
    io: dict[str, Pointer] = {}
    sizes = {"io": 0, "host": 0}
    for name, size in io_arrays(limits, vocabulary).items():
        for segment, key in (("io", name), ("host", f"host.{name}")):
            if segment == "host" and name in DEVICE_ONLY:
                continue
            io[key] = Pointer(segment=segment, offset=sizes[segment], bytes=size)
            sizes[segment] += padded(size)
    arena_bytes = max(arena_bytes, *(padded(part.offset + part.bytes) for part in scratch.values()))
    return Placement(buffers, tuple(phases), arena_bytes, io, sizes["io"], sizes["host"])


def lay_out_scratch(max_rows: int, vocabulary: int) -> dict[str, Scratch]:
    """Where the scratch of the largest draw lies in the arena, which has that of the largest score among it."""
    found, offset = {}, 0
    for name, (element, count) in (score_scratch(max_rows, vocabulary) | sample_scratch(max_rows, vocabulary)).items():
        found[name] = Scratch(offset, count * BYTES[element])
        offset += padded(count * BYTES[element])
    return found


def step_launches(lowered: Lowered, tokens: int, rows: int) -> list[list[Launch]]:
    """Returns the launches of a bucket's step, by work."""
    return [work.launches(tokens, rows) for work in lowered.works]


def draw_launches(kind: str, limits: Limits, vocabulary: int, rows: int) -> list[Launch]:
    """Returns the launches of the "sample" or "score" graph of a bucket of `rows`."""
    sizes = {"sample": sample_scratch, "score": score_scratch}[kind](rows, vocabulary)
    places = lay_out_scratch(limits.max_rows, vocabulary)
    at = {
        name: launch.Pointer(element, Scratch(places[name].offset, count * BYTES[element]))
        for name, (element, count) in sizes.items()
    }
    at |= {name: launch.Pointer(_IO_ELEMENTS.get(name, "i32"), IoArray(name)) for name in io_arrays(limits, vocabulary)}
    if kind == "sample":
        return sample_launches(at, rows=rows, vocabulary=vocabulary, max_context=limits.max_context)
    return score_launches(at, rows=rows, all_rows=limits.max_rows, vocabulary=vocabulary)


def all_launches(lowered: Lowered, limits: Limits, vocabulary: int) -> Iterator[Launch]:
    """Every launch of every bucket of an architecture's graphs."""
    for tokens in bucket_sizes(limits.max_step_tokens):
        for some in step_launches(lowered, tokens, min(tokens, limits.max_rows)):
            yield from some
    for kind in ("sample", "score"):
        for rows in bucket_sizes(limits.max_rows):
            yield from draw_launches(kind, limits, vocabulary, rows)


def cubin_file(architecture: str, cubin: Cubin) -> str:
    """The core's file of a cubin."""
    return f"kernels/{architecture}/{sha256_bytes(cubin.data)[:16]}.cubin"


def make_graphs(
    architecture: str,
    lowered: Lowered,
    placement: Placement,
    weights: Mapping[str, Sequence[Span]],
    compiled: Compiled,
    limits: Limits,
    vocabulary: int,
) -> CudaGraphs:
    """Returns the graphs of an architecture. weights: where each packed weight's arrays lie in the weights segment."""
    binding = _Binding(placement, weights)
    kernels = _Kernels(architecture, compiled)
    step = []
    for tokens in bucket_sizes(limits.max_step_tokens):
        rows = min(tokens, limits.max_rows)
        nodes = _Nodes(binding, kernels, tokens, rows)
        nodes.copy(STEP_INPUTS, inward=True)
        nodes.barrier()
        last = 0
        for work, phase in zip(lowered.works, placement.phases, strict=True):
            if work.cut is not None:
                nodes.cut(work.cut)
                continue
            if phase != last:
                nodes.barrier()
                last = phase
            nodes.run(work.launches(tokens, rows))
        step.append(Bucket(tokens=tokens, rows=rows, nodes=nodes.finished(), host=nodes.cuts))
    draws: dict[str, list[Bucket]] = {"sample": [], "score": []}
    for kind, buckets in draws.items():
        for rows in bucket_sizes(limits.max_rows):
            nodes = _Nodes(binding, kernels, 0, rows)
            nodes.run(draw_launches(kind, limits, vocabulary, rows))
            nodes.barrier()
            if kind == "sample":
                for name in SAMPLE_OUTPUTS:
                    nodes.copy([name], inward=False, share=(rows, limits.max_rows))
            buckets.append(Bucket(tokens=0, rows=rows, nodes=nodes.finished()))
    return CudaGraphs(
        arch=architecture,
        kernels=kernels.made,
        step=step,
        sample=draws["sample"],
        score=draws["score"],
        io=dict(placement.io),
    )


@dataclass(frozen=True, slots=True)
class _Binding:
    """Gives operands their places."""

    placement: Placement
    weights: Mapping[str, Sequence[Span]]

    def pointer(self, operand: object, tokens: int, rows: int) -> Pointer:
        match operand:
            case Buffer(output=True):
                logits = self.placement.io["logits"]
                return Pointer(segment="io", offset=logits.offset, bytes=operand.used(tokens, rows))
            case Buffer(id=number):
                return Pointer(segment="arena", offset=self.placement.buffers[number], bytes=operand.used(tokens, rows))
            case WeightArray(name=name, index=index):
                span = self.weights[name][index]
                return Pointer(segment="weights", offset=span.offset, bytes=span.bytes)
            case PageRange(offset=offset, bytes=size):
                return Pointer(segment="kv", offset=offset, bytes=size)
            case IoArray(name=name):
                return self.placement.io[name]
            case Scratch(offset=offset, bytes=size):
                return Pointer(segment="arena", offset=offset, bytes=size)
        raise TypeError(f"no operand of a launch: {operand!r}")


class _Kernels:
    """The file's kernels, each once."""

    def __init__(self, architecture: str, compiled: Compiled) -> None:
        self.architecture = architecture
        self.compiled = compiled
        self.made: list[Kernel] = []
        self.numbers: dict[bytes, int] = {}  # by what decides the machine code

    def number(self, each: Launch) -> int:
        """The index of a launch's kernel."""
        key = job(each, self.architecture).key()
        if key not in self.numbers:
            cubin = self.compiled.cubin(each, self.architecture)
            self.numbers[key] = len(self.made)
            self.made.append(
                Kernel(
                    cubin=cubin_file(self.architecture, cubin),
                    name=cubin.symbol,
                    threads=cubin.threads,
                    shared=cubin.shared,
                    source=each.kernel,
                    signature=each.signature(),
                    constants=each.all_constants(),
                    boxes=cubin.boxes,
                )
            )
        return self.numbers[key]


class _Nodes:
    """The nodes of one bucket. Those that are added between two barriers wait for all that were added between the two barriers
    before, and not for each other."""

    def __init__(self, binding: _Binding, kernels: _Kernels, tokens: int, rows: int) -> None:
        self.binding = binding
        self.kernels = kernels
        self.tokens = tokens
        self.rows = rows
        self.made: list[KernelNode | CopyNode | FillNode] = []
        self.cuts: list[HostCut] = []
        self.before: list[int] = []
        self.ends: list[int] = []

    def barrier(self) -> None:
        """What is added from here on waits for what was added since the last barrier."""
        self.before, self.ends = self.ends, []

    def cut(self, cut: Cut) -> None:
        """Begins a new piece, whose nodes wait for none of those before: the host sees to that."""
        gives, takes = ([self._rows(buffer) for buffer in buffers] for buffers in (cut.gives, cut.takes))
        self.cuts.append(HostCut(at=len(self.made), gives=gives, takes=takes))
        self.before, self.ends = [], []

    def _rows(self, buffer: Buffer) -> HostRows:
        pointer = self.binding.pointer(buffer, self.tokens, self.rows)
        return HostRows(buffer=pointer, row_bytes=buffer.width * BYTES[buffer.element], count=buffer.count)

    def run(self, launches: Sequence[Launch]) -> None:
        """Adds launches, of which each waits for the one before it."""
        after = self.before
        for each in launches:
            args: list[Pointer | Scalar | TensorMap] = []
            for value in each.args.values():
                match value:
                    case launch.Pointer(operand=operand):
                        args.append(self.binding.pointer(operand, self.tokens, self.rows))
                    case launch.TensorMap(pointer=pointer, shape=shape):
                        base = self.binding.pointer(pointer.operand, self.tokens, self.rows)
                        args.append(TensorMap(base=base, shape=shape, strides=value.strides()))
                    case int():
                        args.append(Scalar(type="i32", value=value))
                    case float():
                        args.append(Scalar(type="f32", value=value))
            self.made.append(
                KernelNode(
                    kernel=self.kernels.number(each),
                    grid=each.grid,
                    args=[*args, _NULL, _NULL],
                    label=each.label,
                    after=[Edge(node=number) for number in after],
                )
            )
            after = [len(self.made) - 1]
        self.ends += after

    def copy(self, names: Sequence[str], *, inward: bool, share: tuple[int, int] = (1, 1)) -> None:
        """Adds one copy of arrays that lie side by side: from the host, or (not inward) to it; share: how much of each."""
        ends = []
        for prefix in ("host.", ""):
            first, last = (self.binding.placement.io[prefix + name] for name in (names[0], names[-1]))
            size = (last.offset + last.bytes - first.offset) * share[0] // share[1]
            ends.append(Pointer(segment=first.segment, offset=first.offset, bytes=size))
        source, target = ends if inward else reversed(ends)
        self.made.append(
            CopyNode(
                source=source,
                target=target,
                label=", ".join(names),
                after=[Edge(node=number) for number in self.before],
            )
        )
        self.ends.append(len(self.made) - 1)

    def finished(self) -> list[KernelNode | CopyNode | FillNode]:
        """Returns the nodes, with programmatic edges where there are to be some."""
        if not ABILITIES[self.kernels.architecture].programmatic:
            return self.made
        followers = Counter(edge.node for node in self.made for edge in node.after)
        found = list(self.made)
        for index, node in enumerate(self.made):
            match node:
                case KernelNode(after=[Edge(node=before)]) if (
                    isinstance(self.made[before], KernelNode) and followers[before] == 1
                ):
                    found[index] = structs.replace(node, after=[Edge(node=before, programmatic=True)])
        return found
