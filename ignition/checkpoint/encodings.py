"""How a stored tensor spells its numbers: one table of encodings, each with its exact decoding to float32.

Block encodings are GGML's. A row of a matrix is a whole number of blocks; every value of a block is one small integer
times a scale, plus a minimum for some. Decoding follows the order of operations of ggml's reference (scale times
integer, then the minimum), whose products are exact in float32, so that every correct reader gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Decoder = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Encoding:
    """`elements` values take `bytes` bytes; `decode` maps uint8 [n, bytes] to float32 [n, elements]."""

    name: str
    elements: int
    bytes: int
    decode: Decoder | None

    def span(self, elements: int) -> int:
        """Bytes of `elements` values; the caller made sure that they are whole blocks."""
        return elements // self.elements * self.bytes


def _halves(raw: np.ndarray) -> np.ndarray:
    """uint8 [n, 2m] to float32 [n, m], read as float16."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _decode_f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4").astype(np.float32, copy=False)


def _decode_f16(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks)


def _decode_bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q8_0(blocks: np.ndarray) -> np.ndarray:
    """f16 scale, int8 q[32]."""
    return _halves(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, m] to uint8 [n, 2m]: all low nibbles of a row, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _decode_q4_0(blocks: np.ndarray) -> np.ndarray:
    """f16 scale, 32 nibbles around 8."""
    return _halves(blocks[:, :2]) * (nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _decode_q4_1(blocks: np.ndarray) -> np.ndarray:
    """f16 scale, f16 minimum, 32 nibbles."""
    values = _halves(blocks[:, :2]) * nibbles(blocks[:, 4:]).astype(np.float32)
    values += _halves(blocks[:, 2:4])
    return values


def _scales_and_minimums(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of a K block hold eight 6-bit scales and eight 6-bit minimums.

    The first four of each lie in the low six bits of bytes 0..3 and 4..7. The last four take a nibble each of bytes
    8..11 and borrow the top two bits of bytes 0..3 and 4..7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _k_values(blocks: np.ndarray, quants: np.ndarray) -> np.ndarray:
    """quants uint8 [n, 8, 32] of a Q4_K or Q5_K block; f16 scale, f16 minimum and the 12 bytes lead the block."""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    scales *= _halves(blocks[:, 0:2])
    minimums *= _halves(blocks[:, 2:4])
    values = scales[:, :, None] * quants.astype(np.float32)
    values -= minimums[:, :, None]
    return values.reshape(len(blocks), 256)


def _k_nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 128] to [n, 8, 32]: 32 bytes hold one group in their low nibbles and the next in their high ones."""
    pairs = packed.reshape(len(packed), 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(len(packed), 8, 32)


def _decode_q4_k(blocks: np.ndarray) -> np.ndarray:
    return _k_values(blocks, _k_nibbles(blocks[:, 16:]))


def _decode_q5_k(blocks: np.ndarray) -> np.ndarray:
    """Bit g of high byte i is the fifth bit of value i of group g."""
    group = np.arange(8, dtype=np.uint8)[None, :, None]
    high = (blocks[:, 16:48][:, None, :] >> group) & 1
    return _k_values(blocks, _k_nibbles(blocks[:, 48:]) | (high << 4))


def _decode_q6_k(blocks: np.ndarray) -> np.ndarray:
    """128 low nibble bytes, 64 bytes of high bit pairs, sixteen int8 scales, f16 scale; groups of 16 values around
    32.
    """
    n = len(blocks)
    halves = blocks[:, :128].reshape(n, 2, 1, 64)
    low = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(n, 8, 32)
    shift = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = ((blocks[:, 128:192].reshape(n, 2, 1, 32) >> shift) & 3).reshape(n, 8, 32)
    quants = (low | (high << 4)).astype(np.float32) - np.float32(32)
    scales = _halves(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * quants.reshape(n, 16, 16)).reshape(n, 256)


_TABLE = [
    Encoding("f32", 1, 4, _decode_f32),
    Encoding("f16", 1, 2, _decode_f16),
    Encoding("bf16", 1, 2, _decode_bf16),
    Encoding("q8_0", 32, 34, _decode_q8_0),
    Encoding("q4_0", 32, 18, _decode_q4_0),
    Encoding("q4_1", 32, 20, _decode_q4_1),
    Encoding("q4_k", 256, 144, _decode_q4_k),
    Encoding("q5_k", 256, 176, _decode_q5_k),
    Encoding("q6_k", 256, 210, _decode_q6_k),
]
ENCODINGS: dict[str, Encoding] = {encoding.name: encoding for encoding in _TABLE}
