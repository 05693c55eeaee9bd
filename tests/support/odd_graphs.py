"""Steps as no recipe of ours writes them: ops in places that kernels may not have been made for."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ignition import ops
from ignition.capture import capture
from ignition.graph import Graph
from recipes import KvSpec, Recipe, StepIO, WeightSpec

SHAPES = {"table": ((384, 64), "embedding"), "square": ((64, 64), "linear"), "freq": ((16,), "vector")}
SHAPES |= {"norm": ((64,), "vector"), "head": ((32,), "vector")}

Change = Callable[[Tensor, dict[str, Tensor], StepIO], Tensor]
"""Makes of the tokens' embeddings, f32 [T, 64], and the weights what the last norm reads."""


class Model:
    vocabulary, max_context = 384, 64


def odd_recipe(change: Change, names: str, *, states: bool = False) -> Recipe:
    """The recipe of a step that uses the weights `names`, and makes what `change` says of the tokens' embeddings."""

    def made(model: object, weights: dict[str, Tensor], io: StepIO) -> Tensor:
        x = change(ops.embed(weights["table"], io.tokens), weights, io)
        return ops.linear(ops.rms_norm(ops.take_rows(x, io.rows), weights["norm"], 1e-5), weights["table"])

    specs = {name: WeightSpec(*SHAPES[name], (name,)) for name in dict.fromkeys(("table", "norm", *names.split()))}
    kv = {"kv": KvSpec(2, 32)} if states else {}
    return Recipe("odd", ("odd",), lambda c: Model, lambda m: specs, lambda m: kv, made, lambda m, t: False)


def odd_graph(change: Change, names: str, *, states: bool = False) -> Graph:
    """The graph of such a step."""
    return capture(odd_recipe(change, names, states=states), Model)


def heads_of_their_own(x: Tensor, w: dict[str, Tensor], io: StepIO) -> Tensor:
    """Norms of heads without a projection."""
    return ops.rms_norm(x.view(-1, 2, 32), w["head"], 1e-5).view(-1, 64)


def turned(x: Tensor, w: dict[str, Tensor], io: StepIO) -> Tensor:
    """Rope without attention."""
    return ops.rope(x.view(-1, 2, 32), *ops.rope_angles(io.positions, w["freq"], 1.0)).view(-1, 64)


def straight(x: Tensor, w: dict[str, Tensor], io: StepIO) -> Tensor:
    """A linear layer of what is kept in f32."""
    return ops.linear(x, w["square"])


def unprojected(x: Tensor, w: dict[str, Tensor], io: StepIO) -> Tensor:
    """Attention whose queries, keys and values no linear layer makes."""
    q = k = v = x.view(-1, 2, 32)
    ops.kv_write(io.state["kv"], k, v, io.positions, io.slots, io.page_table)
    return ops.attention(q, io.state["kv"], io.positions, io.slots, io.page_table, 0.2, 0)


def late_queries(x: Tensor, w: dict[str, Tensor], io: StepIO) -> Tensor:
    """Attention whose queries are made behind the store of its keys and values."""
    x = ops.rms_norm(x, w["norm"], 1e-5)
    k, v = (ops.linear(x, w["square"]).view(-1, 2, 32) for _ in range(2))
    ops.kv_write(io.state["kv"], k, v, io.positions, io.slots, io.page_table)
    q = ops.linear(x, w["square"]).view(-1, 2, 32)
    return ops.attention(q, io.state["kv"], io.positions, io.slots, io.page_table, 0.2, 0)


def two_readers(x: Tensor, w: dict[str, Tensor], io: StepIO) -> Tensor:
    """Two attentions over one state."""
    x = ops.rms_norm(x, w["norm"], 1e-5)
    q, k, v = (ops.linear(x, w["square"]).view(-1, 2, 32) for _ in range(3))
    ops.kv_write(io.state["kv"], k, v, io.positions, io.slots, io.page_table)
    found = [ops.attention(q, io.state["kv"], io.positions, io.slots, io.page_table, 0.2, window) for window in (0, 2)]
    return ops.add(*found)


def late_product(x: Tensor, w: dict[str, Tensor], io: StepIO) -> Tensor:
    """A layer that is done with an addition far behind it; a later layer of the same input is done before."""
    x = ops.silu_mul(x, x)
    late, early = (ops.linear(x, w["square"]) for _ in range(2))
    return ops.add(ops.silu_mul(early, early), late)
