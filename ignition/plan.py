"""Planning: kernel calls become nodes with fixed phases and addresses.

Calls are put into phases: a call joins the current phase unless it depends on one of its members. A buffer lives from the
phase that writes it to the last phase that reads it; two buffers share arena memory only if their phases do not overlap,
since the calls of a phase run in any order. Placement is first fit in order of decreasing size, so equal inputs give
equal addresses. The logits live at the start of the `io` segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flare.core.graph import Argument, Graph, Node
from flare.core.manifest import Limits
from flare.errors import InputError
from ignition.lowered import Buffer, Lowered, Operand, PageRange, Weight

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the weights segment that hold one packed weight."""

    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A placed graph and the sizes of the segments it runs over, in bytes."""

    graph: Graph
    arena_bytes: int
    io_bytes: int
    kv_page_bytes: int


class Work(Protocol):
    """What one kernel call, or several that follow each other, read and write. Buffers are named "%id"; other names order calls
    too. in_place: (output, residual), ids of buffers that may be the same memory."""

    @property
    def reads(self) -> frozenset[str]: ...
    @property
    def writes(self) -> frozenset[str]: ...
    @property
    def in_place(self) -> tuple[int, int] | None: ...


class Space(Protocol):
    """A buffer to place. output: it lies in `io`, not in the arena."""

    @property
    def id(self) -> int: ...
    @property
    def output(self) -> bool: ...
    def bytes(self, limits: Limits) -> int: ...


def plan(lowered: Lowered, weights: Mapping[str, Span], limits: Limits, name: str = "step") -> Plan:
    """Places a lowered graph. `weights` says where each packed weight lies in the weights segment."""
    phases = assign_phases(lowered.calls)
    offsets, arena_bytes = place_buffers(lowered.calls, lowered.buffers, phases, limits)
    io_bytes = sum(buffer.bytes(limits) for buffer in lowered.buffers if buffer.output)

    def bind(operand: Operand) -> Argument:
        match operand:
            case None:
                return Argument(segment="none", offset=0, bytes=0)
            case Weight(name=weight):
                span = weights[weight]
                return Argument(segment="weights", offset=span.offset, bytes=span.bytes)
            case PageRange(offset=offset, bytes=size):
                return Argument(segment="kv", offset=offset, bytes=size)
            case Buffer(output=True):
                return Argument(segment="io", offset=0, bytes=operand.bytes(limits))
            case _:
                return Argument(segment="arena", offset=offsets[operand.id], bytes=operand.bytes(limits))

    nodes = [
        Node(kernel=call.kernel, phase=phase, label=call.label, args=[bind(o) for o in call.operands], op=call.op)
        for call, phase in zip(lowered.calls, phases, strict=True)
    ]
    return Plan(Graph(name=name, nodes=nodes), arena_bytes, io_bytes, lowered.kv_page_bytes)


def assign_phases(calls: Sequence[Work]) -> list[int]:
    """The phase of each call: as early as the calls' order and their dependencies allow without reordering."""
    phases: list[int] = []
    phase, written, read = 0, set[str](), set[str]()
    for call in calls:
        if (call.reads | call.writes) & written or call.writes & read:
            phase, written, read = phase + 1, set(), set()
        phases.append(phase)
        written |= call.writes
        read |= call.reads
    return phases


def place_buffers(
    calls: Sequence[Work], buffers: Sequence[Space], phases: list[int], limits: Limits
) -> tuple[dict[int, int], int]:
    """Returns each arena buffer's offset by id and the arena's size, both in bytes.

    Raises InputError when a graph has more than one output, since `io` holds one.
    """
    if sum(buffer.output for buffer in buffers) > 1:
        raise InputError("the step returns several tensors; there is room for one output, the logits")
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    names = {f"%{buffer.id}" for buffer in buffers}
    for call, phase in zip(calls, phases, strict=True):
        for name in (call.reads | call.writes) & names:
            number = int(name[1:])
            first.setdefault(number, phase)
            last[number] = phase
    home = _share_in_place(calls, buffers, phases, last)
    groups: dict[int, list[int]] = {}
    for buffer in buffers:
        if not buffer.output and buffer.id in first:
            groups.setdefault(home[buffer.id], []).append(buffer.id)
    sizes = {root: max(padded(buffers[i].bytes(limits)) for i in members) for root, members in groups.items()}
    lives = {root: (min(first[i] for i in m), max(last[i] for i in m)) for root, m in groups.items()}
    placed: list[tuple[int, int, int, int]] = []  # (offset, end, first phase, last phase)
    offsets: dict[int, int] = {}
    for root in sorted(groups, key=lambda r: (-sizes[r], r)):
        begin, end = lives[root]
        busy = sorted((lo, hi) for lo, hi, start, stop in placed if start <= end and begin <= stop)
        offset = 0
        for lo, hi in busy:
            if offset + sizes[root] <= lo:
                break
            offset = max(offset, hi)
        placed.append((offset, offset + sizes[root], begin, end))
        for member in groups[root]:
            offsets[member] = offset
    return offsets, max((end for _, end, _, _ in placed), default=0)


def _share_in_place(
    calls: Sequence[Work], buffers: Sequence[Space], phases: list[int], last: Mapping[int, int]
) -> dict[int, int]:
    """Maps each buffer to the one whose memory it uses: a residual sum overwrites its residual where that one ends."""
    home = {buffer.id: buffer.id for buffer in buffers}
    for index, (call, phase) in enumerate(zip(calls, phases, strict=True)):
        if call.in_place is None:
            continue
        out, residual = call.in_place
        if buffers[out].output or last[residual] != phase:
            continue
        others = (c for i, c in enumerate(calls) if i != index and phases[i] == phase)
        if not any(f"%{residual}" in other.reads for other in others):
            home[out] = home[residual]
    return home


def padded(size: int) -> int:
    """The bytes that a buffer of `size` bytes takes: a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
