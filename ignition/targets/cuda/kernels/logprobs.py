"""Log probabilities of rows of logits, as they leave the model: by the definition at the head of the cpu target's logprobs.h.

Two graphs use these kernels. When tokens are drawn, `params` says what is wanted, and scan and weigh (sampler.py) have made the
chunks' maxima and sums on their way; a row's token is its `sampled`. When given tokens are scored, `params` is None, the rows
begin at `first[0]`, and `maxima` and `add` come before:

1. maxima (scores alone): each chunk's highest logit.
2. add (scores alone): each chunk's sum of exp(x - highest), f64.
3. compare: how many of a chunk's tokens have a higher value than the row's token, and its own best ones, in their order.
4. collect: the row's entry of RowLogprobs.

Values are computed in f64 and rounded once; ranks and order go by what was rounded. Sums are f64 in another order than the cpu
target's: values have its bits unless they lie within their rounding, 1e-15, of the middle between two floats.
"""

from __future__ import annotations

import ctypes

import triton
import triton.language as tl

from flare.core.manifest import MAX_ALTERNATIVES, MAX_EXPLICIT_IDS
from flare.replay.cpu_interface import RowLogprobs
from ignition.targets.cuda.kernels.checks import power_of_two
from ignition.targets.cuda.kernels.exact_math import INFINITY, NEGATIVE_INFINITY, exp_nonpositive, logarithm
from ignition.targets.cuda.kernels.logit_rows import (
    ALTERNATIVES,
    CHUNK,
    EXPLICIT,
    MASKED_ROW,
    NAN_ROW,
    chunks,
    exponents,
    highest_of,
    keys,
    row_highest,
    row_sums,
    whole,
)
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer

MOST = tl.constexpr(MAX_ALTERNATIVES)
MOST_EXPLICIT = tl.constexpr(MAX_EXPLICIT_IDS)
NONE = tl.constexpr(-(2**63))  # below every ranked token


def _word(field: str) -> tl.constexpr:
    return tl.constexpr(getattr(RowLogprobs, field).offset // 4)


ENTRY = tl.constexpr(ctypes.sizeof(RowLogprobs) // 4)  # words a row
CHOSEN, RANK, COUNT, RESERVED = _word("chosen"), _word("rank"), _word("count"), _word("reserved")
IDS, VALUES, EXPLICIT_VALUES = _word("ids"), _word("values"), _word("explicit")


@triton.jit
def row_of_program(first, program, rows):
    """The row that a program's row of the grid stands for; `rows` where there is none."""
    if first is None:
        row = program
    else:
        row = tl.load(first) + program
        row = tl.where((row >= 0) & (row < rows), row, rows)
    return row


@triton.jit
def wanted_of(params, wanted, row, rows):
    """How many alternatives a row wants; -1: no log probabilities at all."""
    if params is None:
        count = tl.load(wanted + row, mask=row < rows, other=-1)
    else:
        count = whole(params, row, ALTERNATIVES)
    return tl.minimum(count, MOST)


@triton.jit
def maxima(
    logits,
    first,
    wanted,
    maxima,
    rows,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """The highest logit of a chunk, NaN if it holds one."""
    begin(PROGRAMMATIC)
    program = tl.program_id(1)
    row = row_of_program(first, program, rows)
    if wanted_of(None, wanted, row, rows) >= 0:
        offsets = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * V + offsets, mask=offsets < V, other=NEGATIVE_INFINITY)
        tl.store(maxima + program * CHUNKS + tl.program_id(0), highest_of(x))


def maxima_launch(
    logits: Pointer,
    first: Pointer,
    wanted: Pointer,
    maxima: Pointer,
    *,
    rows: int,
    all_rows: int,
    vocabulary: int,
    chunk: int = CHUNK,
) -> Launch:
    """logits: f32 [all_rows, V]; first: i32 [1]; wanted: i32 [all_rows]; maxima: f32 [rows, chunks]."""
    count = chunks(vocabulary, chunk)
    return Launch(
        "logprobs.maxima",
        {"logits": logits, "first": first, "wanted": wanted, "maxima": maxima, "rows": all_rows},
        {"V": vocabulary, "CHUNK": chunk, "CHUNKS": count},
        (count, rows, 1),
        "scan logits",
        warps=8,
    )


@triton.jit
def add(
    logits,
    first,
    wanted,
    maxima,
    sums,
    rows,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """The sum of exp(x - highest) of a chunk."""
    begin(PROGRAMMATIC)
    program = tl.program_id(1)
    row = row_of_program(first, program, rows)
    if wanted_of(None, wanted, row, rows) >= 0:
        highest = row_highest(maxima, program, CHUNKS, CHUNKS_BLOCK)
        offsets = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * V + offsets, mask=offsets < V, other=NEGATIVE_INFINITY)
        weights = exp_nonpositive(exponents(x, highest, 1.0)).to(tl.float64)
        tl.store(sums + program * CHUNKS + tl.program_id(0), tl.sum(weights, 0).to(tl.int64, bitcast=True))


def add_launch(
    logits: Pointer,
    first: Pointer,
    wanted: Pointer,
    maxima: Pointer,
    sums: Pointer,
    *,
    rows: int,
    all_rows: int,
    vocabulary: int,
    chunk: int = CHUNK,
) -> Launch:
    """As for `maxima`; sums: f64 bits [rows, chunks]."""
    count = chunks(vocabulary, chunk)
    return Launch(
        "logprobs.add",
        {"logits": logits, "first": first, "wanted": wanted, "maxima": maxima, "sums": sums, "rows": all_rows},
        {"V": vocabulary, "CHUNK": chunk, "CHUNKS": count, "CHUNKS_BLOCK": power_of_two(count)},
        (count, rows, 1),
        "add weights",
        warps=8,
    )


@triton.jit
def values_of(x, highest, log_sum):
    """Log probabilities, f32, of logits of a row."""
    if highest == INFINITY:
        values = tl.where(x == INFINITY, 0.0 - log_sum, NEGATIVE_INFINITY).to(tl.float32)
    else:
        values = ((x.to(tl.float64) - highest.to(tl.float64)) - log_sum).to(tl.float32)
    return values


@triton.jit
def ranked(values, ids):
    """Numbers that fall with the value, and among equals rise as ids fall: i64, the higher the better."""
    return ((keys(values).to(tl.int64) - 2**31) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def compare(
    logits,
    params,
    tokens,
    first,
    wanted,
    maxima,
    sums,
    above,
    best,
    rows,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """Of a chunk's tokens: how many have a higher value than the row's token, and the best ones that are wanted, ranked."""
    begin(PROGRAMMATIC)
    program = tl.program_id(1)
    row = row_of_program(first, program, rows)
    count = wanted_of(params, wanted, row, rows)
    if count >= 0:
        highest = row_highest(maxima, program, CHUNKS, CHUNKS_BLOCK)
        token = tl.load(tokens + row)
        if (highest > NEGATIVE_INFINITY) & (token >= 0) & (token < V):
            log_sum = logarithm(tl.sum(row_sums(sums, program, CHUNKS, CHUNKS_BLOCK), 0))
            start = logits + row.to(tl.int64) * V
            offsets = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
            inside = offsets < V
            values = values_of(tl.load(start + offsets, mask=inside, other=NEGATIVE_INFINITY), highest, log_sum)
            chosen = values_of(tl.load(start + token), highest, log_sum)
            place = program * CHUNKS + tl.program_id(0)
            tl.store(above + place, tl.sum((values > chosen).to(tl.int32), 0))
            ranks = tl.where(inside, ranked(values, offsets), NONE)
            for i in range(count):
                next_best = tl.max(ranks, 0)
                tl.store(best + place * MOST + i, next_best)
                ranks = tl.where(ranks == next_best, NONE, ranks)


def compare_launch(
    logits: Pointer,
    params: Pointer | None,
    tokens: Pointer,
    first: Pointer | None,
    wanted: Pointer | None,
    maxima: Pointer,
    sums: Pointer,
    above: Pointer,
    best: Pointer,
    *,
    rows: int,
    all_rows: int,
    vocabulary: int,
    chunk: int = CHUNK,
) -> Launch:
    """logits: f32 [all_rows, V]; params: i32 [rows, 22], or None, and then first: i32 [1] and wanted: i32 [all_rows];
    tokens: i32 [all_rows]; maxima: f32, sums: f64 bits, above: i32 [rows, chunks]; best: i64 [rows, chunks, 20]."""
    count = chunks(vocabulary, chunk)
    return Launch(
        "logprobs.compare",
        {
            "logits": logits,
            "params": params,
            "tokens": tokens,
            "first": first,
            "wanted": wanted,
            "maxima": maxima,
            "sums": sums,
            "above": above,
            "best": best,
            "rows": all_rows,
        },
        {
            "V": vocabulary,
            "CHUNK": chunk,
            "CHUNKS": count,
            "CHUNKS_BLOCK": power_of_two(count),
            "MOST": MAX_ALTERNATIVES,
        },
        (count, rows, 1),
        "compare values",
        warps=8,
    )


@triton.jit
def collect(
    logits,
    params,
    tokens,
    explicit_ids,
    first,
    wanted,
    outcomes,
    maxima,
    sums,
    above,
    best,
    logprobs,
    rows,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    BEST_BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """The entry of a row."""
    begin(PROGRAMMATIC)
    program = tl.program_id(0)
    row = row_of_program(first, program, rows)
    count = wanted_of(params, wanted, row, rows)
    if count >= 0:
        highest = row_highest(maxima, program, CHUNKS, CHUNKS_BLOCK)
        token = tl.load(tokens + row)
        entry = logprobs + row.to(tl.int64) * ENTRY
        real_entry = entry.to(tl.pointer_type(tl.float32))
        good = (highest > NEGATIVE_INFINITY) & (token >= 0) & (token < V)
        chosen = tl.full([], NEGATIVE_INFINITY, tl.float32)
        rank = tl.full([], 0, tl.int32)
        found = rank
        if good:
            log_sum = logarithm(tl.sum(row_sums(sums, program, CHUNKS, CHUNKS_BLOCK), 0))
            start = logits + row.to(tl.int64) * V
            chosen = values_of(tl.load(start + token), highest, log_sum)
            of_chunk = tl.arange(0, CHUNKS_BLOCK)
            rank = 1 + tl.sum(tl.load(above + program * CHUNKS + of_chunk, mask=of_chunk < CHUNKS, other=0), 0)
            found = tl.minimum(count, V)
            if count > 0:
                places = tl.arange(0, BEST_BLOCK)
                there = (places < CHUNKS * MOST) & (places % MOST < count)
                ranks = tl.load(best + program * CHUNKS * MOST + places, mask=there, other=NONE)
                for i in range(found):
                    next_best = tl.max(ranks, 0)
                    ranks = tl.where(ranks == next_best, NONE, ranks)
                    best_id = 0x7FFFFFFF - (next_best & 0x7FFFFFFF).to(tl.int32)
                    tl.store(entry + IDS + i, best_id)
                    tl.store(real_entry + VALUES + i, values_of(tl.load(start + best_id), highest, log_sum))
            if params is not None:
                place = tl.arange(0, MOST_EXPLICIT)
                there = place < whole(params, row, EXPLICIT)
                ids = tl.load(explicit_ids + row * MOST_EXPLICIT + place, mask=there, other=0)
                x = tl.load(start + ids, mask=there & (ids >= 0) & (ids < V), other=NEGATIVE_INFINITY)
                tl.store(real_entry + EXPLICIT_VALUES + place, values_of(x, highest, log_sum), mask=there)
        tl.store(real_entry + CHOSEN, chosen)
        tl.store(entry + RANK, rank)
        tl.store(entry + COUNT, found)
        tl.store(entry + RESERVED, 0)
        if outcomes is not None:
            failure = tl.where(highest == NEGATIVE_INFINITY, MASKED_ROW, NAN_ROW)
            tl.store(outcomes + row, tl.where(good, token, failure))


def collect_launch(
    logits: Pointer,
    params: Pointer | None,
    tokens: Pointer,
    explicit_ids: Pointer | None,
    first: Pointer | None,
    wanted: Pointer | None,
    outcomes: Pointer | None,
    maxima: Pointer,
    sums: Pointer,
    above: Pointer,
    best: Pointer,
    logprobs: Pointer,
    *,
    rows: int,
    all_rows: int,
    vocabulary: int,
    chunk: int = CHUNK,
) -> Launch:
    """As for `compare`; explicit_ids: i32 [rows, 128]; outcomes: i32 [all_rows], tokens or why their rows have no
    probabilities (-1: NaN, -2: all are -inf); logprobs: the words of RowLogprobs, i32 [all_rows, 172]."""
    count = chunks(vocabulary, chunk)
    return Launch(
        "logprobs.collect",
        {
            "logits": logits,
            "params": params,
            "tokens": tokens,
            "explicit_ids": explicit_ids,
            "first": first,
            "wanted": wanted,
            "outcomes": outcomes,
            "maxima": maxima,
            "sums": sums,
            "above": above,
            "best": best,
            "logprobs": logprobs,
            "rows": all_rows,
        },
        {
            "V": vocabulary,
            "CHUNKS": count,
            "CHUNKS_BLOCK": power_of_two(count),
            "MOST": MAX_ALTERNATIVES,
            "BEST_BLOCK": power_of_two(count * MAX_ALTERNATIVES),
        },
        (rows, 1, 1),
        "collect log probabilities",
    )
