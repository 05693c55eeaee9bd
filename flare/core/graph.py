"""A lowered graph: the kernel nodes that one replay runs, in phases, over memory segments.

A node names a kernel of the core's libraries and binds its arguments to (segment, offset, bytes). Nodes of one phase are
independent of each other; a barrier stands between phases. Offsets into `kv` count inside one page, so that the number of
pages can be chosen when the core is loaded. Graph files are MessagePack.
"""

from __future__ import annotations

from typing import Literal

import msgpack
import msgspec

from flare.core.manifest import Segments, Struct
from flare.errors import CoreError

Segment = Literal["weights", "arena", "io", "kv", "none"]
ALIGNMENT = 64


class Argument(Struct):
    """Memory bound to one kernel argument. Segment "none" is an absent optional argument (offset and bytes 0)."""

    segment: Segment
    offset: int
    bytes: int


class Node(Struct):
    """One kernel call. `label` says what it computes, in the recipe's names, for people and error texts."""

    kernel: str
    phase: int
    label: str
    args: list[Argument]


class Graph(Struct):
    """Nodes in launch order; `phase` never decreases."""

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


def check_graph(graph: Graph, segments: Segments, kernels: set[str], name: str) -> None:
    """Checks every node against the segments' sizes and the libraries' kernels. Raises CoreError naming the node."""
    sizes = {
        "weights": segments.weights_bytes,
        "arena": segments.arena_bytes,
        "io": segments.io_bytes,
        "kv": segments.kv_page_bytes,
        "none": 0,
    }
    phase = 0
    for index, node in enumerate(graph.nodes):
        where = f"{name}: node {index} ({node.label[:60]!r})"
        if node.kernel not in kernels:
            raise CoreError(f"{where} names kernel {node.kernel[:80]!r}, which the core's libraries lack; export again")
        if node.phase not in (phase, phase + 1):
            raise CoreError(f"{where} has phase {node.phase} after phase {phase}; export the core again")
        phase = node.phase
        for number, arg in enumerate(node.args):
            inside = 0 <= arg.offset and 0 <= arg.bytes and arg.offset + arg.bytes <= sizes[arg.segment]
            if not inside or arg.offset % ALIGNMENT:
                raise CoreError(
                    f"{where} argument {number}: bytes {arg.offset}..{arg.offset + arg.bytes} of segment {arg.segment}, "
                    f"which has {sizes[arg.segment]} (offsets are multiples of {ALIGNMENT}); export the core again"
                )
