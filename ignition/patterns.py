"""Patterns of ops in a captured graph that one kernel can compute in one pass over memory. All targets look for these."""

from __future__ import annotations

from collections.abc import Collection

from ignition.graph import Graph, Node, Value


class Patterns:
    """Who makes and who uses each value of a graph, and the chains of ops that a later op's kernel can take in."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers: dict[int, Node] = {}
        self.uses: dict[int, list[Node]] = {}
        for node in graph.nodes:
            for output in node.outputs:
                self.producers[graph.root(output).id] = node
            for root in {graph.root(i).id for i in node.inputs if i is not None}:
                self.uses.setdefault(root, []).append(node)
        self.output_roots = {graph.root(i).id for i in graph.outputs}
        self.apart: Collection[int] = frozenset()
        """id() of the nodes that no kernel computes: no chain takes them in."""

    def only_use(self, value: int | None, node: Node) -> Node | None:
        """The node that makes `value`, if a kernel does, `node` is its only consumer and it is not an output; else None."""
        root = self.graph.root(value).id
        if root in self.output_roots or self.uses.get(root, []) != [node]:
            return None
        made_by = self.producers.get(root)
        return None if made_by is None or id(made_by) in self.apart else made_by

    def heads(self, value: int | None) -> list[Node] | None:
        """[linear, head norm?, rope?] that make one projection's heads, each used once; None if they do not."""
        consumers = self.uses[self.graph.root(value).id]
        chain: list[Node] = []
        node = self.only_use(value, consumers[0]) if len(consumers) == 1 else None
        if node is not None and node.op == "rope":
            chain.insert(0, node)
            node = self.only_use(node.inputs[0], node)
        if node is not None and node.op == "rms_norm" and len(self.graph.values[node.inputs[0]].shape) == 3:
            chain.insert(0, node)
            node = self.only_use(node.inputs[0], node)
        if node is None or node.op != "linear":
            return None
        return [node, *chain]

    def gate_up(self, node: Node) -> tuple[Node, Node] | None:
        """The two linear layers of one input whose results a silu_mul alone uses."""
        gate, up = (self.only_use(value, node) for value in node.inputs)
        if gate is None or up is None or gate is up or {gate.op, up.op} != {"linear"}:
            return None
        return (gate, up) if self.graph.root(gate.inputs[0]) is self.graph.root(up.inputs[0]) else None

    def residual_linear(self, node: Node) -> Node | None:
        """The linear layer whose result an add alone uses, once."""
        if self.graph.root(node.inputs[0]) is self.graph.root(node.inputs[1]):
            return None
        for value in (node.inputs[1], node.inputs[0]):
            made_by = self.only_use(value, node)
            if made_by is not None and made_by.op == "linear":
                return made_by
        return None

    def row_selection(self, node: Node) -> Node | None:
        """The take_rows whose result a norm alone uses."""
        made_by = self.only_use(node.inputs[0], node)
        return made_by if made_by is not None and made_by.op == "take_rows" else None


def matrices_of(graph: Graph, node: Node) -> list[str]:
    """The weights that a node reads as matrices; the rest are f32 vectors."""
    index = {"embed": 0, "linear": 1}.get(node.op)
    if index is None:
        return []
    root = graph.root(node.inputs[index])
    return [root.name] if root.kind == "weight" else []


def matrix_names(graph: Graph, kernels: Collection[str] | None = None) -> dict[str, Value]:
    """The weights that kernels read as matrices, by name, in the graph's order; all others are stored as plain f32. `kernels`
    are the ops that have kernels, None for all."""
    plain: set[str] = set()
    if kernels is not None:
        plain = {name for node in graph.nodes if node.op not in kernels for name in matrices_of(graph, node)}
    values = {value.name: value for value in graph.of_kind("weight")}
    names = dict.fromkeys(name for node in graph.nodes for name in matrices_of(graph, node))
    return {name: values[name] for name in names if name not in plain}
