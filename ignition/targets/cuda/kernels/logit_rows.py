"""What the kernels of sampling and of log probabilities share: a row's parameters, its chunks, the order of its logits.

A row of V logits lies in chunks of CHUNK; a grid has one program for each chunk of each row, and what a program finds goes to
its place in an array [rows, CHUNKS], which the next kernel reads whole. How many chunks there are depends on V alone, and
every sum runs in an order of its own that the chunk gives: rows, and the number of rows, change nothing.

Sums of f64 lie in memory as their bits, i64.
"""

from __future__ import annotations

import ctypes

import triton
import triton.language as tl

from flare.replay.cpu_interface import SampleParams
from ignition.targets.cuda.kernels.exact_math import INFINITY, LARGEST, NEGATIVE_INFINITY

CHUNK = 4096
"""Logits that one program looks at."""


def chunks(vocabulary: int, chunk: int) -> int:
    """How many chunks a row has."""
    return -(-vocabulary // chunk)


def _word(field: str) -> tl.constexpr:
    return tl.constexpr(getattr(SampleParams, field).offset // 4)


PARAMS = tl.constexpr(ctypes.sizeof(SampleParams) // 4)  # words a row
TEMPERATURE, TOP_P, MIN_P = _word("temperature"), _word("top_p"), _word("min_p")
REPETITION, PRESENCE, FREQUENCY = _word("repetition"), _word("presence"), _word("frequency")
TOP_K, CHOICE, SEED, POSITION = _word("top_k"), _word("choice"), _word("seed"), _word("position")
HISTORY_LEN, PROMPT_LEN, MASK = _word("history_len"), _word("prompt_len"), _word("mask")
EXPLICIT, ALTERNATIVES = _word("explicit"), _word("alternatives")

NAN_ROW = tl.constexpr(-1)  # instead of a token, as in maxima.h: the logits hold NaN
MASKED_ROW = tl.constexpr(-2)  # all are -inf


@triton.jit
def whole(params, row, WORD: tl.constexpr):
    """A row's parameter that is an integer."""
    return tl.load(params + row * PARAMS + WORD)


@triton.jit
def real(params, row, WORD: tl.constexpr):
    """A row's parameter that is a float."""
    return whole(params, row, WORD).to(tl.float32, bitcast=True)


@triton.jit
def is_penalised(params, row):
    changed = (real(params, row, PRESENCE) != 0.0) | (real(params, row, FREQUENCY) != 0.0)
    return changed | (real(params, row, REPETITION) != 1.0)


@triton.jit
def is_masked(params, row):
    return (whole(params, row, MASK) | whole(params, row, MASK + 1)) != 0


@triton.jit
def is_filtered(params, row):
    filtered = (real(params, row, TOP_P) < 1.0) | (real(params, row, MIN_P) > 0.0)
    return filtered | (whole(params, row, TOP_K) > 0)


@triton.jit
def inverse_temperature(params, row):
    """1 / temperature, rounded first; finite, which keeps 0 times it 0."""
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), real(params, row, TEMPERATURE))
    return tl.where(inverse < LARGEST, inverse, LARGEST)


@triton.jit
def row_of(logits, adjusted, params, row, V: tl.constexpr):
    """Where the logits lie that penalties and mask leave: the model's own where there are none."""
    if is_penalised(params, row) | is_masked(params, row):
        start = adjusted + row.to(tl.int64) * V
    else:
        start = logits + row.to(tl.int64) * V
    return start


@triton.jit
def highest_of(x):
    """The highest of a block; NaN if it holds one."""
    is_nan = x != x
    highest = tl.max(tl.where(is_nan, NEGATIVE_INFINITY, x), 0)
    return tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), highest)


@triton.jit
def row_highest(maxima, row, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """The highest of a row from those of its chunks; NaN if one is."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    return highest_of(tl.load(maxima + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=NEGATIVE_INFINITY))


@triton.jit
def row_sums(sums, row, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """The f64 sums of a row's chunks, 0 behind them."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    return tl.load(sums + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0).to(tl.float64, bitcast=True)


@triton.jit
def exponents(x, highest, inverse):
    """(x - highest) * inverse, whose exp is a token's weight; at a highest of +inf 0 for those that are there, else -inf."""
    if highest == INFINITY:
        result = tl.where(x == INFINITY, 0.0, NEGATIVE_INFINITY)
    else:
        result = (x - highest) * inverse
    return result


@triton.jit
def keys(x):
    """uint32 in the order of f32 logits, from 0x00800000 for -inf to 0xFF800000 for +inf; -0 and +0 are one."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits < 0x80000000, bits + 0x80000000, (bits ^ 0xFFFFFFFF) + 1)
