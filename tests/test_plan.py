"""Planning keeps what must not overlap apart: checked against brute force on random lowered graphs and on real ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recipes
from flare.core.manifest import Limits
from flare.errors import InputError
from ignition.capture import capture
from ignition.lowered import Buffer, Call, Lowered
from ignition.patterns import matrix_names
from ignition.plan import Span, assign_phases, place_buffers, plan
from ignition.targets.cpu.lower import lower

LIMITS = Limits(max_context=256, slots=4, page_tokens=16, max_step_tokens=8, max_rows=4)


@st.composite
def lowered_graphs(draw: st.DrawFn) -> Lowered:
    """Random straight-line programs: each call reads some earlier buffers and writes one new one."""
    lowered = Lowered()
    for number in range(draw(st.integers(1, 14))):
        storage = draw(st.sampled_from(["float", "quant"]))
        buffer = Buffer(number, draw(st.sampled_from(["T", "R"])), 32 * draw(st.integers(1, 5)), storage)
        reads = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        in_place = None
        same = [r for r in reads if lowered.buffers[r].bytes(LIMITS) == buffer.bytes(LIMITS)]
        if same and draw(st.booleans()):
            in_place = (number, same[0])
        lowered.buffers.append(buffer)
        operands = (*(lowered.buffers[r] for r in sorted(reads)), buffer)
        lowered.calls.append(
            Call(f"K{number}", "", operands, frozenset(f"%{r}" for r in reads), frozenset({f"%{number}"}), in_place)
        )
    return lowered


@given(lowered_graphs())
def test_no_buffer_is_overwritten_while_it_is_needed(lowered: Lowered) -> None:
    """Runs the placed program on a simulated arena whose bytes remember who wrote them last."""
    phases = assign_phases(lowered.calls)
    offsets, size = place_buffers(lowered.calls, lowered.buffers, phases, LIMITS)
    arena: list[int | None] = [None] * (size // 64 + 1)

    def cells(number: int) -> range:
        assert offsets[number] % 64 == 0
        end = offsets[number] + lowered.buffers[number].bytes(LIMITS)
        assert end <= size
        return range(offsets[number] // 64, -(-end // 64))

    for phase in range(phases[-1] + 1):
        members = [call for call, p in zip(lowered.calls, phases, strict=True) if p == phase]
        for order in (members, members[::-1]):  # members of a phase run in any order
            before = list(arena)
            for call in order:
                allowed = set() if call.in_place is None else {call.in_place[0]}
                for name in call.reads:
                    owner = int(name[1:])
                    assert all(arena[c] in {owner} | allowed for c in cells(owner)), (phase, call)
                for name in call.writes:
                    for cell in cells(int(name[1:])):
                        arena[cell] = int(name[1:])
            if order is members:
                after, arena = arena, before
        arena = after


@given(lowered_graphs())
def test_phases_respect_dependencies(lowered: Lowered) -> None:
    phases = assign_phases(lowered.calls)
    assert phases == sorted(phases) and phases[0] == 0
    written = {name: phase for call, phase in zip(lowered.calls, phases, strict=True) for name in call.writes}
    for call, phase in zip(lowered.calls, phases, strict=True):
        assert all(written[name] < phase for name in call.reads)


def dense_graph(**settings: object):
    config = dict(
        model_type="llama",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=384,
        max_position_embeddings=256,
        hidden_act="silu",
    )
    recipe = recipes.find("dense").recipe
    return capture(recipe, recipe.configure(config | settings))


def kernels_of(graph, format: str = "f32", kv: str = "f32") -> list[str]:
    formats = {name: format for name in matrix_names(graph)}
    lowered = lower(graph, formats, kv, LIMITS)
    return [call.kernel.partition("<")[0] for call in lowered.calls]


def test_a_dense_layer_becomes_eight_calls() -> None:
    layer = ["Norm", "Heads", "Heads", "Heads", "Attention", "Linear", "Norm", "GateUp", "Linear"]
    assert kernels_of(dense_graph()) == ["Embed", "RopeAngles", *layer, *layer, "Norm", "Linear"]
    # heads of 16 do not hold a quantisation group of 32: attention stays float and is quantised by a call of its own
    quantised = kernels_of(dense_graph(), "q8", "f16")
    assert quantised.count("Quantize") == 2
    assert kernels_of(dense_graph(head_dim=32), "q8", "f16").count("Quantize") == 0


def test_mlp_biases_keep_the_unfused_kernels() -> None:
    kernels = kernels_of(dense_graph(mlp_bias=True))
    assert "GateUp" not in kernels and kernels.count("SiluMul") == 2


def test_unknown_ops_and_odd_widths_are_named() -> None:
    graph = dense_graph(hidden_size=72, num_attention_heads=4, head_dim=18, intermediate_size=100)
    with pytest.raises(InputError, match="multiple of 32"):
        lower(graph, {name: "q8" for name in matrix_names(graph)}, "f16", LIMITS)


def test_a_plan_is_the_same_every_time_and_inside_its_segments() -> None:
    graph = dense_graph()
    formats = {name: "f32" for name in matrix_names(graph)}
    spans = {value.name: Span(64 * i, 64) for i, value in enumerate(graph.of_kind("weight"))}
    first, second = (plan(lower(graph, formats, "f32", LIMITS), spans, LIMITS) for _ in range(2))
    assert first == second
    assert first.io_bytes == LIMITS.max_rows * 384 * 4
    assert first.kv_page_bytes == 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, page tokens, head size, f32
    for node in first.graph.nodes:
        for arg in node.args:
            limit = {"arena": first.arena_bytes, "io": first.io_bytes, "kv": first.kv_page_bytes}.get(arg.segment)
            assert limit is None or arg.offset + arg.bytes <= limit


def test_a_residual_that_is_the_layer_s_own_input_is_not_overwritten() -> None:
    """x + linear(x): the layer still reads rows of x while it writes; (y + linear(x)) may overwrite y."""
    from torch import Tensor

    from ignition import ops
    from recipes import Recipe, WeightSpec

    def step(model: Limits, weights: dict[str, Tensor], io: recipes.StepIO) -> Tensor:
        x = ops.embed(weights["table"], io.tokens)
        y = ops.add(x, ops.linear(x, weights["square"]))
        z = ops.add(y, ops.linear(ops.rms_norm(y, weights["norm"], 1e-5), weights["square"]))
        return ops.linear(ops.take_rows(z, io.rows), weights["table"])

    shapes = {"table": ((384, 64), "embedding"), "square": ((64, 64), "linear"), "norm": ((64,), "vector")}
    specs = {name: WeightSpec(shape, role, (name,)) for name, (shape, role) in shapes.items()}

    class Model:
        vocabulary, max_context = 384, 256

    recipe = Recipe("loop", ("loop",), lambda c: Model, lambda m: specs, lambda m: {}, step, lambda m, t: False)
    graph = capture(recipe, Model)
    lowered = lower(graph, {name: "f32" for name in matrix_names(graph)}, "f32", LIMITS)
    own, other = (call for call in lowered.calls if call.kernel.startswith("Linear<Tokens"))
    offsets, _ = place_buffers(lowered.calls, lowered.buffers, assign_phases(lowered.calls), LIMITS)
    assert own.in_place is None and offsets[own.operands[0].id] != offsets[own.operands[4].id]
    assert other.in_place is not None and offsets[other.operands[3].id] == offsets[other.operands[4].id]
