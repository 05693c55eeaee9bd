"""A token's logits are the same bits whatever runs beside it: the numerics contract, as a property of compiled cores.

Random ragged schedules of several sequences (any chunking, any order in a step, any pages, pages full of leftovers) on
one and two threads against each sequence alone, one token at a time: short steps at every token, and chunks as long as
prefill's at some of their tokens.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.core.directory import open_core
from flare.replay.cpu import CpuReplay, best_isa
from flare.replay.program import make_program, open_replay
from tests.support.fake_library import aligned
from tests.support.replaying import Sequences, scattered_pages

SLOTS, LENGTH, PAGES = 3, 40, 24


class Subject:
    """A core on one and on two threads, and what each of its sequences gives alone."""

    def __init__(self, path: Path, seed: int) -> None:
        core = open_core(path)
        self.replays = {threads: open_replay(core, threads=threads, kv_pages=PAGES) for threads in (1, 2)}
        rng = np.random.default_rng(seed)
        self.tokens = [rng.integers(4, core.manifest.model.vocabulary, LENGTH).tolist() for _ in range(SLOTS)]
        self.alone = [self._alone(self.replays[1], tokens) for tokens in self.tokens]

    @staticmethod
    def _alone(replay: CpuReplay, tokens: list[int]) -> np.ndarray:
        running = Sequences(replay, [list(range(3))])
        return np.concatenate([running.step([(0, [token])])[0] for token in tokens])


@pytest.fixture(scope="module", params=["tiny_core", "smollm2_core"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    made = Subject(request.getfixturevalue(request.param), seed=11)
    yield made
    for replay in made.replays.values():
        replay.close()


schedules = st.lists(
    st.lists(
        st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 17)), min_size=1, max_size=SLOTS, unique_by=lambda p: p[0]
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=25)
@given(schedule=schedules, threads=st.sampled_from([1, 2]), page_seed=st.integers(0, 2**16))
def test_logits_do_not_depend_on_company(
    subject: Subject, schedule: list[list[tuple[int, int]]], threads: int, page_seed: int
) -> None:
    replay = subject.replays[threads]
    running = Sequences(replay, scattered_pages(replay, SLOTS, 3, page_seed))
    for wanted in schedule:
        room = replay.max_rows
        parts = []
        for slot, count in wanted:
            at = running.computed[slot]
            tokens = subject.tokens[slot][at : at + min(count, room)]
            room -= len(tokens)
            if tokens:
                parts.append((slot, tokens))
        if not parts:
            continue
        before = list(running.computed)
        for (slot, tokens), found in zip(parts, running.step(parts), strict=True):
            at = before[slot]
            assert np.array_equal(found, subject.alone[slot][at : at + len(tokens)]), (slot, at, len(tokens))


LONG = (230, 150, 90)  # tokens of each sequence before it decodes
DECODED = 6


class LongSubject:
    """A core on one and on two threads, and what some tokens of long sequences give alone, token by token."""

    def __init__(self, path: Path) -> None:
        core = open_core(path)
        self.pages = -(-(max(LONG) + DECODED) // core.manifest.limits.page_tokens)
        kv_pages = self.pages * len(LONG)
        self.replays = {threads: open_replay(core, threads=threads, kv_pages=kv_pages) for threads in (1, 2)}
        rng = np.random.default_rng(5)
        vocabulary = core.manifest.model.vocabulary
        self.tokens = [rng.integers(4, vocabulary, length + DECODED).tolist() for length in LONG]
        # One token of each sequence a step: the property above says that company this small changes nothing.
        running = Sequences(self.replays[2], scattered_pages(self.replays[2], len(LONG), self.pages, 9))
        self.alone: list[dict[int, np.ndarray]] = [{} for _ in LONG]
        for at in range(max(LONG) + DECODED):
            slots = [slot for slot, tokens in enumerate(self.tokens) if at < len(tokens)]
            wanted = [[0] if at >= LONG[slot] or at % 5 == 4 else [] for slot in slots]
            found = running.step([(slot, [self.tokens[slot][at]]) for slot in slots], wanted)
            for slot, rows in zip(slots, found, strict=True):
                if len(rows):
                    self.alone[slot][at] = rows[0]

    def close(self) -> None:
        for replay in self.replays.values():
            replay.close()


@pytest.fixture(scope="module", params=["tiny_core", "smollm2_core"])
def long_subject(request: pytest.FixtureRequest) -> Iterator[LongSubject]:
    made = LongSubject(request.getfixturevalue(request.param))
    yield made
    made.close()


# For each step, each slot's share of its prompt's tokens; what is left comes in one last step.
CUTS = {
    "whole prompts in one step": [],
    "one after the other": [(1, 0, 0), (0, 1, 0), (0, 0, 1)],
    "halves, mixed": [(0.5, 0.9, 0.1)],
    "a decode beside prefill": [(0, 0, 1), (0.6, 0.6, 0)],
    "odd pieces": [(0.31, 0.47, 0.77), (0.33, 0.02, 0.02)],
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_long_chunks_give_the_bits_of_one_token_at_a_time(
    long_subject: LongSubject, cuts: list[tuple[float, ...]], threads: int
) -> None:
    """Chunks in tens to hundreds of tokens take other tiles, units and conversions than single tokens do."""
    replay, seed = long_subject.replays[threads], len(cuts)
    assert sum(LONG) <= replay.max_step_tokens
    order = [2, 0, 1]
    running = Sequences(replay, scattered_pages(replay, len(LONG), long_subject.pages, seed))
    for shares in [*cuts, (1, 1, 1)]:
        parts, wanted = [], []
        for slot in order:
            at, tokens = running.computed[slot], long_subject.tokens[slot]
            count = min(LONG[slot] - at, round(shares[slot] * LONG[slot]))
            if count > 0:
                parts.append((slot, tokens[at : at + count]))
                known = [p - at for p in long_subject.alone[slot] if at <= p < at + count]
                wanted.append(known[:3] + known[-3:] if len(known) > 6 else known)
            elif at >= LONG[slot] and at < len(tokens):
                parts.append((slot, [tokens[at]]))
                wanted.append([0])
        compare(long_subject, running, parts, wanted)
    while parts := [
        (slot, [tokens[running.computed[slot]]])
        for slot, tokens in enumerate(long_subject.tokens)
        if running.computed[slot] < len(tokens)
    ]:
        compare(long_subject, running, parts, [[0]] * len(parts))


def compare(
    subject: LongSubject, running: Sequences, parts: list[tuple[int, list[int]]], wanted: list[list[int]]
) -> None:
    """Runs a step and holds its wanted rows against what their tokens give alone."""
    before = list(running.computed)
    for (slot, tokens), indices, found in zip(parts, wanted, running.step(parts, wanted), strict=True):
        for index, row in zip(indices, found, strict=True):
            at = before[slot] + index
            assert np.array_equal(row, subject.alone[slot][at]), (slot, at, len(tokens))


@pytest.mark.parametrize("name", ["tiny_core", "smollm2_core"])
def test_a_sequence_whose_embedding_is_nan_is_nan_and_harms_no_other(request: pytest.FixtureRequest, name: str) -> None:
    """From the first activation to the logits nothing turns NaN into a number; the sampler would choose by it."""
    core, bad, good = open_core(request.getfixturevalue(name)), 5, [9, 10, 11]
    level = best_isa(library.isa for library in core.manifest.cpu.libraries)
    plan = make_program(core.manifest, core.graph("step"), core.path, level)
    table = next(node for node in plan.nodes if node.kernel.startswith("Embed<"))
    kind, _, columns = table.kernel.rstrip(">").removeprefix("Embed<").split(", ")
    weights = bytearray(plan.weights[plan.weights_offset : plan.weights_offset + plan.weights_bytes])
    # Scales of quantised tables and elements of plain ones both lie sixteen rows side by side.
    size = 4 if kind == "F32" else 2
    block = table.args[0].bytes // -(-core.manifest.model.vocabulary // 16)
    assert kind in ("F32", "Q4", "Q8") and int(columns) >= 32
    at = table.args[0].offset + bad // 16 * block + bad % 16 * size
    weights[at : at + size] = struct.pack("<f" if size == 4 else "<e", math.nan)
    found = []
    for data in (plan.weights[plan.weights_offset : plan.weights_offset + plan.weights_bytes], weights):
        changed = replace(plan, weights=aligned(bytes(data)), weights_offset=0)
        with CpuReplay(changed, threads=2, kv_pages=2) as replay:
            found.append(Sequences(replay, [[0], [1]]).step([(0, good), (1, [good[0], bad])]))
    (clean, _), (beside, poisoned) = found
    others = np.arange(clean.shape[1]) != bad  # where the table is tied, its bad row is a column of every output too
    assert np.array_equal(beside[:, others], clean[:, others])
    assert np.array_equal(poisoned[0][others], clean[0][others])
    assert np.isnan(poisoned[1]).all()


def test_two_cores_in_one_process_do_not_disturb_each_other(tiny_core: Path, smollm2_core: Path) -> None:
    first, second = Subject(tiny_core, seed=3), Subject(smollm2_core, seed=3)
    for subject, other in ((first, second), (second, first)):
        running = Sequences(subject.replays[2], scattered_pages(subject.replays[2], SLOTS, 3))
        beside = Sequences(other.replays[2], scattered_pages(other.replays[2], SLOTS, 3))
        for at in range(0, LENGTH, 10):
            found = running.step([(0, subject.tokens[0][at : at + 10])])[0]
            beside.step([(1, other.tokens[1][at : at + 10])])
            assert np.array_equal(found, subject.alone[0][at : at + 10])
    for subject in (first, second):
        for replay in subject.replays.values():
            replay.close()
