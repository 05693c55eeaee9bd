"""Draws a token from each row of logits, by the definition at the head of the cpu target's sampler.h.

Passes over a row, each a launch; a row that does not need one leaves it at once:

1. scan: penalties and mask; each chunk's highest logit and its first token.
2. weigh (candidates.py; rows that draw): each chunk's sum of weights, f64; for rows with a filter also how many tokens, and
   of what weight, reach each of 16 levels below the highest logit.
3. gather (candidates.py; rows with a filter): the tokens that reach the highest level which surely holds all that the
   first filter keeps, in the order of their ids. Where more than CAPACITY do, the next pass looks at the complete row instead.
4. choose: the token. Without filters the chunk in which the running sum exceeds the target, and the token in it. With filters
   what top_k keeps, of it what top_p keeps, of it what min_p keeps, and the draw, each as a border in the order of logits
   (prefix.py).

Weights have the cpu target's bits, and so has u. Sums are f64 too, in another order (within a chunk, then over chunks): tokens
are those of the cpu target unless a target lies within their rounding, 1e-15, of a border.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.candidates import CAPACITY
from ignition.targets.cuda.kernels.checks import power_of_two
from ignition.targets.cuda.kernels.exact_math import NEGATIVE_INFINITY, exp_nonpositive, uniform
from ignition.targets.cuda.kernels.logit_rows import (
    ALTERNATIVES,
    CHOICE,
    CHUNK,
    MASKED_ROW,
    MIN_P,
    NAN_ROW,
    POSITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    chunks,
    exponents,
    highest_of,
    inverse_temperature,
    is_filtered,
    is_masked,
    is_penalised,
    real,
    row_highest,
    row_of,
    row_sums,
    whole,
)
from ignition.targets.cuda.kernels.penalties import masked, penalised
from ignition.targets.cuda.kernels.prefix import measured, shortest_prefix
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer

BLOCK = 2048
"""Tokens that `choose` looks at together."""


@triton.jit
def scan(
    logits,
    params,
    counts,
    masks,
    adjusted,
    maxima,
    firsts,
    raw_maxima,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """The highest logit of a chunk (NaN if it holds one) and the lowest id among those that have it; with log probabilities
    wanted also the highest before penalties and mask."""
    begin(PROGRAMMATIC)
    row = tl.program_id(1)
    offsets = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < V
    start = row.to(tl.int64) * V
    place = row * CHUNKS + tl.program_id(0)
    x = tl.load(logits + start + offsets, mask=inside, other=NEGATIVE_INFINITY)
    if whole(params, row, ALTERNATIVES) >= 0:
        tl.store(raw_maxima + place, highest_of(x))
    if is_penalised(params, row):
        x = penalised(x, tl.load(counts + start + offsets, mask=inside, other=0), params, row)
    if is_masked(params, row):
        x = masked(x, tl.load(masks + row.to(tl.int64) * WORDS + offsets // 32, mask=inside, other=0), offsets)
    if is_penalised(params, row) | is_masked(params, row):
        tl.store(adjusted + start + offsets, x, mask=inside)
    highest = highest_of(x)
    tl.store(maxima + place, highest)
    tl.store(firsts + place, tl.min(tl.where(inside & (x == highest), offsets, V), 0))


def scan_launch(
    logits: Pointer,
    params: Pointer,
    counts: Pointer,
    masks: Pointer,
    adjusted: Pointer,
    maxima: Pointer,
    firsts: Pointer,
    raw_maxima: Pointer,
    *,
    rows: int,
    vocabulary: int,
    chunk: int = CHUNK,
) -> Launch:
    """logits, adjusted: f32 [rows, V]; params: i32 [rows, 22]; counts: i32 [rows, V] (penalties.py); masks: i32 [rows,
    ceil(V / 32)]; maxima, raw_maxima: f32 [rows, chunks]; firsts: i32 [rows, chunks]."""
    return Launch(
        "sampler.scan",
        {
            "logits": logits,
            "params": params,
            "counts": counts,
            "masks": masks,
            "adjusted": adjusted,
            "maxima": maxima,
            "firsts": firsts,
            "raw_maxima": raw_maxima,
        },
        {"V": vocabulary, "WORDS": -(-vocabulary // 32), "CHUNK": chunk, "CHUNKS": chunks(vocabulary, chunk)},
        (chunks(vocabulary, chunk), rows, 1),
        "scan logits",
        warps=8,
    )


@triton.jit
def draw_by_id(
    start,
    sums,
    row,
    highest,
    inverse,
    u,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    """The first token, by id, at which the running sum of weights exceeds u times the sum of all."""
    of_chunk = tl.arange(0, CHUNKS_BLOCK)
    of_chunks = row_sums(sums, row, CHUNKS, CHUNKS_BLOCK)
    target = u * tl.sum(of_chunks, 0)
    reached = tl.min(tl.where(tl.cumsum(of_chunks, 0) > target, of_chunk, CHUNKS), 0)
    last = tl.max(tl.where(of_chunks > 0.0, of_chunk, 0), 0)
    chunk = tl.minimum(reached, last)  # the last one with any weight if rounding leaves none
    running = tl.sum(tl.where(of_chunk < chunk, of_chunks, 0.0), 0)
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(start + offsets, mask=offsets < V, other=NEGATIVE_INFINITY)
    weights = exp_nonpositive(exponents(x, highest, inverse)).to(tl.float64)
    reached = tl.min(tl.where((running + tl.cumsum(weights, 0) > target) & (weights > 0.0), offsets, V), 0)
    last = tl.max(tl.where(weights > 0.0, offsets, 0), 0)
    return tl.minimum(reached, last)


@triton.jit
def draw_by_rank(start, end, total, highest, inverse, top_k, top_p, min_p, u, BLOCK: tl.constexpr):
    """The place among logits start[:end] of the drawn token; `total` is the weight of all tokens of the row."""
    key = tl.full([], 0, tl.uint32)
    place = end
    for step in range(3):  # one copy of the search instead of three: what top_k keeps, what top_p keeps, the draw
        draws = step == 2
        if draws | ((step == 0) & (top_k > 0)) | ((step == 1) & (top_p < 1.0)):
            least = tl.where(draws, min_p, 0.0)
            if draws | ((step == 1) & (top_k > 0)):
                total = measured(start, end, highest, inverse, least, key, place, True, 0, BLOCK)
            target = tl.where(draws, u, top_p.to(tl.float64)) * total
            target = tl.where(step == 0, top_k.to(tl.float64), target)
            key, place = shortest_prefix(
                start, end, highest, inverse, least, key, place, step > 0, target, draws, BLOCK
            )
    return place


@triton.jit
def choose(
    logits,
    adjusted,
    params,
    maxima,
    firsts,
    sums,
    sizes,
    candidates,
    ids,
    sampled,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """The token of a row, or why it has none."""
    begin(PROGRAMMATIC)
    row = tl.program_id(0)
    highest = row_highest(maxima, row, CHUNKS, CHUNKS_BLOCK)
    token = tl.full([], NAN_ROW, tl.int32)
    if highest == NEGATIVE_INFINITY:
        token = tl.full([], MASKED_ROW, tl.int32)
    elif highest == highest:
        if real(params, row, TEMPERATURE) > 0.0:
            start = row_of(logits, adjusted, params, row, V)
            inverse = inverse_temperature(params, row)
            u = uniform(
                whole(params, row, POSITION),
                whole(params, row, CHOICE),
                whole(params, row, SEED),
                whole(params, row, SEED + 1),
            )
            if is_filtered(params, row):
                top_k = whole(params, row, TOP_K)
                top_p = real(params, row, TOP_P)
                min_p = real(params, row, MIN_P)
                end = tl.load(sizes + row)
                compact = end <= CAPACITY
                if compact:
                    start = candidates + row.to(tl.int64) * CAPACITY
                else:
                    end = tl.full([], V, tl.int32)
                total = tl.sum(row_sums(sums, row, CHUNKS, CHUNKS_BLOCK), 0)
                token = draw_by_rank(start, end, total, highest, inverse, top_k, top_p, min_p, u, BLOCK)
                if compact:
                    token = tl.load(ids + row.to(tl.int64) * CAPACITY + token)
            else:
                token = draw_by_id(start, sums, row, highest, inverse, u, V, CHUNK, CHUNKS, CHUNKS_BLOCK)
        else:
            chunk = tl.arange(0, CHUNKS_BLOCK)
            there = chunk < CHUNKS
            best = tl.load(maxima + row * CHUNKS + chunk, mask=there, other=NEGATIVE_INFINITY) == highest
            token = tl.min(tl.where(best, tl.load(firsts + row * CHUNKS + chunk, mask=there, other=V), V), 0)
    tl.store(sampled + row, token)


def choose_launch(
    logits: Pointer,
    adjusted: Pointer,
    params: Pointer,
    maxima: Pointer,
    firsts: Pointer,
    sums: Pointer,
    sizes: Pointer,
    candidates: Pointer,
    ids: Pointer,
    sampled: Pointer,
    *,
    rows: int,
    vocabulary: int,
    chunk: int = CHUNK,
    capacity: int = CAPACITY,
    block: int = BLOCK,
) -> Launch:
    """sampled: i32 [rows]: tokens; -1: the row's logits hold NaN; -2: all are -inf after penalties and mask."""
    count = chunks(vocabulary, chunk)
    return Launch(
        "sampler.choose",
        {
            "logits": logits,
            "adjusted": adjusted,
            "params": params,
            "maxima": maxima,
            "firsts": firsts,
            "sums": sums,
            "sizes": sizes,
            "candidates": candidates,
            "ids": ids,
            "sampled": sampled,
        },
        {
            "V": vocabulary,
            "CHUNK": chunk,
            "CHUNKS": count,
            "CHUNKS_BLOCK": power_of_two(count),
            "CAPACITY": capacity,
            "BLOCK": block,
        },
        (rows, 1, 1),
        "choose tokens",
        warps=8,
    )
