"""Attention for steps of many tokens: neighbours of one slot together, so that they share the reading of keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.attention_blocks import finished, first_seen, merged, nothing, over_split
from ignition.targets.cuda.kernels.attention_shape import PagedAttention
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer


@triton.jit
def attention_tile(
    q,
    k,
    v,
    positions,
    slots,
    page_table,
    out,
    exponent,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """A tile of one slot's tokens, for `SHARE` heads of a KV head and `COLUMNS` columns of values.

    A tile holds neighbours at positions of one multiple of ROWS // SHARE on. Its first token's program computes it, those of
    the others end at once; a token of padding gets zeros.
    """
    begin(PROGRAMMATIC)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PARTS: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    RUNS: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    TOGETHER: tl.constexpr = ROWS // SHARE
    # Later tokens of a slot see more, and what takes longest had better begin first.
    token = tl.num_programs(0) - 1 - tl.program_id(0)
    position, slot = tl.load(positions + token), tl.load(slots + token)
    before = tl.load(positions + token - 1, mask=token > 0, other=-2)
    slot_before = tl.load(slots + token - 1, mask=token > 0, other=-1)
    if (position % TOGETHER > 0) & (before == position - 1) & (slot_before == slot):
        return
    part = tl.program_id(1) % PARTS
    kv_head = tl.program_id(1) // PARTS // RUNS
    ahead = tl.arange(0, ROWS) // SHARE
    member = tl.program_id(1) // PARTS % RUNS * SHARE + tl.arange(0, ROWS) % SHARE
    there = (ahead < TOGETHER - position % TOGETHER) & (token + ahead < tl.num_programs(0)) & (member < GROUP)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    row = ((token + ahead).to(tl.int64) * HEADS + kv_head * GROUP + member) * HEAD_DIM
    place = out + row[:, None] + columns[None, :]
    if position < 0:
        mask = ((ahead == 0) & (member < GROUP))[:, None] & (columns < HEAD_DIM)[None, :]
        tl.store(place, tl.zeros((ROWS, COLUMNS), out.dtype.element_ty), mask=mask)
        return
    same = tl.load(slots + token + ahead, mask=there, other=-1) == slot
    here = tl.load(positions + token + ahead, mask=there, other=-1)
    at = tl.where(there & same & (here == position + ahead), here, -1)
    newest = tl.max(at, axis=0)
    width = tl.arange(0, WIDTH)
    mask = (at >= 0)[:, None] & (width < HEAD_DIM)[None, :]
    query = tl.load(q + row[:, None] + width[None, :], mask=mask, other=0.0).to(k.dtype.element_ty)
    table = page_table + slot.to(tl.int64) * PAGES
    state = nothing(ROWS, COLUMNS)
    for split in range(first_seen(position, WINDOW) // SPLIT, newest // SPLIT + 1):
        other = over_split(
            split, query, k, v, table, kv_head, part, exponent, at, position, newest,
            HEAD_DIM, PAGE_TOKENS, PAGE_STRIDE, WINDOW, SPLIT, BLOCK, ROWS, WIDTH, COLUMNS,
        )  # fmt: skip
        state = merged(state, other, at, split, WINDOW, SPLIT)
    result = finished(state).to(out.dtype.element_ty)
    tl.store(place, result, mask=(at >= 0)[:, None] & (columns < HEAD_DIM)[None, :])


def attention_tile_launch(
    shape: PagedAttention,
    q: Pointer,
    k: Pointer,
    v: Pointer,
    positions: Pointer,
    slots: Pointer,
    page_table: Pointer,
    out: Pointer,
    *,
    tokens: int,
    label: str,
) -> Launch:
    """q [T, H, DH] over the pool's k and v -> out [T, H * DH]."""
    tile = shape.tiles.many
    return Launch(
        "attention_prefill.attention_tile",
        {
            "q": q,
            "k": k,
            "v": v,
            "positions": positions,
            "slots": slots,
            "page_table": page_table,
            "out": out,
            "exponent": shape.exponent,
        },
        shape.constants(tile),
        (tokens, shape.programs(tile), 1),
        label,
        warps=tile.warps,
        stages=shape.tiles.stages,
    )
