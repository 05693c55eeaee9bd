"""Kernels of a tiny cuda core that computes nothing sensible, but touches everything that a replay hands over."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.programmatic import begin


@triton.jit
def write(tokens, positions, slots, table, weights, pool, STRIDE, PT: tl.constexpr, PAGE_STRIDE: tl.constexpr):
    """pool at the token's place = weights[token]; nothing for padding."""
    t = tl.program_id(0)
    position = tl.load(positions + t)
    if position >= 0:
        page = tl.load(table + tl.load(slots + t) * STRIDE + position // PT).to(tl.int64)
        tl.store(pool + page * PAGE_STRIDE + position % PT, tl.load(weights + tl.load(tokens + t)))


@triton.jit
def gather(
    positions,
    slots,
    table,
    pool,
    out,
    scale,
    STRIDE,
    PT: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    CONTEXT: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """out[t] = scale * the sum of the pool at positions 0 to the token's own. It is behind a programmatic edge."""
    begin(PROGRAMMATIC)
    t = tl.program_id(0)
    place = tl.arange(0, CONTEXT)
    there = place <= tl.load(positions + t)
    page = tl.load(table + tl.load(slots + t) * STRIDE + place // PT, mask=there, other=0).to(tl.int64)
    found = tl.load(pool + page * PAGE_STRIDE + place % PT, mask=there, other=0.0)
    tl.store(out + t, tl.sum(found, axis=0) * scale)


@triton.jit
def project(values, rows, weights, logits, V: tl.constexpr):
    """logits[r, v] = values[rows[r]] * weights[v]."""
    r = tl.program_id(0)
    v = tl.arange(0, V)
    tl.store(logits + r * V + v, tl.load(values + tl.load(rows + r)) * tl.load(weights + v))


@triton.jit
def pick(logits, params, history, masks, ids, sampled, logprobs, CONTEXT: tl.constexpr, V: tl.constexpr):
    """sampled = the likeliest token that the mask lets come, plus the sum of a history's tokens, modulo V; -1 for NaN, -2 where
    all are -inf. logprobs: that logit, rank 1, `alternatives`, and the logits of the explicit ids."""
    r = tl.program_id(0)
    v = tl.arange(0, V)
    row = params + r * 22
    found = tl.load(logits + r * V + v)
    if (tl.load(row + 16) | tl.load(row + 17)) != 0:
        word = tl.load(masks + r * ((V + 31) // 32) + v // 32)
        found = tl.where((word >> (v % 32)) & 1 != 0, found, float("-inf"))
    token = tl.argmax(found, axis=0)
    length = tl.load(row + 11)
    if (tl.load(row + 14) | tl.load(row + 15)) != 0:
        place = tl.arange(0, CONTEXT)
        token = (token + tl.sum(tl.load(history + r * CONTEXT + place, mask=place < length, other=0), axis=0)) % V
    if tl.max(found, axis=0) == float("-inf"):
        token = -2
    if tl.sum((found != found).to(tl.int32), axis=0) > 0:
        token = -1
    tl.store(sampled + r, token)
    alternatives = tl.load(row + 21)
    if alternatives >= 0:
        out = logprobs + r * 172
        if token >= 0:
            tl.store(out, tl.load(logits + r * V + token).to(tl.int32, bitcast=True))
            tl.store(out + 1, 1)
            tl.store(out + 2, alternatives)
            e = tl.arange(0, 128)
            live = e < tl.load(row + 20)
            id = tl.load(ids + r * 128 + e, mask=live, other=0)
            tl.store(out + 44 + e, tl.load(logits + r * V + id).to(tl.int32, bitcast=True), mask=live)
        else:
            tl.store(out + 1, 0)


@triton.jit
def grade(logits, first, targets, wanted, logprobs, V: tl.constexpr, ROWS: tl.constexpr):
    """logprobs of row first + r: the target's logit, rank 1 (0 for NaN), `wanted`."""
    r = tl.load(first) + tl.program_id(0)
    if r < ROWS:
        value = tl.load(logits + r * V + tl.load(targets + r))
        out = logprobs + r * 172
        tl.store(out, value.to(tl.int32, bitcast=True))
        tl.store(out + 1, (value == value).to(tl.int32))
        tl.store(out + 2, tl.load(wanted + r))
