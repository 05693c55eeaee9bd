"""Weights of a row's tokens, and the few that its filters can keep: between the scan of a row and the draw (sampler.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.checks import power_of_two
from ignition.targets.cuda.kernels.exact_math import NEGATIVE_INFINITY, VANISHED, exp_nonpositive
from ignition.targets.cuda.kernels.logit_rows import (
    ALTERNATIVES,
    CHUNK,
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    chunks,
    exponents,
    inverse_temperature,
    is_filtered,
    real,
    row_highest,
    row_of,
    row_sums,
    whole,
)
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer

LEVELS = 16
"""Levels of the search for what a filter surely keeps."""

CAPACITY = 8192
"""Tokens of a row that `gather` may leave; a row with more costs some hundred microseconds instead of twenty."""


@triton.jit
def level_exponent(level, LEVELS: tl.constexpr):
    """The least exponent of a level: closer levels near the highest logit; the last holds all tokens that weigh anything."""
    return (level + 1) * (level + 1) * (VANISHED / (LEVELS * LEVELS))


@triton.jit
def weigh(
    logits,
    adjusted,
    params,
    maxima,
    raw_maxima,
    sums,
    raw_sums,
    level_counts,
    level_sums,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """The sum of a chunk's weights, for rows with a filter also by levels; with log probabilities wanted also the sum of
    exp(x - highest) before penalties and mask."""
    begin(PROGRAMMATIC)
    row = tl.program_id(1)
    offsets = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < V
    place = row * CHUNKS + tl.program_id(0)
    if whole(params, row, ALTERNATIVES) >= 0:
        highest = row_highest(raw_maxima, row, CHUNKS, CHUNKS_BLOCK)
        x = tl.load(logits + row.to(tl.int64) * V + offsets, mask=inside, other=NEGATIVE_INFINITY)
        weights = exp_nonpositive(exponents(x, highest, 1.0)).to(tl.float64)
        tl.store(raw_sums + place, tl.sum(weights, 0).to(tl.int64, bitcast=True))
    if real(params, row, TEMPERATURE) > 0.0:
        highest = row_highest(maxima, row, CHUNKS, CHUNKS_BLOCK)
        x = tl.load(row_of(logits, adjusted, params, row, V) + offsets, mask=inside, other=NEGATIVE_INFINITY)
        exponent = exponents(x, highest, inverse_temperature(params, row))
        weights = exp_nonpositive(exponent).to(tl.float64)
        tl.store(sums + place, tl.sum(weights, 0).to(tl.int64, bitcast=True))
        if is_filtered(params, row):
            for level in range(LEVELS):
                reached = exponent >= level_exponent(level, LEVELS)
                tl.store(level_counts + place * LEVELS + level, tl.sum(reached.to(tl.int32), 0))
                of_level = tl.sum(tl.where(reached, weights, 0.0), 0)
                tl.store(level_sums + place * LEVELS + level, of_level.to(tl.int64, bitcast=True))


def weigh_launch(
    logits: Pointer,
    adjusted: Pointer,
    params: Pointer,
    maxima: Pointer,
    raw_maxima: Pointer,
    sums: Pointer,
    raw_sums: Pointer,
    level_counts: Pointer,
    level_sums: Pointer,
    *,
    rows: int,
    vocabulary: int,
    chunk: int = CHUNK,
    levels: int = LEVELS,
) -> Launch:
    """logits, adjusted: f32 [rows, V]; maxima, raw_maxima: f32 [rows, chunks], from `scan`; sums, raw_sums: f64 bits
    [rows, chunks]; level_counts: i32 and level_sums: f64 bits [rows, chunks, levels]."""
    count = chunks(vocabulary, chunk)
    return Launch(
        "candidates.weigh",
        {
            "logits": logits,
            "adjusted": adjusted,
            "params": params,
            "maxima": maxima,
            "raw_maxima": raw_maxima,
            "sums": sums,
            "raw_sums": raw_sums,
            "level_counts": level_counts,
            "level_sums": level_sums,
        },
        {"V": vocabulary, "CHUNK": chunk, "CHUNKS": count, "CHUNKS_BLOCK": power_of_two(count), "LEVELS": levels},
        (count, rows, 1),
        "weigh tokens",
        warps=8,
    )


@triton.jit
def gather(
    logits,
    adjusted,
    params,
    maxima,
    sums,
    level_counts,
    level_sums,
    sizes,
    candidates,
    ids,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    CAPACITY: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """The logits and ids, in the order of ids, of the tokens that reach a level; their number also where that is more than
    CAPACITY, and none are written."""
    begin(PROGRAMMATIC)
    row = tl.program_id(1)
    highest = tl.full([], NEGATIVE_INFINITY, tl.float32)
    if (real(params, row, TEMPERATURE) > 0.0) & is_filtered(params, row):
        highest = row_highest(maxima, row, CHUNKS, CHUNKS_BLOCK)
    if highest > NEGATIVE_INFINITY:  # false for NaN
        top_p = real(params, row, TOP_P)
        level = tl.arange(0, LEVELS)
        of_chunk = tl.arange(0, CHUNKS_BLOCK)
        places = (row * CHUNKS + of_chunk[:, None]) * LEVELS + level[None, :]
        there = (of_chunk[:, None] < CHUNKS) & (level[None, :] >= 0)
        counts = tl.load(level_counts + places, mask=there, other=0)
        if whole(params, row, TOP_K) > 0:
            suffices = tl.sum(counts, 0) >= whole(params, row, TOP_K)
        elif top_p < 1.0:
            weights = tl.load(level_sums + places, mask=there, other=0).to(tl.float64, bitcast=True)
            total = tl.sum(row_sums(sums, row, CHUNKS, CHUNKS_BLOCK), 0)
            suffices = tl.sum(weights, 0) >= top_p.to(tl.float64) * total
        else:  # weights of tokens below a level are at most its own, but for the error of exp
            suffices = exp_nonpositive(level_exponent(level, LEVELS)) < real(params, row, MIN_P) * 0.9999
        chosen = tl.min(tl.where(suffices, level, LEVELS - 1), 0)
        counts = tl.sum(tl.where(level[None, :] == chosen, counts, 0), 1)
        size = tl.sum(counts, 0)
        if tl.program_id(0) == 0:
            tl.store(sizes + row, size)
        if size <= CAPACITY:
            offsets = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
            start = row_of(logits, adjusted, params, row, V)
            x = tl.load(start + offsets, mask=offsets < V, other=NEGATIVE_INFINITY)
            reached = exponents(x, highest, inverse_temperature(params, row)) >= level_exponent(chosen, LEVELS)
            before = tl.sum(tl.where(of_chunk < tl.program_id(0), counts, 0), 0)
            place = row * CAPACITY + before + tl.cumsum(reached.to(tl.int32), 0) - 1
            tl.store(candidates + place, x, mask=reached)
            tl.store(ids + place, offsets, mask=reached)


def gather_launch(
    logits: Pointer,
    adjusted: Pointer,
    params: Pointer,
    maxima: Pointer,
    sums: Pointer,
    level_counts: Pointer,
    level_sums: Pointer,
    sizes: Pointer,
    candidates: Pointer,
    ids: Pointer,
    *,
    rows: int,
    vocabulary: int,
    chunk: int = CHUNK,
    levels: int = LEVELS,
    capacity: int = CAPACITY,
) -> Launch:
    """sums, level_counts and level_sums: of `weigh`; sizes: i32 [rows]; candidates: f32 and ids: i32 [rows, capacity]."""
    count = chunks(vocabulary, chunk)
    return Launch(
        "candidates.gather",
        {
            "logits": logits,
            "adjusted": adjusted,
            "params": params,
            "maxima": maxima,
            "sums": sums,
            "level_counts": level_counts,
            "level_sums": level_sums,
            "sizes": sizes,
            "candidates": candidates,
            "ids": ids,
        },
        {
            "V": vocabulary,
            "CHUNK": chunk,
            "CHUNKS": count,
            "CHUNKS_BLOCK": power_of_two(count),
            "LEVELS": levels,
            "CAPACITY": capacity,
        },
        (count, rows, 1),
        "gather candidates",
        warps=8,
    )
