"""The captured graph: what one step of a model is, as nodes of the closed op set over symbolic values.

A graph is plain data. `ignition.capture` makes it, `ignition.reference` runs it with the torch references, and the
targets lower it. A dimension is an integer or a symbol:

    T           live tokens of the step             R            rows whose logits are wanted
    slots       rows of the page table              slot_pages   pages a slot can own
    pages       pages of the KV pool                page_tokens  token positions in a page

A value's id is its index in `Graph.values`. Views are values with `alias_of` set: the same elements, in the same order,
under another shape. Ops that update in place (`kv_write`) have no output; the nodes' order carries the dependency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Dim = int | str
Kind = Literal["input", "weight", "state", "temp"]
DType = Literal["f32", "i32"]


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the graph. `name` is set for inputs, weights, state and outputs, and empty for other temporaries.

    An alias has its root's kind, and `alias_of` is the id of that root (never of another alias).
    """

    id: int
    shape: tuple[Dim, ...]
    dtype: DType
    kind: Kind
    name: str = ""
    alias_of: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One op call. `inputs` are value ids in the order of the op's schema (None for an optional tensor that is absent),
    `mutates` the ids among them that the op updates in place, `attrs` the scalar arguments by name in schema order."""

    op: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, int | float]
    mutates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """`inputs` are the ids of the step's inputs in their fixed order (used or not), `outputs` of what it returns."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def root(self, id: int) -> Value:
        """The value whose memory `id` lies in: itself, or what it is an alias of."""
        value = self.values[id]
        return value if value.alias_of is None else self.values[value.alias_of]

    def of_kind(self, kind: Kind) -> Iterator[Value]:
        """The root values of one kind, by id."""
        return (value for value in self.values if value.kind == kind and value.alias_of is None)

    def consumers(self, id: int) -> list[Node]:
        """The nodes that read the memory of `id`, under any alias, in order."""
        root = self.root(id).id
        return [node for node in self.nodes if any(i is not None and self.root(i).id == root for i in node.inputs)]

    def pruned(self) -> Graph:
        """The same without the values that nothing mentions, renumbered."""
        used = {*self.inputs, *self.outputs}
        for node in self.nodes:
            used.update(id for id in (*node.inputs, *node.outputs) if id is not None)
        used |= {self.root(id).id for id in used}
        number: dict[int | None, int | None] = {old: new for new, old in enumerate(sorted(used))} | {None: None}
        values = tuple(replace(v, id=number[v.id], alias_of=number[v.alias_of]) for v in self.values if v.id in used)
        nodes = tuple(
            replace(
                node,
                inputs=tuple(number[id] for id in node.inputs),
                outputs=tuple(number[id] for id in node.outputs),
                mutates=tuple(number[id] for id in node.mutates),
            )
            for node in self.nodes
        )
        return Graph(values, nodes, tuple(number[id] for id in self.inputs), tuple(number[id] for id in self.outputs))

    def __str__(self) -> str:
        lines = [f"input  {_typed(self.values[id])}" for id in self.inputs]
        lines += [f"state  {_typed(value)}" for value in self.of_kind("state")]
        for node in self.nodes:
            arguments = ["none" if id is None else self._operand(id) for id in node.inputs]
            arguments += [f"{name}={value!r}" for name, value in node.attrs.items()]
            call = f"{node.op}({', '.join(arguments)})"
            if not node.outputs:
                lines.append(call)
                continue
            results = ", ".join(_label(self.values[id]) for id in node.outputs)
            shapes = ", ".join(_type(self.values[id]) for id in node.outputs)
            lines.append(f"{results}: {shapes} = {call}")
        lines += [f"output {_typed(self.values[id])}" for id in self.outputs]
        return "\n".join(lines)

    def _operand(self, id: int) -> str:
        value = self.values[id]
        root = self.root(id)
        return _label(value) if root is value else f"{_label(root)}{_dims(value)}"


def _label(value: Value) -> str:
    return value.name if value.name and value.kind != "temp" else f"%{value.id}"


def _dims(value: Value) -> str:
    return f"[{', '.join(map(str, value.shape))}]"


def _type(value: Value) -> str:
    return f"{value.dtype}{_dims(value)}"


def _typed(value: Value) -> str:
    name = f"{value.name} = {_label(value)}" if value.kind == "temp" and value.name else _label(value)
    return f"{name}: {_type(value)}"
