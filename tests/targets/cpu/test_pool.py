"""Phases, units and threads of the native runtime, seen through kernels that report what happened to them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.replay.cpu import CpuArg, CpuReplay
from tests.support.fake_library import fake_library, fill, io, node, program

THREADS = [1, 2, 3, 8]
OUT = CpuArg("io", 1024, 256)


def thread_states() -> list[str]:
    """The scheduling state of each worker of this process: R, S, ..."""
    states = []
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition(") ")
        if "(flare-" in name:
            states.append(rest[0])
    return states


@pytest.mark.parametrize("threads", THREADS)
def test_a_phase_sees_all_of_the_phase_before(threads: int) -> None:
    """201 phases, each reading all that the one before wrote; empty phases and gaps in the numbers change nothing."""
    x, y = CpuArg("arena", 0, 256), CpuArg("arena", 256, 256)
    nodes = []
    for phase in range(0, 400, 4):
        nodes += [
            node("SumPlus", phase, x, y),
            node("Nothing", phase),
            node("Nothing", phase + 1),
            node("SumPlus", phase + 2, y, x),
        ]
    nodes.append(node("SumPlus", 400, x, OUT))
    expected, rounds = [0] * 64, 201
    history = []
    for _ in range(3):
        for _ in range(rounds - 1):
            expected = [(sum(expected) + i) % 2**32 for i in range(64)]
        history.append([(sum(expected) + i) % 2**32 for i in range(64)])
    with CpuReplay(program(nodes), threads=threads, kv_pages=8) as replay:
        for step in range(3):
            fill(replay, [0])
            replay.step(1, 0)
            assert list(io(replay, ctypes.c_uint32, 64)) == history[step]


@pytest.mark.parametrize("threads", THREADS)
@settings(max_examples=20)
@given(steps=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=64), min_size=1, max_size=20))
def test_every_unit_runs_exactly_once(threads: int, steps: list[list[int]]) -> None:
    """Any number of units, of any durations, in two nodes of one phase."""
    nodes = [node("Spin", 0, OUT), node("Spin", 0, CpuArg("io", 2048, 256)), node("Spin", 1, CpuArg("io", 3072, 256))]
    with CpuReplay(program(nodes), threads=threads, kv_pages=40) as replay:
        expected = [0] * 64
        for tokens in steps:
            fill(replay, tokens)
            replay.step(len(tokens), 0)
            expected = [count + (i < len(tokens)) for i, count in enumerate(expected)]
            for offset in (1024, 2048, 3072):
                assert list(io(replay, ctypes.c_int32, 64, offset)) == expected


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_units_run_at_the_same_time(threads: int) -> None:
    """As many units as threads, each waiting until all have begun."""
    with CpuReplay(program([node("Meet", 0, OUT, CpuArg("io", 2048, 64))]), threads=threads, kv_pages=40) as replay:
        met = io(replay, ctypes.c_int32, 16, 2048)
        for _ in range(5):
            met[0] = 0
            fill(replay, [threads] * threads)
            replay.step(threads, 0)
            assert list(met[:2]) == [threads, 0], "a unit waited in vain"


@pytest.mark.parametrize("waiting", [0, 15])
def test_a_stuck_thread_loses_its_units_to_the_others(waiting: int) -> None:
    """One unit, in either thread's share, waits until all other units are done: the other thread must take them."""
    with CpuReplay(program([node("Meet", 0, OUT, CpuArg("io", 2048, 64))]), threads=2, kv_pages=40) as replay:
        met = io(replay, ctypes.c_int32, 16, 2048)
        tokens = [0] * 16
        tokens[waiting] = 16
        fill(replay, tokens)
        replay.step(16, 0)
        assert list(met[:2]) == [16, 0], "the units behind the stuck one were not taken"
        assert list(io(replay, ctypes.c_int32, 16)) == [1] * 16


@pytest.mark.parametrize("asleep", [False, True])
def test_workers_work_while_the_caller_does_something_else(asleep: bool) -> None:
    """All phases but a chunk of the caller's own could be done when it joins; here all are, workers awake or not."""
    nodes = [node("Tokens", 0, OUT), node("Meet", 1, CpuArg("io", 2048, 256), CpuArg("io", 3072, 64))]
    with CpuReplay(program(nodes), threads=2, kv_pages=40) as replay:
        met, deadline = io(replay, ctypes.c_int32, 16, 3072), time.monotonic() + 20

        def wait_for(done: Callable[[], bool]) -> None:
            while not done():
                assert time.monotonic() < deadline

        for count in (1, 2, 3):
            if asleep:
                wait_for(lambda: thread_states() == ["S"])
            fill(replay, [0])
            replay.step(1, 0, lambda: wait_for(lambda: met[0] == count))  # noqa: B023
            assert list(met[:2]) == [count, 0]


@pytest.mark.parametrize("threads", [1, 2])
def test_what_the_caller_raises_meanwhile_comes_when_the_step_is_done(threads: int) -> None:
    with CpuReplay(program([node("Tokens", 0, OUT)]), threads=threads, kv_pages=40) as replay:
        library, error = replay._library, ctypes.create_string_buffer(200)

        def fails() -> None:
            with pytest.raises(ValueError, match="another call runs on this core"):
                replay.sample(0)
            raise RuntimeError("of the caller")

        fill(replay, [3, 4, 5])
        with pytest.raises(RuntimeError, match="of the caller"):
            replay.step(3, 0, fails)
        assert list(io(replay, ctypes.c_int32, 3)) == [3, 4, 5]
        assert library.flare_finish(replay._handle, error, 200) == 1 and error.value == b"no step was begun"
        replay.step(2, 0)


def test_workers_are_named_sleep_when_idle_and_end_on_close() -> None:
    replay = CpuReplay(program([node("Tokens", 0, OUT)]), threads=4, kv_pages=40)
    fill(replay, [1, 2, 3])
    replay.step(3, 0)
    deadline = time.monotonic() + 20
    while thread_states() != ["S"] * 3:  # yielding threads are R; only a futex makes them S
        assert time.monotonic() < deadline, thread_states()
    replay.step(3, 0)
    replay.close()
    assert thread_states() == []


def test_one_thread_starts_no_worker() -> None:
    with CpuReplay(program([node("Tokens", 0, OUT)]), threads=1, kv_pages=40) as replay:
        assert thread_states() == []
        fill(replay, [7])
        replay.step(1, 0)
        assert io(replay, ctypes.c_int32, 1)[0] == 7


def test_the_thread_sanitizer_finds_no_race(tmp_path: Path, repository: Path) -> None:
    """Random phases on 2 to 16 threads under the compiler's race detector, every unit's turn checked by the others."""
    kernels = repository / "ignition/targets/cpu/kernels"
    source = Path(__file__).with_name("pool_stress.cc")
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-g",
        "-fsanitize=thread",
        "-pthread",
        f"-I{kernels}",
        source,
        "-o",
        "stress",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    result = subprocess.run([tmp_path / "stress", "60"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


FLUSHED = """
import ctypes, sys
from flare.replay.cpu import CpuArg, CpuReplay
from tests.support.fake_library import fill, io, node, program
ctypes.CDLL(sys.argv[1])  # compiled with -ffast-math: loading it makes this thread flush denormals
assert sys.float_info.min * 0.5 == 0.0, "the thread does not flush denormals"
from pathlib import Path
plan = program([node("Halve", 0, CpuArg("io", 1024, 256))], library=Path(sys.argv[2]))
with CpuReplay(plan, threads=int(sys.argv[3]), kv_pages=40) as replay:
    fill(replay, [0] * 32)
    replay.step(32, 0)
    words = set(io(replay, ctypes.c_uint32, 32))
assert words == {1 << 22}, words
assert sys.float_info.min * 0.5 == 0.0, "the caller's own setting was not restored"
"""


@pytest.mark.parametrize("threads", [1, 4])
def test_denormals_survive_a_host_that_flushes_them(tmp_path: Path, repository: Path, threads: int) -> None:
    """Some libraries switch the loading thread to flush denormals; results may not depend on that."""
    (tmp_path / "fast.c").write_text("int fast;\n")
    fast = tmp_path / "fast.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-ffast-math", tmp_path / "fast.c", "-o", fast], check=True)
    subprocess.run([sys.executable, "-c", FLUSHED, fast, fake_library(), str(threads)], check=True, cwd=repository)
