"""What a draw takes to the device beside the logits: parameters, and the histories, masks and explicit ids they point to."""

from __future__ import annotations

import struct
from ctypes import addressof, c_char, c_int32, memmove, sizeof
from typing import Any, NamedTuple

from flare.core.manifest import MAX_ALTERNATIVES, MAX_EXPLICIT_IDS
from flare.replay.cpu_interface import SampleParams
from flare.replay.cuda_arrays import DeviceArrays, differ

FLT_MAX = 3.4028234663852886e38
FLT_MIN = 1.1754943508222875e-38

# The fields of SampleParams, pointers as addresses.
_PARAMS = struct.Struct("<6fiIQIiiiQQQii")
_PARAMS_BYTES = sizeof(SampleParams)

_RANGES = (
    ("temperature", -FLT_MAX, FLT_MAX),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition", FLT_MIN, FLT_MAX),
    ("presence", -FLT_MAX, FLT_MAX),
    ("frequency", -FLT_MAX, FLT_MAX),
)


class Drawn(NamedTuple):
    """What of rows is not on the device: (row, address, first token, end) of histories, (row, address, bytes) of masks and
    explicit ids; and the rows that want log probabilities."""

    histories: list[tuple[int, int, int, int]]
    masks: list[tuple[int, int, int]]
    explicit: list[tuple[int, int, int]]
    wanting: list[int]


class DrawArrays:
    """What rows are drawn by: their parameters, and the histories, masks and explicit ids that these point to.

    A row's history only grows while its request has the row, so the device's is compared with it and gets what is new.
    """

    def __init__(self, arrays: DeviceArrays, max_rows: int, vocabulary: int, max_context: int) -> None:
        self._arrays = arrays
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._mask_bytes = 4 * -(-vocabulary // 32)
        self._known = [0] * max_rows  # tokens of each row's history that are on the device
        neutral = SampleParams(top_p=1.0, repetition=1.0, alternatives=-1)
        self._neutral = (SampleParams * max_rows)(*[neutral] * max_rows)

    def check(self, params: Any, rows: int) -> Drawn:
        """Returns what of the first `rows` of `params` is not on the device. Raises ValueError when a parameter is out of its
        range."""
        found = Drawn([], [], [], [])
        view = (c_char * (rows * _PARAMS_BYTES)).from_address(addressof(params))
        for row, fields in enumerate(_PARAMS.iter_unpack(view)):
            *shaping, top_k, _, _, _, length, prompt, _, history, mask, ids, count, alternatives = fields
            self._check(row, shaping, top_k, length, prompt, count, alternatives)
            if length and shaping[3:] != [1.0, 0.0, 0.0]:
                start = self._known_of(row, history, length)
                if start < length:
                    self._check_tokens(row, "history", history and history + 4 * start, length - start)
                    found.histories.append((row, history, start, length))
            if mask:
                found.masks.append((row, mask, self._mask_bytes))
            if alternatives >= 0:
                found.wanting.append(row)
                if count:
                    self._check_tokens(row, "explicit_ids", ids, count)
                    found.explicit.append((row, ids, 4 * count))
        return found

    def send(self, drawn: Drawn, params: Any, rows: int, padded: int) -> None:
        """Starts to copy the first `rows` of `params` and what `check` found; rows up to `padded` get neutral parameters."""
        arrays = self._arrays
        host, live = arrays.host("params"), rows * _PARAMS_BYTES
        memmove(host, params, live)
        memmove(host + live, self._neutral, padded * _PARAMS_BYTES - live)
        arrays.send("params", 0, padded * _PARAMS_BYTES)
        for row, history, start, length in drawn.histories:
            offset = 4 * (row * self._max_context + start)
            memmove(arrays.host("history") + offset, history + 4 * start, 4 * (length - start))
            arrays.send("history", offset, 4 * (length - start))
            self._known[row] = length
        self._send_rows("masks", self._mask_bytes, drawn.masks)
        self._send_rows("explicit_ids", 4 * MAX_EXPLICIT_IDS, drawn.explicit)

    def forget(self) -> None:
        """Has all histories copied anew: it is not known what of them arrived."""
        self._known = [0] * len(self._known)

    def _send_rows(self, name: str, stride: int, rows: list[tuple[int, int, int]]) -> None:
        host = self._arrays.host(name)
        for row, source, size in rows:
            memmove(host + row * stride, source, size)
        self._arrays.send_all(name, [(row * stride, size) for row, _, size in rows])

    def _known_of(self, row: int, history: int, length: int) -> int:
        """How much of a history's beginning is on the device."""
        shared = min(self._known[row], length)
        there = self._arrays.host("history") + 4 * row * self._max_context
        return shared if history and not differ(there, history, 4 * shared) else 0

    def _check(
        self, row: int, shaping: list[float], top_k: int, length: int, prompt: int, count: int, alternatives: int
    ) -> None:
        for (name, least, most), value in zip(_RANGES, shaping, strict=True):
            if not least <= value <= most:
                raise ValueError(f"params[{row}]: {name} {value:g}: must be in [{least:g}, {most:g}]")
        if top_k < -1:
            raise ValueError(f"params[{row}]: top_k {top_k}: must be at least -1")
        if length < 0 or not 0 <= prompt <= length:
            raise ValueError(f"params[{row}]: prompt_len {prompt} of history_len {length}")
        if length > self._max_context:
            raise ValueError(f"params[{row}]: history_len {length}: must be in [0, {self._max_context}]")
        if not -1 <= alternatives <= MAX_ALTERNATIVES:
            raise ValueError(f"params[{row}]: alternatives {alternatives}: must be in [-1, {MAX_ALTERNATIVES}]")
        if not 0 <= count <= MAX_EXPLICIT_IDS:
            raise ValueError(f"params[{row}]: explicit {count}: must be in [0, {MAX_EXPLICIT_IDS}]")

    def _check_tokens(self, row: int, name: str, address: int, count: int) -> None:
        if not address:
            raise ValueError(f"params[{row}]: {name} is null")
        tokens = (c_int32 * count).from_address(address)[:]
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self._vocabulary:
                raise ValueError(f"params[{row}]: {name} has token {token}: must be in [0, {self._vocabulary})")
