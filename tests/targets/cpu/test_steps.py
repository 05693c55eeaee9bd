"""Steps across the C border: a reference says what is in range, and what the core must have computed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from ctypes import c_int32
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import CoreError
from flare.replay.cpu import ISA_FLAGS, CpuArg, CpuReplay, machine_flags
from tests.support.fake_library import fake_library, fill, io, node, program

OUT = CpuArg("io", 1024, 256)
PAGE = CpuArg("kv", 64, 64)


@st.composite
def good_steps(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """(slot, tokens) of each run, for the limits of `program`: 64 tokens a step, 160 positions."""
    slots = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
    return [(slot, draw(st.lists(st.integers(0, 63), min_size=1, max_size=16))) for slot in slots]


class Session:
    """A core that remembers tokens in its pages, beside plain lists that do too."""

    def __init__(self, threads: int) -> None:
        nodes = [node("Remember<16>", 0, PAGE), node("Recall<16>", 1, PAGE, OUT)]
        self.replay = CpuReplay(program(nodes), threads=threads, kv_pages=40)
        self.history: list[list[int]] = [[] for _ in range(4)]
        stride = self.replay.limits.page_stride
        assert stride == 10
        self.replay.page_table[:] = [(i * 7) % 40 for i in range(40)]  # each page once

    def write(self, runs: list[tuple[int, list[int]]]) -> int:
        replay, n = self.replay, 0
        for slot, tokens in runs:
            if len(self.history[slot]) + len(tokens) > 160:
                self.history[slot] = []
            for i, token in enumerate(tokens):
                replay.tokens[n], replay.positions[n], replay.slots[n] = token, len(self.history[slot]) + i, slot
                n += 1
        return n

    def expected(self, runs: list[tuple[int, list[int]]]) -> list[int]:
        sums = []
        for slot, tokens in runs:
            for token in tokens:
                self.history[slot].append(token)
                sums.append(sum(self.history[slot]))
        return sums


@settings(max_examples=25)
@given(steps=st.lists(good_steps(), min_size=1, max_size=12), threads=st.sampled_from([1, 2]))
def test_steps_in_range_are_accepted_and_right(steps: list[list[tuple[int, list[int]]]], threads: int) -> None:
    session = Session(threads)
    with session.replay as replay:
        for runs in steps:
            n = session.write(runs)
            replay.rows[0] = n - 1
            replay.step(n, 1)
            assert list(io(replay, c_int32, n)) == session.expected(runs)


EDGE = st.sampled_from([-(2**31), -1, 2**31 - 1])

BREAKS: dict[str, tuple[Callable[[CpuReplay, int, int], None], str]] = {
    "token": (lambda r, i, v: r.tokens.__setitem__(i, v if v < 0 else 64), "token"),
    "position": (lambda r, i, v: r.positions.__setitem__(i, v if v < 0 else 160), "position"),
    "jump": (lambda r, i, v: r.positions.__setitem__(max(i, 1), r.positions[max(i, 1)] - 1), "position"),
    "slot": (lambda r, i, v: r.slots.__setitem__(i, v if v < 0 else 4), "slot"),
    "page": (lambda r, i, v: r.page_table.__setitem__(r.slots[i] * 10, v if v < 0 else 40), "page"),
    "row": (lambda r, i, v: r.rows.__setitem__(0, v if v < 0 else 64), "row"),
    "stride": (lambda r, i, v: setattr(r._step, "page_stride", min(v, 0)), "page_stride"),
    "null": (lambda r, i, v: setattr(r._step, "page_table", None), "null"),
}


@settings(max_examples=100)
@given(runs=good_steps(), data=st.data(), name=st.sampled_from(sorted(BREAKS)), value=EDGE)
def test_one_value_out_of_range_is_refused_before_anything_runs(
    runs: list[tuple[int, list[int]]], data: st.DataObject, name: str, value: int
) -> None:
    session = Session(1)
    runs[0] = (runs[0][0], [*runs[0][1], 5])  # a run of two tokens at least, so that a jump can be made
    with session.replay as replay:
        n = session.write(runs)
        replay.rows[0] = 0
        index = 1 if name == "jump" else data.draw(st.integers(0, n - 1))
        change, text = BREAKS[name]
        change(replay, index, value)
        out = io(replay, c_int32, 64)
        out[:] = [77] * 64
        with pytest.raises(ValueError, match=text):
            replay.step(n, 1)
        assert list(out) == [77] * 64


def test_counts_out_of_range_are_refused() -> None:
    session = Session(1)
    with session.replay as replay:
        n = session.write([(0, [1, 2, 3])])
        for tokens, rows in [(0, 0), (-1, 0), (65, 0), (2**31 - 1, 0), (n, -1), (n, n + 1), (n, 2**31 - 1)]:
            with pytest.raises(ValueError, match="tokens|rows"):
                replay.step(tokens, rows)
        replay.step(n, n)


def test_a_slot_in_two_runs_is_refused() -> None:
    session = Session(1)
    with session.replay as replay:
        for i, (slot, position) in enumerate([(0, 0), (1, 0), (0, 1)]):
            replay.tokens[i], replay.positions[i], replay.slots[i] = 1, position, slot
        with pytest.raises(ValueError, match=r"slot\[2\] 0: the slot's tokens are not contiguous"):
            replay.step(3, 0)
        replay.step(2, 0)  # and a refused step leaves no trace
        replay.step(2, 0)


def test_every_page_up_to_the_position_must_exist_and_none_behind_it() -> None:
    session = Session(1)
    with session.replay as replay:
        replay.tokens[0], replay.positions[0], replay.slots[0] = 1, 47, 2
        for page in (3, 9):
            replay.page_table[20 + page] = 40
        replay.step(1, 0)
        replay.page_table[22] = 40
        with pytest.raises(ValueError, match=r"page_table: slot 2 has page 40: must be in \[0, 40\)"):
            replay.step(1, 0)
        replay.positions[0] = 31
        replay.step(1, 0)
        replay._step.page_stride = 1
        with pytest.raises(ValueError, match="page_stride 1: slot 2 at position 31 needs 2 pages"):
            replay.step(1, 0)


def test_an_absent_argument_is_a_null_pointer() -> None:
    for there, arg in ((0, CpuArg("none")), (1, CpuArg("weights", 0, 64))):
        with CpuReplay(program([node("Present", 0, arg, OUT)]), threads=1, kv_pages=40) as replay:
            fill(replay, [0])
            replay.step(1, 0)
            assert io(replay, c_int32, 1)[0] == there


def test_weights_are_read_where_they_lie_or_from_their_copy_in_huge_pages() -> None:
    nodes = [node("Logits<64>", 0, CpuArg("weights", 256, 256), CpuArg("io", 0, 1024))]
    for huge_pages in (False, True):
        plan = program(nodes, weights_offset=64, weights_bytes=65536)
        with CpuReplay(plan, threads=2, kv_pages=40, huge_pages=huge_pages) as replay:
            fill(replay, [3])
            replay.step(1, 1)
            first = (64 + 256) // 4
            assert list(replay.logits(0)) == [first + i + 3 * (i == 3) for i in range(64)]


def test_a_second_call_on_a_core_is_refused_while_one_runs() -> None:
    with CpuReplay(program([node("Meet", 0, OUT, CpuArg("io", 2048, 64))]), threads=1, kv_pages=40) as replay:
        met = io(replay, c_int32, 16, 2048)
        fill(replay, [2])
        runner = threading.Thread(target=replay.step, args=(1, 0))
        runner.start()
        while met[0] == 0:
            pass
        with pytest.raises(ValueError, match="another call runs on this core"):
            replay.step(1, 0)
        with pytest.raises(ValueError, match="another call runs on this core"):
            replay.sample(0)
        met[0] = 2
        runner.join()
        assert met[1] == 0
        replay.step(1, 0)


def test_cores_of_one_and_of_several_libraries_live_side_by_side(runnable: list[str]) -> None:
    """Four cores, each with history of its own, stepped in turn and at the same time."""
    sessions = [Session(threads) for threads in (1, 2)]
    for isa in runnable:
        session = Session(1)
        session.replay.close()
        nodes = [node("Remember<16>", 0, PAGE), node("Recall<16>", 1, PAGE, OUT)]
        session.replay = CpuReplay(program(nodes, library=fake_library(isa)), threads=2, kv_pages=40)
        session.replay.page_table[:] = [(i * 7) % 40 for i in range(40)]
        sessions.append(session)
    failures: list[object] = []

    def run(number: int, session: Session, rounds: int) -> None:
        for i in range(rounds):
            runs = [(slot, [(number * 13 + i * 5 + slot) % 64] * (slot + 1)) for slot in range(4)]
            n = session.write(runs)
            session.replay.step(n, 0)
            expected = session.expected(runs)
            if list(io(session.replay, c_int32, n)) != expected:
                failures.append((number, i))

    for i, session in enumerate(sessions):
        run(i, session, 3)
    threads = [threading.Thread(target=run, args=(i, session, 30)) for i, session in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        session.replay.close()
    assert not failures


@pytest.fixture
def runnable() -> list[str]:
    return [isa for isa, flags in ISA_FLAGS.items() if flags <= machine_flags()]


def memory_bytes() -> tuple[int, int]:
    """Mapped and resident bytes of this process."""
    mapped, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(mapped) * 4096, int(resident) * 4096


def test_opening_and_closing_leaks_nothing() -> None:
    """200 good opens and 200 failing ones: no memory, mapping, thread or file stays."""
    nodes = [node("Remember<16>", 0, PAGE), node("Recall<16>", 1, PAGE, OUT)]
    good = program(nodes, arena_bytes=1 << 20)
    bad = program([*nodes, node("Tokens", 1, OUT), node("Missing", 2, OUT)], arena_bytes=1 << 20)

    def round_trip() -> None:
        with CpuReplay(good, threads=3, kv_pages=4000, huge_pages=True) as replay:
            fill(replay, [1, 2, 3])
            replay.step(3, 0)
        with pytest.raises(CoreError, match="no kernel Missing"):
            CpuReplay(bad, threads=3, kv_pages=4000, huge_pages=True)

    def census() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("\n")
        return maps, len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(20):
        round_trip()
    before, memory = census(), memory_bytes()
    for _ in range(200):
        round_trip()
    after = census()
    assert after[1:] == before[1:]
    assert after[0] <= before[0] + 5
    for now, then in zip(memory_bytes(), memory, strict=True):
        assert now < then + (8 << 20)


def test_a_failed_step_keeps_the_logits_of_the_last() -> None:
    nodes = [node("Logits<64>", 0, CpuArg("weights", 0, 256), CpuArg("io", 0, 1024))]
    with CpuReplay(program(nodes), threads=1, kv_pages=40) as replay:
        with pytest.raises(ValueError, match="the last step left 0 rows"):
            replay.sample(1)
        fill(replay, [3])
        replay.step(1, 1)
        replay.tokens[0] = 64
        with pytest.raises(ValueError, match="token"):
            replay.step(1, 1)
        replay.sample(1)
        assert replay.sampled[0] == 63
        with pytest.raises(ValueError, match="the last step left 1 rows"):
            replay.sample(2)
