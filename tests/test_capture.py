"""Capture: the graph computes what the step computes, says so readably, and nothing outside the op set gets in."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from flare.errors import InputError
from ignition import ops
from ignition.capture import capture
from ignition.graph import Graph
from recipes import KvSpec, Recipe, StepIO, WeightSpec, dense
from tests.recipes.families import CONFIGURATIONS, make

LISTING = """\
input  tokens: i32[T]
input  positions: i32[T]
input  slots: i32[T]
input  page_table: i32[slots, slot_pages]
input  rows: i32[R]
state  kv: f32[pages, 2, 1, page_tokens, 4]
%8: f32[T, 4] = embed(table, tokens)
%9: f32[T, 4] = rms_norm(%8, norm, eps=0.5)
kv_write(kv, %9[T, 1, 4], %8[T, 1, 4], positions, slots, page_table)
%12: f32[T, 4] = attention(%9[T, 1, 4], kv, positions, slots, page_table, scale=0.5, window=3)
%13: f32[R, 4] = take_rows(%12, rows)
%14: f32[R, 9] = linear(%13, table, none)
output logits = %14: f32[R, 9]"""


def small_step(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    x = ops.embed(weights["table"], io.tokens)
    y = ops.rms_norm(x, weights["norm"], 0.5)
    k, v = y.view(-1, 1, 4), x.reshape(-1, 1, 4)
    ops.kv_write(io.state["kv"], k, v, io.positions, io.slots, io.page_table)
    ops.add(x, y)  # dead: nobody reads it
    z = ops.attention(k.contiguous(), io.state["kv"], io.positions, io.slots, io.page_table, 0.5, 3)
    return ops.linear(ops.take_rows(z.view(-1, 2, 2).flatten(1), io.rows), weights["table"])


def recipe_of(step: Callable[..., Any], **extra: WeightSpec) -> Recipe:
    specs = {
        "table": WeightSpec((9, 4), "embedding", ("table",)),
        "norm": WeightSpec((4,), "vector", ("norm",)),
        **extra,
    }
    return Recipe(
        name="small",
        model_types=("small",),
        configure=dict,
        weights=lambda model: specs,
        states=lambda model: {"kv": KvSpec(1, 4)},
        step=step,
        ignored=lambda model, tensor: False,
    )


def test_a_graph_reads_as_a_listing() -> None:
    assert str(capture(recipe_of(small_step), None)) == LISTING


def test_views_are_aliases_and_updates_stay_in_place() -> None:
    graph = capture(recipe_of(small_step), None)
    write = next(node for node in graph.nodes if node.op == "kv_write")
    assert write.outputs == () and write.mutates == (next(value for value in graph.values if value.name == "kv").id,)
    key = graph.values[write.inputs[1]]
    assert key.shape == ("T", 1, 4) and graph.root(key.id).shape == ("T", 4)
    assert [node.op for node in graph.consumers(key.id)] == ["kv_write", "attention"]
    assert [value.name for value in graph.of_kind("weight")] == ["table", "norm"]
    assert all(value.id == index for index, value in enumerate(graph.values))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_is_captured_and_the_same_each_time(name: str) -> None:
    model = dense.configure(make(name).config)
    graph = capture(dense.RECIPE, model)
    assert graph == capture(dense.RECIPE, model)
    assert {value.name for value in graph.of_kind("weight")} == set(dense.weights(model))
    assert [graph.values[id].name for id in graph.inputs] == ["tokens", "positions", "slots", "page_table", "rows"]
    assert graph.values[graph.outputs[0]].shape == ("R", model.vocabulary)
    _check_integrity(graph)


def _check_integrity(graph: Graph) -> None:
    """Every temporary is made exactly once and before it is used, and all that is made is used."""
    made = {value.id for value in graph.values if value.kind != "temp" and value.alias_of is None}
    used = set(graph.outputs)
    for node in graph.nodes:
        for id in node.inputs:
            if id is not None:
                assert graph.root(id).id in made
                used.add(graph.root(id).id)
        for id in node.outputs:
            assert id not in made
            made.add(id)
        used.update(graph.root(id).id for id in node.mutates)
    assert {graph.root(id).id for id in used} >= made - set(graph.inputs)


def _calls_torch(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    x = ops.embed(weights["table"], io.tokens)
    return x * 2


def _makes_a_tensor(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    return ops.add(ops.embed(weights["table"], io.tokens), torch.ones(3, 4))


def _reads_a_value(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    return small_step(model, weights, io) if io.tokens[0].item() else None


def _updates_in_place(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    x = ops.embed(weights["table"], io.tokens)
    return x.add_(1)


def _transposes(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    return ops.embed(weights["table"], io.tokens).t().contiguous()


def _gives_wrong_shapes(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    return ops.rms_norm(ops.embed(weights["table"], io.tokens), weights["table"], 1e-5)


def _merges_tokens(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    x = ops.embed(weights["table"], io.tokens)
    return ops.linear(x.view(-1, 1, 2), weights["table"])


def _scales_tokens(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    x = ops.embed(weights["table"], io.tokens).view(-1, 2)
    return ops.add(x, x)


def _depends_on_the_count(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    x = ops.embed(weights["table"], io.tokens)
    return ops.add(x, x) if len(io.tokens) > 1500 else x


def _embeds_positions(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    x = ops.embed(weights["table"], io.tokens)
    return ops.add(x, ops.embed(weights["table"], io.positions))


def _multiplies_activations(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    x = ops.embed(weights["table"], io.tokens)
    return ops.linear(x, x)


def _turns_a_weight(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    x = ops.embed(weights["table"], io.tokens)
    return ops.linear(x.view(-1, 2, 2).flatten(1), weights["norm"].view(1, 4))


def _takes_pages(model: Any, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    return ops.take_rows(ops.embed(weights["table"], io.tokens), io.page_table.view(-1))


@pytest.mark.parametrize(
    ("step", "line", "problem"),
    [
        (_calls_torch, 2, "aten.mul.Tensor is not an op"),
        (_makes_a_tensor, 1, "aten.ones.default is not an op"),
        (_reads_a_value, 1, "aten.select.int is not an op"),
        (_updates_in_place, 2, "aten.add_.Tensor is not an op"),
        (_transposes, 1, "aten.t.default is not an op"),
        (_gives_wrong_shapes, 1, r"op rms_norm: weight is \[9, 4\], must be \[4\]"),
        (_merges_tokens, 2, r"op linear: x is \[2018, 1, 2\], must be \[\*, \*\]"),
        (_scales_tokens, 1, "a dimension of 2018 at T=1009 and 4006 at T=2003"),
        (_embeds_positions, 2, "op embed: tokens is the step's positions, must be the step's tokens"),
        (_takes_pages, 1, "op take_rows: rows is a view of the step's page_table, must be the step's rows"),
        (_multiplies_activations, 2, "op linear: w is no weight, must be one of the recipe's"),
        (_turns_a_weight, 2, "op linear: w is a view of norm, must be a weight as the recipe declares it"),
        (_depends_on_the_count, 2, "something else at another number of tokens or rows"),
    ],
)
def test_what_is_not_an_op_is_refused_with_the_recipes_line(step: Callable[..., Any], line: int, problem: str) -> None:
    number = inspect.getsourcelines(step)[1] + line
    with pytest.raises(InputError, match=rf"test_capture\.py:{number}: .*{problem}"):
        capture(recipe_of(step), None)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (lambda model, weights, io: None, "returned NoneType"),
        (lambda model, weights, io: io.tokens, r"returned int32 \[1009\]"),
        (lambda model, weights, io: weights["table"], "returned table itself"),
        (
            lambda model, weights, io: ops.embed(weights["table"], io.tokens),
            "norm is declared but the step does not use it",
        ),
    ],
)
def test_a_step_that_is_not_one_is_refused(step: Callable[..., Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        capture(recipe_of(step), None)


def test_a_tensor_from_outside_the_step_is_refused() -> None:
    hidden = torch.ones(9, 4)
    with pytest.raises(InputError, match=r"test_capture\.py:\d+: a tensor made outside the step"):
        capture(recipe_of(lambda model, weights, io: ops.embed(hidden, io.tokens)), None)


def test_an_unused_state_is_refused() -> None:
    model = dense.configure(make("llama").config)
    recipe = dataclasses.replace(
        dense.RECIPE, states=lambda model: {**dense.states(model), "kv.left over": KvSpec(1, 2)}
    )
    with pytest.raises(InputError, match="kv.left over is declared"):
        capture(recipe, model)
