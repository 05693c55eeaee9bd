"""Which nodes of a step are of sizes that their kernels take, by the limits that stand beside the kernels.

The processor's part of a core is one for all of its architectures, and so are joined weights. So what one of them does not
take, none does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ignition.graph import Graph, Node
from ignition.targets.cuda.kernels.attention_shape import attention_sizes
from ignition.targets.cuda.kernels.checks import Size
from ignition.targets.cuda.kernels.embedding import row_size
from ignition.targets.cuda.kernels.gate_up import gate_up_size
from ignition.targets.cuda.kernels.heads import head_sizes
from ignition.targets.cuda.kernels.linear import linear_size
from ignition.targets.cuda.kernels.norm import norm_size
from ignition.targets.cuda.kernels.rotary import frequencies_size
from ignition.targets.cuda.launch import Element


class Sizes:
    """The sizes of a graph's nodes for kernels of `architectures`. `formats` are those of matrices by name, `compute` is what
    the kv pages hold."""

    def __init__(
        self, graph: Graph, formats: Mapping[str, str], compute: Element, architectures: Sequence[str]
    ) -> None:
        self.graph = graph
        self.formats = formats
        self.compute = compute
        self.architectures = architectures

    def refusal(self, node: Node) -> str | None:
        """Says why no kernel takes a node by itself, as a sentence; None where one does."""
        return self._refusal({architecture: self._sizes(node, architecture) for architecture in self.architectures})

    def heads_refusal(self, attention: Node) -> str | None:
        """Says the same of an attention, with the store of its keys and values."""
        heads, head_dim = (int(dim) for dim in self._shape(attention, 0)[1:])
        kv_heads = int(self.graph.root(attention.inputs[1]).shape[2])
        sizes = heads, kv_heads, head_dim
        return self._refusal(
            {a: [*attention_sizes(a, self.compute, *sizes), *head_sizes(*sizes)] for a in self.architectures}
        )

    def joined(self, linears: Sequence[Node]) -> bool:
        """Whether linear layers of one format can be one, by the rows of their weights together."""
        rows, format = sum(self._rows(node) for node in linears), self.format(linears[0])
        return all(linear_size(architecture, format, rows).taken for architecture in self.architectures)

    def gate_up(self, gate: Node, up: Node) -> bool:
        """Whether two linear layers of equal shapes are of one format, and the kernel that does both takes their rows."""
        format, rows = self.format(gate), self._rows(gate)
        if format != self.format(up):
            return False
        return all(gate_up_size(architecture, format, rows).taken for architecture in self.architectures)

    def format(self, linear: Node) -> str:
        """What a linear layer's weight is stored as."""
        return self.formats[self.graph.root(linear.inputs[1]).name]

    def _sizes(self, node: Node, architecture: str) -> list[Size]:
        match node.op:
            case "linear":
                return [linear_size(architecture, self.format(node), self._rows(node))]
            case "rms_norm" if len(self._shape(node, 0)) == 2:
                return [norm_size(int(self._shape(node, 0)[-1]))]
            case "embed" | "take_rows":
                return [row_size(int(self._shape(node, 0)[-1]))]
            case "rope_angles":
                return [frequencies_size(int(self._shape(node, 1)[0]))]
        return []

    def _refusal(self, sizes: Mapping[str, Iterable[Size]]) -> str | None:
        """Says what the first size is that an architecture does not take, and which ones do not where others do."""
        refused = {name: size for name, some in sizes.items() if (size := _first(some)) is not None}
        if not refused:
            return None
        size = next(iter(refused.values()))
        *others, last = (name for name, other in refused.items() if other == size)
        alike = f"{', '.join(others)} and {last}" if others else last
        target = "the cuda target" if len(refused) == len(sizes) else alike
        return f"has kernels on {target} only where {size.name} is {size.wanted}, not {size.value}"

    def _shape(self, node: Node, place: int) -> tuple[int | str, ...]:
        value = node.inputs[place]
        assert value is not None
        return self.graph.values[value].shape

    def _rows(self, linear: Node) -> int:
        return int(self._shape(linear, 1)[0])


def _first(sizes: Iterable[Size]) -> Size | None:
    return next((size for size in sizes if not size.taken), None)
