"""Causal attention over the paged KV state.

`kv` is one layer's state, [pages, 2, KH, PT, DH] f32: of every page the keys, then the values, by KV head and by
position inside the page. Position p of slot s lies in page `page_table[s, p // PT]` at offset `p % PT`. Targets choose
their own storage; the page arithmetic is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ignition.ops.registry import (
    define,
    require,
    require_activation,
    require_index,
    require_range,
    require_scalar,
    require_shape,
)


def _require_paged(op: str, kv: Tensor, tokens: int, positions: Tensor, slots: Tensor, page_table: Tensor) -> None:
    require(kv.dim() == 5 and kv.shape[1] == 2, op, f"kv is {list(kv.shape)}, must be [pages, 2, KH, PT, DH]")
    require_activation(op, "kv", kv, *kv.shape)
    require_index(op, "positions", positions, tokens)
    require_index(op, "slots", slots, tokens)
    require_index(op, "page_table", page_table, None, None)


def _kv_write_shape(kv: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor) -> None:
    require_shape("kv_write", "k", k, None, None, None)
    _require_paged("kv_write", kv, k.shape[0], positions, slots, page_table)
    heads, head_dim = kv.shape[2], kv.shape[4]
    require_activation("kv_write", "k", k, None, heads, head_dim)
    require_activation("kv_write", "v", v, *k.shape)


def _kv_write(kv: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor) -> None:
    page_tokens = kv.shape[3]
    require_range("kv_write", "slots", slots, page_table.shape[0])
    require_range("kv_write", "positions", positions, page_table.shape[1] * page_tokens)
    page = page_table[slots.long(), (positions // page_tokens).long()].long()
    require_range("kv_write", "page_table", page, kv.shape[0])
    offset = (positions % page_tokens).long()
    kv[page, 0, :, offset] = k
    kv[page, 1, :, offset] = v


def _attention_shape(
    q: Tensor, kv: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, scale: float, window: int
) -> Tensor:
    require_activation("attention", "q", q, None, None, None)
    _require_paged("attention", kv, q.shape[0], positions, slots, page_table)
    tokens, heads, head_dim = q.shape
    require(kv.shape[4] == head_dim, "attention", f"q has head size {head_dim}, kv has {kv.shape[4]}")
    require(heads % kv.shape[2] == 0, "attention", f"{heads} query heads are not a multiple of {kv.shape[2]} KV heads")
    require_scalar("attention", "scale", scale)
    require(window >= 0, "attention", f"window is {window}, must be 0 (none) or more")
    return q.new_empty((tokens, heads * head_dim))


def _attention(
    q: Tensor, kv: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, scale: float, window: int
) -> Tensor:
    tokens, heads, head_dim = q.shape
    kv_heads, page_tokens = kv.shape[2], kv.shape[3]
    require_range("attention", "slots", slots, page_table.shape[0])
    require_range("attention", "positions", positions, page_table.shape[1] * page_tokens)
    out = torch.empty((tokens, heads * head_dim), dtype=torch.float32)
    for slot in slots.unique().tolist():
        mine = (slots == slot).nonzero().flatten()
        position = positions[mine].long()
        # Pages before the first key that any of these tokens sees are not touched: their table entries may be stale.
        first_key = max(0, int(position.min()) - window + 1) if window else 0
        first_page, last_page = first_key // page_tokens, int(position.max()) // page_tokens
        pages = page_table[slot, first_page : last_page + 1].long()
        require_range("attention", "page_table", pages, kv.shape[0])
        key, value = kv[pages].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)
        key_position = torch.arange(first_page * page_tokens, (last_page + 1) * page_tokens)
        visible = key_position <= position[:, None]
        if window:
            visible &= key_position > position[:, None] - window
        query = q[mine].view(len(mine), kv_heads, heads // kv_heads, head_dim)
        scores = torch.einsum("tkgd,ksd->kgts", query, key) * scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        # Hidden positions may hold anything, even NaN, which a zero weight would not silence.
        value = value.masked_fill(~visible.any(dim=0)[:, None], 0.0)
        out[mine] = torch.einsum("kgts,ksd->tkgd", weights, value).reshape(len(mine), heads * head_dim)
    return out


_kv_write_op = define(
    "kv_write(Tensor(a!) kv, Tensor k, Tensor v, Tensor positions, Tensor slots, Tensor page_table) -> ()",
    shape=_kv_write_shape,
    reference=_kv_write,
)
_attention_op = define(
    "attention(Tensor q, Tensor kv, Tensor positions, Tensor slots, Tensor page_table, float scale, int window)"
    " -> Tensor",
    shape=_attention_shape,
    reference=_attention,
)


def kv_write(kv: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor) -> None:
    """Stores k, v [T, KH, DH] f32 at the tokens' places in `kv`, in place.

    kv [pages, 2, KH, PT, DH]; positions and slots [T] int32; page_table [slots, pages of a slot] int32.
    """
    _kv_write_op(kv, k, v, positions, slots, page_table)


def attention(
    q: Tensor, kv: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, scale: float, window: int = 0
) -> Tensor:
    """q [T, H, DH] f32 -> [T, H*DH]: softmax(scale q k^T) v over the slot's own keys at positions <= the token's.

    Query head h reads KV head h // (H / KH) (Ainslie et al., "GQA", 2023). window > 0 hides keys at positions
    <= position - window, as `sliding_window` of transformers. The step's own keys must have been written before.
    """
    return _attention_op(q, kv, positions, slots, page_table, scale, window)
