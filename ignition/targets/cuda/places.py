"""Where a step has kernels of the cuda target, and where one node's launches do other nodes' work as well.

A kernel takes an op only in places that it was made for: rope and norms of heads between a projection and attention, attention
behind one store of its keys and values; and only of sizes that it was made for (sizes.py). All other nodes are apart: the
processor runs them. A state lies on one side, so all that use it go together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ignition.graph import Graph, Node, Value
from ignition.patterns import Patterns
from ignition.targets.cuda.sizes import Sizes

KERNELS = frozenset(
    ("embed", "rope_angles", "rms_norm", "linear", "rope", "kv_write", "attention", "silu_mul", "add", "take_rows")
)
"""The ops that have kernels."""

_ONE_ATTENTION = "has kernels on the cuda target only for a state that one store and one attention use"
_HEADS = (
    "has kernels on the cuda target only where each of queries, keys and values is of a linear layer, queries and keys behind "
    "the same norms and rope, and the device makes all of them before the store, to be used once"
)
_BETWEEN = "has a kernel on the cuda target only between a projection and attention that the device runs"
_NONE = "has no kernel on the cuda target"


@dataclass(slots=True)
class Places:
    """What becomes of a graph's nodes, by their id(). apart: those that no kernel computes, and why. absorbed: those whose work
    another node's launches perform, and which. queries: of a kv_write, the attention whose queries its launches make."""

    apart: dict[int, str] = field(default_factory=dict)
    absorbed: dict[int, Node] = field(default_factory=dict)
    queries: dict[int, Node] = field(default_factory=dict)


def find_places(patterns: Patterns, sizes: Sizes, kernels: Collection[str]) -> Places:
    """Returns what becomes of the nodes of `patterns`' graph, whose chains then take in none that is apart. `sizes` are its
    nodes', `kernels` the ops that have kernels."""
    apart: dict[int, str] = {}
    for node in patterns.graph.nodes:
        why = sizes.refusal(node) if node.op in kernels and node.op in KERNELS else _NONE
        if why is not None:
            apart[id(node)] = why
    while True:
        patterns.apart = apart.keys()
        round = _Round(patterns, sizes)
        if not round.more:
            return Places(apart, round.absorbed, round.queries)
        apart |= round.more


class _Round:
    """What follows from the nodes that are apart so far: what is absorbed, and `more` nodes that are apart."""

    def __init__(self, patterns: Patterns, sizes: Sizes) -> None:
        self.patterns = patterns
        self.graph: Graph = patterns.graph
        self.sizes = sizes
        self.absorbed: dict[int, Node] = {}
        self.queries: dict[int, Node] = {}
        self.more: dict[int, str] = {}
        for state in self.graph.of_kind("state"):
            self._state(state)
        for node in self._here():
            if node.op == "rope" and id(node) not in self.absorbed:
                self.more[id(node)] = _BETWEEN
            elif node.op == "rms_norm":
                self._norm(node)
            elif node.op == "silu_mul":
                self._absorb(node, *(gate_up(patterns, sizes, node) or ()))
            elif node.op == "add" and (linear := patterns.residual_linear(node)) is not None:
                self._absorb(node, linear)

    def _here(self) -> list[Node]:
        return [node for node in self.graph.nodes if id(node) not in self.patterns.apart]

    def _absorb(self, into: Node, *nodes: Node) -> None:
        self.absorbed.update((id(node), into) for node in nodes)

    def _state(self, state: Value) -> None:
        """Absorbs what makes a state's queries, keys and values, or sets all its users apart."""
        users = self.patterns.uses.get(state.id, [])
        missing = [node.op for node in users if id(node) in self.patterns.apart]
        if len(missing) == len(users):
            return
        stores, readers = ([node for node in users if node.op == op] for op in ("kv_write", "attention"))
        chains, why = None, _ONE_ATTENTION
        if missing:
            why = f"uses the same state as {missing[0]}, which {_NONE}"
        elif len(stores) == len(readers) == 1:
            why = self.sizes.heads_refusal(readers[0])
            if why is None:
                chains, why = head_chains(self.patterns, stores[0], readers[0]), _HEADS
        if chains is None:
            self.more.update((id(node), why) for node in users if id(node) not in self.patterns.apart)
            return
        self.queries[id(stores[0])] = readers[0]
        for chain in chains:
            self._absorb(stores[0], *chain)

    def _norm(self, node: Node) -> None:
        if len(self.graph.values[node.inputs[0]].shape) != 2:
            if id(node) not in self.absorbed:
                self.more[id(node)] = _BETWEEN
        elif (rows := self.patterns.row_selection(node)) is not None:
            self._absorb(node, rows)


def read_by_layers(patterns: Patterns, root: int) -> bool:
    """Whether linear layers that have kernels, and they alone, read a value, which is no output then."""
    uses = patterns.uses.get(root, [])
    layers = all(node.op == "linear" and id(node) not in patterns.apart for node in uses)
    return bool(uses) and layers and root not in patterns.output_roots


def head_chains(patterns: Patterns, write: Node, attention: Node) -> list[list[Node]] | None:
    """The chains of queries, keys and values, if one `heads` launch can make all of them."""
    found = [patterns.heads(value) for value in (attention.inputs[0], write.inputs[1], write.inputs[2])]
    chains = [chain for chain in found if chain is not None]
    if len(chains) < 3 or len(chains[2]) > 1:
        return None
    kinds = [[(node.op, node.attrs, node.inputs[1:] if node.op == "rope" else ()) for node in c[1:]] for c in chains]
    order = {id(node): place for place, node in enumerate(patterns.graph.nodes)}
    early = all(order[id(node)] < order[id(write)] for node in chains[0])
    return chains if kinds[0] == kinds[1] and early else None


def gate_up(patterns: Patterns, sizes: Sizes, node: Node) -> tuple[Node, Node] | None:
    """The two layers of a silu_mul, if one `gate_up` launch can do them and the product."""
    pair = patterns.gate_up(node)
    return pair if pair is not None and sizes.gate_up(*pair) else None
