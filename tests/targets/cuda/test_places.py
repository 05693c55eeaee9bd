"""Which nodes of a step go apart, why, and what goes between the host and the device's pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flare.core.graph import DEVICE, Op
from ignition.graph import Graph, Node
from ignition.patterns import Patterns, matrix_names
from ignition.plan import assign_phases
from ignition.targets.cpu.lower import lower as lower_for_cpu
from ignition.targets.cuda.lower import lower
from ignition.targets.cuda.pieces import Cuts, cut, host_graph, ops, reasons
from ignition.targets.cuda.places import KERNELS, Places, find_places
from ignition.targets.cuda.sizes import Sizes
from tests.support.cuda_exports import LIMITS
from tests.support.odd_graphs import (
    Change,
    heads_of_their_own,
    late_product,
    late_queries,
    odd_graph,
    straight,
    turned,
    two_readers,
    unprojected,
)
from tests.test_plan import dense_graph

BETWEEN = "has a kernel on the cuda target only between a projection and attention that the device runs"
NONE = "has no kernel on the cuda target"
ONE = "has kernels on the cuda target only for a state that one store and one attention use"
HEADS = (
    "has kernels on the cuda target only where each of queries, keys and values is of a linear layer, queries and keys behind "
    "the same norms and rope, and the device makes all of them before the store, to be used once"
)


def sizes_of(graph: Graph, format: str = "f32", architectures: Sequence[str] = ("sm_90a",)) -> Sizes:
    return Sizes(graph, {name: format for name in matrix_names(graph)}, "f32", architectures)


def places_of(graph: Graph, kernels: Collection[str] = KERNELS) -> tuple[Places, Cuts]:
    places = find_places(Patterns(graph), sizes_of(graph), kernels)
    return places, cut(graph, places)


@pytest.mark.parametrize(
    ("change", "names", "states", "said"),
    [
        (heads_of_their_own, "head", False, [f"op rms_norm (1 node, at head) {BETWEEN}"]),
        (turned, "freq", False, [f"op rope (1 node, behind freq) {BETWEEN}"]),
        (straight, "square", False, []),
        (
            unprojected,
            "",
            True,
            [f"op kv_write (1 node, at kv) {HEADS}", f"op attention (1 node, at kv) {HEADS}"],
        ),
        (
            late_queries,
            "square",
            True,
            [f"op kv_write (1 node, at kv) {HEADS}", f"op attention (1 node, at kv) {HEADS}"],
        ),
        (
            two_readers,
            "square",
            True,
            [f"op kv_write (1 node, at kv) {ONE}", f"op attention (2 nodes, the first at kv) {ONE}"],
        ),
    ],
)
def test_places_without_a_kernel(change: Change, names: str, states: bool, said: list[str]) -> None:
    graph = odd_graph(change, names, states=states)
    places, cuts = places_of(graph)
    assert reasons(graph, cuts, places) == said


@cache
def dense(layers: int = 2, *, tied: bool = False) -> Graph:
    return dense_graph(num_hidden_layers=layers, tie_word_embeddings=tied)


STEPS: dict[str, Callable[[], Graph]] = {
    "dense": dense,
    "tied": lambda: dense(tied=True),
    "late product": lambda: odd_graph(late_product, "square"),
    "late queries": lambda: odd_graph(late_queries, "square", states=True),
    "two readers": lambda: odd_graph(two_readers, "square", states=True),
    "turned": lambda: odd_graph(turned, "freq"),
}


@cache
def graph_of(step: str) -> Graph:
    return STEPS[step]()


HEADS_HERE = {"rope": 4, "kv_write": 2, "attention": 2}


def beside(op: str) -> str:
    """Why the other users of a state follow an op without a kernel."""
    return f"uses the same state as {op}, which {NONE}"


@pytest.mark.parametrize(
    ("missing", "found", "cuts", "why"),
    [
        ({"silu_mul"}, {"silu_mul": 2}, 2, {}),
        ({"rms_norm"}, {"rms_norm": 5}, 5, {}),
        ({"add"}, {"add": 4}, 4, {}),
        ({"embed"}, {"embed": 1}, 1, {}),
        ({"take_rows"}, {"take_rows": 1}, 1, {}),
        ({"rope_angles"}, {"rope_angles": 1}, 1, {}),
        ({"linear"}, {"linear": 15, **HEADS_HERE}, 7, {"rope": BETWEEN, "kv_write": HEADS, "attention": HEADS}),
        ({"rope"}, HEADS_HERE, 2, {"kv_write": HEADS, "attention": HEADS}),
        ({"kv_write"}, HEADS_HERE, 2, {"rope": BETWEEN, "attention": beside("kv_write")}),
        ({"attention"}, HEADS_HERE, 2, {"rope": BETWEEN, "kv_write": beside("attention")}),
        (set(KERNELS), {"embed": 1, "rope_angles": 1, "rms_norm": 5, "linear": 15, **HEADS_HERE,
                        "add": 4, "silu_mul": 2, "take_rows": 1}, 1, {}),
    ],
)  # fmt: skip
def test_what_goes_apart_without_a_kernel(
    missing: set[str], found: dict[str, int], cuts: int, why: dict[str, str]
) -> None:
    """A state and the ropes that its heads need go together; nothing else follows. Each op is told with its own cause."""
    places, made = places_of(dense(), KERNELS - missing)
    assert ops(made) == found and len(made.host) == cuts
    lines = [line.split(" ", 2)[1:] for line in reasons(dense(), made, places)]
    told = {(op, rest.partition(") ")[2]) for op, rest in lines}
    assert told == {(op, NONE if op in missing else why[op]) for op in found}


def sized(name: str, wanted: str, seen: int, target: str = "the cuda target") -> str:
    """Why an op of a size that kernels do not take goes apart."""
    return f"has kernels on {target} only where {name} is {wanted}, not {seen}"


ROWS = "the number of its weight's rows"
HEAD = "a multiple of 8 from 16 to 512"
WIDE = {"hidden_size": 20_480, "head_dim": 64}
HALF_WIDE = {"head_dim": 392, "num_attention_heads": 16_384, "num_key_value_heads": 16_384}


@pytest.mark.parametrize(
    ("config", "found", "why"),
    [
        ({"head_dim": 20}, HEADS_HERE, {"attention": sized("head_dim", HEAD, 20)}),
        ({"head_dim": 8}, HEADS_HERE, {"attention": sized("head_dim", HEAD, 8)}),
        ({"head_dim": 520}, HEADS_HERE, {"attention": sized("head_dim", HEAD, 520)}),
        ({"head_dim": 512}, {}, {}),
        (WIDE, {"rms_norm": 5}, {"rms_norm": sized("width", "in [1, 16384]", 20_480)}),
        ({"vocab_size": 4_194_241}, {"linear": 1}, {"linear": sized(ROWS, "in [1, 4194240]", 4_194_241)}),
        ({"vocab_size": 4_194_240}, {}, {}),
        # Products that are joined where that fits.
        ({"intermediate_size": 2_097_121}, {}, {}),
        ({"head_dim": 512, "num_attention_heads": 4096, "num_key_value_heads": 4096}, {}, {}),
        # A projection that has no kernel has no heads behind it either.
        (HALF_WIDE, {"linear": 6, **HEADS_HERE}, {"linear": sized(ROWS, "in [1, 4194240]", 6_422_528)}),
    ],
)  # fmt: skip
def test_what_goes_apart_for_its_size(config: dict[str, int], found: dict[str, int], why: dict[str, str]) -> None:
    graph = dense_graph(**config)
    places, made = places_of(graph)
    assert ops(made) == found
    lines = reasons(graph, made, places)
    for op, cause in why.items():
        assert [line.partition(") ")[2] for line in lines if line.startswith(f"op {op} ")] == [cause]
    if "rope" in found:
        assert any(line.startswith("op rope (4 nodes") and line.endswith(BETWEEN) for line in lines)
    # All that is not apart has launches, in every bucket.
    lowered = lower(graph, sizes_of(graph).formats, "f32", LIMITS, "sm_90a")
    assert all(work.launches(tokens, 1) or work.cut for work in lowered.works for tokens in (1, 16))


def test_products_that_do_not_fit_together_stand_alone() -> None:
    """By the kernels of f32: 65535 programs of 64 rows, or of 32 of gate and up each."""
    graph = dense_graph(num_hidden_layers=1, intermediate_size=2_097_121, head_dim=512, num_attention_heads=4096)
    lowered = lower(graph, sizes_of(graph).formats, "f32", LIMITS, "sm_90a")
    kernels = [launch.kernel.partition(".")[2] for work in lowered.works for launch in work.launches(1, 1)]
    assert kernels.count("gate_up") == 0 and kernels.count("silu_mul") == 1
    assert kernels.index("heads") - kernels.index("rms_norm") == 2
    assert {name.count("+") for name in lowered.weights} == {0, 2}


def test_what_one_architecture_does_not_take_none_of_the_core_does() -> None:
    """A product of halves is of up to 65535 x 64 rows on sm_80, and of twice as many on sm_90a: what that joins and takes alone
    is apart, and in products of their own, in a core of both."""
    rows = {"vocab_size": 5_000_000, "num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 512}
    graph = dense_graph(num_hidden_layers=1, intermediate_size=3_000_000, **rows)
    both = ("sm_80", "sm_90a")
    sizes = sizes_of(graph, "bf16", both)
    places = find_places(Patterns(graph), sizes, KERNELS)
    why = sized(ROWS, "in [1, 4194240]", 5_000_000, "sm_80")
    assert reasons(graph, cut(graph, places), places) == [f"op linear (1 node, at lm_head.weight) {why}"]
    for more, told in (("sm_86",), "sm_80 and sm_86"), (("sm_86", "sm_89"), "sm_80, sm_86 and sm_89"):
        found = find_places(Patterns(graph), sizes_of(graph, "bf16", ("sm_80", *more, "sm_90a")), KERNELS)
        assert set(found.apart.values()) == {sized(ROWS, "in [1, 4194240]", 5_000_000, told)}
    alone, old, new = (
        lower(graph, sizes.formats, "bf16", LIMITS, name, KERNELS, core)
        for name, core in (("sm_90a", ("sm_90a",)), ("sm_80", both), ("sm_90a", both))
    )
    kernels = [{launch.kernel for work in made.works for launch in work.launches(1, 1)} for made in (alone, old, new)]
    cuts = [[work.cut for work in made.works if work.cut] for made in (alone, old, new)]
    assert "gate_up.gate_up" in kernels[0] and not cuts[0] and any("+" in name for name in alone.weights)
    assert kernels[1] == kernels[2] and "gate_up.gate_up" not in kernels[1]
    assert old.weights == new.weights and not any("+" in name for name in old.weights)
    crossing = [[[(b.count, b.width) for b in (*c.gives, *c.takes)] for c in some] for some in cuts[1:]]
    assert crossing == [[[("R", 64), ("R", 5_000_000)]]] * 2


def test_an_op_that_nobody_knows_goes_apart_too() -> None:
    graph = dense()
    strange = Graph(
        graph.values,
        tuple(
            Node("strange", n.inputs, n.outputs, n.attrs, n.mutates) if n.op == "silu_mul" else n for n in graph.nodes
        ),
        graph.inputs,
        graph.outputs,
    )
    places, cuts = places_of(strange)
    assert ops(cuts) == {"strange": 2} and reasons(strange, cuts, places)[0].startswith(
        "op strange (2 nodes, the first"
    )


def test_without_anything_apart_there_is_one_piece() -> None:
    places, cuts = places_of(dense())
    assert not places.apart and len(cuts.pieces) == 1 and cuts.host == ()
    assert cuts.pieces[0].takes == cuts.pieces[0].gives == ()


@settings(max_examples=100)
@given(
    missing=st.sets(st.sampled_from(sorted(KERNELS)), min_size=1),
    name=st.sampled_from(sorted(STEPS)),
)
@example(missing={"silu_mul"}, name="late product")
def test_every_value_is_where_it_is_read(missing: set[str], name: str) -> None:
    """The pieces and the host's nodes run in their order, each on the values of its side."""
    graph = graph_of(name)
    places, cuts = places_of(graph, KERNELS - missing)
    hosted: set[int] = set()
    on_device: set[int] = set()

    def roots(values: Collection[int | None]) -> set[int]:
        found = [graph.root(value) for value in values if value is not None]
        return {root.id for root in found if root.kind == "temp"}

    state_sides: dict[str, set[bool]] = {}
    at = 0
    performed = {
        id(node): [other for other in graph.nodes if places.absorbed.get(id(other)) is node] for node in graph.nodes
    }
    queries = {id(read): write for write in graph.nodes if (read := places.queries.get(id(write))) is not None}
    on_device |= set(cuts.pieces[0].takes)
    for node in graph.nodes:
        apart = id(node) in places.apart
        for value in node.inputs:
            if value is not None and graph.root(value).kind == "state":
                state_sides.setdefault(graph.root(value).name, set()).add(apart)
        if apart:
            while not any(node is other for other in cuts.host[at]):
                at += 1
                on_device |= set(cuts.pieces[at].takes)
            gone = set().union(*(piece.gives for piece in cuts.pieces[: at + 1]))
            assert roots(node.inputs) <= hosted | (gone & on_device)
            hosted |= roots(node.outputs)
        elif id(node) not in places.absorbed:
            while at < cuts.piece[id(node)]:
                at += 1
                assert set(cuts.pieces[at].takes) <= hosted
                on_device |= set(cuts.pieces[at].takes)
            inside = set().union(*(roots(other.outputs) for other in performed[id(node)]), roots(node.outputs))
            if id(node) in queries:
                inside |= roots(node.inputs)
            needed = roots(node.inputs).union(*(roots(other.inputs) for other in performed[id(node)])) - inside
            assert needed <= on_device
            on_device |= roots(node.outputs)
    on_device |= set(cuts.pieces[-1].takes)
    assert roots(graph.outputs) <= on_device and all(len(sides) == 1 for sides in state_sides.values())
    assert not cuts.pieces[0].takes and not cuts.pieces[-1].gives
    taken = [value for piece in cuts.pieces for value in piece.takes]
    given = [value for piece in cuts.pieces for value in piece.gives]
    assert len(set(taken)) == len(taken) and len(set(given)) == len(given) and not set(taken) & set(given)


def test_a_piece_takes_what_its_first_reader_needs_in_the_order_of_launches() -> None:
    """The first layer in the graph is launched last, with the addition; the second needs the same input a piece earlier."""
    graph = odd_graph(late_product, "square")
    _, cuts = places_of(graph, KERNELS - {"silu_mul"})
    assert [len(piece.takes) for piece in cuts.pieces] == [0, 1, 1]
    formats = {name: "f32" for name in matrix_names(graph)}
    lowered = lower(graph, formats, "f32", LIMITS, "sm_90a", KERNELS - {"silu_mul"})
    kernels = [launch.kernel.partition(".")[2] for work in lowered.works for launch in work.launches(1, 1)]
    assert kernels == ["embed", "linear", "linear", "rms_norm", "linear"]


def test_the_hosts_graph_has_the_pieces_in_their_order() -> None:
    """They follow each other, whatever the host does between; only what the host needs is in it."""
    graph = dense()
    _, cuts = places_of(graph, KERNELS - {"silu_mul"})
    made = host_graph(graph, cuts)
    assert [node.op for node in made.nodes] == [DEVICE, "silu_mul", DEVICE, "silu_mul", DEVICE]
    assert [node.attrs for node in made.nodes[::2]] == [{"piece": 0}, {"piece": 1}, {"piece": 2}]
    assert not list(made.of_kind("weight")) and not list(made.of_kind("state"))
    lowered = lower_for_cpu(made, {}, "f32", LIMITS)
    assert [call.kernel for call in lowered.calls] == [DEVICE, "SiluMul<96>", DEVICE, "SiluMul<96>", DEVICE]
    assert assign_phases(lowered.calls) == [0, 1, 2, 3, 4] and lowered.kv_page_bytes == 64
    op = lowered.calls[2].op
    assert isinstance(op, Op) and [tensor.shape for tensor in (*op.inputs, *op.outputs)] == [["T", 96]] * 3
    assert lowered.interpreted == {} and lowered.kernels == ["SiluMul<96>"]


def test_a_host_that_needs_nothing_of_the_device_runs_beside_it() -> None:
    graph = dense(1)
    _, cuts = places_of(graph, KERNELS - {"rope_angles"})
    lowered = lower_for_cpu(host_graph(graph, cuts), {}, "f32", LIMITS)
    assert [call.kernel.partition("<")[0] for call in lowered.calls] == [DEVICE, "RopeAngles", DEVICE]
    assert assign_phases(lowered.calls) == [0, 0, 1]


def test_works_of_different_pieces_share_no_phase_and_pages_hold_the_devices_states() -> None:
    graph = dense()
    formats = {name: "f32" for name in matrix_names(graph)}
    whole = lower(graph, formats, "f32", LIMITS, "sm_90a")
    lowered = lower(graph, formats, "f32", LIMITS, "sm_90a", KERNELS - {"kv_write", "rope_angles"})
    assert not any(work.cut for work in whole.works) and (whole.kv_page_bytes, lowered.kv_page_bytes) == (8192, 64)
    phases = assign_phases(lowered.works)
    alone = [phase for work, phase in zip(lowered.works, phases, strict=True) if work.cut is not None]
    assert len(alone) == 3 and all(phases.count(phase) == 1 for phase in alone)


def test_what_layers_read_is_rounded_once_by_a_launch_where_it_is_kept_in_f32() -> None:
    """The norm that the host makes is read by three layers; results of norms on the device are rounded as they are made."""
    graph = dense(1)
    formats = {name: "bf16" for name in matrix_names(graph)}

    def kernels(missing: set[str]) -> list[str]:
        lowered = lower(graph, formats, "bf16", LIMITS, "sm_90a", KERNELS - missing)
        return [launch.kernel.partition(".")[2] for work in lowered.works for launch in work.launches(1, 1)]

    assert kernels(set()).count("rounded") == 0
    assert kernels({"rms_norm"}) == [
        *("embed", "rope_angles", "rounded", "linear", "heads", "attention_split", "attention_combine", "linear"),
        *("rounded", "gate_up", "linear", "take_rows", "rounded", "linear"),
    ]
