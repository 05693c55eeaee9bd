"""Penalties and masks: what becomes of a row of logits before a token is drawn from it (sampler.h, steps 1 and 2).

A row that is penalised counts its history in a row of `counts`, with atomic operations on integers, whose order changes
nothing: the sign bit is set for a token that occurs in the prompt, the bits below count it among the generated tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.exact_math import NEGATIVE_INFINITY
from ignition.targets.cuda.kernels.logit_rows import (
    CHUNK,
    FREQUENCY,
    HISTORY_LEN,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    chunks,
    is_penalised,
    real,
    whole,
)
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer

BLOCK = 1024
"""Tokens of a history that a program counts at once."""

PROGRAMS = 16
"""Programs that share one history."""

_IN_PROMPT = tl.constexpr(-(2**31))
_GENERATED = tl.constexpr(2**31 - 1)


@triton.jit
def clear_counts(params, counts, V: tl.constexpr, CHUNK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False):
    """Zeroes the counts of rows that are penalised."""
    begin(PROGRAMMATIC)
    offsets = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    row = tl.program_id(1)
    if is_penalised(params, row):
        tl.store(counts + row.to(tl.int64) * V + offsets, tl.zeros([CHUNK], tl.int32), mask=offsets < V)


def clear_counts_launch(params: Pointer, counts: Pointer, *, rows: int, vocabulary: int, chunk: int = CHUNK) -> Launch:
    """params: i32 [rows, 22], counts: i32 [rows, V]."""
    return Launch(
        "penalties.clear_counts",
        {"params": params, "counts": counts},
        {"V": vocabulary, "CHUNK": chunk},
        (chunks(vocabulary, chunk), rows, 1),
        "clear counts",
    )


@triton.jit
def count_history(
    params,
    history,
    counts,
    V: tl.constexpr,
    CONTEXT: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """Adds the history of rows that are penalised to their counts. Tokens beyond the vocabulary do not count."""
    begin(PROGRAMMATIC)
    row = tl.program_id(1)
    if is_penalised(params, row):
        length = tl.minimum(whole(params, row, HISTORY_LEN), CONTEXT)
        prompt = whole(params, row, PROMPT_LEN)
        start = history + row.to(tl.int64) * CONTEXT
        count = counts + row.to(tl.int64) * V
        for first in range(tl.program_id(0) * BLOCK, length, PROGRAMS * BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            token = tl.load(start + offsets, mask=offsets < length, other=-1)
            known = (token >= 0) & (token < V)
            marks = tl.full([BLOCK], _IN_PROMPT, tl.int32)
            tl.atomic_or(count + token, marks, mask=known & (offsets < prompt))
            tl.atomic_add(count + token, tl.full([BLOCK], 1, tl.int32), mask=known & (offsets >= prompt))


def count_history_launch(
    params: Pointer,
    history: Pointer,
    counts: Pointer,
    *,
    rows: int,
    vocabulary: int,
    max_context: int,
    block: int = BLOCK,
    programs: int = PROGRAMS,
) -> Launch:
    """history: i32 [rows, max_context]; counts: i32 [rows, V], zero where a row is penalised."""
    return Launch(
        "penalties.count_history",
        {"params": params, "history": history, "counts": counts},
        {"V": vocabulary, "CONTEXT": max_context, "BLOCK": block, "PROGRAMS": programs},
        (programs, rows, 1),
        "count history",
    )


@triton.jit
def penalised(x, count, params, row):
    """Logits after penalties, whose tokens were counted so."""
    repetition = real(params, row, REPETITION)
    divided = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = tl.where(count != 0, divided, x)
    generated = count & _GENERATED
    lowered = (x - real(params, row, FREQUENCY) * generated.to(tl.float32)) - real(params, row, PRESENCE)
    return tl.where(generated != 0, lowered, x)


@triton.jit
def masked(x, words, offsets):
    """Logits, -inf where the bit offsets % 32 of their words is not set; NaN stays NaN."""
    allowed = (words >> (offsets % 32)) & 1
    return tl.where((allowed == 0) & (x == x), NEGATIVE_INFINITY, x)
