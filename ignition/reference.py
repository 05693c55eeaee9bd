"""The reference model: a recipe's step run with the torch references of the ops. It is the oracle's truth.

It runs either the recipe's own step or the captured graph, node by node; the two agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flare.errors import InputError
from ignition import ops
from ignition.graph import Graph, Node
from recipes import Recipe, StepIO, WeightSpec


def run_graph(graph: Graph, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Runs a graph's nodes in order and returns its outputs.

    tensors: every input, weight and state by name; states are updated in place. Temporaries are freed after their last
    use.
    """
    memory: dict[int, Tensor] = {
        value.id: tensors[value.name] for value in graph.values if value.kind != "temp" and value.alias_of is None
    }
    last_use = {root: node for node in graph.nodes for root in _roots(graph, node)}
    outputs = {graph.root(id).id for id in graph.outputs}
    symbols = _symbols(graph, memory)

    def tensor(id: int) -> Tensor:
        value = graph.values[id]
        stored = memory[graph.root(id).id]
        if value.alias_of is None:
            return stored
        return stored.view([symbols[dim] if isinstance(dim, str) else dim for dim in value.shape])

    for node in graph.nodes:
        arguments = [None if id is None else tensor(id) for id in node.inputs]
        for id, result in zip(node.outputs, _run_node(node, arguments), strict=True):
            memory[id] = result
        for root in _roots(graph, node):
            if last_use[root] is node and graph.values[root].kind == "temp" and root not in outputs:
                del memory[root]
    return tuple(tensor(id) for id in graph.outputs)


def _roots(graph: Graph, node: Node) -> set[int]:
    return {graph.root(id).id for id in (*node.inputs, *node.outputs) if id is not None}


def _run_node(node: Node, arguments: list[Tensor | None]) -> tuple[Tensor, ...]:
    result = getattr(ops, node.op)(*arguments, **node.attrs)
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def _symbols(graph: Graph, memory: Mapping[int, Tensor]) -> dict[str, int]:
    """What T, R and the sizes of the state are in this run, from the shapes of what is given."""
    symbols: dict[str, int] = {}
    for id, tensor in memory.items():
        value = graph.values[id]
        if len(value.shape) != tensor.dim():
            raise InputError(f"{value.name} has {tensor.dim()} dimensions, the graph wants {len(value.shape)}")
        for dim, size in zip(value.shape, tensor.shape, strict=True):
            if (symbols.setdefault(dim, size) if isinstance(dim, str) else dim) != size:
                raise InputError(f"{value.name} is {list(tensor.shape)}, the graph wants {list(value.shape)}")
    return symbols


class ReferenceModel:
    """A configured model with its weights and a paged KV pool.

    tensors: the checkpoint's tensors by name, torch or numpy, float32, bfloat16 or float16; they are kept as they are
    given, and widened one matrix at a time. pages x page_tokens: the pool. graph: run it instead of the recipe's step.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        tensors: Mapping[str, Any],
        *,
        pages: int = 64,
        page_tokens: int = 16,
        graph: Graph | None = None,
    ) -> None:
        self.page_tokens = page_tokens
        self.pages = pages
        self._recipe = recipe
        self._model = model
        self._graph = graph
        self._weights = {name: _load(name, spec, tensors) for name, spec in recipe.weights(model).items()}
        self._state = {
            name: torch.zeros(pages, 2, kv.heads, page_tokens, kv.head_dim) for name, kv in recipe.states(model).items()
        }

    @torch.no_grad()
    def step(
        self,
        tokens: Iterable[int],
        positions: Iterable[int],
        slots: Iterable[int],
        page_table: Sequence[Sequence[int]],
        rows: Iterable[int],
    ) -> Tensor:
        """One ragged step -> logits [R, vocabulary] float32. Updates the KV pool."""
        io = StepIO(_index(tokens), _index(positions), _index(slots), _index(page_table), _index(rows), self._state)
        if self._graph is None:
            return self._recipe.step(self._model, self._weights, io)
        inputs = {name: getattr(io, name) for name in ("tokens", "positions", "slots", "page_table", "rows")}
        return run_graph(self._graph, {**inputs, **self._weights, **self._state})[0]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [len(tokens), vocabulary] after each token of one sequence, computed in one step."""
        count = len(tokens)
        return self.step(tokens, range(count), [0] * count, self._own_pages(count), range(count))

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """`count` tokens after the prompt, each the most likely one (the lowest id of equals), and the logits
        [count, vocabulary] that they were chosen from."""
        table = self._own_pages(len(prompt) + count)
        fed, position = list(prompt), 0
        chosen: list[int] = []
        logits: list[Tensor] = []
        for _ in range(count):
            positions = range(position, position + len(fed))
            logits.append(self.step(fed, positions, [0] * len(fed), table, [len(fed) - 1])[0])
            position += len(fed)
            fed = [int(logits[-1].argmax())]
            chosen += fed
        return chosen, torch.stack(logits)

    def _own_pages(self, count: int) -> list[list[int]]:
        needed = -(-count // self.page_tokens)
        if needed > self.pages:
            raise InputError(f"{count} tokens need {needed} pages of {self.page_tokens}, the pool has {self.pages}")
        return [list(range(needed))]


def _load(name: str, spec: WeightSpec, tensors: Mapping[str, Any]) -> Tensor:
    if spec.value is not None:
        return torch.tensor(spec.value, dtype=torch.float32).view(spec.shape)
    parts = []
    for source in spec.sources:
        if source not in tensors:
            raise InputError(f"the checkpoint has no tensor {source}")
        given = tensors[source]
        parts.append(torch.from_numpy(given) if isinstance(given, np.ndarray) else given.detach())
    tensor = (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()
    if tuple(tensor.shape) != spec.shape:
        raise InputError(f"{name} is {list(tensor.shape)} in the checkpoint, config.json says {list(spec.shape)}")
    return tensor


def _index(values: Iterable[Any]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
