"""A lowered graph of the cpu target: the kernel nodes that one replay runs, in phases, over memory segments.

A node names a kernel of the core's libraries and binds its arguments to (segment, offset, bytes). Nodes of one phase are
independent of each other; a barrier stands between phases. Offsets into `kv` count inside one page, so that the number of
pages can be chosen when the core is loaded. Graph files are MessagePack.

A node whose op has no kernel on the target says which op it is, and is interpreted. The host part of a cuda target is such a
graph too, in which each piece of the step that the device runs is a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgpack
import msgspec

from flare.core.manifest import CpuSegments, Struct
from flare.errors import CoreError

Segment = Literal["weights", "arena", "io", "kv", "none"]
ALIGNMENT = 64
INTERPRETED = "interpret"
DEVICE = "device"
CALLED = (INTERPRETED, DEVICE)
"""Kernels of nodes that the library calls back for, which have an op: INTERPRETED one of the set, DEVICE one of this name, with
the number of its `piece`."""

MAX_DIMENSIONS = 8
"""Of an op's tensor. Those of the set have at most 5."""


class Argument(Struct):
    """Memory bound to one kernel argument. Segment "none" is an absent optional argument (offset and bytes 0)."""

    segment: Segment
    offset: int
    bytes: int


class Tensor(Struct, omit_defaults=True):
    """A tensor of an op: the node's next argument in this shape, where T and R stand for the step's tokens and rows; or, where
    `input` is set, that array of the step, which is no argument. A state, [pages, 2, KV heads, page_tokens, head size], is two
    arguments, its keys and its values in each page. All but the step's arrays are f32; in pages they are of the kv format."""

    shape: list[int | str]
    input: Literal["", "tokens", "positions", "slots", "page_table", "rows"] = ""


def elements(sizes: Sequence[int], most: int) -> int:
    """How many elements a tensor of these sizes has; 0 if that is more than `most`, or a size is less than 1. No product on the
    way is larger, whatever the sizes are."""
    count = 1
    for size in sizes:
        if not 1 <= size <= most // count:
            return 0
        count *= size
    return count if count <= most else 0


class Op(Struct):
    """An op of the set: its name, its scalar arguments by name, and its tensors in the order of its schema. None is an optional
    tensor that is absent; its argument is in segment "none"."""

    name: str
    attrs: dict[str, int | float]
    inputs: list[Tensor | None]
    outputs: list[Tensor]


def without_kernel(op: str, count: int, target: str) -> str:
    """How it is told that no kernel of a target runs so many nodes of an op."""
    return f"op {op} ({count} node{'s' * (count > 1)}) is not run by a kernel of the {target} target"


class Node(Struct, omit_defaults=True):
    """One kernel call. `label` says what it computes, in the recipe's names, for people and error texts. That of an `op` has a
    kernel of CALLED."""

    kernel: str
    phase: int
    label: str
    args: list[Argument]
    op: Op | None = None


class Graph(Struct):
    """Nodes in launch order. The first is in phase 0, each other one in the phase of the node before or in the next."""

    name: str
    nodes: list[Node]

    def encode(self) -> bytes:
        """Returns the graph file's bytes."""
        return msgpack.packb(msgspec.to_builtins(self), use_bin_type=True)


def decode_graph(data: bytes, name: str) -> Graph:
    """Decodes a graph file. Raises CoreError naming the field when it is malformed."""
    try:
        return msgspec.msgpack.decode(data, type=Graph)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CoreError(f"{name}: {str(error).splitlines()[0][:200]}; export the core again") from None


class Named(Protocol):
    """A node as far as its kernel's name and its op tell what it is."""

    @property
    def kernel(self) -> str: ...
    @property
    def op(self) -> Op | None: ...


def misnamed(node: Named) -> str | None:
    """Says which kernel and op a node has that do not go together; None where they do."""
    device = node.op is not None and node.op.name == DEVICE
    if (node.kernel in CALLED) == (node.op is not None) and (node.kernel == DEVICE) == device:
        return None
    return f"kernel {node.kernel[:80]!r} and {'no op' if node.op is None else f'op {node.op.name[:40]!r}'}"


def check_phases(graph: Graph, name: str) -> None:
    """Checks that phases begin with 0, never decrease, and each have nodes. Raises CoreError naming the first node that is in
    another."""
    low = high = 0
    for index, node in enumerate(graph.nodes):
        if not low <= node.phase <= high:
            wanted = f"{low} or {high}, by the node before" if index else "0, as the first node"
            where = f"{name}: node {index} ({node.label[:60]!r})"
            raise CoreError(f"{where}: it is in phase {node.phase}, wanted {wanted}; export the core again")
        low, high = node.phase, node.phase + 1


def check_graph(graph: Graph, segments: CpuSegments, kernels: set[str], name: str) -> None:
    """Checks every node's phase, and the node against the segments' sizes and the libraries' kernels. Raises CoreError naming
    the node."""
    sizes = {
        "weights": segments.weights_bytes,
        "arena": segments.arena_bytes,
        "io": segments.io_bytes,
        "kv": segments.kv_page_bytes,
        "none": 0,
    }
    check_phases(graph, name)
    for index, node in enumerate(graph.nodes):
        where = f"{name}: node {index} ({node.label[:60]!r})"
        if (problem := misnamed(node)) is not None:
            raise CoreError(f"{where} names {problem}; export the core again")
        if node.op is None and node.kernel not in kernels:
            raise CoreError(f"{where} names kernel {node.kernel[:80]!r}, which the core's libraries lack; export again")
        for number, arg in enumerate(node.args):
            inside = 0 <= arg.offset and 0 <= arg.bytes and arg.offset + arg.bytes <= sizes[arg.segment]
            if not inside or arg.offset % ALIGNMENT:
                raise CoreError(
                    f"{where} argument {number}: bytes {arg.offset}..{arg.offset + arg.bytes} of segment {arg.segment}, "
                    f"which has {sizes[arg.segment]} (offsets are multiples of {ALIGNMENT}); export the core again"
                )
