"""A core's sample and score graphs on logits that are put there: every parameter of a draw, and rows without a token.

Logits are multiples of 1/64 and penalties powers of two, so that penalised logits are exact in f32 and in doubles alike.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_uint32, sizeof
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check.findings import Checks, Finding, at_most
from benchmarks.gpu_check.program_memory import ProgramMemory
from benchmarks.gpu_check.rated import logprob_excess, wanted_token
from flare.core.cuda_graph import Bucket
from flare.core.directory import open_core
from flare.core.manifest import MAX_ALTERNATIVES
from flare.replay.cpu_interface import RowLogprobs, SampleParams
from flare.replay.cuda_draws import DrawArrays
from flare.replay.cuda_driver import open_device
from flare.replay.cuda_program import CudaProgram

SETTINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "repetition": 2.0, "presence": 0.5, "frequency": 0.25},
    {"temperature": 0.0, "repetition": 2.0},
)


@dataclass
class Row:
    """One row to draw from. bad: the token that stands for no token, where the logits give none."""

    logits: np.ndarray
    fields: dict[str, float]
    history: list[int] = field(default_factory=list)
    allowed: list[int] | None = None
    explicit: list[int] = field(default_factory=list)
    bad: int | None = None

    def params(self, held: list[Any]) -> SampleParams:
        """The row's parameters; `held` keeps what they point to."""
        found = SampleParams(**({"top_p": 1.0, "repetition": 1.0, "alternatives": MAX_ALTERNATIVES} | self.fields))
        found.prompt_len, found.history_len = len(self.history) // 2, len(self.history)
        held.append((c_int32 * len(self.history))(*self.history))
        found.history = ctypes.cast(held[-1], type(found.history))
        if self.allowed is not None:
            words = [0] * -(-len(self.logits) // 32)
            for token in self.allowed:
                words[token // 32] |= 1 << token % 32
            held.append((c_uint32 * len(words))(*words))
            found.mask = ctypes.cast(held[-1], type(found.mask))
        held.append((c_int32 * len(self.explicit))(*self.explicit))
        found.explicit_ids, found.explicit = ctypes.cast(held[-1], type(found.explicit_ids)), len(self.explicit)
        return found


def make_rows(count: int, vocabulary: int, context: int) -> list[Row]:
    """Rows with every setting in turn, every third with a mask; of more than four the last two have no token."""
    source = np.random.default_rng(count)
    rows = []
    for number in range(count):
        logits = (np.round(source.standard_normal(vocabulary) * 4 * 64) / 64).astype(np.float32)
        fields = SETTINGS[number % len(SETTINGS)] | {
            "seed": 1000 + number,
            "choice": number % 3,
            "position": 7 * number,
        }
        row = Row(logits, fields, source.integers(0, vocabulary, min(context, 40)).tolist())
        row.explicit = source.integers(0, vocabulary, number % 5).tolist()
        if number % 3 == 2:
            row.allowed = sorted(set(source.integers(0, vocabulary, vocabulary // 3 + 1).tolist()))
        rows.append(row)
    if count > 4:
        rows[-1].logits[vocabulary // 2] = np.nan
        rows[-2].logits[:] = -np.inf
        rows[-1].bad, rows[-2].bad = -1, -2
    return rows


class Drawer:
    """The draws and scores of a core on a device."""

    def __init__(self, memory: ProgramMemory, max_rows: int, vocabulary: int, max_context: int) -> None:
        self.memory = memory
        self.vocabulary = vocabulary
        self._sending = DrawArrays(memory.arrays, max_rows, vocabulary, max_context)

    def draw(self, bucket: Bucket, rows: list[Row]) -> list[tuple[int, RowLogprobs]]:
        """Draws from rows, as many as the bucket has or fewer."""
        held: list[Any] = []
        params = (SampleParams * len(rows))(*[row.params(held) for row in rows])
        self._put_logits(rows)
        self._sending.send(self._sending.check(params, len(rows)), params, len(rows), bucket.rows)
        self.memory.run(self.memory.build(bucket.nodes, rows=bucket.rows))
        arrays = self.memory.arrays
        sampled = (c_int32 * len(rows)).from_address(arrays.host("sampled"))[:]
        logprobs = (RowLogprobs * len(rows)).from_buffer_copy(
            ctypes.string_at(arrays.host("logprobs"), sizeof(RowLogprobs) * len(rows))
        )
        return list(zip(sampled, logprobs, strict=True))

    def score(self, bucket: Bucket, rows: list[Row], targets: list[int]) -> list[RowLogprobs]:
        """Scores a token of each row."""
        self._put_logits(rows)
        count = len(rows)
        self.memory.put("first", bytes(4))
        self.memory.put("targets", np.asarray(targets, np.int32).tobytes())
        wanted = np.full(bucket.rows, -1, np.int32)
        wanted[:count] = MAX_ALTERNATIVES
        self.memory.put("wanted", wanted.tobytes()[: 4 * bucket.rows])
        self.memory.run(self.memory.build(bucket.nodes, rows=bucket.rows))
        return list((RowLogprobs * count).from_buffer_copy(self.memory.get("logprobs", 0, sizeof(RowLogprobs) * count)))

    def _put_logits(self, rows: list[Row]) -> None:
        self.memory.put("logits", b"".join(row.logits.tobytes() for row in rows))


def check_draws(checks: Checks, path: Path) -> None:
    """Checks a core's draws and scores."""
    core = open_core(path)
    assert core.manifest.cuda is not None
    limits, vocabulary = core.manifest.limits, core.manifest.model.vocabulary
    device = open_device(core.manifest.cuda.architectures)
    try:
        program = CudaProgram.open(core, device.architecture)  # type: ignore[arg-type]
        graphs = program.graphs
        drawer = Drawer(ProgramMemory(device, program, 1), limits.max_rows, vocabulary, limits.max_context)
        rows = make_rows(limits.max_rows, vocabulary, limits.max_context)
        whole: list[tuple[int, RowLogprobs]] = []

        def drawn() -> list[tuple[int, RowLogprobs]]:
            whole[:] = whole or drawer.draw(graphs.sample[-1], rows)
            return whole

        def tokens() -> Finding:
            wanted = [
                wanted_token(row.logits, row.params([]), row.history, row.allowed) if row.bad is None else row.bad
                for row in rows
            ]
            found = [token for token, _ in drawn()]
            return at_most(
                _differing(found, wanted), 0, "rows that draw another token than the definition", rows=len(rows)
            )

        def rated() -> Finding:
            return at_most(
                max(_excess(row, token, logprobs) for row, (token, logprobs) in zip(rows, drawn(), strict=True)),
                1.0,
                "largest error of a log probability by what it may be",
            )

        def other_buckets() -> Finding:
            differing = compared = 0
            for number, bucket in enumerate(graphs.sample):
                some = [(number + place) % len(rows) for place in range(bucket.rows)]
                for index, (token, logprobs) in zip(some, drawer.draw(bucket, [rows[i] for i in some]), strict=True):
                    before, rated_before = drawn()[index]
                    same = token == before and used(logprobs, rows[index]) == used(rated_before, rows[index])
                    compared, differing = compared + 1, differing + (not same)
            return at_most(differing, 0, "rows that differ in another bucket or place", rows_compared=compared)

        def scores() -> Finding:
            good = [(row, token) for row, (token, _) in zip(rows, drawn(), strict=True) if row.bad is None]
            worst = 0.0
            for bucket in graphs.score:
                some = good[: bucket.rows]
                found = drawer.score(bucket, [row for row, _ in some], [token for _, token in some])
                for (row, token), logprobs in zip(some, found, strict=True):
                    worst = max(worst, logprob_excess(row.logits, token, logprobs, MAX_ALTERNATIVES, ()))
            return at_most(worst, 1.0, "largest error of a scored token by what it may be")

        checks.run("tokens drawn", tokens)
        checks.run("log probabilities", rated)
        checks.run("draws in every bucket", other_buckets)
        checks.run("scores", scores)
    finally:
        device.close()


def used(logprobs: RowLogprobs, row: Row) -> tuple[Any, ...]:
    """What of a row's log probabilities means something, as bits."""
    count = logprobs.count
    floats = [
        logprobs.chosen,
        *logprobs.values[:count],
        *logprobs.explicit[: len(row.explicit) if logprobs.rank else 0],
    ]
    return (logprobs.rank, *logprobs.ids[:count], np.asarray(floats, np.float32).tobytes())


def _excess(row: Row, token: int, logprobs: RowLogprobs) -> float:
    if row.bad is not None:
        return 0.0 if logprobs.rank == 0 else float("inf")
    return logprob_excess(row.logits, token, logprobs, MAX_ALTERNATIVES, row.explicit)


def _differing(found: list[int], wanted: list[int]) -> int:
    return sum(one != other for one, other in zip(found, wanted, strict=True))
