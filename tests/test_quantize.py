"""Weight formats: exact where they claim to be, and within half a step of the best everywhere else."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from flare.errors import InputError
from ignition.checkpoint.encodings import ENCODINGS
from ignition.checkpoint.tensors import LazyTensor
from ignition.quantize import (
    Q4,
    Q8,
    convert,
    decode,
    encode,
    from_blocks,
    is_lossless,
    natural_format,
    quantize_fp8,
    quantize_q4,
    quantize_q8,
    to_e4m3,
)

MATRICES = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.sampled_from([32, 64, 96])),
    elements=st.floats(-1000, 1000, width=32),
    fill=st.nothing(),
)
GGML = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}


def random_blocks(encoding: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Every bit pattern of integers, finite random scales: uint8 blocks of a [rows, columns] matrix."""
    rng = np.random.default_rng(seed)
    size, width = ENCODINGS[encoding].bytes, ENCODINGS[encoding].elements
    blocks = rng.integers(0, 256, (rows * columns // width, size), dtype=np.uint8)
    halves = 2 if encoding == "q4_1" else 1
    blocks[:, : 2 * halves] = (rng.standard_normal((len(blocks), halves)) * 0.1).astype("<f2").view(np.uint8)
    return blocks


@given(MATRICES)
def test_q8_is_within_half_a_step_of_every_value(values: np.ndarray) -> None:
    weights = quantize_q8(values)
    step = np.repeat(weights.scale.astype(np.float64), 32, axis=1)
    error = np.abs(weights.quant * step - values)
    assert (error <= step * 0.5 * (1 + 1e-5) + 127 * step * 2**-11).all()
    assert np.abs(weights.quant.astype(int)).max() <= 127


@given(MATRICES)
def test_q8_of_its_own_values_changes_nothing(values: np.ndarray) -> None:
    """Quantising is idempotent up to one float16 rounding of the scale: integers stay the same."""
    weights = quantize_q8(values)
    assert np.array_equal(quantize_q8(decode(weights)).quant, weights.quant)


@given(MATRICES)
def test_q4_is_no_worse_than_the_plain_range(values: np.ndarray) -> None:
    """The plain range as GGML's reference takes it, up to one unit of float16 in scale and minimum.

    Such a unit moves every value by at most 15 units of the scale and one of the minimum, so a group's error norm by
    sqrt(32) times that.
    """
    weights = quantize_q4(values)
    plain = decode(from_blocks(gguf.quants.quantize(values, GGML["q4_1"]), "q4_1", *values.shape))
    groups = (-1, 32)
    ours = np.square(decode(weights).astype(np.float64) - values).reshape(groups).sum(axis=1)
    theirs = np.square(plain.astype(np.float64) - values).reshape(groups).sum(axis=1)
    largest = np.abs(values).max() + 1e-6
    moved = 3 * largest * 2**-10  # 15 scales are at most twice the largest value
    assert (np.sqrt(ours) <= np.sqrt(theirs) + np.sqrt(32) * moved).all()
    assert weights.quant.max() <= 15


def test_q4_beats_the_plain_range_on_bell_shaped_weights() -> None:
    values = np.random.default_rng(7).standard_normal((256, 512), dtype=np.float32)
    plain = gguf.quants.dequantize(gguf.quants.quantize(values, GGML["q4_1"]), GGML["q4_1"])
    assert np.square(decode(quantize_q4(values)) - values).sum() < 0.9 * np.square(plain - values).sum()


@pytest.mark.parametrize("quantize", [quantize_q8, quantize_q4])
def test_rows_do_not_influence_each_other(quantize) -> None:
    values = np.random.default_rng(1).standard_normal((300, 512), dtype=np.float32)  # more groups than one chunk
    whole = decode(quantize(values))
    pieces = np.concatenate([decode(quantize(values[first : first + 7])) for first in range(0, 300, 7)])
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("quantize", [quantize_q8, quantize_q4])
def test_constant_and_tiny_groups_survive(quantize) -> None:
    values = np.zeros((4, 32), np.float32)
    values[1] = 0.5
    values[2] = 1e-9  # below every float16 step
    values[3, 0] = 8.9e-8 * 127  # a scale among the subnormals
    found = decode(quantize(values))
    assert np.array_equal(found[0], values[0])
    assert np.allclose(found[1], 0.5, rtol=2**-10)
    assert np.abs(found[2:] - values[2:]).max() <= 4e-6


@pytest.mark.parametrize("format", ["q8", "q4", "f16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_values_without_a_place_are_refused_by_name(format: str, bad: float) -> None:
    values = np.zeros((2, 32), np.float32)
    values[1, 3] = bad
    with pytest.raises(InputError, match="^tensor blk: "):
        encode(values, format, "blk")


@pytest.mark.parametrize("encoding", sorted(GGML))
def test_ggml_blocks_convert_without_loss(encoding: str) -> None:
    blocks = random_blocks(encoding, 24, 96)
    tensor = LazyTensor("w", (24, 96), encoding, memoryview(blocks.reshape(-1)))
    format = natural_format(encoding)
    assert is_lossless(encoding, format)
    weights = convert(tensor, format)
    assert isinstance(weights, Q8 if encoding == "q8_0" else Q4)
    truth = gguf.quants.dequantize(blocks.reshape(24, -1), GGML[encoding])
    assert np.array_equal(decode(weights), truth)
    assert np.array_equal(decode(convert(tensor, format, 5, 17)), truth[5:17])
    assert np.array_equal(convert(tensor, "f32"), truth)


@given(arrays.arrays(np.uint32, 64))
def test_bf16_rounds_as_torch_does(bits: np.ndarray) -> None:
    values = bits.view(np.float32).reshape(2, 32)
    truth = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    found = encode(values, "bf16")
    numbers = ~np.isnan(values)
    assert np.array_equal(found[numbers], truth[numbers])
    assert np.isnan(decode(found)[~numbers]).all()


@pytest.mark.parametrize(("encoding", "dtype"), [("f32", "<f4"), ("f16", "<f2"), ("bf16", "<u2")])
def test_floats_keep_their_bits(encoding: str, dtype: str) -> None:
    stored = np.random.default_rng(3).standard_normal((5, 7)).astype("<f4").astype(dtype if dtype != "<u2" else "<f4")
    stored = encode(stored, "bf16") if encoding == "bf16" else stored
    tensor = LazyTensor("w", (5, 7), encoding, memoryview(stored.tobytes()))
    kept = convert(tensor, natural_format(encoding))
    assert kept.dtype == np.dtype(dtype) and np.array_equal(kept, stored)
    assert np.array_equal(decode(kept), tensor.float32())


def test_k_quants_go_to_q8_and_are_said_to_lose() -> None:
    for encoding in ("q4_k", "q5_k", "q6_k"):
        assert natural_format(encoding) == "q8"
        assert not is_lossless(encoding, "q8") and is_lossless(encoding, "f32")


def test_rows_that_are_no_whole_groups_are_refused() -> None:
    tensor = LazyTensor("w", (2, 48), "f32", memoryview(bytes(2 * 48 * 4)))
    with pytest.raises(InputError, match="tensor w: rows of 48"):
        convert(tensor, "q8")


def test_fp8_bits_are_those_of_torch_and_saturate() -> None:
    every = np.arange(256).astype(np.uint8)
    values = torch.from_numpy(every.copy()).view(torch.float8_e4m3fn).float().numpy()
    finite = np.isfinite(values)
    assert np.array_equal(to_e4m3(values[finite]), every[finite])
    middles = (np.sort(values[finite])[1:] + np.sort(values[finite])[:-1]) / 2  # ties, which go to even
    draws = np.random.default_rng(8).standard_normal(4096).astype(np.float32) * np.float32(50)
    near = np.concatenate([middles, np.nextafter(middles, np.float32(0)), draws, draws / 4096]).astype(np.float32)
    near = near[np.abs(near) <= 448]
    expected = torch.from_numpy(near).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(to_e4m3(near), expected)
    assert to_e4m3(np.float32([449, -1e9, np.inf])).tolist() == [0x7E, 0xFE, 0x7E]


def test_fp8_has_a_scale_for_each_row() -> None:
    values = np.random.default_rng(3).standard_normal((6, 40)).astype(np.float32)
    values[1] *= 1e-3
    values[2] = 0
    weights = quantize_fp8(values)
    assert np.array_equal(weights.scale, np.abs(values).max(axis=1) / np.float32(448))
    error = np.abs(decode(weights) - values)
    allowed = np.maximum(np.abs(values) * 2.0**-4, weights.scale[:, None] * 2.0**-10)  # half a step of 3 + 1 bits
    assert (error <= allowed * 1.000001).all()
    with pytest.raises(InputError, match="not finite"):
        quantize_fp8(np.float32([[np.nan, 1]]), "w")
