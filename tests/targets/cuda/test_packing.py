"""Packed weights against the layout's formula, element by element, and through files' tensors in pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ignition.checkpoint.tensors import LazyTensor
from ignition.quantize import GROUP, Q4, Q8, Fp8, convert, decode
from ignition.targets.cuda import packing
from ignition.targets.cuda.packing import arrays, pack_tensors, packed_bytes

FORMATS = ("f32", "f16", "bf16", "q8", "q4", "fp8")
SHAPES = [(1, 32), (17, 64), (5, 160)]


def tensor(rows: int, columns: int, seed: int = 0) -> LazyTensor:
    values = np.random.default_rng([rows, columns, seed]).standard_normal((rows, columns)).astype(np.float32)
    return LazyTensor(f"w{seed}", (rows, columns), "f32", memoryview(values).cast("B"))


def packed(tensors: list[LazyTensor], format: str) -> list[np.ndarray]:
    """The arrays of the packed matrix, as bytes."""
    data = np.concatenate(list(pack_tensors(tensors, format)))
    rows, columns = sum(t.rows for t in tensors), tensors[0].shape[1]
    assert data.dtype == np.uint8 and data.size == packed_bytes(format, rows, columns)
    spans = arrays(format, rows, columns)
    assert all(span.offset % 64 == 0 for span in spans)
    return [data[span.offset : span.offset + span.bytes] for span in spans]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_kernel_reads_the_values_that_the_format_holds(format: str, rows: int, columns: int) -> None:
    source = tensor(rows, columns)
    own, *others = packed([source], format)
    if format == "q8":
        scale = others[0].view("<f2").reshape(rows, columns // GROUP)
        found = own.view(np.int8).reshape(rows, columns) * np.repeat(scale, GROUP, 1).astype(np.float32)
    elif format == "q4":
        scale, minimum = (other.view("<f2").reshape(rows, columns // GROUP).astype(np.float32) for other in others)
        found = np.empty((rows, columns), np.float32)
        for row, column in np.ndindex(rows, columns):
            group, inside = divmod(column, GROUP)
            byte = int(own.reshape(rows, columns // 2)[row, 16 * group + inside % 16])
            quant = np.float32(byte >> 4 if inside >= 16 else byte & 15)
            found[row, column] = quant * scale[row, group] + minimum[row, group]
    elif format == "fp8":
        quant = torch.from_numpy(own.copy()).view(torch.float8_e4m3fn).float().numpy()
        found = quant.reshape(rows, columns) * others[0].view("<f4")[:, None]
    else:
        of = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[format]
        found = torch.from_numpy(own.copy()).view(of).float().numpy().reshape(rows, columns)
    assert np.array_equal(found, decode(convert(source, format)))


@pytest.mark.parametrize("format", FORMATS)
def test_joined_matrices_are_packed_as_one_and_pieces_change_nothing(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [tensor(rows, 64, seed) for seed, rows in enumerate((8, 3, 5))]
    values = np.concatenate([np.frombuffer(part.data, np.float32).reshape(-1, 64) for part in parts])
    whole = LazyTensor("whole", values.shape, "f32", memoryview(values).cast("B"))
    expected = packed([whole], format)
    monkeypatch.setattr(packing, "_PIECE", 2 * 64)
    assert len(list(pack_tensors(parts, format))) >= 8
    for found, wanted in zip(packed(parts, format), expected, strict=True):
        assert np.array_equal(found, wanted)


def test_groups_that_are_not_whole_are_refused() -> None:
    for format in ("q8", "q4"):
        with pytest.raises(ValueError, match="multiple of 32 inputs, not 40"):
            packed_bytes(format, 4, 40)


def test_every_format_has_its_arrays() -> None:
    kinds = {"q8": Q8, "q4": Q4, "fp8": Fp8}
    for format in FORMATS:
        weights = convert(tensor(4, 32), format)
        count = len(kinds[format].__dataclass_fields__) if format in kinds else 1
        assert len(arrays(format, 4, 32)) == count and isinstance(weights, kinds.get(format, np.ndarray))
