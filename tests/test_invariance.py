"""A token's logits are the same bits whatever runs beside it: the numerics contract, as a property of compiled cores.

Random ragged schedules of several sequences (any chunking, any order in a step, any pages, pages full of leftovers) on one
and two threads against each sequence alone, one token at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.core.directory import open_core
from flare.replay.cpu import CpuReplay
from flare.replay.program import open_replay
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
