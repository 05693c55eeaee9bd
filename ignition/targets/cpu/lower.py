"""Lowering for the cpu target: captured op nodes become kernel calls over buffers.

Several ops become one call wherever one kernel does their work in one pass over memory: linear + bias + head norm + rope +
store (`Heads`), both halves of a gated MLP (`GateUp`), linear + residual (`Linear`), row selection + norm (`Norm`). An op
that matches no such pattern has a kernel of its own, so any graph of the op set can be lowered.

Storage of activations is decided here and nowhere else: a linear layer with q8 or q4 weights reads int8 activations, so a
value whose consumers all want them is produced quantised; where only some do, a `Quantize` call is added.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from flare.core.manifest import Limits
from flare.errors import InputError
from ignition.graph import Graph, Node, Value
from ignition.lowered import GROUP, Buffer, Call, Lowered, Operand, PageRange, Weight

QUANTISED = ("q8", "q4")
TAGS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8": "Q8", "q4": "Q4"}


def f32_literal(value: float) -> str:
    """`value` rounded to f32, as an exact C++ hex literal."""
    mantissa, exponent = float.hex(struct.unpack("f", struct.pack("f", value))[0]).split("p")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    return f"{whole}.{fraction}p{exponent}f" if fraction else f"{whole}p{exponent}f"


def lower(graph: Graph, formats: Mapping[str, str], kv_format: str, limits: Limits) -> Lowered:
    """Lowers a captured graph. `formats` maps each matrix's name to f32, f16, bf16, q8 or q4.

    Raises InputError naming the op or weight that has no kernel.
    """
    return _Lowering(graph, formats, kv_format, limits).run()


class _Lowering:
    def __init__(self, graph: Graph, formats: Mapping[str, str], kv_format: str, limits: Limits) -> None:
        self.graph = graph
        self.formats = formats
        self.limits = limits
        self.kv_tag = TAGS[kv_format]
        self.kv_bytes = 4 if kv_format == "f32" else 2
        self.result = Lowered()
        self.producers: dict[int, Node] = {}
        self.uses: dict[int, list[Node]] = {}
        for node in graph.nodes:
            for output in node.outputs:
                self.producers[graph.root(output).id] = node
            for root in {graph.root(i).id for i in node.inputs if i is not None}:
                self.uses.setdefault(root, []).append(node)
        self.output_roots = {graph.root(i).id for i in graph.outputs}
        self.absorbed: set[int] = set()  # id() of nodes that another node's call performs
        self.made: dict[tuple[int, str], Buffer] = {}  # (root value, storage) -> buffer
        self.kv_ranges = self._lay_out_kv()

    def run(self) -> Lowered:
        handlers = {
            "embed": self._embed,
            "rope_angles": self._rope_angles,
            "rms_norm": self._rms_norm,
            "linear": self._linear,
            "rope": self._rope,
            "kv_write": self._kv_write,
            "attention": self._attention,
            "silu_mul": self._silu_mul,
            "add": self._add,
            "take_rows": self._take_rows,
        }
        self._absorb()
        for node in self.graph.nodes:
            if id(node) in self.absorbed:
                continue
            if node.op not in handlers:
                raise InputError(
                    f"op {node.op}: the cpu target has no kernel for it; it has {', '.join(sorted(handlers))}"
                )
            handlers[node.op](node)
        return self.result

    # -- what can be fused -------------------------------------------------------------------------------------------

    def _absorb(self) -> None:
        """Marks the nodes whose work a later node's call performs, so that they make no call of their own."""
        for node in self.graph.nodes:
            if node.op == "kv_write":
                k_chain, v_chain = self._heads_chain(node.inputs[1]), self._heads_chain(node.inputs[2])
                if k_chain and v_chain:
                    self.absorbed.update(map(id, k_chain + v_chain))
            elif node.op == "attention":
                self.absorbed.update(map(id, self._heads_chain(node.inputs[0]) or ()))
            elif node.op == "silu_mul":
                self.absorbed.update(map(id, self._gate_up(node) or ()))
            elif node.op == "add":
                if (linear := self._residual_linear(node)) is not None:
                    self.absorbed.add(id(linear))
            elif node.op == "rms_norm" and (rows := self._row_selection(node)) is not None:
                self.absorbed.add(id(rows))

    def _only_use(self, value: int | None, node: Node) -> Node | None:
        """The node that makes `value`, if `node` is its only consumer and it is not an output; else None."""
        root = self.graph.root(value).id
        if root in self.output_roots or self.uses.get(root, []) != [node]:
            return None
        return self.producers.get(root)

    def _heads_chain(self, value: int | None) -> list[Node] | None:
        """[linear, head norm?, rope?] that make one projection's heads, each used once; None if they do not."""
        consumers = self.uses[self.graph.root(value).id]
        chain: list[Node] = []
        node = self._only_use(value, consumers[0]) if len(consumers) == 1 else None
        if node is not None and node.op == "rope":
            chain.insert(0, node)
            node = self._only_use(node.inputs[0], node)
        if node is not None and node.op == "rms_norm" and len(self.graph.values[node.inputs[0]].shape) == 3:
            chain.insert(0, node)
            node = self._only_use(node.inputs[0], node)
        if node is None or node.op != "linear":
            return None
        return [node, *chain]

    def _gate_up(self, node: Node) -> tuple[Node, Node] | None:
        gate, up = (self._only_use(value, node) for value in node.inputs)
        if gate is None or up is None or gate is up or {gate.op, up.op} != {"linear"}:
            return None
        same_input = self.graph.root(gate.inputs[0]) is self.graph.root(up.inputs[0])
        same_storage = self._wants(gate) == self._wants(up)
        no_bias = gate.inputs[2] is None and up.inputs[2] is None
        return (gate, up) if same_input and same_storage and no_bias else None

    def _residual_linear(self, node: Node) -> Node | None:
        for value in (node.inputs[1], node.inputs[0]):
            made_by = self._only_use(value, node)
            if made_by is not None and made_by.op == "linear":
                return made_by
        return None

    def _row_selection(self, node: Node) -> Node | None:
        made_by = self._only_use(node.inputs[0], node)
        return made_by if made_by is not None and made_by.op == "take_rows" else None

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _wants(self, linear: Node) -> str:
        """The activation storage that a linear node reads."""
        return "quant" if self.formats[self._weight_name(linear.inputs[1])] in QUANTISED else "float"

    def _storage(self, value: int) -> str:
        """Storage to produce `value` in: quantised if every consumer reads it so and groups fit, else float."""
        root = self.graph.root(value)
        wants = {self._wants(use) if use.op == "linear" else "float" for use in self.uses.get(root.id, [])}
        return "quant" if wants == {"quant"} and root.id not in self.output_roots else "float"

    def _make(self, value: int, storage: str = "float") -> Buffer:
        """A new buffer for a value of shape [count, ...]; trailing dimensions are one row."""
        root = self.graph.root(value)
        width = 1
        for dim in root.shape[1:]:
            width *= int(dim)
        buffer = Buffer(len(self.result.buffers), str(root.shape[0]), width, storage, root.id in self.output_roots)
        self.result.buffers.append(buffer)
        self.made[root.id, storage] = buffer
        return buffer

    def _get(self, value: int | None, storage: str = "float") -> Buffer:
        """The buffer that holds `value` in `storage`; quantises a float buffer when it is wanted so."""
        root = self.graph.root(value)
        if (root.id, storage) in self.made:
            return self.made[root.id, storage]
        if storage == "float":
            raise InputError(f"value %{root.id} is used before it is made; the recipe's step is not in order")
        source = self._get(value, "float")
        if source.width % GROUP:
            raise InputError(
                f"a linear layer's input has {source.width} elements, q8 and q4 need a multiple of {GROUP}"
            )
        target = self._make(value, "quant")
        self._call(
            f"Quantize<{_count(source)}, {source.width}>", "quantise", (source, target), reads=[source], writes=[target]
        )
        return target

    def _call(
        self,
        kernel: str,
        label: str,
        operands: tuple[Operand, ...],
        *,
        reads: list[Buffer | str],
        writes: list[Buffer | str],
        in_place: tuple[int, int] | None = None,
    ) -> None:
        def names(items: list[Buffer | str]) -> frozenset[str]:
            return frozenset(item if isinstance(item, str) else f"%{item.id}" for item in items)

        self.result.calls.append(Call(kernel, label, operands, names(reads), names(writes), in_place))

    def _weight_name(self, value: int | None) -> str:
        root = self.graph.root(value)
        if root.kind != "weight":
            raise InputError(f"a linear layer's weight is {root.kind} %{root.id}; the cpu target wants a named weight")
        return root.name

    def _weight(self, value: int | None) -> Weight | None:
        return None if value is None else Weight(self._weight_name(value))

    def _matrix(self, value: int | None) -> tuple[Weight, str, int, int]:
        """(operand, format tag, rows N, columns K) of a matrix."""
        name = self._weight_name(value)
        rows, columns = (int(dim) for dim in self.graph.root(value).shape)
        return Weight(name), TAGS[self.formats[name]], rows, columns

    # -- the kv pages ------------------------------------------------------------------------------------------------

    def _lay_out_kv(self) -> dict[str, tuple[PageRange, PageRange]]:
        """Places every layer's K and V inside a page, in the order of the states, 64-byte aligned."""
        ranges: dict[str, tuple[PageRange, PageRange]] = {}
        offset = 0
        for state in self.graph.of_kind("state"):
            heads, width = int(state.shape[2]), int(state.shape[4])
            size = heads * self.limits.page_tokens * width * self.kv_bytes
            padded = -(-size // 64) * 64
            ranges[state.name] = (PageRange(offset, size), PageRange(offset + padded, size))
            offset += 2 * padded
        self.result.kv_page_bytes = offset
        return ranges

    # -- one handler an op -------------------------------------------------------------------------------------------

    def _embed(self, node: Node) -> None:
        table, tag, rows, columns = self._matrix(node.inputs[0])
        out = self._make(node.outputs[0])
        self._call(f"Embed<{tag}, {rows}, {columns}>", table.name, (table, out), reads=[], writes=[out])

    def _rope_angles(self, node: Node) -> None:
        frequencies = self._weight(node.inputs[1])
        cos, sin = self._make(node.outputs[0]), self._make(node.outputs[1])
        kernel = f"RopeAngles<{cos.width}, {f32_literal(node.attrs['scale'])}>"
        self._call(kernel, "rope angles", (frequencies, cos, sin), reads=[], writes=[cos, sin])

    def _rms_norm(self, node: Node) -> None:
        shape = self.graph.values[node.inputs[0]].shape
        eps, weight = f32_literal(node.attrs["eps"]), self._weight(node.inputs[1])
        if len(shape) == 3:
            source, out = self._get(node.inputs[0]), self._make(node.outputs[0])
            kernel = f"HeadNorm<{shape[1]}, {shape[2]}, {eps}>"
            self._call(kernel, weight.name, (source, weight, out), reads=[source], writes=[out])
            return
        rows = self._row_selection(node)
        if rows is None and shape[0] != "T":
            raise InputError(f"{weight.name}: a norm over selected rows must follow take_rows directly")
        source = self._get(rows.inputs[0] if rows else node.inputs[0])
        storage = self._storage(node.outputs[0])
        out = self._make(node.outputs[0], storage)
        kernel = f"Norm<{_count(out)}, {out.width}, {eps}, {_out(storage)}>"
        self._call(kernel, weight.name, (source, weight, out), reads=[source], writes=[out])

    def _linear(self, node: Node) -> None:
        self._linear_call(node, node.outputs[0], residual=None)

    def _add(self, node: Node) -> None:
        linear = self._residual_linear(node)
        if linear is not None:
            made = self.graph.root(linear.outputs[0]).id
            other = next(value for value in node.inputs if self.graph.root(value).id != made)
            self._linear_call(linear, node.outputs[0], residual=self._get(other))
            return
        left, right = self._get(node.inputs[0]), self._get(node.inputs[1])
        out = self._make(node.outputs[0])
        self._call(f"Add<{out.width}>", "add", (left, right, out), reads=[left, right], writes=[out])

    def _linear_call(self, node: Node, output: int, residual: Buffer | None) -> None:
        weight, tag, rows, columns = self._matrix(node.inputs[1])
        bias = self._weight(node.inputs[2])
        source = self._get(node.inputs[0], self._wants(node))
        out = self._make(output)
        # A layer that reads its residual as its input too reads whole rows of it for each element: not in place.
        in_place = (out.id, residual.id) if residual and residual is not source else None
        flags = f"{_flag(bias is not None)}, {_flag(residual is not None)}"
        self._call(
            f"Linear<{_count(out)}, {tag}, {columns}, {rows}, {flags}>",
            weight.name,
            (source, weight, bias, residual, out),
            reads=[source, *([residual] if residual else [])],
            writes=[out],
            in_place=in_place,
        )

    def _heads_call(
        self, chain: list[Node], heads: int, width: int, kind: str, target: Operand, writes: Buffer | str
    ) -> None:
        linear, *rest = chain
        norm = next((node for node in rest if node.op == "rms_norm"), None)
        rope = next((node for node in rest if node.op == "rope"), None)
        weight, tag, _, columns = self._matrix(linear.inputs[1])
        bias = self._weight(linear.inputs[2])
        source = self._get(linear.inputs[0], self._wants(linear))
        cos, sin = (self._get(rope.inputs[1]), self._get(rope.inputs[2])) if rope else (None, None)
        eps = f32_literal(norm.attrs["eps"] if norm else -1.0)
        kernel = (
            f"Heads<{tag}, {columns}, {heads}, {width}, {_flag(bias is not None)}, {eps}, {_flag(rope is not None)}, "
            f"{kind}, {self.kv_tag}, {self.limits.page_tokens}>"
        )
        operands = (source, weight, bias, self._weight(norm.inputs[1]) if norm else None, cos, sin, target)
        reads: list[Buffer | str] = [source, *([cos, sin] if cos and sin else [])]
        self._call(kernel, weight.name, operands, reads=reads, writes=[writes])

    def _kv_write(self, node: Node) -> None:
        state = self.graph.root(node.inputs[0])
        heads, width = int(state.shape[2]), int(state.shape[4])
        k_range, v_range = self.kv_ranges[state.name]
        k_chain, v_chain = self._heads_chain(node.inputs[1]), self._heads_chain(node.inputs[2])
        if k_chain and v_chain:
            self._heads_call(k_chain, heads, width, "Key", k_range, state.name + ".k")
            self._heads_call(v_chain, heads, width, "Value", v_range, state.name + ".v")
            return
        k, v = self._get(node.inputs[1]), self._get(node.inputs[2])
        kernel = f"KvWrite<{heads}, {width}, {self.kv_tag}, {self.limits.page_tokens}>"
        writes: list[Buffer | str] = [state.name + ".k", state.name + ".v"]
        self._call(kernel, state.name, (k, v, k_range, v_range), reads=[k, v], writes=writes)

    def _attention(self, node: Node) -> None:
        state = self.graph.root(node.inputs[1])
        q_shape = self.graph.values[node.inputs[0]].shape
        heads, width, kv_heads = int(q_shape[1]), int(q_shape[2]), int(state.shape[2])
        chain = self._heads_chain(node.inputs[0])
        if chain:
            # the query's own buffer: the chain's last value
            query = self._make(node.inputs[0])
            self._heads_call(chain, heads, width, "Query", query, query)
        query = self._get(node.inputs[0])
        storage = self._storage(node.outputs[0]) if width % GROUP == 0 else "float"
        out = self._make(node.outputs[0], storage)
        k_range, v_range = self.kv_ranges[state.name]
        kernel = (
            f"Attention<{heads}, {kv_heads}, {width}, {self.kv_tag}, {self.limits.page_tokens}, "
            f"{f32_literal(node.attrs['scale'])}, {int(node.attrs['window'])}, {_out(storage)}>"
        )
        reads: list[Buffer | str] = [query, state.name + ".k", state.name + ".v"]
        self._call(kernel, state.name, (query, k_range, v_range, out), reads=reads, writes=[out])

    def _silu_mul(self, node: Node) -> None:
        pair = self._gate_up(node)
        if pair is None:
            gate, up = self._get(node.inputs[0]), self._get(node.inputs[1])
            out = self._make(node.outputs[0])
            self._call(f"SiluMul<{out.width}>", "silu_mul", (gate, up, out), reads=[gate, up], writes=[out])
            return
        gate_node, up_node = pair
        gate, gate_tag, rows, columns = self._matrix(gate_node.inputs[1])
        up, up_tag, _, _ = self._matrix(up_node.inputs[1])
        source = self._get(gate_node.inputs[0], self._wants(gate_node))
        storage = self._storage(node.outputs[0]) if rows % GROUP == 0 else "float"
        out = self._make(node.outputs[0], storage)
        kernel = f"GateUp<{gate_tag}, {up_tag}, {columns}, {rows}, {_out(storage)}>"
        self._call(kernel, gate.name, (source, gate, up, out), reads=[source], writes=[out])

    def _rope(self, node: Node) -> None:
        source, cos, sin = (self._get(value) for value in node.inputs)
        shape = self.graph.values[node.inputs[0]].shape
        out = self._make(node.outputs[0])
        self._call(
            f"Rope<{shape[1]}, {shape[2]}>", "rope", (source, cos, sin, out), reads=[source, cos, sin], writes=[out]
        )

    def _take_rows(self, node: Node) -> None:
        source, out = self._get(node.inputs[0]), self._make(node.outputs[0])
        self._call(f"TakeRows<{out.width}>", "take rows", (source, out), reads=[source], writes=[out])


def _count(buffer: Buffer) -> str:
    return "Tokens" if buffer.count == "T" else "Rows"


def _out(storage: str) -> str:
    return "ToQuant" if storage == "quant" else "ToFloat"


def _flag(value: bool) -> str:
    return "true" if value else "false"


def matrix_names(graph: Graph) -> dict[str, Value]:
    """The weights that are matrices (used by embed or linear), by name, in the graph's order; the rest are f32 vectors."""
    names: dict[str, Value] = {}
    for node in graph.nodes:
        if node.op in ("embed", "linear"):
            root = graph.root(node.inputs[0 if node.op == "embed" else 1])
            names.setdefault(root.name, root)
    return names
