"""CudaReplay over the tiny core: what reaches the device, and what comes back.

The core's arithmetic is small integers, exact in f32: every expectation is worked out here in plain Python.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int32, c_uint32, cast, sizeof
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from flare.errors import CoreError, ReplayDead
from flare.replay.cpu_interface import RowLogprobs, SampleParams
from flare.replay.cuda import CudaReplay
from tests.replay.conftest import Open
from tests.support.fake_cuda.library import FakeCuda
from tests.support.tiny_cuda.core import IO, SCALE, VALUES
from tests.support.tiny_cuda.sizes import CONTEXT, PAGE_BYTES, PT, ROWS, SLOTS, STRIDE, TOKENS, V

NAN, INFINITY = float("nan"), float("inf")


def fill(replay: Any, chunks: list[tuple[int, int, list[int]]]) -> int:
    """Writes (slot, first position, tokens) one after the other; returns how many tokens there are."""
    at = 0
    for slot, position, tokens in chunks:
        end = at + len(tokens)
        replay.tokens[at:end] = tokens
        replay.positions[at:end] = list(range(position, position + len(tokens)))
        replay.slots[at:end] = [slot] * len(tokens)
        at = end
    return at


def expected(tokens: list[int]) -> list[list[float]]:
    """The logits behind each token of a slot, with the weights 1 to V."""
    return [[SCALE * total * (v + 1) for v in range(V)] for total in accumulate(token + 1 for token in tokens)]


def device_array(replay: CudaReplay, name: str, kind: Any, count: int) -> Any:
    """An array of the device's memory, which is the host's here."""
    return (kind * count).from_address(replay._arrays.address[name])


def pool(fake: FakeCuda, pages: int) -> list[int]:
    """The words of the kv pool."""
    begin = next(begin for begin, size in fake.blocks() if size == pages * PAGE_BYTES)
    return list((c_int32 * (pages * PAGE_BYTES // 4)).from_address(begin))


def test_steps_of_mixed_slots(open_tiny: Open) -> None:
    """Pages anywhere, a chunk that goes on with a slot, rows in any order: each row is what its slot's tokens make."""
    replay = open_tiny()
    limits = replay.limits
    assert (limits.vocabulary, limits.slots, limits.page_stride, limits.kv_pages) == (V, SLOTS, STRIDE, 8)
    replay.page_table[0:2] = [3, 5]
    replay.page_table[STRIDE] = 7
    first, second = [5, 6, 9, 1, 2, 8, 40, 3], [11, 0]
    n = fill(replay, [(0, 0, first[:5]), (1, 0, second)])
    replay.rows[:3] = [4, 6, 0]
    replay.step(n, 3)
    for row, wanted in enumerate([expected(first)[4], expected(second)[1], expected(first)[0]]):
        assert replay.logits(row).tolist() == wanted
    replay.rows[0] = 2
    replay.step(fill(replay, [(0, 5, first[5:])]), 1)
    assert replay.logits(0).tolist() == expected(first)[-1]
    view = replay.logits(0)
    assert view.format == "f" and view.nbytes == 4 * V


def test_a_row_is_the_same_in_every_bucket_and_by_any_chunks(open_tiny: Open) -> None:
    replay = open_tiny()
    replay.page_table[0:4] = [0, 1, 2, 3]
    replay.page_table[STRIDE] = 4
    tokens = [(7 * i + 3) % V for i in range(20)]
    wanted = expected(tokens)
    for chunks in ([4, 4, 4, 4, 4], [16, 4], [1, 15, 4], [3, 5, 12]):
        done = 0
        for count in chunks:
            other = [(1, 0, [9])] if count < TOKENS else []
            n = fill(replay, [(0, done, tokens[done : done + count]), *other])
            replay.rows[0] = count - 1
            replay.step(n, 1)
            done += count
            assert replay.logits(0).tolist() == wanted[done - 1]


def test_tokens_behind_the_live_ones_are_padding(open_tiny: Open, fake: FakeCuda) -> None:
    replay = open_tiny()
    replay.page_table[0] = 2
    fill(replay, [(0, 0, [63] * TOKENS)])
    replay.rows[:4] = [9, 8, 7, 6]
    replay.step(TOKENS, 4)
    replay.rows[:4] = [2, 3, 1, 1]
    replay.page_table[STRIDE] = 4
    before = pool(fake, 8)
    replay.step(fill(replay, [(1, 0, [5, 6, 7])]), 1)
    for name, live, pad in [("tokens", [5, 6, 7], 0), ("positions", [0, 1, 2], -1), ("slots", [1, 1, 1], 0)]:
        assert list(device_array(replay, name, c_int32, 4)) == [*live, pad], name
    assert list(device_array(replay, "rows", c_int32, 4)) == [2, 0, 0, 0]
    arena = next(begin for begin, size in fake.blocks() if size == VALUES.offset + VALUES.bytes)
    assert ctypes.string_at(arena + VALUES.offset + 16, VALUES.bytes - 16) == bytes(
        VALUES.bytes - 16
    )  # filled by a node
    after = pool(fake, 8)
    place = 4 * PAGE_BYTES // 4
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [place, place + 1, place + 2]


def test_the_smallest_bucket_runs(open_tiny: Open, executor: Any) -> None:
    replay = open_tiny()
    grids: list[int] = []
    run = executor._launch
    executor._launch = lambda kernel, grid, raw: (grids.append(grid[0]), run(kernel, grid, raw))
    try:
        for n in (1, 4, 5, TOKENS):
            replay.step(fill(replay, [(0, 0, [1] * n)]), 1)
        replay.sample(1)
        replay.score(0, 1)
    finally:
        executor._launch = run
    assert grids == [n for tokens in (4, 4, TOKENS, TOKENS) for n in (tokens, tokens, ROWS)] + [1, 2]


def test_a_changed_page_table_reaches_the_device(open_tiny: Open) -> None:
    """Only where it changed, and as far as it is used: a slot's pages are replaced between steps."""
    replay = open_tiny()
    tokens = list(range(1, 1 + TOKENS + 2))
    replay.page_table[0:2] = [6, 1]
    replay.step(fill(replay, [(0, 0, tokens[:TOKENS])]), 0)
    replay.rows[0] = 1
    replay.step(fill(replay, [(0, TOKENS, tokens[TOKENS:])]), 1)
    assert replay.logits(0).tolist() == expected(tokens)[-1]
    assert list(device_array(replay, "page_table", c_int32, 3)) == [6, 1, -1]
    sent: list[tuple[str, int, int]] = []
    send = replay._arrays.send
    replay._arrays.send = lambda name, offset, size: (sent.append((name, offset, size)), send(name, offset, size))
    replay.step(fill(replay, [(0, TOKENS, tokens[TOKENS:])]), 1)
    assert sent == []
    replay.page_table[0:2] = [4, 0]
    replay.step(fill(replay, [(0, 0, [30, 31])]), 1)
    assert replay.logits(0).tolist() == expected([30, 31])[-1]
    assert sent == [("page_table", 0, 4)]


def test_what_is_called_while_the_device_works(open_tiny: Open) -> None:
    """It runs once, on the caller's thread; what it raises comes when the device is done."""
    replay = open_tiny()
    seen: list[int] = []

    def meanwhile() -> None:
        seen.append(threading.get_ident())

    replay.rows[0] = 2
    replay.step(fill(replay, [(0, 0, [5, 6, 9])]), 1, meanwhile)
    assert replay.logits(0).tolist() == expected([5, 6, 9])[-1] and seen == [threading.get_ident()]

    def fail() -> None:
        raise LookupError("meanwhile")

    replay.rows[0] = 0
    with pytest.raises(LookupError, match="meanwhile"):
        replay.step(fill(replay, [(0, 0, [5])]), 1, fail)
    with pytest.raises(ValueError, match="the last step left 0 rows"):
        replay.sample(1)
    replay.step(fill(replay, [(0, 0, [5])]), 1)
    assert replay.logits(0).tolist() == expected([5])[0]


def test_another_thread_may_go_on(open_tiny: Open) -> None:
    """A context is a thread's; the engine's thread is not the one that loads, although it may have got its number."""

    def work() -> None:
        replay.rows[0] = 1
        replay.step(fill(replay, [(0, 0, [1, 2])]), 1)
        replay.sample(1)

    replay = in_thread(open_tiny)
    in_thread(work)
    assert replay.logits(0).tolist() == expected([1, 2])[-1]
    replay.step(fill(replay, [(0, 2, [3])]), 0)
    replay.close()


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a thread of its own, which then ends."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def prepared(open_tiny: Open, tokens: list[int], **opening: Any) -> CudaReplay:
    """A replay with a row of logits for each of up to four tokens."""
    replay = open_tiny(**opening)
    replay.rows[: len(tokens)] = list(range(len(tokens)))
    replay.step(fill(replay, [(0, 0, tokens)]), len(tokens))
    return replay


def test_draws(open_tiny: Open) -> None:
    """Masks, histories and explicit ids go with rows that have them; log probabilities come back for rows that want some."""
    replay = prepared(open_tiny, [1, 2, 3])
    logits = expected([1, 2, 3])
    mask = (c_uint32 * 2)(0b1010, 0)
    history = (c_int32 * CONTEXT)(*range(CONTEXT))
    ids = (c_int32 * 3)(9, 0, 33)
    row = replay.sampling[0]
    row.mask, row.alternatives = mask, 0
    row.explicit_ids, row.explicit = ids, 3
    row = replay.sampling[1]
    row.repetition, row.history, row.history_len = 2.0, history, 5
    replay.logprobs[1].count = 77
    replay.sampling[2].alternatives = 4
    replay.sample(3)
    assert list(replay.sampled[:3]) == [3, (63 + sum(range(5))) % V, 63]
    first, untouched, last = replay.logprobs[:3]
    assert (first.chosen, first.rank, first.count) == (logits[0][3], 1, 0)
    assert first.explicit[:3] == [logits[0][9], logits[0][0], logits[0][33]]
    assert untouched.count == 77
    assert (last.chosen, last.rank, last.count) == (logits[2][63], 1, 4)
    params = device_array(replay, "params", SampleParams, ROWS)
    assert (params[3].temperature, params[3].top_p, params[3].alternatives, bool(params[3].mask)) == (0, 1, -1, False)


def test_histories_are_compared_and_what_is_new_is_sent(open_tiny: Open) -> None:
    replay = prepared(open_tiny, [1])
    sent: list[tuple[int, int]] = []
    send = replay._arrays.send

    def watched(name: str, offset: int, size: int) -> None:
        if name == "history":
            sent.append((offset, size))
        send(name, offset, size)

    replay._arrays.send = watched
    row = replay.sampling[0]
    row.presence = 1.0

    def draw(tokens: list[int]) -> int:
        row.history = (c_int32 * len(tokens))(*tokens)
        row.history_len = len(tokens)
        replay.sample(1)
        return replay.sampled[0]

    tokens = [3, 1, 4, 1, 5]
    assert draw(tokens) == (63 + 14) % V and sent.pop() == (0, 20)
    assert draw([*tokens, 9]) == (63 + 23) % V and sent.pop() == (20, 4)
    assert draw([*tokens, 9]) == (63 + 23) % V and not sent
    assert draw([3, 1]) == (63 + 4) % V and not sent  # another request, whose beginning is known
    assert draw([*tokens, 9, 2]) == (63 + 25) % V and sent.pop() == (24, 4)
    assert draw([3, 2, 4, 1, 5, 9]) == (63 + 24) % V and sent.pop() == (0, 24)


def test_rows_without_a_token(open_tiny: Open) -> None:
    """They are -1 and have rank 0, all others are good, and the first one's reason is told."""
    replay = prepared(open_tiny, [1, 2])
    none = (c_uint32 * 2)(0, 0)
    replay.sampling[0].mask = none
    replay.sampling[0].alternatives = replay.sampling[1].alternatives = 2
    with pytest.raises(CoreError, match=r"graphs/cuda-sm_90a.msgpack: row 0: all its logits are -inf$"):
        replay.sample(2)
    assert list(replay.sampled[:2]) == [-1, 63]
    assert (replay.logprobs[0].rank, replay.logprobs[1].rank) == (0, 1)
    replay.sampling[0].mask = None
    replay.sample(2)
    assert list(replay.sampled[:2]) == [63, 63]


def test_rows_with_nan(open_tiny: Open) -> None:
    replay = prepared(open_tiny, [1, 0], values=[1.0, 2.0, NAN, *[1.0] * (V - 3)])
    with pytest.raises(CoreError, match="row 0: its logits hold NaN$"):
        replay.sample(2)
    assert list(replay.sampled[:2]) == [-1, -1]
    replay.targets[:2] = [0, 2]
    with pytest.raises(CoreError, match="row 1: its logits hold NaN, or all of them are -inf"):
        replay.score(0, 2)
    assert [replay.logprobs[i].rank for i in range(2)] == [1, 0]


def test_rows_behind_those_that_are_scored_are_not_wanted(open_tiny: Open) -> None:
    """Graphs of 2 and of 4 rows run from the first row on; they leave alone whose `wanted` is -1."""
    replay = open_tiny()
    replay.rows[:4] = range(4)
    replay.step(fill(replay, [(0, 0, [1, 2, 3, 4])]), 4)
    for first, count, wanted in (
        (0, 4, [5, 6, 7, 8]),
        (0, 1, [5, -1, 7, 8]),
        (1, 3, [5, 6, 7, 8]),
        (0, 3, [5, 6, 7, -1]),
    ):
        replay.targets[:4], replay.wanted[:4] = [9] * 4, [5, 6, 7, 8]
        replay.score(first, count)
        assert list(device_array(replay, "wanted", c_int32, 4)) == wanted, (first, count)
        assert replay.wanted[:4] == [5, 6, 7, 8]


def test_scores_of_rows_from_anywhere(open_tiny: Open) -> None:
    replay = prepared(open_tiny, [1, 2, 3, 4])
    logits = expected([1, 2, 3, 4])
    for first, count in [(0, 4), (1, 2), (3, 1), (2, 2), (0, 1)]:
        ctypes.memset(replay.logprobs, 0, sizeof(replay.logprobs))
        replay.targets[:4] = [10 * row + 4 * first + count for row in range(4)]  # others in each call
        replay.wanted[:4] = [row + first + count for row in range(4)]
        replay.score(first, count)
        for row in range(4):
            entry = replay.logprobs[row]
            wanted = (logits[row][replay.targets[row]], 1, replay.wanted[row])
            assert (entry.chosen, entry.rank, entry.count) == (wanted if first <= row < first + count else (0, 0, 0))
    replay.score(4, 0)


def test_rows_of_logits_are_bounded(open_tiny: Open) -> None:
    replay = prepared(open_tiny, [1])
    for row in (-1, ROWS):
        with pytest.raises(ValueError, match=rf"row {row}: must be in \[0, 4\)"):
            replay.logits(row)


def test_a_closed_replay_is_dead(open_tiny: Open, fake: FakeCuda) -> None:
    """Everything was given back, in an order that the driver takes; arrays stay usable memory."""
    replay = prepared(open_tiny, [1])
    assert fake.blocks() and fake.contexts() == 1
    replay.close()
    replay.close()
    assert not fake.blocks() and not fake.contexts()
    for call in (
        lambda: replay.step(1, 0),
        lambda: replay.sample(0),
        lambda: replay.score(0, 0),
        lambda: replay.logits(0),
    ):
        with pytest.raises(ReplayDead, match="closed"):
            call()
    replay.tokens[0] = 5
    with open_tiny() as other:
        other.step(1, 1)
    assert not fake.blocks()


def test_the_arrays_are_ctypes_arrays_of_the_engines_types(open_tiny: Open) -> None:
    replay = open_tiny()
    for name, kind, count in [
        ("tokens", c_int32, TOKENS),
        ("positions", c_int32, TOKENS),
        ("slots", c_int32, TOKENS),
        ("rows", c_int32, ROWS),
        ("page_table", c_int32, SLOTS * STRIDE),
        ("sampled", c_int32, ROWS),
        ("targets", c_int32, ROWS),
        ("wanted", c_int32, ROWS),
        ("sampling", SampleParams, ROWS),
        ("logprobs", RowLogprobs, ROWS),
    ]:
        array = getattr(replay, name)
        assert isinstance(array, ctypes.Array) and array._type_ is kind and len(array) == count, name
    assert (replay.sampling[ROWS - 1].top_p, replay.sampling[ROWS - 1].alternatives) == (1.0, -1)
    assert cast(replay.sampling[0].mask, ctypes.c_void_p).value is None
    assert (replay.max_rows, replay.page_tokens, replay.kv_pages, replay.vocabulary) == (ROWS, PT, 8, V)
    assert IO["sampled"].bytes == sizeof(replay.sampled)


def test_the_replay_imports_no_heavy_package(repository: Path, fake_libcuda: Path) -> None:
    """With a device opened: neither numpy nor what compiles kernels."""
    code = f"""
import ctypes, sys
ctypes.CDLL({str(fake_libcuda)!r}, mode=ctypes.RTLD_GLOBAL)
import flare.replay.cuda
from flare.replay.cuda_driver import open_device
print("cuda.bindings.driver" in sys.modules, end=" ")
open_device(["sm_90a"]).close()
print("cuda.bindings.driver" in sys.modules, sorted({{"numpy", "torch", "triton", "ignition"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert result.stdout == "False True []\n"
