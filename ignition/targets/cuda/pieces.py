"""A step cut up: pieces that the device runs, and the host's nodes between them, in the order of the graph.

The host's nodes become a graph of their own, in which each piece is a node of the op DEVICE: its inputs are what the host made
and the piece needs first, its outputs what the piece makes and any node of the host reads. The cpu target lowers that graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flare.core.graph import DEVICE
from ignition.graph import Graph, Node
from ignition.targets.cuda.places import Places


@dataclass(frozen=True, slots=True)
class Piece:
    """What goes between the host and a piece: root values that it takes before, and those that it gives behind."""

    takes: tuple[int, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cuts:
    """A graph's pieces, one more than there are cuts; host: the host's nodes in each cut; piece: of the device's nodes that
    launch something, by id()."""

    pieces: tuple[Piece, ...]
    host: tuple[tuple[Node, ...], ...]
    piece: dict[int, int]


def cut(graph: Graph, places: Places) -> Cuts:
    """Cuts a graph where nodes are apart. Nodes that are so and follow each other are one cut."""
    piece: dict[int, int] = {}
    host: list[list[Node]] = []
    open_cut = False
    for node in graph.nodes:
        if id(node) in places.apart:
            if not open_cut:
                host.append([])
            host[-1].append(node)
        elif id(node) in places.absorbed:
            continue
        else:
            piece[id(node)] = len(host)
        open_cut = id(node) in places.apart
    makers = {graph.root(value).id: node for node in graph.nodes for value in node.outputs}
    first: dict[int, int] = {}  # of each value of the host's, the piece that needs it first
    given: dict[int, None] = {}
    for node in graph.nodes:
        for root in _temporaries(graph, node.inputs):
            made_apart = id(makers[root]) in places.apart
            if id(node) in places.apart:
                if not made_apart:
                    given[root] = None
            elif made_apart:
                # an absorbed node may stand before others and yet run behind them, with the node that absorbs it
                number = piece[id(places.absorbed.get(id(node), node))]
                first[root] = min(first.get(root, number), number)
    for root in _temporaries(graph, graph.outputs):
        if id(makers[root]) in places.apart:
            first.setdefault(root, len(host))
    made: dict[int, int] = {root: piece[id(makers[root])] for root in given}
    pieces = [
        Piece(
            tuple(root for root, number in first.items() if number == index),
            tuple(root for root, number in made.items() if number == index),
        )
        for index in range(len(host) + 1)
    ]
    return Cuts(tuple(pieces), tuple(map(tuple, host)), piece)


def host_graph(graph: Graph, cuts: Cuts) -> Graph:
    """The host's graph: its nodes, and between them one for each piece."""
    nodes: list[Node] = []
    for number, (piece, behind) in enumerate(zip(cuts.pieces, (*cuts.host, ()), strict=True)):
        nodes.append(Node(DEVICE, piece.takes, piece.gives, {"piece": number}))
        nodes += behind
    return Graph(graph.values, tuple(nodes), graph.inputs, ()).pruned()


def ops(cuts: Cuts) -> dict[str, int]:
    """How many nodes the host runs, by op."""
    return dict(Counter(node.op for behind in cuts.host for node in behind))


def reasons(graph: Graph, cuts: Cuts, places: Places) -> list[str]:
    """A line for each op that the host runs, and each cause of that: how many nodes, and where the first of them is."""
    found: dict[tuple[str, str], list[Node]] = {}
    for behind in cuts.host:
        for node in behind:
            found.setdefault((node.op, places.apart[id(node)]), []).append(node)
    lines = []
    for (op, why), nodes in found.items():
        counted = "1 node," if len(nodes) == 1 else f"{len(nodes)} nodes, the first"
        lines.append(f"op {op} ({counted} {_place(graph, nodes[0])}) {why}")
    return lines


def _place(graph: Graph, node: Node) -> str:
    """Where a node is, for people: by its weight or state, or else by the weights before it."""
    named = _names(graph, node)
    if named:
        return f"at {named[0]}"
    before = graph.nodes[: next(i for i, other in enumerate(graph.nodes) if other is node)]
    behind = next((names[0] for other in reversed(before) if (names := _names(graph, other))), None)
    return "at the start of the step" if behind is None else f"behind {behind}"


def _names(graph: Graph, node: Node) -> Sequence[str]:
    roots = [graph.root(value) for value in node.inputs if value is not None]
    return [root.name for root in roots if root.kind in ("weight", "state")]


def _temporaries(graph: Graph, values: Iterable[int | None]) -> list[int]:
    """The root values among these that nodes make."""
    roots = [graph.root(value) for value in values if value is not None]
    return [root.id for root in roots if root.kind == "temp"]
