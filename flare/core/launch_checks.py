"""Whether the launches of a kind of graph go together, found without a device.

What a kernel does with its arguments is not known. But each leads somewhere, parameters have names, and the buckets of a kind
are one model at several sizes: an argument that does not fit the others is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from flare.core.cuda_graph import Bucket, CudaGraphs, FillNode, KernelNode, Pointer, Scalar
from flare.core.manifest import Limits
from flare.errors import CoreError

KERNEL_ARRAYS: Mapping[str, frozenset[str]] = {
    "step": frozenset({"tokens", "positions", "slots", "rows", "page_table", "logits"}),
    "sample": frozenset({"logits", "params", "history", "masks", "explicit_ids", "sampled", "logprobs"}),
    "score": frozenset({"logits", "first", "targets", "wanted", "sampled", "logprobs"}),
}
"""The arrays of `io` that kernels of each kind of graph are given."""

_RESULTS: Mapping[str, Sequence[str]] = {
    "step": ["logits"],
    "sample": ["sampled", "logprobs"],
    "score": ["logprobs"],
}
_COUNT: Mapping[str, str] = {"step": "tokens", "sample": "rows", "score": "rows"}
"""The name of numbers (i32) that say how many tokens or rows a launch is for."""

_Place = tuple[str, str, int, int, tuple[int, ...], tuple[int, ...]]
"""A place in the weights or in pages: the parameter's name, segment, offset, bytes, and a map's shape and strides."""

_Places = dict[_Place, int]
"""In the order of their first use, with the node that uses them first."""


def check_launches(kind: str, buckets: Sequence[Bucket], graphs: CudaGraphs, limits: Limits, where: str) -> None:
    """Checks the buckets of a kind of graph, "step", "sample" or "score", each node of which is good by itself.

    Raises CoreError naming bucket, node, value and what it may be.
    """
    check, first = _Launches(kind, graphs, limits), None
    for index, bucket in enumerate(buckets):
        at = f"{where}: {kind}[{index}]"
        places = check.bucket(bucket, at)
        if first is None:
            first = places
        elif list(places) != list(first):
            _refuse_places(bucket, places, first, f"{where}: {kind}", index)
        check.end(bucket, at)


def _refuse(where: str, what: str) -> NoReturn:
    raise CoreError(f"{where}: {what}; export the core again")


def _refuse_node(bucket: Bucket, index: int, where: str, what: str) -> NoReturn:
    _refuse(f"{where} node {index} ({bucket.nodes[index].label[:60]!r})", what)


def _refuse_places(bucket: Bucket, places: _Places, first: _Places, where: str, index: int) -> NoReturn:
    """Refuses a bucket that uses other weights or pages than the first one, or in another order."""
    for ours, theirs in zip(places, first, strict=False):
        if ours != theirs:
            found, wanted = (_told(place, as_tensor=ours[1:4] == theirs[1:4]) for place in (ours, theirs))
            what = f"it is the first to use {found}, where {where}[0] uses {wanted}"
            _refuse_node(bucket, places[ours], f"{where}[{index}]", what)
    counts = f"{len(places)} places of weights and pages, {where}[0] uses {len(first)}"
    _refuse(f"{where}[{index}]", f"it uses {counts}")


def _told(place: _Place, *, as_tensor: bool) -> str:
    """A place in words, with its shape and strides where they may be what sets it apart."""
    name, segment, offset, size, shape, strides = place
    told = f"{name[:40]}, bytes {offset}..{offset + size} of {segment}"
    if not as_tensor:
        return told
    return f"{told} as {list(shape)} elements in strides of {list(strides)}" if shape else f"{told} as a pointer"


@dataclass(frozen=True, slots=True)
class _Launch:
    """One launch of a bucket of `size` tokens, or rows of a draw. same: of each argument what is the same in every bucket, an
    offset into the arena or a number (f32); None of others."""

    size: int
    blocks: int
    same: list[float | None]

    def other_than(self, before: _Launch, names: Sequence[str]) -> str | None:
        """How it is not the same launch in a larger bucket, None where it is. names: of the kernel's parameters. Blocks share
        the rows, so twice as many rows have twice as many blocks at most; fewer where each does more."""
        most = before.blocks * -(-self.size // before.size)
        if self.blocks > most:
            wanted = f"wanted 1 to {most} by the {before.blocks} of the bucket of {before.size}"
            return f"its grid has {self.blocks} blocks, {wanted}"
        if self.same != before.same:
            pairs = zip(self.same, before.same, strict=True)
            number, (ours, theirs) = next(each for each in enumerate(pairs) if each[1][0] != each[1][1])
            found, wanted = ("no place in the arena" if value is None else value for value in (ours, theirs))
            said = f"argument {number} ({names[number][:40]}): {found}"
            return f"{said}, wanted {wanted}, as in the bucket of {before.size}"
        return None


class _Uses:
    """What the launches of a bucket use, and what they may be given: `counts`, and the bytes of its `logits`. named: offsets in
    the arena with the node that names each first; shared: those that others name too, or that are `crossing` a cut."""

    def __init__(self, counts: Sequence[int], logits: int, crossing: Sequence[Pointer]) -> None:
        self.counts = counts
        self.logits = logits
        self.named: dict[int, int] = {}
        self.shared = {buffer.offset for buffer in crossing if buffer.segment == "arena"}
        self.reached = {"logits"} if any(buffer.segment == "io" for buffer in crossing) else set[str]()
        self.counted: set[int] = set()
        self.places: _Places = {}


class _Wrong(Exception):
    """What is wrong with a launch."""


class _Launches:
    """The check of one kind of graph."""

    def __init__(self, kind: str, graphs: CudaGraphs, limits: Limits) -> None:
        self.kind = kind
        self.io = graphs.io
        self.max_rows = limits.max_rows
        self.names = [list(kernel.signature) for kernel in graphs.kernels]
        self.arrays = KERNEL_ARRAYS[kind]
        self.at = {pointer.offset: name for name, pointer in graphs.io.items() if pointer.segment == "io"}
        self.launches: dict[tuple[int, str, int], _Launch] = {}

    def bucket(self, bucket: Bucket, where: str) -> _Places:
        """Checks a bucket's launches, alone and with each other. Returns the places in weights and pages that they use."""
        counts = self._counts(bucket)
        logits = self.io["logits"].bytes // self.max_rows * (bucket.rows if self.kind == "step" else self.max_rows)
        uses = _Uses(counts, logits, [rows.buffer for cut in bucket.host for rows in (*cut.gives, *cut.takes)])
        launched: dict[tuple[int, str], int] = {}
        for index, node in enumerate(bucket.nodes):
            if isinstance(node, FillNode) and node.target.segment == "arena":
                uses.named.setdefault(node.target.offset, index)
            if not isinstance(node, KernelNode):
                continue
            try:
                size, same = self._arguments(node, index, uses)
            except _Wrong as problem:
                _refuse_node(bucket, index, where, str(problem))
            blocks = math.prod(node.grid)
            if blocks > size:
                what = f"its grid has {blocks} blocks, more than its arguments have bytes, {size}"
                _refuse_node(bucket, index, where, what)
            again = launched[node.kernel, node.label] = launched.get((node.kernel, node.label), 0) + 1
            launch = _Launch(bucket.tokens or bucket.rows, blocks, same)
            before = self.launches.get((node.kernel, node.label, again), launch)
            if (what := launch.other_than(before, self.names[node.kernel])) is not None:
                _refuse_node(bucket, index, where, what)
            self.launches[node.kernel, node.label, again] = launch
        for offset in uses.named.keys() - uses.shared:
            what = f"it alone names byte {offset} of the arena, where others would read or write what it uses"
            _refuse_node(bucket, uses.named[offset], where, what)
        for name in _RESULTS[self.kind]:
            if name not in uses.reached:
                _refuse(where, f"no kernel of it is given {name}")
        if uses.counted and not bucket.host and counts[0] not in uses.counted:
            found, unit = min(uses.counted), _COUNT[self.kind]
            _refuse(where, f"its launches are for {found} {unit}, wanted {counts[0]} in one of them")
        return uses.places

    def _arguments(self, node: KernelNode, index: int, uses: _Uses) -> tuple[int, list[float | None]]:
        """Checks a launch's arguments, and adds what they use to the bucket's. Returns their bytes, and of each what is the
        same in every bucket. Raises _Wrong."""
        arrays, size, same = self.arrays, 0, list[float | None]()
        for number, (name, arg) in enumerate(zip(self.names[node.kernel], node.args, strict=False)):
            if isinstance(arg, Scalar):
                same.append(arg.value if arg.type == "f32" else None)
                if name == _COUNT[self.kind] and arg.type == "i32":
                    if arg.value not in uses.counts:
                        wanted = " or ".join(map(str, uses.counts))
                        raise _Wrong(f"argument {number} ({name}): {arg.value}, wanted {wanted} by the bucket's sizes")
                    uses.counted.add(int(arg.value))
                continue
            pointer, tensor = (arg, ((), ())) if isinstance(arg, Pointer) else (arg.base, (arg.shape, arg.strides))
            segment, offset = pointer.segment, pointer.offset
            size += pointer.bytes
            same.append(offset if segment == "arena" else None)
            if segment == "io" or name in arrays:
                if (problem := self._wrong_array(name, pointer, uses.logits)) is not None:
                    raise _Wrong(f"argument {number} ({name[:40]}): {problem}")
                uses.reached.add(self.at[offset])
            elif segment == "arena":
                if uses.named.setdefault(offset, index) != index:
                    uses.shared.add(offset)
            elif self.kind != "step":
                what = f"a place in segment {segment}, which steps alone use"
                raise _Wrong(f"argument {number} ({name[:40]}): {what}")
            else:
                uses.places.setdefault((name, segment, offset, pointer.bytes, *tensor), index)
        return size, same

    def end(self, bucket: Bucket, where: str) -> None:
        """Checks that the last node of a step or score, or of its last piece, comes behind all others: what no node waits for
        is used by none. Those of a draw wait for each other up to its copies."""
        last = len(bucket.nodes) - 1
        begin = bucket.host[-1].at if bucket.host else 0
        waited = {edge.node for node in bucket.nodes for edge in node.after}
        for index in range(begin, last if self.kind != "sample" else 0):
            if index not in waited:
                _refuse_node(bucket, index, where, f"no node waits for it, and node {last} ends the graph")

    def _counts(self, bucket: Bucket) -> list[int]:
        """What the numbers of a launch may be, the one first that some launch must have."""
        if self.kind == "step":
            return [bucket.tokens, *([bucket.rows] if bucket.rows != bucket.tokens else [])]
        return [bucket.rows if self.kind == "sample" else self.max_rows]

    def _wrong_array(self, name: str, pointer: Pointer, logits: int) -> str | None:
        """What is wrong with an argument that is an array of `io`, or should be one by its name; None where nothing is."""
        array = self.at.get(pointer.offset) if pointer.segment == "io" else None
        if array is None:
            wanted = name if name in self.arrays else "one of " + ", ".join(sorted(self.arrays))
            return f"byte {pointer.offset} of segment {pointer.segment}, wanted the place of {wanted}"
        if array not in self.arrays:
            return f"the place of {array}, wanted one of {', '.join(sorted(self.arrays))}"
        if name in self.arrays and name != array:
            return f"the place of {array}, wanted that of {name}"
        size = logits if array == "logits" else self.io[array].bytes
        return None if pointer.bytes == size else f"{pointer.bytes} bytes of {array}, wanted {size}"
