"""Packed weights and quantised activations of the cpu target, written down a second time from the format's description.

The product has its own packing; tests of kernels use this one, so that an error in either shows.
"""

from __future__ import annotations

import numpy as np

BLOCK = 16
GROUP = 32


def activation_row_bytes(k: int) -> int:
    """Bytes of one quantised row of k activations: int8 q, then f32 scale, f32 sum and int32 correction a group."""
    return (k + 12 * (k // GROUP) + 63) // 64 * 64


def pack_activations(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Rows from q int8 [T, K] and scale f32 [T, K/32]: u8 [T, row bytes]."""
    count, k = q.shape
    sums = q.reshape(count, -1, GROUP).sum(axis=2, dtype=np.int32)
    rows = np.zeros((count, activation_row_bytes(k)), np.uint8)
    parts = (q, scale.astype(np.float32), scale.astype(np.float32) * sums.astype(np.float32), -128 * sums)
    at = 0
    for part in parts:
        data = np.ascontiguousarray(part).view(np.uint8).reshape(count, -1)
        rows[:, at : at + data.shape[1]] = data
        at += data.shape[1]
    return rows


def unpack_activations(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q int8 [T, K], scale f32, sum f32 and correction int32 [T, K/32] of rows u8 [T, row bytes]."""
    groups = k // GROUP
    q = rows[:, :k].view(np.int8)
    scale, sums, correction = (
        np.ascontiguousarray(rows[:, k + i * 4 * groups : k + (i + 1) * 4 * groups]).view(kind)
        for i, kind in enumerate((np.float32, np.float32, np.int32))
    )
    return q, scale, sums, correction


def _blocks(matrix: np.ndarray) -> np.ndarray:
    """[N, ...] to [blocks, 16, ...], padded with zero rows."""
    padding = -len(matrix) % BLOCK
    padded = np.concatenate([matrix, np.zeros((padding, *matrix.shape[1:]), matrix.dtype)])
    return padded.reshape(-1, BLOCK, *matrix.shape[1:])


def _join(*parts: np.ndarray) -> np.ndarray:
    """The parts of each block one after the other, as one u8 vector."""
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8).reshape(len(p), -1) for p in parts], axis=1).ravel()


def _group_scales(scale: np.ndarray) -> np.ndarray:
    return _blocks(scale.astype(np.float16)).transpose(0, 2, 1)


def pack_float(weight: np.ndarray) -> np.ndarray:
    """f32 or f16 [N, K], or bf16 as u16 [N, K]: element [K][16] a block."""
    return _join(_blocks(weight).transpose(0, 2, 1))


def pack_q8(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """q int8 [N, K], scale f16 [N, K/32]."""
    n, k = q.shape
    biased = (q.astype(np.int16) + 128).astype(np.uint8).reshape(n, k // GROUP, 8, 4)
    return _join(_group_scales(scale), _blocks(biased).transpose(0, 2, 3, 1, 4))


def pack_q4(nibbles: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """nibbles u8 [N, K] in 0..15, scale and minimum f16 [N, K/32]."""
    n, k = nibbles.shape
    pairs = nibbles.reshape(n, k // GROUP, 4, 2, 4)
    packed = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4
    return _join(_group_scales(scale), _group_scales(minimum), _blocks(packed).transpose(0, 2, 3, 1, 4))


def to_bf16(weight: np.ndarray) -> np.ndarray:
    """f32 to bf16 bits (u16), truncated: any bf16 will do for a test."""
    return (np.ascontiguousarray(weight, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (u16) to f32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
