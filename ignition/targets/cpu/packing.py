"""Bytes of a weight matrix as the cpu kernels read them: blocks of 16 rows, input dimension innermost in groups.

A matrix is [N, K]: N outputs (rows), K inputs. N is padded with zero rows to a multiple of 16; block b holds rows 16b
to 16b + 15, and blocks lie back to back, so packing a matrix in pieces of whole blocks gives the same bytes as
packing it at once. With ng = K / 32:

    q8               f16 scale[ng][16];  u8 w[ng][8][16][4]        w[g][i][r][j] = quant(16b + r, 32g + 4i + j) + 128
    q4               f16 scale[ng][16];  f16 minimum[ng][16];  u8 w[ng][4][16][4]
                     w[g][i][r][j]: low nibble of input 32g + 8i + j, high nibble of input 32g + 8i + 4 + j
    f32, f16, bf16   w[K][16]                                       w[k][r] = weight(16b + r, k)

Four consecutive inputs of 16 rows are one 64-byte vector: what one VNNI instruction multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from flare.errors import InputError
from ignition.checkpoint.tensors import LazyTensor
from ignition.quantize import GROUP, Q4, Q8, Weights, convert

BLOCK = 16
_FLOATS: dict[str, np.dtype] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}
_PIECE = 1 << 22  # values packed at a time by pack_tensor


def block_bytes(format: str, columns: int) -> int:
    """Bytes of 16 rows of `columns` inputs."""
    if format in _FLOATS:
        return columns * BLOCK * _FLOATS[format].itemsize
    if columns % GROUP:
        raise ValueError(f"{format} needs a multiple of {GROUP} inputs, not {columns}")
    return columns // GROUP * BLOCK * {"q8": 2 + 32, "q4": 2 + 2 + 16}[format]


def packed_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a packed matrix [rows, columns]."""
    return -(-rows // BLOCK) * block_bytes(format, columns)


def pack_tensors(tensors: Sequence[LazyTensor], format: str) -> Iterator[np.ndarray]:
    """Matrices joined along their rows, converted and packed: uint8 pieces. Raises InputError for joined q8 and q4."""
    if len(tensors) == 1:
        yield from pack_tensor(tensors[0], format)
        return
    if format not in _FLOATS:
        raise InputError(
            f"tensor {tensors[0].name}: joined tensors cannot be stored as {format}; use --weights bf16 or f32"
        )
    yield pack(np.concatenate([convert(tensor, format) for tensor in tensors]), format)


def pack_tensor(tensor: LazyTensor, format: str) -> Iterator[np.ndarray]:
    """A stored matrix [N, K] converted and packed: uint8 pieces whose concatenation is the packed matrix."""
    rows, columns = tensor.shape
    step = max(1, _PIECE // max(1, columns) // BLOCK) * BLOCK
    for first in range(0, rows, step):
        yield pack(convert(tensor, format, first, min(first + step, rows)), format)


def pack(weights: Weights, format: str) -> np.ndarray:
    """uint8 [packed_bytes]: a matrix in its format's arrays (see ignition.quantize), N padded with zero rows."""
    if isinstance(weights, Q8):
        scale, quant = _padded(weights.scale), _padded(weights.quant)
        blocks, groups = len(quant) // BLOCK, scale.shape[1]
        bias = (quant.view(np.uint8) ^ 0x80).reshape(blocks, BLOCK, groups, 8, 4)
        parts = [_group_major(scale), bias.transpose(0, 2, 3, 1, 4)]
    elif isinstance(weights, Q4):
        scale, minimum, quant = _padded(weights.scale), _padded(weights.minimum), _padded(weights.quant)
        blocks, groups = len(quant) // BLOCK, scale.shape[1]
        pairs = quant.reshape(blocks, BLOCK, groups, 4, 2, 4)
        bytes_ = pairs[:, :, :, :, 0] | (pairs[:, :, :, :, 1] << 4)
        parts = [_group_major(scale), _group_major(minimum), bytes_.transpose(0, 2, 3, 1, 4)]
    else:
        values = _padded(np.asarray(weights, _FLOATS[format]))
        blocks = len(values) // BLOCK
        parts = [values.reshape(blocks, BLOCK, -1).transpose(0, 2, 1)]
    flat = [np.ascontiguousarray(part).view(np.uint8).reshape(blocks, -1) for part in parts]
    return np.concatenate(flat, axis=1).reshape(-1)


def unpack(packed: np.ndarray, format: str, rows: int, columns: int) -> Weights:
    """The inverse of `pack`: uint8 [packed_bytes] to the format's arrays, padding removed. Raises ValueError on a
    wrong size.
    """
    if packed.size != packed_bytes(format, rows, columns):
        raise ValueError(
            f"{format} [{rows}, {columns}] takes {packed_bytes(format, rows, columns)} bytes, not {packed.size}"
        )
    blocks = packed.reshape(-(-rows // BLOCK), -1)
    if format in _FLOATS:
        values = np.ascontiguousarray(blocks).view(_FLOATS[format]).reshape(-1, columns, BLOCK)
        return np.ascontiguousarray(values.transpose(0, 2, 1)).reshape(-1, columns)[:rows]
    groups = columns // GROUP
    scale = _row_major(blocks[:, : groups * 32], groups)[:rows]
    if format == "q8":
        bias = blocks[:, groups * 32 :].reshape(-1, groups, 8, BLOCK, 4).transpose(0, 3, 1, 2, 4)
        return Q8(scale, (np.ascontiguousarray(bias) ^ 0x80).view(np.int8).reshape(-1, columns)[:rows])
    minimum = _row_major(blocks[:, groups * 32 : groups * 64], groups)[:rows]
    bytes_ = blocks[:, groups * 64 :].reshape(-1, groups, 4, BLOCK, 4).transpose(0, 3, 1, 2, 4)
    quant = np.stack([bytes_ & 15, bytes_ >> 4], axis=4)
    return Q4(scale, minimum, quant.reshape(-1, columns)[:rows])


def _padded(rows: np.ndarray) -> np.ndarray:
    """[N, ...] with zero rows up to a multiple of 16."""
    missing = -len(rows) % BLOCK
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows


def _group_major(scale: np.ndarray) -> np.ndarray:
    """[N, ng] to [N/16, ng, 16]."""
    return scale.reshape(-1, BLOCK, scale.shape[1]).transpose(0, 2, 1)


def _row_major(raw: np.ndarray, groups: int) -> np.ndarray:
    """Bytes of f16 [blocks][ng][16] to [16 * blocks, ng]."""
    values = np.ascontiguousarray(raw).view("<f2").reshape(-1, groups, BLOCK)
    return np.ascontiguousarray(values.transpose(0, 2, 1)).reshape(-1, groups)
