"""What choosing and scoring tokens costs: microseconds a row on one thread, without a model.

    python -m benchmarks.sampling

Logits follow Zipf's law, as a language model's do: the token of rank r has a probability in proportion to r^-1.5.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from ctypes import c_uint32
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import machine, report
from flare.core.manifest import Limits
from flare.replay.cpu import CpuArg, CpuNode, CpuProgram, CpuReplay, SampleParams, best_isa
from ignition.targets.cpu.compile import ISA_FLAGS, compile_libraries
from ignition.targets.cpu.source import generate, headers

VOCABULARIES = (49_152, 151_936)
ROWS = 16

GREEDY = {"temperature": 0.0}
FILTERED = {"temperature": 0.7, "top_k": 40, "top_p": 0.95}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy, mask": GREEDY | {"masked": True},
    "greedy, 20 log probabilities": GREEDY | {"alternatives": 20},
    "temperature": {"temperature": 0.7},
    "temperature, top-k 40, top-p 0.95": FILTERED,
    "the same, mask": FILTERED | {"masked": True},
    "the same, mask, 20 log probabilities": FILTERED | {"masked": True, "alternatives": 20},
}
SCORES = {"score": 0, "score, 20 alternatives": 20}
CALLS = 40
"""of a setting in a round"""


def compare(rounds: int) -> list[dict[str, Any]]:
    """A row for each vocabulary, setting and round; `us` is the median over a round's calls of a call's time a row."""
    results = []
    with tempfile.TemporaryDirectory(prefix="flare-sampling-") as folder:
        library = compile_library(Path(folder))
        for vocabulary in VOCABULARIES:
            with open_rows(library, vocabulary) as replay:
                for round_number in range(rounds):
                    machine.wait_for_quiet()
                    load = machine.ForeignLoad()
                    taken = {name: sample(replay, **setting) for name, setting in SETTINGS.items()}
                    taken |= {name: score(replay, alternatives) for name, alternatives in SCORES.items()}
                    head = {"vocabulary": vocabulary, "round": round_number, "foreign": load.share()}
                    results += [head | {"setting": name, "us": us} for name, us in taken.items()]
    return results


def compile_library(folder: Path) -> Path:
    """A kernel library of this machine's best level; of its kernels none is run."""
    isa = best_isa(ISA_FLAGS)
    path = folder / f"cpu-{isa}.so"
    path.write_bytes(compile_libraries({isa: generate(["Add<16>"], isa)}, headers())[isa].data)
    return path


def open_rows(library: Path, vocabulary: int) -> CpuReplay:
    """A core without layers, whose only step has left ROWS rows of logits."""
    operand = CpuArg("arena", 0, 64 * ROWS)
    program = CpuProgram(
        library=library, nodes=[CpuNode("Add<16>", 0, (operand,) * 3)],
        weights=b"", weights_offset=0, weights_bytes=0, arena_bytes=64 * ROWS,
        io_bytes=4 * vocabulary * ROWS, logits_offset=0, kv_page_bytes=64,
        vocabulary=vocabulary, limits=Limits(max_context=16, slots=1, max_step_tokens=ROWS, max_rows=ROWS, page_tokens=16),
    )  # fmt: skip
    replay = CpuReplay(program, threads=1, kv_pages=1)
    replay.positions[:] = range(ROWS)
    replay.rows[:] = range(ROWS)
    replay.step(ROWS, ROWS)
    for row in range(ROWS):
        rank = np.random.default_rng(row).permutation(vocabulary) + 1
        replay.logits(row)[:] = memoryview((-1.5 * np.log(rank)).astype(np.float32))
    return replay


def sample(replay: CpuReplay, *, masked: bool = False, **fields: float) -> float:
    """Microseconds a row of `sample`. A mask allows every other token."""
    words = -(-replay.vocabulary // 32)
    mask = (c_uint32 * words)(*[0x55555555] * words)
    for row in range(ROWS):
        neutral = {"top_p": 1, "repetition": 1, "alternatives": -1, "seed": row}
        replay.sampling[row] = SampleParams(**(neutral | fields))
        if masked:
            replay.sampling[row].mask = mask
    return measure(lambda: replay.sample(ROWS))


def score(replay: CpuReplay, alternatives: int) -> float:
    """Microseconds a row of `score`, of targets at all ranks."""
    replay.targets[:] = range(ROWS)
    replay.wanted[:] = [alternatives] * ROWS
    return measure(lambda: replay.score(0, ROWS))


def measure(call: Callable[[], None]) -> float:
    call()
    times = []
    for _ in range(CALLS):
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
    return 1e6 * statistics.median(times) / ROWS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    print(report.sampling(compare(parser.parse_args().rounds)))
