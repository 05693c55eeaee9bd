"""Bytes of a weight matrix as the cuda kernels read them: row-major arrays, each 64-byte aligned, one after the other.

A matrix is [N, K]: N outputs (rows), K inputs. With ng = K / 32:

    f32, bf16, f16   w[N][K]
    q8               i8 w[N][K];  f16 scale[N][ng]                      value = scale * w
    q4               u8 w[N][K/2];  f16 scale[N][ng];  f16 minimum[N][ng]    value = scale * quant + minimum
                     byte j of a group's 16: low nibble of its input j, high nibble of its input 16 + j
    fp8              e4m3 w[N][K];  f32 scale[N]                        value = scale * w

Matrices that are joined along their rows are packed as the one matrix that they make.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from ignition.checkpoint.tensors import LazyTensor
from ignition.plan import ALIGNMENT, Span
from ignition.quantize import GROUP, Q4, Q8, Fp8, Weights, convert

_PIECE = 1 << 22  # values packed at a time by pack_tensors
_FLOATS = {"f32": 4, "f16": 2, "bf16": 2}


def arrays(format: str, rows: int, columns: int) -> tuple[Span, ...]:
    """Where each array of a packed matrix lies inside it: the matrix's own, then scales, then minimums."""
    if format in ("q8", "q4") and columns % GROUP:
        raise ValueError(f"{format} needs a multiple of {GROUP} inputs, not {columns}")
    scales = 2 * rows * (columns // GROUP)
    sizes = {
        "q8": (rows * columns, scales),
        "q4": (rows * columns // 2, scales, scales),
        "fp8": (rows * columns, 4 * rows),
    }.get(format) or (rows * columns * _FLOATS[format],)
    spans, offset = [], 0
    for size in sizes:
        spans.append(Span(offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(spans)


def packed_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a packed matrix [rows, columns]."""
    last = arrays(format, rows, columns)[-1]
    return last.offset + last.bytes


def pack_tensors(tensors: Sequence[LazyTensor], format: str) -> Iterator[np.ndarray]:
    """Stored matrices [N, K], joined along N, converted and packed: uint8 pieces whose concatenation is the packed matrix."""
    columns = tensors[0].shape[-1]
    spans = arrays(format, sum(tensor.rows for tensor in tensors), columns)
    step = max(1, _PIECE // max(1, columns))
    rest: list[list[np.ndarray]] = [[] for _ in spans[1:]]
    for tensor in tensors:
        for first in range(0, tensor.rows, step):
            own, *others = _row_major(convert(tensor, format, first, min(first + step, tensor.rows)), format)
            yield own
            for kept, other in zip(rest, others, strict=True):
                kept.append(other)
    for before, span, pieces in zip(spans, spans[1:], rest, strict=False):
        yield from chain([np.zeros(span.offset - before.offset - before.bytes, np.uint8)], pieces)


def _row_major(weights: Weights, format: str) -> list[np.ndarray]:
    """The arrays of some rows, as bytes."""
    if isinstance(weights, Q8):
        parts = [weights.quant, weights.scale]
    elif isinstance(weights, Q4):
        halves = weights.quant.reshape(len(weights.quant), -1, 2, GROUP // 2)
        parts = [halves[:, :, 0] | halves[:, :, 1] << 4, weights.scale, weights.minimum]
    elif isinstance(weights, Fp8):
        parts = [weights.quant, weights.scale]
    else:
        parts = [np.asarray(weights, f"<{'u' if format == 'bf16' else 'f'}{_FLOATS[format]}")]
    return [np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts]
