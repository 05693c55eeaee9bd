"""Attention for steps of few tokens: a token's splits side by side, then put together."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.attention_blocks import finished, first_seen, merged, nothing, over_split
from ignition.targets.cuda.kernels.attention_shape import PagedAttention
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer

PROGRAMS = 512
"""As many programs as keep a large device busy; with more tokens, a program takes several splits, one after the other."""


@triton.jit
def attention_split(
    q,
    k,
    v,
    positions,
    slots,
    page_table,
    partials,
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
    SPLITS: tl.constexpr,
    PARTIAL: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """Every num_programs(2)-th split that a token sees, for `SHARE` heads of a KV head and `COLUMNS` columns of values.

    partials [T, SPLITS, HEADS, PARTIAL]: sums [HEAD_DIM], then maximum and total of each part of the columns.
    """
    begin(PROGRAMMATIC)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PARTS: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    RUNS: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    token = tl.program_id(0)
    position = tl.load(positions + token)
    if position < 0:
        return
    part = tl.program_id(1) % PARTS
    kv_head = tl.program_id(1) // PARTS // RUNS
    member = tl.program_id(1) // PARTS % RUNS * SHARE + tl.arange(0, ROWS)
    used = (tl.arange(0, ROWS) < SHARE) & (member < GROUP)
    at = tl.where(used, position, -1)
    head = kv_head * GROUP + member
    width = tl.arange(0, WIDTH)
    row = (token.to(tl.int64) * HEADS + head) * HEAD_DIM
    mask = used[:, None] & (width < HEAD_DIM)[None, :]
    query = tl.load(q + row[:, None] + width[None, :], mask=mask, other=0.0).to(k.dtype.element_ty)
    table = page_table + tl.load(slots + token).to(tl.int64) * PAGES
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    first = first_seen(position, WINDOW) // SPLIT
    for split in range(first + tl.program_id(2), position // SPLIT + 1, tl.num_programs(2)):
        peak, total, sums = over_split(
            split, query, k, v, table, kv_head, part, exponent, at, position, position,
            HEAD_DIM, PAGE_TOKENS, PAGE_STRIDE, WINDOW, SPLIT, BLOCK, ROWS, WIDTH, COLUMNS,
        )  # fmt: skip
        place = partials + ((token.to(tl.int64) * SPLITS + split) * HEADS + head) * PARTIAL
        tl.store(place[:, None] + columns[None, :], sums, mask=used[:, None] & (columns < HEAD_DIM)[None, :])
        tl.store(place + HEAD_DIM + 2 * part, peak, mask=used)
        tl.store(place + HEAD_DIM + 2 * part + 1, total, mask=used)


@triton.jit
def attention_combine(
    positions,
    partials,
    out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTIAL: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """One part of one head of a token's output, of its splits; zeros for a token of padding."""
    begin(PROGRAMMATIC)
    token, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + token)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    one = tl.zeros((1,), tl.int32)
    state = nothing(1, COLUMNS)
    first = first_seen(position, WINDOW) // SPLIT
    stop = tl.where(position < 0, first, position // SPLIT + 1)
    for split in range(first, stop):
        place = partials + ((token.to(tl.int64) * SPLITS + split) * HEADS + head) * PARTIAL
        peak = tl.load(place + HEAD_DIM + 2 * part + one)
        total = tl.load(place + HEAD_DIM + 2 * part + 1 + one)
        sums = tl.load(place + columns, mask=columns < HEAD_DIM, other=0.0)
        state = merged(state, (peak, total, sums), position + one, split, WINDOW, SPLIT)
    result = tl.where(position < 0, 0.0, finished(state))
    place = out + (token.to(tl.int64) * HEADS + head) * HEAD_DIM
    tl.store(place + columns, result.to(out.dtype.element_ty), mask=columns < HEAD_DIM)


def attention_split_launch(
    shape: PagedAttention,
    q: Pointer,
    k: Pointer,
    v: Pointer,
    positions: Pointer,
    slots: Pointer,
    page_table: Pointer,
    partials: Pointer,
    *,
    tokens: int,
    label: str,
) -> Launch:
    """q [T, H, DH] over the pool's k and v -> partials [T, splits, H, DH + 8] f32, of the splits that the tokens see."""
    tile = shape.tiles.few
    programs = shape.programs(tile)
    lanes = min(shape.splits, max(1, PROGRAMS // (tokens * programs)))
    return Launch(
        "attention_decode.attention_split",
        {
            "q": q,
            "k": k,
            "v": v,
            "positions": positions,
            "slots": slots,
            "page_table": page_table,
            "partials": partials,
            "exponent": shape.exponent,
        },
        {**shape.constants(tile), "SPLITS": shape.splits, "PARTIAL": shape.partial},
        (tokens, programs, lanes),
        label,
        warps=tile.warps,
        stages=shape.tiles.stages,
    )


def attention_combine_launch(
    shape: PagedAttention, positions: Pointer, partials: Pointer, out: Pointer, *, tokens: int, label: str
) -> Launch:
    """partials of attention_split -> out [T, H * DH]."""
    return Launch(
        "attention_decode.attention_combine",
        {"positions": positions, "partials": partials, "out": out},
        {
            "HEADS": shape.heads,
            "HEAD_DIM": shape.head_dim,
            "WINDOW": shape.narrow_window,
            "SPLIT": shape.split,
            "COLUMNS": shape.columns,
            "SPLITS": shape.splits,
            "PARTIAL": shape.partial,
        },
        (tokens, shape.heads, shape.parts),
        label,
        warps=1,
        stages=1,
    )
