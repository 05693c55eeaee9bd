"""The safetensors format: a length, a JSON header, then the tensors' bytes without a gap.

Every claim of the header is held against the file's real length before the data is touched. The rules are the
format's own: tensors lie one after the other, from byte 0 to the last byte of the data, and each takes exactly what
its shape and type say.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeGuard

from flare.errors import InputError
from ignition.checkpoint.files import JSON_LIMIT, map_file, parse_object, printable
from ignition.checkpoint.tensors import LazyTensor

# Bits of one element. Types without an entry in ENCODINGS may be listed by a file, but their values are refused when
# asked for.
_DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6,
    "F4": 4,
}  # fmt: skip
_MAX_DIMENSIONS = 8


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """All tensors of one file, mapped, by name. Raises InputError naming file, tensor, value and limit."""
    file = map_file(path)
    if len(file) < 8:
        raise InputError(f"{path}: {len(file)} bytes; a safetensors file has at least 8")
    header_bytes = int.from_bytes(file[:8], "little")
    if header_bytes > JSON_LIMIT:
        raise InputError(
            f"{path}: header length {header_bytes}, the limit is {JSON_LIMIT}; this is not a safetensors file"
        )
    if header_bytes > len(file) - 8:
        raise InputError(
            f"{path}: header length {header_bytes}, but the file ends after {len(file) - 8} bytes: truncated"
        )
    header = parse_object(bytes(file[8 : 8 + header_bytes]), f"{path}: header")
    header.pop("__metadata__", None)

    data = file[8 + header_bytes :]
    entries = sorted(
        (_entry(path, name, value, len(data)) for name, value in header.items()), key=lambda entry: entry[3:]
    )
    end = 0
    for name, _, _, start, stop in entries:
        if start != end:
            what = "overlaps the tensor before it" if start < end else "leaves a gap before it"
            raise InputError(
                f"{path}: tensor {printable(name)}: data_offsets start {start} {what}, which ends at {end}"
            )
        end = stop
    if end != len(data):
        raise InputError(f"{path}: tensors end at byte {end} of {len(data)} bytes of data; the file is damaged")
    return {name: LazyTensor(name, shape, encoding, data[start:stop]) for name, encoding, shape, start, stop in entries}


def _entry(path: Path, name: str, value: object, data_bytes: int) -> tuple[str, str, tuple[int, ...], int, int]:
    """One header entry, checked alone: (name, encoding, shape, start, stop)."""
    where = f"{path}: tensor {printable(name)}"
    if not isinstance(value, dict):
        raise InputError(f"{where}: the header's entry is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise InputError(f"{where}: dtype {str(dtype)[:40]!r} is unknown; known are {', '.join(_DTYPE_BITS)}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMENSIONS:
        raise InputError(f"{where}: shape {str(shape)[:80]} is not a list of at most {_MAX_DIMENSIONS} lengths")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise InputError(f"{where}: data_offsets {str(offsets)[:80]} are not two byte positions")
    start, stop = offsets
    if not start <= stop <= data_bytes:
        raise InputError(
            f"{where}: data_offsets [{start}, {stop}] leave the file, which has {data_bytes} bytes of data"
        )
    bits = math.prod(shape) * _DTYPE_BITS[dtype]
    if bits % 8 or bits // 8 != stop - start:
        raise InputError(
            f"{where}: shape {list(shape)} of {dtype} takes {bits // 8} bytes, data_offsets span {stop - start}"
        )
    return name, dtype.lower(), tuple(shape), start, stop


def _are_counts(value: object) -> TypeGuard[list[int]]:
    """A list of integers in [0, 2^63)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
