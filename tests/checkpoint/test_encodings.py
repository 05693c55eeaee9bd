"""Stored bytes to float32, against the gguf package's own dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from flare.errors import InputError
from ignition.checkpoint.encodings import ENCODINGS
from ignition.checkpoint.tensors import LazyTensor
from tests.support.gguf_files import TYPES, interleave


def random_bytes(encoding: str, values: int, seed: int) -> np.ndarray:
    """Random blocks whose float16 fields are finite, so that equality means something."""
    rng = np.random.default_rng(seed)
    entry = ENCODINGS[encoding]
    blocks = rng.integers(0, 256, (values // entry.elements, entry.bytes), dtype=np.uint8)
    if encoding in ("f32", "f16", "bf16"):
        floats = rng.standard_normal(values).astype("<f4")
        upper = np.ascontiguousarray(floats.view("<u2")[1::2])
        return {"f32": floats, "f16": floats.astype("<f2"), "bf16": upper}[encoding].view(np.uint8)
    halves = {"q6_k": [208], "q4_1": [0, 2], "q4_k": [0, 2], "q5_k": [0, 2]}.get(encoding, [0])
    for at in halves:
        blocks[:, at : at + 2] = rng.standard_normal((len(blocks), 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(-1)


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
def test_values_equal_the_gguf_package_bit_for_bit(encoding: str) -> None:
    rows, columns = 7, 512
    data = random_bytes(encoding, rows * columns, seed=1)
    truth = gguf.quants.dequantize(data.reshape(rows, -1), TYPES[encoding]).reshape(rows, columns)
    tensor = LazyTensor("w", (rows, columns), encoding, memoryview(data))
    assert np.array_equal(tensor.float32().view(np.uint32), truth.astype("<f4").view(np.uint32))
    assert np.array_equal(tensor.float32(2, 5), truth[2:5])
    assert bytes(tensor.raw()) == data.tobytes()


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
def test_the_table_agrees_with_ggml_about_sizes(encoding: str) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[TYPES[encoding]]
    assert (ENCODINGS[encoding].elements, ENCODINGS[encoding].bytes) == (elements, size)


def test_decoding_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes("q5_k", 64 * 256, seed=2)
    tensor = LazyTensor("w", (64, 256), "q5_k", memoryview(data))
    whole = tensor.float32()
    monkeypatch.setattr("ignition.checkpoint.tensors._DECODE_BYTES", 1000)
    assert np.array_equal(tensor.float32(), whole)


@pytest.mark.parametrize("encoding", ["f32", "q8_0", "q4_1", "q6_k"])
def test_interleaved_heads_are_put_back_in_order(encoding: str) -> None:
    heads, rows, columns = 3, 24, 256
    values = np.random.default_rng(4).standard_normal((rows, columns)).astype("<f4")
    if encoding == "q6_k":
        stored = random_bytes("q6_k", rows * columns, seed=5).reshape(rows, -1)
    else:
        stored = gguf.quants.quantize(values, TYPES[encoding]).reshape(rows, -1)
    truth = gguf.quants.dequantize(stored, TYPES[encoding])
    shuffled = np.ascontiguousarray(interleave(stored, heads)).view(np.uint8)
    tensor = LazyTensor("q", (rows, columns), encoding, memoryview(shuffled.reshape(-1)), interleaved_heads=heads)
    assert np.array_equal(tensor.float32(), truth)
    assert np.array_equal(tensor.float32(5, 13), truth[5:13])
    assert bytes(tensor.raw()) == np.ascontiguousarray(stored).view(np.uint8).tobytes()


def test_vectors_and_scalars_have_values_too() -> None:
    data = np.arange(8, dtype="<f4")
    vector = LazyTensor("bias", (8,), "f32", memoryview(interleave(data, 2).tobytes()), interleaved_heads=2)
    assert np.array_equal(vector.float32(), data)
    scalar = LazyTensor("s", (), "f32", memoryview(np.float32(3).tobytes()))
    assert scalar.float32().shape == () and scalar.float32() == 3


def test_a_type_without_values_is_named() -> None:
    tensor = LazyTensor("ids", (2,), "i64", memoryview(bytes(16)))
    assert len(tensor.raw()) == 16
    with pytest.raises(InputError, match="tensor ids: stored as i64"):
        tensor.float32()
