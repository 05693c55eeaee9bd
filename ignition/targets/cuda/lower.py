"""Lowering for the cuda target: captured op nodes become kernels' launches over buffers.

Several ops become one launch wherever one kernel does their work: head norms, rope and the store of keys and values (`heads`),
both halves of a gated MLP (`gate_up`), linear and residual, row selection and norm. The projections of queries, keys and values
become one product where their weights can be joined. What lowering returns holds for all buckets: a work makes its launches
when it is told how many tokens and rows a bucket has, over buffers that are the same in each.

Activations: the residual stream, and whatever is not read by linear layers alone, is f32; what only linear layers read has the
compute dtype. Nodes without a kernel (places.py) leave cuts between the works, where values go to the host and come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from flare.core.manifest import Limits
from ignition.graph import Graph, Node
from ignition.lowered import lay_out_kv
from ignition.patterns import Patterns
from ignition.targets.cuda.kernels.attention import FEW_TOKENS, attention_launches, attention_workspace
from ignition.targets.cuda.kernels.attention_shape import PagedAttention
from ignition.targets.cuda.kernels.elementwise import add_launch, round_launch, silu_mul_launch
from ignition.targets.cuda.kernels.embedding import embed_launch, take_rows_launch
from ignition.targets.cuda.kernels.gate_up import gate_up_launch
from ignition.targets.cuda.kernels.heads import Pages, heads_launch
from ignition.targets.cuda.kernels.linear import linear_launch
from ignition.targets.cuda.kernels.norm import rms_norm_launch
from ignition.targets.cuda.kernels.quantised_linear import quantised_linear_launch
from ignition.targets.cuda.kernels.rotary import rope_angles_launch
from ignition.targets.cuda.launch import BYTES, Element, Launch, Pointer
from ignition.targets.cuda.limits import require_elements, require_pages
from ignition.targets.cuda.operands import QUANTISED, Buffer, Operands, at, count
from ignition.targets.cuda.pieces import Cuts, cut
from ignition.targets.cuda.places import KERNELS, find_places, gate_up, head_chains
from ignition.targets.cuda.sizes import Sizes
from ignition.targets.cuda.works import Cut, Launches, Lowered, Work

_PIECE = "piece"
"""Stands among what works read and cuts write, so that a cut is in a phase of its own."""


def linear_weights(graph: Graph, apart: Collection[int] = ()) -> set[str]:
    """The names of the weights that linear layers multiply with, but those `apart`, by id()."""
    layers = (node for node in graph.nodes if node.op == "linear" and id(node) not in apart)
    return {graph.root(node.inputs[1]).name for node in layers}


def compute_dtype(graph: Graph, formats: Mapping[str, str]) -> Element:
    """Returns what linear layers' inputs and the kv pages hold: the one float format among the layers' weights, bf16 where all
    are quantised, f32 where they disagree."""
    floats = {formats[name] for name in linear_weights(graph)} - QUANTISED
    if len(floats) > 1:
        return "f32"
    return "bf16" if not floats else floats.pop()


def lower(
    graph: Graph,
    formats: Mapping[str, str],
    compute: Element,
    limits: Limits,
    architecture: str,
    kernels: Collection[str] = KERNELS,
    architectures: Sequence[str] = (),
) -> Lowered:
    """Lowers a captured graph for an architecture. `formats` maps each matrix's name to its format; those of linear layers are
    `compute` or quantised. `kernels` are the ops that have kernels, `architectures` all of the core, whose host part is the
    same: this one alone unless told otherwise.

    Raises InputError for a format that the architecture has no kernels for, and for limits that are too large for kernels,
    naming the option.
    """
    sizes = Sizes(graph, formats, compute, architectures or (architecture,))
    return _Lowering(graph, sizes, compute, limits, architecture, kernels).run()


class _Lowering:
    def __init__(
        self,
        graph: Graph,
        sizes: Sizes,
        compute: Element,
        limits: Limits,
        architecture: str,
        kernels: Collection[str],
    ) -> None:
        self.graph = graph
        self.sizes = sizes
        self.compute = compute
        self.limits = limits
        self.architecture = architecture
        self.patterns = Patterns(graph)
        self.places = find_places(self.patterns, sizes, kernels)
        self.operands = Operands(graph, self.patterns, sizes.formats, compute)
        self.works: list[Work] = []
        self.tables: set[str] = set()
        self.rounded: dict[int, Buffer] = {}  # by the number of the buffer that is rounded
        here = {graph.root(write.inputs[0]).id for write in graph.nodes if id(write) in self.places.queries}
        states = (state for state in graph.of_kind("state") if state.id in here)
        self.kv_ranges, self.kv_page_bytes = lay_out_kv(states, limits.page_tokens, BYTES[compute])
        self.pages = -(-limits.max_context // limits.page_tokens)
        require_pages(limits, self.kv_page_bytes // BYTES[compute])

    def run(self) -> Lowered:
        cuts = cut(self.graph, self.places)
        at = 0
        for node in self.graph.nodes:
            if id(node) not in cuts.piece:
                continue
            while at < cuts.piece[id(node)]:
                at = self._cut(cuts, at)
            _HANDLERS[node.op](self, node)
        while at < len(cuts.host):
            at = self._cut(cuts, at)
        return Lowered(
            works=self.works,
            buffers=self.operands.buffers,
            kv_page_bytes=self.kv_page_bytes,
            weights=self.operands.weights,
            tables=self.tables,
        )

    def _cut(self, cuts: Cuts, at: int) -> int:
        """Adds the cut behind piece `at`, and returns the next piece's number."""
        gives = tuple(self.operands.get(value) for value in cuts.pieces[at].gives)
        takes = tuple(self.operands.make(value) for value in cuts.pieces[at + 1].takes)
        self._work("host", lambda tokens, rows: [], reads=gives, writes=[*takes, _PIECE], cut=Cut(gives, takes))
        return at + 1

    def _joined(self, linears: Sequence[Node]) -> bool:
        """Whether linear layers can be one: of one input, format and kind of bias, with weights that nothing else uses."""
        first = linears[0]
        return all(
            self.graph.root(node.inputs[0]) is self.graph.root(first.inputs[0])
            and self.sizes.format(node) == self.sizes.format(first)
            and (node.inputs[2] is None) == (first.inputs[2] is None)
            and all(len(self.patterns.uses[self.graph.root(i).id]) == 1 for i in node.inputs[1:] if i is not None)
            for node in linears
        ) and self.sizes.joined(linears)

    # -- one handler an op -------------------------------------------------------------------------------------------

    def _work(
        self,
        label: str,
        launches: Launches,
        *,
        reads: Sequence[Buffer | str] = (),
        writes: Sequence[Buffer | str],
        in_place: tuple[int, int] | None = None,
        cut: Cut | None = None,
    ) -> None:
        def names(items: Sequence[Buffer | str]) -> frozenset[str]:
            return frozenset(item if isinstance(item, str) else f"%{item.id}" for item in items)

        self.works.append(Work(label, launches, names(reads) | {_PIECE}, names(writes), in_place, cut))

    def _elementwise(self, label: str, launch: Callable[..., Launch], reads: Sequence[Buffer], out: Buffer) -> None:
        """Adds a work over all elements of buffers of one size."""
        require_elements(self.limits, label, out.width, out.count)
        self._work(
            label,
            lambda tokens, rows: [
                launch(*map(at, reads), at(out), elements=out.width * count(out, tokens, rows), label=label)
            ],
            reads=reads,
            writes=[out],
        )

    def _embed(self, node: Node) -> None:
        table, out = self.operands.matrix(node.inputs[0]), self.operands.make(node.outputs[0])
        label = self.operands.weight_name(node.inputs[0])
        self.tables.add(label)
        self._work(
            label,
            lambda tokens, rows: [
                embed_launch(
                    table,
                    self.operands.io("tokens"),
                    at(out),
                    count=tokens,
                    architecture=self.architecture,
                    label=label,
                )
            ],
            writes=[out],
        )

    def _rope_angles(self, node: Node) -> None:
        frequencies = self.operands.vector(node.inputs[1])
        cos, sin = self.operands.make(node.outputs[0]), self.operands.make(node.outputs[1])
        self._work(
            "rope angles",
            lambda tokens, rows: [
                rope_angles_launch(
                    self.operands.io("positions"),
                    frequencies,
                    at(cos),
                    at(sin),
                    tokens=tokens,
                    half=cos.width,
                    scale=node.attrs["scale"],
                    label="rope angles",
                )
            ],
            writes=[cos, sin],
        )

    def _rms_norm(self, node: Node) -> None:
        label = self.operands.weight_name(node.inputs[1])
        selection = self.patterns.row_selection(node)
        source = self.operands.get(selection.inputs[0] if selection else node.inputs[0])
        weight, out = self.operands.vector(node.inputs[1]), self.operands.make(node.outputs[0], rounded=True)
        self._work(
            label,
            lambda tokens, rows: [
                rms_norm_launch(
                    at(source),
                    weight,
                    at(out),
                    count=count(out, tokens, rows),
                    width=out.width,
                    eps=node.attrs["eps"],
                    label=label,
                    rows=self.operands.io("rows") if selection else None,
                )
            ],
            reads=[source],
            writes=[out],
        )

    def _linear(self, node: Node) -> None:
        self._product([node], self.operands.make(node.outputs[0]))

    def _add(self, node: Node) -> None:
        linear = self.patterns.residual_linear(node)
        if linear is not None:
            made = self.graph.root(linear.outputs[0]).id
            other = next(value for value in node.inputs if self.graph.root(value).id != made)
            residual = self.operands.get(other)
            self._product([linear], self.operands.make(node.outputs[0]), residual)
            return
        left, right = self.operands.get(node.inputs[0]), self.operands.get(node.inputs[1])
        out = self.operands.make(node.outputs[0])
        self._elementwise("add", add_launch, [left, right], out)

    def _layer_input(self, linear: Node) -> Buffer:
        """What a linear layer reads, in the compute dtype: a launch of its own rounds what is kept in f32, once for all
        layers."""
        source = self.operands.get(linear.inputs[0])
        if source.element == self.compute:
            return source
        if source.id not in self.rounded:
            out = self.rounded[source.id] = self.operands.buffer(source.count, source.width, self.compute)
            self._elementwise("round", round_launch, [source], out)
        return self.rounded[source.id]

    def _product(self, linears: Sequence[Node], out: Buffer, residual: Buffer | None = None) -> None:
        """The product of one linear layer, or of several joined."""
        source = self._layer_input(linears[0])
        matrix = self.operands.matrix(*(node.inputs[1] for node in linears))
        bias = self.operands.vector(*(node.inputs[2] for node in linears))
        launch = quantised_linear_launch if matrix.format in QUANTISED else linear_launch
        label = matrix.values.operand.name
        # A layer that reads its residual as its input too reads whole rows of it for each element: not in place.
        in_place = (out.id, residual.id) if residual and residual is not source else None
        self._work(
            label,
            lambda tokens, rows: [
                launch(
                    at(source),
                    matrix,
                    at(out),
                    tokens=count(out, tokens, rows),
                    architecture=self.architecture,
                    label=label,
                    bias=bias,
                    residual=at(residual) if residual else None,
                )
            ],
            reads=[source, *([residual] if residual else [])],
            writes=[out],
            in_place=in_place,
        )

    def _kv_write(self, node: Node) -> None:
        state, attention = self.graph.root(node.inputs[0]), self.places.queries[id(node)]
        chains = head_chains(self.patterns, node, attention)
        assert chains is not None
        heads, head_dim = (int(dim) for dim in self.graph.values[attention.inputs[0]].shape[1:])
        kv_heads = int(state.shape[2])
        linears = [chain[0] for chain in chains]
        widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        if self._joined(linears):
            made = [self.operands.buffer("T", sum(widths), "f32")]
            self._product(linears, made[0])
        else:
            made = [self.operands.buffer("T", width, "f32") for width in widths]
            for linear, buffer in zip(linears, made, strict=True):
                self._product([linear], buffer)
        norms = [next((n for n in chain if n.op == "rms_norm"), None) for chain in chains[:2]]
        rope = next((n for n in chains[1] if n.op == "rope"), None)
        angles = (self.operands.get(rope.inputs[1]), self.operands.get(rope.inputs[2])) if rope else ()
        weights = tuple(self.operands.vector(norm.inputs[1]) for norm in norms if norm)
        out = self.operands.buffer("T", widths[0], self.compute)
        self.operands.hold(attention.inputs[0], out)
        k, v = (Pointer(self.compute, part) for part in self.kv_ranges[state.name])
        stride = self.kv_page_bytes // BYTES[self.compute]
        pages = Pages(k, v, self.operands.io("page_table"), self.limits.page_tokens, stride, self.pages)
        projections = at(made[0]) if len(made) == 1 else tuple(map(at, made))
        self._work(
            state.name,
            lambda tokens, rows: [
                heads_launch(
                    projections,
                    at(out),
                    pages,
                    self.operands.io("positions"),
                    self.operands.io("slots"),
                    tokens=tokens,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    label=f"{state.name}, heads",
                    norms=weights or None,
                    eps=norms[0].attrs["eps"] if norms[0] else 1.0,
                    angles=tuple(map(at, angles)) or None,
                )
            ],
            reads=[*made, *angles],
            writes=[out, state.name],
        )

    def _attention(self, node: Node) -> None:
        state, query = self.graph.root(node.inputs[1]), self.operands.get(node.inputs[0])
        _, heads, head_dim = self.graph.values[node.inputs[0]].shape
        shape = PagedAttention(
            architecture=self.architecture,
            element=self.compute,
            heads=int(heads),
            kv_heads=int(state.shape[2]),
            head_dim=int(head_dim),
            page_tokens=self.limits.page_tokens,
            page_stride=self.kv_page_bytes // BYTES[self.compute],
            pages=self.pages,
            max_context=self.limits.max_context,
            scale=node.attrs["scale"],
            window=int(node.attrs["window"]),
        )
        out = self.operands.make(node.outputs[0], rounded=True)
        workspace = self.operands.buffer("T", attention_workspace(shape, 1) // BYTES["f32"], "f32", most=FEW_TOKENS)
        k, v = (Pointer(self.compute, part) for part in self.kv_ranges[state.name])
        self._work(
            state.name,
            lambda tokens, rows: attention_launches(
                shape,
                at(query),
                k,
                v,
                self.operands.io("positions"),
                self.operands.io("slots"),
                self.operands.io("page_table"),
                at(workspace) if tokens <= FEW_TOKENS else None,
                at(out),
                tokens=tokens,
                label=f"{state.name}, attention",
            ),
            reads=[query, state.name],
            writes=[out, workspace],
        )

    def _silu_mul(self, node: Node) -> None:
        pair = gate_up(self.patterns, self.sizes, node)
        if pair is None:
            gate, up = self.operands.get(node.inputs[0]), self.operands.get(node.inputs[1])
            out = self.operands.make(node.outputs[0], rounded=True)
            self._elementwise("silu_mul", silu_mul_launch, [gate, up], out)
            return
        source = self._layer_input(pair[0])
        matrices = [self.operands.matrix(linear.inputs[1]) for linear in pair]
        biases = [self.operands.vector(linear.inputs[2]) for linear in pair]
        out, label = self.operands.make(node.outputs[0], rounded=True), self.operands.weight_name(pair[0].inputs[1])
        self._work(
            label,
            lambda tokens, rows: [
                gate_up_launch(
                    at(source),
                    *matrices,
                    at(out),
                    tokens=count(out, tokens, rows),
                    architecture=self.architecture,
                    label=label,
                    gate_bias=biases[0],
                    up_bias=biases[1],
                )
            ],
            reads=[source],
            writes=[out],
        )

    def _take_rows(self, node: Node) -> None:
        source, out = self.operands.get(node.inputs[0]), self.operands.make(node.outputs[0])
        self._work(
            "take rows",
            lambda tokens, rows: [
                take_rows_launch(
                    at(source), self.operands.io("rows"), at(out), count=rows, width=out.width, label="take rows"
                )
            ],
            reads=[source],
            writes=[out],
        )


_HANDLERS = {op: getattr(_Lowering, f"_{op}") for op in KERNELS - {"rope"}}
"""By op: the method that makes its works. rope is always a part of another op's."""
