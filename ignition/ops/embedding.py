"""Gathers of rows: the embedding table by token, and the tokens whose logits are wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from ignition.ops.registry import define, require_activation, require_index, require_range, require_weight


def _embed_shape(table: Tensor, tokens: Tensor) -> Tensor:
    require_weight("embed", "table", table, None, None)
    require_index("embed", "tokens", tokens, None)
    return table.new_empty((tokens.shape[0], table.shape[1]), dtype=torch.float32)


def _embed(table: Tensor, tokens: Tensor) -> Tensor:
    require_range("embed", "tokens", tokens, table.shape[0])
    return table[tokens.long()].float()


def _take_rows_shape(x: Tensor, rows: Tensor) -> Tensor:
    require_activation("take_rows", "x", x, None, None)
    require_index("take_rows", "rows", rows, None)
    return x.new_empty((rows.shape[0], x.shape[1]))


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    require_range("take_rows", "rows", rows, x.shape[0])
    return x[rows.long()]


_embed_op = define("embed(Tensor table, Tensor tokens) -> Tensor", shape=_embed_shape, reference=_embed)
_take_rows_op = define("take_rows(Tensor x, Tensor rows) -> Tensor", shape=_take_rows_shape, reference=_take_rows)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """table [V, D] weight, tokens [T] int32 in [0, V) -> [T, D] f32: the row of each token."""
    return _embed_op(table, tokens)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [T, D] f32, rows [R] int32 in [0, T) -> [R, D] f32: the named rows, in the order named."""
    return _take_rows_op(x, rows)
