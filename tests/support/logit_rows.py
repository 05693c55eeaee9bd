"""A core without a model: its steps leave rows of logits that a test writes, to draw from and to score."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_int32, c_uint32
from typing import Any

import numpy as np

from flare.replay.cpu import ISA_FLAGS, CpuReplay, SampleParams, machine_flags
from tests.support.fake_library import fake_library, fill, node, program

NEUTRAL: dict[str, float] = {"temperature": 1, "top_p": 1, "repetition": 1, "alternatives": -1}


def open_rows(vocabulary: int, rows: int, *, threads: int = 1, isa: str = "") -> CpuReplay:
    """An open core whose last step left `rows` rows of logits, all 0."""
    context = max(160, rows)
    plan = program(
        [node("Nothing", 0)],
        library=fake_library(isa),
        vocabulary=vocabulary,
        max_rows=rows,
        max_step_tokens=rows,
        max_context=context,
        io_bytes=4 * vocabulary * rows,
    )
    replay = CpuReplay(plan, threads=threads, kv_pages=-(-context // 16))
    fill(replay, [0] * rows)
    replay.rows[:] = range(rows)
    replay.step(rows, rows)
    return replay


def runnable_levels() -> list[str]:
    """The instruction set levels that this machine runs, the best first."""
    return [isa for isa, flags in ISA_FLAGS.items() if flags <= machine_flags()]


def put_logits(replay: CpuReplay, row: int, values: Sequence[float] | np.ndarray) -> list[float]:
    """Returns the values as f32 holds them."""
    view = replay.logits(row)
    view[:] = memoryview(np.asarray(values, np.float32))
    return list(view)


def put_params(
    replay: CpuReplay,
    row: int,
    history: Sequence[int] = (),
    *,
    allowed: Iterable[int] | None = None,
    explicit: Sequence[int] = (),
    **fields: float,
) -> SampleParams:
    """Neutral parameters but for `fields`; `allowed` makes a mask of these tokens."""
    replay.sampling[row] = SampleParams(**(NEUTRAL | fields))
    params = replay.sampling[row]
    params.history = (c_int32 * len(history))(*history)
    params.history_len = len(history)
    if allowed is not None:
        params.mask = mask_of(allowed, replay.vocabulary)
    params.explicit_ids = (c_int32 * len(explicit))(*explicit)
    params.explicit = len(explicit)
    return params


def mask_of(allowed: Iterable[int], vocabulary: int) -> Any:
    """The words of a mask, as ctypes: bit t % 32 of word t // 32 for each token t that is allowed."""
    words = [0] * -(-vocabulary // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return (c_uint32 * len(words))(*words)


def column(array: Any, name: str) -> np.ndarray:
    """One field, not a pointer, of all elements of an array of ctypes structures: a view that can be written to."""
    structure = array._type_
    kind = dict(structure._fields_)[name]
    layout = {"names": [name], "formats": [kind], "offsets": [getattr(structure, name).offset]}
    return np.frombuffer(array, np.dtype(layout | {"itemsize": ctypes.sizeof(structure)}))[name]
