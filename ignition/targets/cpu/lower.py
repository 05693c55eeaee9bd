"""Lowering for the cpu target: captured op nodes become kernel calls over buffers.

Several ops become one call wherever one kernel does their work in one pass over memory: linear + bias + head norm + rope +
store (`Heads`), both halves of a gated MLP (`GateUp`), linear + residual (`Linear`), row selection + norm (`Norm`). An op
that matches no such pattern has a kernel of its own. One without a kernel becomes a call that flare interprets; the matrices
that it reads are stored plain, and what else reads them is interpreted too. So any graph of the op set can be lowered. In the
host part of a cuda step, the nodes of the op DEVICE become calls that have a device run a piece.

Storage of activations is decided here and nowhere else: a linear layer with q8 or q4 weights reads int8 activations, so a
value whose consumers all want them is produced quantised; where only some do, a `Quantize` call is added.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping

from flare.core.graph import DEVICE, INTERPRETED, Op, Tensor
from flare.core.manifest import Limits
from flare.errors import InputError
from ignition.graph import Graph, Node
from ignition.lowered import GROUP, Buffer, Call, Lowered, Operand, Weight, lay_out_kv
from ignition.patterns import Patterns, matrices_of

QUANTISED = ("q8", "q4")
TAGS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8": "Q8", "q4": "Q4"}


KERNELS = frozenset(
    ("embed", "rope_angles", "rms_norm", "linear", "rope", "kv_write", "attention", "silu_mul", "add", "take_rows")
)
"""The ops that have kernels."""


def f32_literal(value: float) -> str:
    """`value` rounded to f32, as an exact C++ hex literal."""
    mantissa, exponent = float.hex(struct.unpack("f", struct.pack("f", value))[0]).split("p")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    return f"{whole}.{fraction}p{exponent}f" if fraction else f"{whole}p{exponent}f"


def lower(
    graph: Graph,
    formats: Mapping[str, str],
    kv_format: str,
    limits: Limits,
    kernels: Collection[str] | None = None,
) -> Lowered:
    """Lowers a captured graph. `formats` maps each matrix's name to f32, f16, bf16, q8 or q4; others are plain. `kernels` are
    the ops that have kernels, KERNELS unless told otherwise.

    Raises InputError naming the weight that no kernel takes.
    """
    return _Lowering(graph, formats, kv_format, limits, KERNELS if kernels is None else kernels).run()


class _Lowering:
    def __init__(
        self, graph: Graph, formats: Mapping[str, str], kv_format: str, limits: Limits, kernels: Collection[str]
    ) -> None:
        self.graph = graph
        self.formats = formats
        self.limits = limits
        self.kv_tag = TAGS[kv_format]
        self.result = Lowered()
        self.patterns = Patterns(graph)
        self.called = {id(node) for node in graph.nodes if node.op == DEVICE or not self._has_kernel(node, kernels)}
        self.patterns.apart = self.called
        self.absorbed: set[int] = set()  # id() of nodes that another node's call performs
        self.made: dict[tuple[int, str], Buffer] = {}  # (root value, storage) -> buffer
        self.kv_ranges, self.result.kv_page_bytes = lay_out_kv(
            graph.of_kind("state"), limits.page_tokens, 4 if kv_format == "f32" else 2
        )

    def run(self) -> Lowered:
        self._absorb()
        for node in self.graph.nodes:
            if id(node) in self.absorbed:
                continue
            if id(node) in self.called:
                self._call_back(node)
            else:
                _HANDLERS[node.op](self, node)
        return self.result

    def _has_kernel(self, node: Node, kernels: Collection[str]) -> bool:
        """Whether a kernel computes a node: one of its op, for matrices that are packed."""
        if node.op not in kernels:
            return False
        if node.op == "rms_norm" and self.graph.values[node.inputs[0]].shape[0] == "R":
            # The kernel selects the rows itself, out of all tokens'.
            root = self.graph.root(node.inputs[0]).id
            maker = self.patterns.producers.get(root)
            alone = self.patterns.uses[root] == [node] and root not in self.patterns.output_roots
            return alone and maker is not None and maker.op == "take_rows" and "take_rows" in kernels
        return all(self.formats.get(name) in TAGS for name in matrices_of(self.graph, node))

    # -- what can be fused -------------------------------------------------------------------------------------------

    def _absorb(self) -> None:
        """Marks the nodes whose work a later node's call performs, so that they make no call of their own."""
        for node in self.graph.nodes:
            if id(node) in self.called:
                continue
            if node.op == "kv_write":
                k_chain, v_chain = self.patterns.heads(node.inputs[1]), self.patterns.heads(node.inputs[2])
                if k_chain and v_chain:
                    self.absorbed.update(map(id, k_chain + v_chain))
            elif node.op == "attention":
                self.absorbed.update(map(id, self.patterns.heads(node.inputs[0]) or ()))
            elif node.op == "silu_mul":
                self.absorbed.update(map(id, self._gate_up(node) or ()))
            elif node.op == "add":
                if (linear := self.patterns.residual_linear(node)) is not None:
                    self.absorbed.add(id(linear))
            elif node.op == "rms_norm" and (rows := self.patterns.row_selection(node)) is not None:
                self.absorbed.add(id(rows))

    def _gate_up(self, node: Node) -> tuple[Node, Node] | None:
        pair = self.patterns.gate_up(node)
        if pair is None or any(linear.inputs[2] is not None for linear in pair):
            return None
        return pair if self._wants(pair[0]) == self._wants(pair[1]) else None

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _wants(self, linear: Node) -> str:
        """The activation storage that a linear node reads."""
        return "quant" if self.formats.get(self._weight_name(linear.inputs[1])) in QUANTISED else "float"

    def _storage(self, value: int) -> str:
        """Storage to produce `value` in: quantised if every consumer reads it so and groups fit, else float."""
        root = self.graph.root(value)
        wants = {self._wants(use) if use.op == "linear" else "float" for use in self.patterns.uses.get(root.id, [])}
        return "quant" if wants == {"quant"} and root.id not in self.patterns.output_roots else "float"

    def _make(self, value: int, storage: str = "float") -> Buffer:
        """A new buffer for a value of shape [count, ...]; trailing dimensions are one row."""
        root = self.graph.root(value)
        width = 1
        for dim in root.shape[1:]:
            width *= int(dim)
        buffer = Buffer(
            len(self.result.buffers), str(root.shape[0]), width, storage, root.id in self.patterns.output_roots
        )
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
        op: Op | None = None,
    ) -> None:
        def names(items: list[Buffer | str]) -> frozenset[str]:
            return frozenset(item if isinstance(item, str) else f"%{item.id}" for item in items)

        self.result.calls.append(Call(kernel, label, operands, names(reads), names(writes), in_place, op))

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

    # -- what has no kernel ------------------------------------------------------------------------------------------

    def _call_back(self, node: Node) -> None:
        """A call that has the op itself, over plain f32 buffers and weights. Those for a device follow each other."""
        operands: list[Operand] = []
        reads: list[Buffer | str] = []
        writes: list[Buffer | str] = []

        def tensor(value: int | None) -> Tensor | None:
            if value is None:
                operands.append(None)
                return None
            root, shape = self.graph.root(value), list(self.graph.values[value].shape)
            if root.kind == "input":
                return Tensor(shape=shape, input=root.name)
            if root.kind == "state":
                operands.extend(self.kv_ranges[root.name])
                shape[3] = self.limits.page_tokens
                (writes if value in node.mutates else reads).extend([root.name + ".k", root.name + ".v"])
            elif root.kind == "weight":
                operands.append(Weight(root.name))
            else:
                buffer = self._get(value)
                operands.append(buffer)
                reads.append(buffer)
            return Tensor(shape=shape)

        inputs = [tensor(value) for value in node.inputs]
        outputs = []
        for value in node.outputs:
            buffer = self._make(value)
            operands.append(buffer)
            writes.append(buffer)
            outputs.append(Tensor(shape=list(self.graph.values[value].shape)))
        op = Op(name=node.op, attrs=dict(node.attrs), inputs=inputs, outputs=outputs)
        if node.op == DEVICE:
            label = f"piece {node.attrs['piece']}"
            self._call(DEVICE, label, tuple(operands), reads=reads, writes=[*writes, DEVICE], op=op)
            return
        label = next((operand.name for operand in operands if isinstance(operand, Weight)), node.op)
        self._call(INTERPRETED, label, tuple(operands), reads=reads, writes=writes, op=op)

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
        rows = self.patterns.row_selection(node)
        source = self._get(rows.inputs[0] if rows else node.inputs[0])
        storage = self._storage(node.outputs[0])
        out = self._make(node.outputs[0], storage)
        kernel = f"Norm<{_count(out)}, {out.width}, {eps}, {_out(storage)}>"
        self._call(kernel, weight.name, (source, weight, out), reads=[source], writes=[out])

    def _linear(self, node: Node) -> None:
        self._linear_call(node, node.outputs[0], residual=None)

    def _add(self, node: Node) -> None:
        linear = self.patterns.residual_linear(node)
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
        k_chain, v_chain = self.patterns.heads(node.inputs[1]), self.patterns.heads(node.inputs[2])
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
        chain = self.patterns.heads(node.inputs[0])
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


_HANDLERS = {op: getattr(_Lowering, f"_{op}") for op in KERNELS}
"""By op: the method that makes its calls."""
