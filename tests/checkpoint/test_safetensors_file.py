"""The safetensors reader against the safetensors library, and against files that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from flare.errors import InputError
from ignition.checkpoint.safetensors_file import open_safetensors
from tests.support.memory import peak_below

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16) * 0.3,
    "c": torch.full((2, 2, 2), 1.5, dtype=torch.float16),
    "ids": torch.arange(3),
    "none": torch.empty(0, 5),
    "scalar": torch.tensor(2.5),
}
GOOD = save(TENSORS, metadata={"format": "pt"})


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header (a JSON value or raw bytes) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def test_values_and_shapes_equal_the_library(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    found = open_safetensors(tmp_path / "x.safetensors")
    assert set(found) == set(TENSORS)
    for name, truth in TENSORS.items():
        assert found[name].shape == tuple(truth.shape)
        if name != "ids":
            assert np.array_equal(found[name].float32(), truth.float().numpy())
    with pytest.raises(InputError, match="tensor ids: stored as i64"):
        found["ids"].float32()


def entry(shape: Any = (2,), start: Any = 0, stop: Any = 8, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, stop]}


LIES = {
    "header longer than the file": (({}, b"", 1 << 20), "header length 1048576, but the file ends"),
    "header absurdly long": (({}, b"", (1 << 64) - 1), "the limit is 104857600"),
    "header no JSON": ((b"{,}", b""), "header: not valid JSON"),
    "header not UTF-8": ((b"\xff\xfe", b""), "header: not valid JSON"),
    "header a list": (([], b""), "header: a JSON list"),
    "header nested": ((b'{"a":' * 50000, b""), "header: JSON nested too deeply"),
    "name twice": ((b'{"a":1,"a":1}', b""), "key 'a' occurs twice"),
    "entry no object": (({"a": 1}, b""), "tensor a: the header's entry is not an object"),
    "dtype unknown": (({"a": entry(dtype="F12")}, bytes(8)), "dtype 'F12' is unknown"),
    "dtype no text": (({"a": entry(dtype=[1])}, bytes(8)), "is unknown"),
    "shape negative": (({"a": entry(shape=(-2,))}, bytes(8)), "shape"),
    "shape a bool": (({"a": entry(shape=(True, 2))}, bytes(8)), "shape"),
    "shape a fraction": (({"a": entry(shape=(2.0,))}, bytes(8)), "shape"),
    "shape too long": (({"a": entry(shape=(1,) * 9)}, bytes(8)), "at most 8 lengths"),
    "shape overflows": (({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(8)), "data_offsets span 8"),
    "shape and bytes differ": (({"a": entry(shape=(3,))}, bytes(8)), "takes 12 bytes, data_offsets span 8"),
    "half a byte": (({"a": entry(shape=(1,), stop=1, dtype="F4")}, bytes(1)), "takes 0 bytes"),
    "offsets leave the file": (({"a": entry(stop=16, shape=(4,))}, bytes(8)), r"data_offsets \[0, 16\] leave the file"),
    "offsets backwards": (({"a": entry(start=8, stop=0)}, bytes(8)), "leave the file"),
    "offsets no pair": (
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, bytes(8)),
        "not two byte positions",
    ),
    "overlap": (({"a": entry(), "b": entry(start=4, stop=12)}, bytes(12)), "tensor b: data_offsets start 4 overlaps"),
    "gap": (({"a": entry(), "b": entry(start=12, stop=20)}, bytes(20)), "leaves a gap"),
    "bytes left over": (({"a": entry()}, bytes(9)), "tensors end at byte 8 of 9"),
    "name with a line break": (({"a\nb": 1}, b""), r"tensor 'a\\nb'"),
    "huge number": ((b'{"a":' + b"9" * 5000 + b"}", b""), "header: not valid JSON"),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_lie_is_one_line_that_names_it(tmp_path: Path, lie: str) -> None:
    arguments, words = LIES[lie]
    path = write(tmp_path / "x.safetensors", *arguments)
    with peak_below(5_000_000), pytest.raises(InputError, match=words) as caught:
        open_safetensors(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_files_without_a_header_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(InputError):
        open_safetensors(tmp_path / "x.safetensors")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        (tmp_path / "x.safetensors").write_bytes(GOOD[:length])
        with pytest.raises(InputError):
            open_safetensors(tmp_path / "x.safetensors")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_mutated_file_opens_or_is_refused(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(GOOD)
    for at, byte in changes:
        content[at] = byte
    (tmp_path / "x.safetensors").write_bytes(content)
    try:
        tensors = open_safetensors(tmp_path / "x.safetensors")
    except InputError as error:
        assert "\n" not in str(error)
        return
    for tensor in tensors.values():
        try:
            tensor.float32()
        except InputError as error:
            assert "cannot be exported" in str(error)
