"""What all attention kernels compute with: blocks of keys and values, in one order.

A slot's positions are cut into splits, a split into blocks, both at fixed places whatever the query. Within a split, blocks are
taken in ascending order with a running maximum (Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022), beginning
from nothing; the results of splits are merged in ascending order. A query's result is so decided by its own position and the
pages alone, if each row of a tile is computed alike wherever it stands and whatever stands beside it:

- A dot sums every element over the same columns or positions in the same order, by the same instruction of the tensor cores (of
  16 positions or columns), whatever the number of rows. A row's weights are summed by such a dot too, with ones, since an
  ordinary sum's order would follow from how a tile is spread over threads. Maxima have no order, all else is by element.
- A block that a row sees nothing of leaves its state as it was, and a hidden position has weight zero. Non-finite values would
  survive a zero weight, so blocks in which some row does not see all are computed from cleaned values, and a row that does see
  such a value becomes NaN in all columns that its program makes, as `finished` has it everywhere: all of a head's, or a part of
  128 where it has more.

That both kernels use the same instructions can be read off what the compiler writes (tests/targets/cuda). That an instruction
gives a row the same bits in every place of a tile is how tensor cores work as far as is known, and for a device to show.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONES = tl.constexpr(16)
"""Columns of ones, the fewest that a dot takes on every architecture: all give the same sum of weights."""


@triton.jit
def rows_at(base, place, columns, inside, LIMIT: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Columns of rows of the pool: zeros from column LIMIT on and, where MASKED, for positions that are not `inside`."""
    pointers = base + place[:, None] + columns[None, :]
    if MASKED:
        return tl.load(pointers, mask=inside[:, None] & (columns < LIMIT)[None, :], other=0.0)
    if PADDED:
        return tl.load(pointers, mask=(columns < LIMIT)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def over_blocks(
    state,
    query,
    k,
    v,
    table,
    head,
    part,
    exponent,
    position,
    oldest,
    newest,
    first,
    stop,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds blocks [first, stop) to `state`, the rows' (maximum [ROWS], total [ROWS, ONES], sums [ROWS, COLUMNS]).

    query [ROWS, WIDTH]; position [ROWS], below 0 for rows that are not used. Keys are read at positions oldest to newest only
    where MASKED; else every row that is used must see all of every block. `table`: the slot's row of the page table.
    """
    peak, total, sums = state
    width = tl.arange(0, WIDTH)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    for block in tl.range(first, stop, num_stages=1 if MASKED else None):
        key = block * BLOCK + tl.arange(0, BLOCK)
        inside = (key >= oldest) & (key <= newest)
        if MASKED:
            page = tl.load(table + key // PAGE_TOKENS, mask=inside, other=0)
        else:
            page = tl.load(table + key // PAGE_TOKENS)
        place = page.to(tl.int64) * PAGE_STRIDE + (head * PAGE_TOKENS + key % PAGE_TOKENS) * HEAD_DIM
        keys = rows_at(k, place, width, inside, HEAD_DIM, WIDTH > HEAD_DIM, MASKED)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * exponent
        values = rows_at(v, place, columns, inside, HEAD_DIM, WIDTH > HEAD_DIM, MASKED)
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
            finite = tl.abs(values.to(tl.float32)) < float("inf")
            broken = tl.max(tl.where(finite, 0, 1), axis=1)
            values = tl.where(finite, values, tl.zeros_like(values))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None]).to(values.dtype)
        ones = tl.full((BLOCK, ONES), 1.0, values.dtype)
        grown = tl.dot(weights, ones, total * shrink[:, None], input_precision="ieee")
        mixed = tl.dot(weights, values, sums * shrink[:, None], input_precision="ieee")
        if MASKED:
            poisoned = tl.max(tl.where(visible, broken[None, :], 0), axis=1)
            grown = tl.where(poisoned[:, None] > 0, float("nan"), grown)
            touched = position >= block * BLOCK
            if WINDOW > 0:
                touched = touched & (position - WINDOW < block * BLOCK + BLOCK - 1)
            peak = tl.where(touched, higher, peak)
            total = tl.where(touched[:, None], grown, total)
            sums = tl.where(touched[:, None], mixed, sums)
        else:
            peak, total, sums = higher, grown, mixed
    return peak, total, sums


@triton.jit
def over_split(
    split,
    query,
    k,
    v,
    table,
    head,
    part,
    exponent,
    position,
    lowest,
    newest,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Returns the rows' (maximum [ROWS], total [ROWS], sums [ROWS, COLUMNS]) over one split.

    lowest, newest: the first and last of the rows' positions.
    """
    peak, total, sums = nothing(ROWS, COLUMNS)
    state = (peak, tl.zeros((ROWS, ONES), tl.float32), sums)
    oldest = first_seen(lowest, WINDOW)
    first = tl.maximum(split * (SPLIT // BLOCK), oldest // BLOCK)
    stop = tl.minimum((split + 1) * (SPLIT // BLOCK), newest // BLOCK + 1)
    # Of the blocks in between, every row sees all.
    begin = first
    if WINDOW > 0:
        begin = tl.minimum(tl.maximum(tl.cdiv(first_seen(newest, WINDOW), BLOCK), first), stop)
        state = over_blocks(
            state, query, k, v, table, head, part, exponent, position, oldest, newest, first, begin,
            True, HEAD_DIM, PAGE_TOKENS, PAGE_STRIDE, WINDOW, BLOCK, WIDTH, COLUMNS,
        )  # fmt: skip
    end = tl.maximum(tl.minimum((lowest + 1) // BLOCK, stop), begin)
    state = over_blocks(
        state, query, k, v, table, head, part, exponent, position, oldest, newest, begin, end,
        False, HEAD_DIM, PAGE_TOKENS, PAGE_STRIDE, WINDOW, BLOCK, WIDTH, COLUMNS,
    )  # fmt: skip
    peak, total, sums = over_blocks(
        state, query, k, v, table, head, part, exponent, position, oldest, newest, end, stop,
        True, HEAD_DIM, PAGE_TOKENS, PAGE_STRIDE, WINDOW, BLOCK, WIDTH, COLUMNS,
    )  # fmt: skip
    return peak, tl.max(total, axis=1), sums


@triton.jit
def nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The state before any position: maximum -inf, total 0, sums 0."""
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    return peak, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """The first position that a token at `position` sees."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0)
    return 0


@triton.jit
def merged(state, other, position, split, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """`state` and, for rows that see something of it, the result `other` over the split behind it."""
    peak, total, sums = state
    peak2, total2, sums2 = other
    seen = position >= split * SPLIT
    if WINDOW > 0:
        seen = seen & (position - WINDOW < split * SPLIT + SPLIT - 1)
    higher = tl.maximum(peak, peak2)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, shrink2 = tl.exp2(peak - base), tl.exp2(peak2 - base)
    sums2 = sums * shrink[:, None] + sums2 * shrink2[:, None]
    total2 = total * shrink + total2 * shrink2
    return tl.where(seen, higher, peak), tl.where(seen, total2, total), tl.where(seen[:, None], sums2, sums)


@triton.jit
def finished(state):
    """Sums over totals; NaN in all columns of a row of which any is not finite."""
    peak, total, sums = state
    out = sums / total[:, None]
    broken = tl.max(tl.where(tl.abs(out) < float("inf"), 0, 1), axis=1)
    return tl.where(broken[:, None] > 0, float("nan"), out)
