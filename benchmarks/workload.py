"""The work that both sides of a step measurement do: the same tokens, the same timed loops. Standard library only.

An engine under test implements `Stepper`; `measure` times it and returns one flat dict of figures:

    load_s                      opening the weights and making the KV pool, until a step can run
    first_step_s                the first step after that: one token (what a lazy load postpones)
    prefill_512                 tokens/s of one 512-token prompt
    decode_1, _4, _8, _16       tokens/s of greedy decoding at that many sequences, each 64 tokens long at the start
    rss_mb, anon_mb, hwm_mb     resident memory now, its anonymous part, and the highest so far

Every decode step includes choosing the greedy token of each sequence. Rates come from the median duration.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Protocol

SEQUENCES = 16
SEQUENCE_TOKENS = 512
PREFILL_TOKENS = 512
PREFIX_TOKENS = 64
DECODE_STEPS = 64
PREFILL_REPEATS = 5


class Stepper(Protocol):
    """One loaded engine with room for SEQUENCES sequences of SEQUENCE_TOKENS tokens each."""

    def clear(self) -> None:
        """Forgets all sequences."""

    def prefill(self, tokens: list[int], sequence: int) -> int:
        """Runs `tokens` at positions 0.. of an empty sequence; returns the greedy next token."""

    def decode(self, tokens: list[int], position: int) -> list[int]:
        """Runs tokens[i] at `position` of sequence i, all in one step; returns the greedy next token of each."""


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that every vocabulary of 40,000 entries has and that are no control tokens."""
    source = random.Random(seed)
    return [source.randrange(1000, 40000) for _ in range(length)]


def measure(open_engine: Callable[[], Stepper], batches: list[int], repeats: int = PREFILL_REPEATS) -> dict[str, float]:
    """Opens an engine and times it; `batches` names the decode measurements, `repeats` 0 leaves prefill out."""
    started = time.perf_counter()
    engine = open_engine()
    figures = {"load_s": time.perf_counter() - started}
    started = time.perf_counter()
    engine.prefill(prompt(1, seed=1), 0)
    figures["first_step_s"] = time.perf_counter() - started
    if repeats:
        figures["prefill_512"] = PREFILL_TOKENS / statistics.median(time_prefill(engine, repeats))
    for batch in batches:
        figures[f"decode_{batch}"] = batch / statistics.median(time_decode(engine, batch))
    return figures | memory_mb()


def time_prefill(engine: Stepper, repeats: int) -> list[float]:
    tokens, seconds = prompt(PREFILL_TOKENS, seed=2), []
    for _ in range(repeats + 1):
        engine.clear()
        started = time.perf_counter()
        engine.prefill(tokens, 0)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]  # the first one also touches fresh memory


def time_decode(engine: Stepper, batch: int) -> list[float]:
    engine.clear()
    current = [engine.prefill(prompt(PREFIX_TOKENS, seed=100 + sequence), sequence) for sequence in range(batch)]
    seconds = []
    for position in range(PREFIX_TOKENS, PREFIX_TOKENS + DECODE_STEPS * (2 if batch == 1 else 1)):
        started = time.perf_counter()
        current = engine.decode(current, position)
        seconds.append(time.perf_counter() - started)
    return seconds[4:]


def memory_mb() -> dict[str, float]:
    """Resident memory of this process in MiB, from /proc."""
    names = {"VmRSS": "rss_mb", "RssAnon": "anon_mb", "VmHWM": "hwm_mb"}
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return {name: int(fields[key].split()[0]) / 1024 for key, name in names.items()}
