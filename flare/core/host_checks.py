"""Whether the host's part of a cuda step and the device's pieces fit together, found without a device.

What goes between them is copied by the numbers of both files: how many values, of how many bytes, in which order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NoReturn

from flare.core.cuda_graph import Bucket, CudaGraphs, HostCut, HostRows, Pointer
from flare.core.graph import DEVICE, MAX_DIMENSIONS, Argument, Graph, Node, Tensor, check_phases, elements
from flare.core.manifest import Limits, Manifest
from flare.errors import CoreError


def cut_begins(bucket: Bucket) -> list[int]:
    """For each node of a bucket, the first one of its piece."""
    edges = [0, *(cut.at for cut in bucket.host), len(bucket.nodes)]
    return [begin for begin, end in pairwise(edges) for _ in range(begin, end)]


def check_cuts(
    buckets: Sequence[Bucket], host: bool, logits: Pointer, outside: Callable[[Pointer], str | None], where: str
) -> None:
    """Checks the cuts of a step's buckets: there are some where the target has a `host` part, they ascend, are the same in
    every bucket, and what goes through them is in the arena or the `logits`, what goes together apart from each other.

    `outside` says what is wrong with where a pointer leads. Raises CoreError naming bucket, cut, value and what it may be.
    """
    for index, bucket in enumerate(buckets):
        at = f"{where}: step[{index}]"
        if bool(bucket.host) != host:
            has, wanted = ("a", "cuts") if host else ("no", "none")
            _refuse(
                at, f"it has {len(bucket.host)} cuts for the host, wanted {wanted}: the manifest has {has} host part"
            )
        ends = [cut.at for cut in bucket.host]
        if ends != sorted(set(ends)) or (ends and not 1 <= ends[0] <= ends[-1] <= len(bucket.nodes)):
            _refuse(at, f"its cuts are at {ends[:20]}, wanted ascending ones from 1 to {len(bucket.nodes)}")
        for number, cut in enumerate(bucket.host):
            for name, values in (("gives", cut.gives), ("takes", cut.takes)):
                for place, rows in enumerate(values):
                    problem = _wrong_rows(rows, bucket, logits) or outside(rows.buffer)
                    if problem is not None:
                        _refuse(f"{at} cut {number}", f"{name}[{place}]: {problem}")
                if (problem := _overlap([rows.buffer for rows in values])) is not None:
                    _refuse(f"{at} cut {number}", f"{name}: {problem}")
        if (problem := _other_cuts(bucket.host, buckets[0].host)) is not None:
            _refuse(at, problem)


def _overlap(buffers: Sequence[Pointer]) -> str | None:
    """Says which of the values that cross together share memory; None where none do."""
    ordered = sorted(buffers, key=lambda buffer: (buffer.segment, buffer.offset))
    for low, high in pairwise(ordered):
        if low.segment == high.segment and high.offset < low.offset + low.bytes:
            both = f"bytes {low.offset}..{low.offset + low.bytes} and {high.offset}..{high.offset + high.bytes}"
            return f"{both} of {low.segment} overlap, wanted each value in memory of its own"
    return None


def _other_cuts(cuts: Sequence[HostCut], first: Sequence[HostCut]) -> str | None:
    """Says how a bucket's cuts differ from those of the first bucket, but for their places; None where they do not."""
    if len(cuts) != len(first):
        return f"it has {len(cuts)} cuts, step[0] has {len(first)}"
    for number, (cut, other) in enumerate(zip(cuts, first, strict=True)):
        for name, values, wanted in (("gives", cut.gives, other.gives), ("takes", cut.takes, other.takes)):
            if len(values) != len(wanted):
                return f"cut {number} {name} {len(values)} values, that of step[0] {len(wanted)}"
            for place, (ours, theirs) in enumerate(zip(map(_value, values), map(_value, wanted), strict=True)):
                if ours != theirs:
                    return f"cut {number} {name}[{place}] is {ours}, that of step[0] {theirs}"
    return None


def _value(rows: HostRows) -> str:
    """What is the same of a value in every bucket."""
    return f"{rows.row_bytes} bytes for each of {rows.count} at byte {rows.buffer.offset} of {rows.buffer.segment}"


def _wrong_rows(rows: HostRows, bucket: Bucket, logits: Pointer) -> str | None:
    buffer, unit = rows.buffer, bucket.tokens if rows.count == "T" else bucket.rows
    if rows.row_bytes < 4 or rows.row_bytes % 4:
        return f"rows of {rows.row_bytes} bytes, wanted a multiple of 4"
    if buffer.bytes != rows.row_bytes * unit:
        return f"a buffer of {buffer.bytes} bytes, wanted {unit} rows of {rows.row_bytes}"
    is_logits = (buffer.segment, buffer.offset) == ("io", logits.offset) and buffer.bytes <= logits.bytes
    if buffer.segment != "arena" and not is_logits:
        return f"byte {buffer.offset} of segment {buffer.segment}, wanted the arena or the logits"
    return None


def check_host_graph(graph: Graph, graphs: CudaGraphs, manifest: Manifest, where: str) -> None:
    """Checks the host part's graph against the cuts of the checked graphs of the file `where`: a node for each piece, in order,
    each in a later phase, whose tensors are what the cuts take and give. No node of its phase uses what it gives. Phases are
    those of `check_phases`.

    Raises CoreError naming the host part's file, the node, the value and what it may be.
    """
    target = manifest.cuda
    assert target is not None and target.host is not None
    file, cuts = target.host.program.graphs["step"], graphs.step[0].host
    nodes = [(index, node) for index, node in enumerate(graph.nodes) if node.kernel == DEVICE]
    if len(nodes) != len(cuts) + 1:
        _refuse(file, f"it has {len(nodes)} pieces for a device, {where} has {len(cuts) + 1}")
    phase = -1
    for piece, (index, node) in enumerate(nodes):
        takes = cuts[piece - 1].takes if piece else []
        gives = cuts[piece].gives if piece < len(cuts) else []
        problem = _wrong_piece(node, piece, takes, gives, manifest.limits)
        if problem is not None:
            _refuse(f"{file}: node {index} ({node.label[:60]!r})", f"{problem}, by {where}")
        if node.phase <= phase:
            wanted = f"wanted one behind {phase}, that of the piece before"
            _refuse(f"{file}: node {index} ({node.label[:60]!r})", f"it is in phase {node.phase}, {wanted}")
        phase = node.phase
    _check_beside(graph, {node.phase: _results(node) for _, node in nodes}, file)
    check_phases(graph, file)


_Results = tuple[list[int], list[int]]
"""Bytes of the arena: where each of some ranges begins, ascending, and the end of the longest up to it."""


def _results(node: Node) -> _Results:
    """The bytes of what a piece gives."""
    inputs = 0 if node.op is None else len(node.op.inputs)
    given = sorted((arg.offset, arg.offset + arg.bytes) for arg in node.args[inputs:])
    return [begin for begin, _ in given], list(accumulate((end for _, end in given), max))


def _check_beside(graph: Graph, results: Mapping[int, _Results], file: str) -> None:
    """Checks that nodes in the phase of a piece, which may run at the same time, do not use what it gives."""
    for index, node in enumerate(graph.nodes):
        if node.kernel == DEVICE or node.phase not in results:
            continue
        begins, ends = results[node.phase]
        for number, arg in enumerate(node.args):
            before = bisect_left(begins, arg.offset + arg.bytes)
            if arg.segment == "arena" and before and ends[before - 1] > arg.offset:
                what = (
                    f"argument {number}: bytes {arg.offset}..{arg.offset + arg.bytes} of arena, which the piece gives"
                )
                _refuse(f"{file}: node {index} ({node.label[:60]!r})", f"{what} in the same phase, {node.phase}")


def _wrong_piece(
    node: Node, piece: int, takes: Sequence[HostRows], gives: Sequence[HostRows], limits: Limits
) -> str | None:
    op = node.op
    if op is None or op.attrs != {"piece": piece}:
        return f"it is piece {str(op and op.attrs)[:80]}, wanted {piece}"
    if len(op.inputs) != len(takes) or len(op.outputs) != len(gives):
        found = f"{len(op.inputs)} inputs and {len(op.outputs)} outputs"
        return f"it has {found}, wanted {len(takes)} and {len(gives)}"
    if len(node.args) != len(takes) + len(gives):
        return f"it has {len(node.args)} arguments, wanted {len(takes) + len(gives)}"
    pairs = zip([*op.inputs, *op.outputs], [*takes, *gives], node.args, strict=True)
    for number, (tensor, rows, arg) in enumerate(pairs):
        if (problem := _wrong_tensor(tensor, rows, arg, limits)) is not None:
            return f"argument {number}: {problem}"
    return None


def _wrong_tensor(tensor: Tensor | None, rows: HostRows, arg: Argument, limits: Limits) -> str | None:
    shape = [] if tensor is None or tensor.input else tensor.shape
    if len(shape) > MAX_DIMENSIONS:
        return f"a tensor of {len(shape)} dimensions, wanted at most {MAX_DIMENSIONS}"
    count, *widths = shape or [None]
    numbers = [width for width in widths if isinstance(width, int)]
    same = len(numbers) == len(widths) and 4 * elements(numbers, rows.row_bytes // 4) == rows.row_bytes
    if count != rows.count or not same:
        return f"a tensor of {str(shape)[:80]}, wanted {rows.row_bytes} bytes for each of {rows.count}"
    needed = rows.row_bytes * (limits.max_step_tokens if rows.count == "T" else limits.max_rows)
    if arg.segment != "arena" or arg.bytes < needed:
        return f"{arg.bytes} bytes of segment {arg.segment}, wanted {needed} of arena"
    return None


def _refuse(where: str, what: str) -> NoReturn:
    raise CoreError(f"{where}: {what}; export the core again")
