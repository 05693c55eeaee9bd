"""The GGUF container: magic, metadata, tensor table, data. Little endian, versions 2 and 3.

The reader knows nothing about models. It holds each count, length and offset against the bytes that are really left, so
that a lying file costs neither memory nor a crash, and answers with the field's name, the value and the limit.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flare.errors import InputError
from ignition.checkpoint import wrong_source
from ignition.checkpoint.encodings import ENCODINGS
from ignition.checkpoint.files import map_file

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
MAGIC = b"GGUF"
_MAX_NAME = 1024  # bytes of a key's or a tensor's name; ggml's own are under 64
_MAX_STRINGS = 1 << 24  # entries of an array of strings; vocabularies stay under a million
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4

# ggml's numbers for stored types. Those without an entry in ENCODINGS are refused by name.
_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k",
    12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64",
    29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """An entry of the tensor table; `shape` is row-major (the file's order reversed), `data` a view of the mapped
    file.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    data: memoryview


@dataclass(frozen=True)
class GgufFile:
    """Metadata as Python values (arrays of numbers as numpy arrays, arrays of strings as lists) and the tensors by
    name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Parses and checks the whole of metadata and tensor table; maps the data. Raises InputError."""
    cursor = _Cursor(path, map_file(path))
    version = _version(cursor)
    tensor_count = cursor.scalar("Q", "tensor count")
    metadata_count = cursor.scalar("Q", "metadata count")
    cursor.check_count("metadata count", metadata_count, 13)  # a length, one type, a one-byte value
    cursor.check_count("tensor count", tensor_count, 32)  # a length, dimensions, one of them, type, offset
    metadata: dict[str, Any] = {"GGUF.version": version}
    for index in range(metadata_count):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            raise InputError(f"{path}: metadata key {key} occurs twice")
        metadata[key] = cursor.value(key)
    return GgufFile(path, metadata, _tensors(cursor, tensor_count, _alignment(path, metadata)))


def _version(cursor: _Cursor) -> int:
    magic = bytes(cursor.take(4, "magic"))
    if magic != MAGIC:
        known = wrong_source.file(cursor.path)
        raise InputError(
            f"{cursor.path}: {known or f'starts with {magic!r}, not with {MAGIC!r}; this is not a GGUF file'}"
        )
    version: int = cursor.scalar("I", "version")
    if version not in (2, 3):
        hint = "; it was written on a big-endian machine" if version & 0xFFFF == 0 else ""
        raise InputError(f"{cursor.path}: GGUF version {version}, readable are 2 and 3{hint}")
    return version


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise InputError(
            f"{path}: general.alignment {str(alignment)[:40]} is not a power of two up to {_MAX_ALIGNMENT}"
        )
    return alignment


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    path = cursor.path
    table: dict[str, tuple[tuple[int, ...], str, int, int]] = {}
    for index in range(count):
        name = cursor.name(f"name of tensor {index}")
        if name in table:
            raise InputError(f"{path}: tensor {name} occurs twice")
        dimensions = cursor.scalar("I", f"tensor {name}: number of dimensions")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise InputError(f"{path}: tensor {name}: {dimensions} dimensions, the limit is {_MAX_DIMENSIONS}")
        lengths = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, f"tensor {name}: shape"))
        if 0 in lengths:
            raise InputError(f"{path}: tensor {name}: shape {list(lengths[::-1])} holds no values")
        type_number = cursor.scalar("I", f"tensor {name}: type")
        offset = cursor.scalar("Q", f"tensor {name}: offset")
        encoding = ENCODINGS.get(_TYPES.get(type_number, ""))
        if encoding is None:
            stored = _TYPES.get(type_number, f"type {type_number}")
            raise InputError(f"{path}: tensor {name}: stored as {stored}, readable are {', '.join(ENCODINGS)}")
        if lengths[0] % encoding.elements:
            raise InputError(
                f"{path}: tensor {name}: rows of {lengths[0]} are not whole {encoding.name} blocks of "
                f"{encoding.elements}"
            )
        if offset % alignment:
            raise InputError(f"{path}: tensor {name}: offset {offset} is not a multiple of the alignment {alignment}")
        table[name] = (lengths[::-1], encoding.name, offset, encoding.span(math.prod(lengths)))

    data = cursor.data_after(alignment, bool(table))
    end, previous = 0, "the data's start"
    for name, (_, _, offset, span) in sorted(table.items(), key=lambda item: item[1][2:]):
        if offset + span > len(data):
            raise InputError(
                f"{path}: tensor {name}: bytes {offset} to {offset + span} leave the file, which has "
                f"{len(data)} bytes of data: truncated"
            )
        if offset < end:
            raise InputError(f"{path}: tensor {name}: offset {offset} overlaps {previous}, which ends at {end}")
        end, previous = offset + span, name
    return {
        name: GgufTensor(name, shape, encoding, data[offset : offset + span])
        for name, (shape, encoding, offset, span) in table.items()
    }


class _Cursor:
    """A position in the mapped file that never passes its end."""

    def __init__(self, path: Path, file: memoryview) -> None:
        self.path = path
        self._file = file
        self._at = 0

    @property
    def _left(self) -> int:
        return len(self._file) - self._at

    def take(self, count: int, field: str) -> memoryview:
        if count > self._left:
            raise InputError(
                f"{self.path}: {field[:200]} takes {count} bytes at {self._at}, {self._left} are left: "
                "truncated or damaged"
            )
        taken = self._file[self._at : self._at + count]
        self._at += count
        return taken

    def check_count(self, field: str, count: int, least: int) -> None:
        """`count` things of at least `least` bytes each must fit into what is left."""
        if count * least > self._left:
            raise InputError(
                f"{self.path}: {field[:200]} {count} does not fit into the {self._left} bytes that are left"
            )

    def scalar(self, code: str, field: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), field))[0]

    def name(self, field: str) -> str:
        length = self.scalar("Q", field)
        if not 0 < length <= _MAX_NAME:
            raise InputError(f"{self.path}: {field}: {length} bytes long, the limits are 1 and {_MAX_NAME}")
        name = self._text(length, field)
        if not name.isprintable():
            raise InputError(f"{self.path}: {field}: {name[:80]!r} holds characters that cannot be printed")
        return name

    def value(self, key: str) -> Any:
        kind = self.scalar("I", f"{key}: type")
        if kind == _STRING:
            return self._text(self.scalar("Q", key), key)
        if kind == _ARRAY:
            return self._array(key)
        return self.scalar(self._code(kind, key), key)

    def _array(self, key: str) -> list[str] | np.ndarray:
        kind = self.scalar("I", f"{key}: element type")
        count = self.scalar("Q", f"{key}: length")
        if kind == _STRING:
            self.check_count(f"{key}: length", count, 8)
            if count > _MAX_STRINGS:
                raise InputError(f"{self.path}: {key}: {count} strings, the limit is {_MAX_STRINGS}")
            return self._strings(key, count)
        if kind == _ARRAY:
            raise InputError(f"{self.path}: {key}: an array of arrays, which no known key holds")
        dtype = np.dtype("u1" if kind == _BOOL else "<" + self._code(kind, key))
        self.check_count(f"{key}: length", count, dtype.itemsize)
        values = np.frombuffer(self.take(count * dtype.itemsize, key), dtype).copy()
        return values.astype(bool) if kind == _BOOL else values

    def _strings(self, key: str, count: int) -> list[str]:
        """`take` and `_text` unrolled: a vocabulary and its merges are half a million strings."""
        file, at, size = self._file, self._at, len(self._file)
        length_of = struct.Struct("<Q").unpack_from
        strings = []
        for index in range(count):
            if size - at < 8 or (length := length_of(file, at)[0]) > size - at - 8:
                raise InputError(
                    f"{self.path}: {key}[{index}] leaves the file, which has {size - at} bytes left: "
                    "truncated or damaged"
                )
            at += 8 + length
            try:
                strings.append(str(file[at - length : at], "utf-8"))
            except UnicodeDecodeError:
                raise InputError(f"{self.path}: {key}[{index}] is not UTF-8") from None
        self._at = at
        return strings

    def _text(self, length: int, field: str) -> str:
        try:
            return str(self.take(length, field), "utf-8")
        except UnicodeDecodeError:
            raise InputError(f"{self.path}: {field[:200]} is not UTF-8") from None

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise InputError(f"{self.path}: {key}: value type {kind} is unknown; known are 0 to 12")
        return _SCALARS[kind]

    def data_after(self, alignment: int, needed: bool) -> memoryview:
        """The data region: from the next multiple of `alignment` to the end."""
        start = -(-self._at // alignment) * alignment
        if start > len(self._file):
            if needed:
                raise InputError(
                    f"{self.path}: data would start at {start}, the file has {len(self._file)} bytes: truncated"
                )
            start = len(self._file)
        return self._file[start:]
