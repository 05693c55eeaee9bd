"""A tensor that stays in its file until somebody asks for its values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from flare.errors import InputError
from ignition.checkpoint.encodings import ENCODINGS, Encoding

_DECODE_BYTES = (
    1 << 20
)  # decoding works through the file in pieces of about this size, so that its temporaries stay in cache


@dataclass(frozen=True)
class LazyTensor:
    """A checkpoint tensor under its Hugging Face name, row-major, last dimension contiguous.

    `data` is a view of the mapped file. `encoding` names an entry of `ENCODINGS`; a tensor of another stored type (an
    int64 buffer, say) can be listed, but its values cannot be read.

    `interleaved_heads` > 0 means that the file holds each head's rows with the two rotary halves interleaved (row 2j
    is channel j, row 2j + 1 is channel j + head_dim / 2), as llama.cpp stores them for Llama. All methods answer in
    Hugging Face order: halves one after the other.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    data: memoryview = field(repr=False)
    interleaved_heads: int = 0

    @property
    def rows(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def raw(self, first: int = 0, last: int | None = None) -> memoryview:
        """The bytes of rows [first, last), uint8: a view of the file, or a copy where rows have to change places."""
        rows = self._file_rows(first, last)
        return np.ascontiguousarray(rows).reshape(-1).data

    def float32(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows [first, last) as float32 [last - first, ...], decoded exactly.

        Raises InputError where the stored type has no decoding.
        """
        rows = self._file_rows(first, last)
        encoding = self._known_encoding()
        shape = (len(rows), *self.shape[1:]) if self.shape else ()
        out = np.empty(math.prod(shape), np.float32)
        blocks = np.ascontiguousarray(rows).reshape(-1, encoding.bytes)
        values = out.reshape(-1, encoding.elements)
        step = max(1, _DECODE_BYTES // encoding.bytes)
        assert encoding.decode is not None
        for start in range(0, len(blocks), step):
            values[start : start + step] = encoding.decode(blocks[start : start + step])
        return out.reshape(shape)

    def _known_encoding(self) -> Encoding:
        encoding = ENCODINGS.get(self.encoding)
        if encoding is None:
            raise InputError(
                f"tensor {self.name}: stored as {self.encoding}, which cannot be exported; known are "
                f"{', '.join(ENCODINGS)}"
            )
        return encoding

    def _file_rows(self, first: int, last: int | None) -> np.ndarray:
        """uint8 [rows, bytes of one row] in Hugging Face order."""
        last = self.rows if last is None else last
        if not 0 <= first <= last <= self.rows:
            raise IndexError(f"{self.name}: rows {first}..{last} of {self.rows}")
        row_bytes = len(self.data) // self.rows if self.rows else 0
        stored = np.frombuffer(self.data, np.uint8).reshape(self.rows, row_bytes)
        if not self.interleaved_heads:
            return stored[first:last]
        channels = self.rows // self.interleaved_heads
        order = np.arange(self.rows).reshape(self.interleaved_heads, channels // 2, 2).swapaxes(1, 2).reshape(-1)
        return stored[order[first:last]]
