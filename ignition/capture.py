"""Captures a recipe's step as a graph, the way a CUDA stream capture records launches.

The step runs on fake tensors (shapes without data) under a recording mode: every op of `ignition.ops` becomes a node,
every reshape an alias, and any other torch call is refused with the recipe's file and line. The step is captured twice,
at sizes that have nothing in common: a dimension that is the same in both captures is a constant, one that follows T or
R (or a size of the state) becomes that symbol, and anything else is refused, as is a step that takes another path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flare.errors import InputError
from ignition.graph import Dim, DType, Graph, Kind, Node, Value
from recipes import Recipe, StepIO

_DTYPES: dict[torch.dtype, DType] = {torch.float32: "f32", torch.int32: "i32"}

# Two sizes for each symbol. A pair differs in itself and from every other pair, so the two captures together tell a
# constant from a symbol, and one symbol from another, whatever the model's own sizes are.
_SIZES: dict[str, tuple[int, int]] = {
    "T": (1009, 2003),
    "R": (503, 757),
    "slots": (307, 401),
    "slot_pages": (601, 701),
    "pages": (3001, 4001),
    "page_tokens": (112, 208),
}

# Arguments that are weights, by the names that ops give them.
_MATRICES = frozenset(("table", "w"))
_VECTORS = frozenset(("weight", "bias", "inv_freq"))

_ALIASES = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default}

# Asking a fake tensor for its device or its layout is a call too; it computes nothing.
_QUERIES = {torch.ops.prim.device.default, torch.ops.prim.layout.default}

_OWN_CODE = (os.path.dirname(torch.__file__) + os.sep, __file__, str(Path(__file__).parent / "ops") + os.sep)


def capture(recipe: Recipe, model: Any) -> Graph:
    """The graph of `recipe.step` for a configured model. Same model, same graph, to the last id.

    Raises InputError, with the recipe's file and line, for a torch call outside the op set, for shapes that an op does
    not take, and for shapes or paths that depend on T or R in another way than being T or R; also for a declared weight
    or state that the step never uses.
    """
    first, second = (_record(recipe, model, {symbol: pair[i] for symbol, pair in _SIZES.items()}) for i in (0, 1))
    graph = _without_dead_nodes(_reconcile(first, second))
    names = {value.name for value in graph.values if value.alias_of is None}
    for name in (*recipe.weights(model), *recipe.states(model)):
        if name not in names:
            raise InputError(f"recipe {recipe.name}: {name} is declared but the step does not use it")
    return graph


@dataclass(slots=True)
class _Tape:
    """What one run of the step recorded, with concrete sizes, and the recipe's line that made each value and node."""

    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    value_places: list[str] = field(default_factory=list)
    node_places: list[str] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


def _record(recipe: Recipe, model: Any, size: Mapping[str, int]) -> _Tape:
    with FakeTensorMode(), torch.no_grad():
        io = StepIO(
            tokens=torch.empty(size["T"], dtype=torch.int32),
            positions=torch.empty(size["T"], dtype=torch.int32),
            slots=torch.empty(size["T"], dtype=torch.int32),
            page_table=torch.empty(size["slots"], size["slot_pages"], dtype=torch.int32),
            rows=torch.empty(size["R"], dtype=torch.int32),
            state={
                name: torch.empty(size["pages"], 2, kv.heads, size["page_tokens"], kv.head_dim)
                for name, kv in recipe.states(model).items()
            },
        )
        weights = {name: torch.empty(spec.shape) for name, spec in recipe.weights(model).items()}
        recorder = _Recorder()
        for item in fields(io):
            if item.name != "state":
                recorder.tape.inputs.append(recorder.add(getattr(io, item.name), "input", item.name))
        for name, tensor in io.state.items():
            recorder.add(tensor, "state", name)
        for name, tensor in weights.items():
            recorder.add(tensor, "weight", name)
        with recorder:
            logits = recipe.step(model, weights, io)
        if not isinstance(logits, Tensor) or logits.dtype != torch.float32 or logits.dim() != 2:
            raise InputError(f"recipe {recipe.name}: step returned {_describe(logits)}, must be logits, float32 [R, V]")
        recorder.finish(logits)
    return recorder.tape


class _Recorder(TorchDispatchMode):
    """Sees every torch call of the step. A value is known by its storage: ops make new ones, views share them."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = _Tape()
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}
        self._roots: dict[int, int] = {}
        self._keep: list[Tensor] = []  # a freed storage's address could come back as another value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUERIES:
            return func(*args, **kwargs)
        place = _place()
        if func in _ALIASES:
            result = func(*args, **kwargs)
            self.id(result, place)
            return result
        if func.namespace != "ignition":
            raise InputError(f"{place}: {func} is not an op; a step may only call ignition.ops, view and reshape")
        return self._call(func, args, kwargs, place)

    def _call(self, func: Any, args: Any, kwargs: Mapping[str, Any], place: str) -> Any:
        inputs: list[int | None] = []
        mutates: list[int] = []
        attrs: dict[str, int | float] = {}
        for index, argument in enumerate(func._schema.arguments):
            given = args[index] if index < len(args) else kwargs[argument.name]
            if "Tensor" not in str(argument.type):
                attrs[argument.name] = given
                continue
            inputs.append(None if given is None else self.id(given, place))
            if argument.alias_info is not None and argument.alias_info.is_write:
                mutates.append(self.id(given, place))
        try:
            result = func(*args, **kwargs)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        self._require_own(func, inputs, place)
        results = () if result is None else result if isinstance(result, tuple) else (result,)
        outputs = tuple(self.add(tensor, "temp", "", place) for tensor in results)
        name = func._schema.name.split("::")[1]
        self.tape.nodes.append(Node(name, tuple(inputs), outputs, attrs, tuple(mutates)))
        self.tape.node_places.append(place)
        return result

    def _require_own(self, func: Any, inputs: Iterable[int | None], place: str) -> None:
        """Kernels find the step's arrays and the weights by themselves: where an op takes an array, it must be that of the
        argument's name, where it takes a weight, one of the recipe's, and a matrix as it was declared."""
        tensors = (argument.name for argument in func._schema.arguments if "Tensor" in str(argument.type))
        for argument, id in zip(tensors, inputs, strict=True):
            if id is None:
                continue
            value = self.tape.values[id]
            view = "" if value.alias_of is None else "a view of "
            if value.kind == "input" and (view or value.name != argument):
                problem = f"{view}the step's {value.name}, must be the step's {argument}"
            elif argument in _MATRICES | _VECTORS and value.kind != "weight":
                problem = "no weight, must be one of the recipe's"
            elif argument in _MATRICES and view:
                problem = f"{view}{value.name}, must be a weight as the recipe declares it"
            else:
                continue
            raise InputError(f"{place}: op {func._schema.name.split('::')[1]}: {argument} is {problem}")

    def add(self, tensor: Tensor, kind: Kind, name: str, place: str = "the step's inputs") -> int:
        """A new value with its own storage."""
        id = len(self.tape.values)
        storage = tensor.untyped_storage()._cdata
        self._keep.append(tensor)
        self._roots[storage] = id
        self._ids[storage, tuple(tensor.shape)] = id
        self.tape.values.append(Value(id, tuple(tensor.shape), _DTYPES[tensor.dtype], kind, name))
        self.tape.value_places.append(place)
        return id

    def id(self, tensor: Tensor, place: str) -> int:
        """The id of a tensor that the step already has, under its own shape: a new alias if that shape is new."""
        storage = tensor.untyped_storage()._cdata
        key = storage, tuple(tensor.shape)
        if key not in self._ids:
            if storage not in self._roots:
                raise InputError(f"{place}: a tensor made outside the step; declare it in the recipe's weights")
            root = self.tape.values[self._roots[storage]]
            self._ids[key] = len(self.tape.values)
            self.tape.values.append(Value(self._ids[key], key[1], root.dtype, root.kind, root.name, root.id))
            self.tape.value_places.append(place)
        return self._ids[key]

    def finish(self, logits: Tensor) -> None:
        id = self.id(logits, "step's result")
        value = self.tape.values[id]
        if value.kind != "temp":
            raise InputError(f"step returned {value.name} itself, must be computed logits")
        self.tape.values[id] = Value(id, value.shape, value.dtype, "temp", "logits", value.alias_of)
        self.tape.outputs.append(id)


def _reconcile(first: _Tape, second: _Tape) -> Graph:
    """One symbolic graph of two tapes that recorded the same calls at different sizes."""
    for index in range(max(len(first.nodes), len(second.nodes))):
        if index >= len(first.nodes) or index >= len(second.nodes) or first.nodes[index] != second.nodes[index]:
            place = (first if index < len(first.nodes) else second).node_places[index]
            raise InputError(f"{place}: the step does something else at another number of tokens or rows")
    if [v.alias_of for v in first.values] != [v.alias_of for v in second.values]:
        raise InputError("step: its views are others at another number of tokens or rows")
    values: list[Value] = []
    for a, b, place in zip(first.values, second.values, first.value_places, strict=True):
        shape = tuple(_dim(x, y, place) for x, y in zip(a.shape, b.shape, strict=True))
        values.append(Value(a.id, shape, a.dtype, a.kind, a.name, a.alias_of))
    return Graph(tuple(values), tuple(first.nodes), tuple(first.inputs), tuple(first.outputs))


def _dim(x: Dim, y: Dim, place: str) -> Dim:
    if x == y:
        return x
    for symbol, pair in _SIZES.items():
        if pair == (x, y):
            return symbol
    raise InputError(f"{place}: a dimension of {x} at T={_SIZES['T'][0]} and {y} at T={_SIZES['T'][1]} is none of T, R")


def _without_dead_nodes(graph: Graph) -> Graph:
    """Drops nodes that neither the outputs nor any state depend on, then values that nothing mentions; renumbers."""
    live = {graph.root(id).id for id in graph.outputs}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.mutates or any(graph.root(id).id in live for id in node.outputs):
            kept.append(node)
            live.update(graph.root(id).id for id in node.inputs if id is not None)
    kept.reverse()
    return replace(graph, nodes=tuple(kept)).pruned()


def _place() -> str:
    """File and line of the innermost frame that is neither torch nor this exporter: the recipe's call."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_CODE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _describe(result: object) -> str:
    if isinstance(result, Tensor):
        return f"{str(result.dtype).removeprefix('torch.')} {list(result.shape)}"
    return type(result).__name__
