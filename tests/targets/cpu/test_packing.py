"""Packed weights against the layout's formula, element by element, and back."""

from __future__ import annotations

import numpy as np
import pytest

from ignition.checkpoint.tensors import LazyTensor
from ignition.quantize import Q4, Q8, decode, encode, quantize_q4, quantize_q8
from ignition.targets.cpu.packing import block_bytes, pack, pack_tensor, packed_bytes, unpack

SHAPES = [(16, 32), (1, 32), (17, 64), (40, 96), (33, 160)]


def matrix(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows * columns).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_q8_bytes_lie_where_the_layout_says(rows: int, columns: int) -> None:
    weights = quantize_q8(matrix(rows, columns))
    packed = pack(weights, "q8")
    groups = columns // 32
    size = groups * (32 + 512)
    assert packed.size == -(-rows // 16) * size
    for row in range(-(-rows // 16) * 16):
        block = packed[row // 16 * size : (row // 16 + 1) * size]
        scale = block[: groups * 32].view("<f2").reshape(groups, 16)
        quants = block[groups * 32 :].reshape(groups, 8, 16, 4)
        for k in range(columns):
            group, inside = divmod(k, 32)
            value = weights.quant[row, k] if row < rows else 0
            assert quants[group, inside // 4, row % 16, inside % 4] == int(value) + 128
            assert scale[group, row % 16] == (weights.scale[row, group] if row < rows else 0)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_q4_nibbles_lie_where_the_layout_says(rows: int, columns: int) -> None:
    weights = quantize_q4(matrix(rows, columns))
    packed = pack(weights, "q4")
    groups = columns // 32
    size = groups * (64 + 256)
    assert packed.size == -(-rows // 16) * size
    for row in range(-(-rows // 16) * 16):
        block = packed[row // 16 * size : (row // 16 + 1) * size]
        scale = block[: groups * 32].view("<f2").reshape(groups, 16)
        minimum = block[groups * 32 : groups * 64].view("<f2").reshape(groups, 16)
        quants = block[groups * 64 :].reshape(groups, 4, 16, 4)
        for k in range(columns):
            group, inside = divmod(k, 32)
            byte = int(quants[group, inside // 8, row % 16, inside % 4])
            nibble = byte >> 4 if inside % 8 >= 4 else byte & 15
            assert nibble == (weights.quant[row, k] if row < rows else 0)
            assert scale[group, row % 16] == (weights.scale[row, group] if row < rows else 0)
            assert minimum[group, row % 16] == (weights.minimum[row, group] if row < rows else 0)


@pytest.mark.parametrize("format", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (18, 33)])
def test_floats_lie_input_by_input(format: str, rows: int, columns: int) -> None:
    weights = encode(matrix(rows, columns), format)
    packed = pack(weights, format).view(weights.dtype).reshape(-1, columns, 16)
    for row in range(len(packed) * 16):
        expected = weights[row] if row < rows else np.zeros(columns, weights.dtype)
        assert np.array_equal(packed[row // 16, :, row % 16], expected)


@pytest.mark.parametrize("format", ["q8", "q4", "f32", "f16", "bf16"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_unpack_is_the_inverse(format: str, rows: int, columns: int) -> None:
    weights = encode(matrix(rows, columns), format)
    packed = pack(weights, format)
    assert packed.dtype == np.uint8 and packed.size == packed_bytes(format, rows, columns)
    found = unpack(packed, format, rows, columns)
    assert np.array_equal(decode(found), decode(weights))
    if isinstance(weights, Q8):
        assert np.array_equal(found.quant, weights.quant) and np.array_equal(found.scale, weights.scale)
    if isinstance(weights, Q4):
        assert np.array_equal(found.quant, weights.quant) and np.array_equal(found.minimum, weights.minimum)
    with pytest.raises(ValueError, match="bytes"):
        unpack(packed[:-1], format, rows, columns)


def test_all_quants_and_both_extremes_keep_their_place() -> None:
    quant = (np.arange(16 * 32) % 256 - 128).astype(np.int8).reshape(16, 32)
    weights = Q8(np.ones((16, 1), np.float16), quant)
    assert np.array_equal(unpack(pack(weights, "q8"), "q8", 16, 32).quant, quant)


@pytest.mark.parametrize("format", ["q8", "q4", "bf16"])
def test_a_tensor_packed_in_pieces_is_the_packed_tensor(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = matrix(75, 64)
    tensor = LazyTensor("w", values.shape, "f32", memoryview(values.tobytes()))
    whole = pack(encode(values, format), format)
    monkeypatch.setattr("ignition.targets.cpu.packing._PIECE", 64 * 20)
    pieces = list(pack_tensor(tensor, format))
    assert len(pieces) > 2
    assert np.array_equal(np.concatenate(pieces), whole)


def test_quantised_formats_need_whole_groups() -> None:
    assert block_bytes("f32", 33) == 33 * 64
    for format in ("q8", "q4"):
        with pytest.raises(ValueError, match="multiple of 32"):
            block_bytes(format, 48)
