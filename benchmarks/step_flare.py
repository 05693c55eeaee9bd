"""flare's side of a step measurement: replays a core directly, without engine or server; prints one JSON line.

    python -m benchmarks.step_flare CORE --threads 2 --batches 1 4 8 16

The KV pool holds 8192 tokens, as the other side's context does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import workload

started = time.perf_counter()
from flare.core.directory import open_core  # noqa: E402  (the import is timed)
from flare.replay.program import open_replay  # noqa: E402

IMPORT_S = time.perf_counter() - started


class Flare:
    """A replayed core behind workload.Stepper; sequence i has slot i and pages of its own."""

    def __init__(self, path: Path, threads: int) -> None:
        core = open_core(path)
        page_tokens = core.manifest.limits.page_tokens
        pages = -(-workload.SEQUENCE_TOKENS // page_tokens)
        self.replay = open_replay(core, threads=threads, kv_pages=pages * workload.SEQUENCES)
        slots = self.replay.limits.slots
        if slots < workload.SEQUENCES:
            raise SystemExit(f"{path} has {slots} slots; export it with --slots {workload.SEQUENCES}")
        for sequence in range(workload.SEQUENCES):
            first = sequence * self.replay.page_stride
            self.replay.page_table[first : first + pages] = range(sequence * pages, (sequence + 1) * pages)
        for row in range(workload.SEQUENCES):
            self.replay.sampling[row].temperature = 0.0
            self.replay.sampling[row].top_p = 1.0

    def clear(self) -> None:
        """Nothing to do: positions say how much of a slot's pages is meant, and start at 0 again."""

    def prefill(self, tokens: list[int], sequence: int) -> int:
        replay, size = self.replay, self.replay.max_step_tokens
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            n = len(chunk)
            replay.tokens[:n] = chunk
            replay.positions[:n] = range(start, start + n)
            replay.slots[:n] = [sequence] * n
            replay.rows[0] = n - 1
            replay.step(n, 1 if start + n == len(tokens) else 0)
        replay.sample(1)
        return replay.sampled[0]

    def decode(self, tokens: list[int], position: int, meanwhile: Callable[[], object] | None = None) -> list[int]:
        replay, n = self.replay, len(tokens)
        replay.tokens[:n] = tokens
        replay.positions[:n] = [position] * n
        replay.slots[:n] = range(n)
        replay.rows[:n] = range(n)
        replay.step(n, n, meanwhile)
        replay.sample(n)
        return replay.sampled[:n]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("core", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=workload.PREFILL_REPEATS, help="of the prefill; 0: none")
    arguments = parser.parse_args()
    figures = workload.measure(lambda: Flare(arguments.core, arguments.threads), arguments.batches, arguments.repeats)
    print(json.dumps({"import_s": IMPORT_S} | figures))


if __name__ == "__main__":
    main()
