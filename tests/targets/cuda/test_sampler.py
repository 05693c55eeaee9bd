"""Tokens that the cuda target draws: those of the sampler's definition and of the cpu target, from equal logits and seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flare.errors import CoreError
from flare.replay.cpu import CpuReplay
from tests.support.cuda_rows import CudaRows
from tests.support.logit_rows import open_rows, put_logits, put_params
from tests.support.reference_sampler import reference_sample

INF = math.inf
FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 3},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.02},
]


@pytest.fixture(scope="module")
def replays() -> Iterator[cache[[int], CpuReplay]]:
    """With 8 rows, by vocabulary, opened once."""
    with ExitStack() as stack:
        yield cache(lambda vocabulary: stack.enter_context(open_rows(vocabulary, 8)))


def on_cpu(replay: CpuReplay, rows: int) -> list[int]:
    """The cpu target's tokens, -1 for a row that has none."""
    try:
        replay.sample(rows)
    except CoreError:
        assert -1 in replay.sampled
    return list(replay.sampled)[:rows]


# Against the definitions


@st.composite
def draws(draw: st.DrawFn) -> tuple[list[float], dict[str, float], list[int], int, set[int] | None]:
    """Logits of 64 tokens (often equal ones, some at -inf), parameters, history, length of its prompt, mask."""
    steps = draw(st.sampled_from([2.0, 64.0, 4096.0]))
    logits = [value / steps for value in draw(st.lists(st.integers(-600, 600), min_size=64, max_size=64))]
    for masked in draw(st.lists(st.integers(0, 63), max_size=5)):
        logits[masked] = -INF
    fields = dict(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5, 3.0, -1.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, 40, 63, 64, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.0, 0.1, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])),
        repetition=draw(st.sampled_from([1.0, 1.1, 0.8])),
        presence=draw(st.sampled_from([0.0, 0.5])),
        frequency=draw(st.sampled_from([0.0, -1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 2**32 - 1)),
        position=draw(st.integers(0, 2**32 - 1)),
    )
    history = draw(st.lists(st.integers(0, 63), max_size=40))
    allowed = draw(st.none() | st.sets(st.integers(0, 63), max_size=20))
    return logits, fields, history, draw(st.integers(0, len(history))), allowed


@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])  # a failing case is not worth minutes of shrinking
@given(cases=st.lists(draws(), min_size=4, max_size=4), capacity=st.sampled_from([1, 8, 64]))
def test_every_token_is_the_cpu_targets(
    replays: cache[[int], CpuReplay],
    cases: list[tuple[list[float], dict[str, float], list[int], int, set[int] | None]],
    capacity: int,
) -> None:
    replay = replays(64)
    held = []
    for row, (logits, fields, history, prompt_len, allowed) in enumerate(cases):
        held.append(put_logits(replay, row, logits))
        put_params(replay, row, history, prompt_len=prompt_len, allowed=allowed, **fields)
    rows = CudaRows(replay, 4, chunk=32, capacity=capacity)
    found = rows.sample()
    assert [max(token, -1) for token in found] == on_cpu(replay, 4)
    assert rows.memory["logits"].view(4, 64).tolist() == held, "sampling changed the logits"
    for row, (_, _, history, _, allowed) in enumerate(cases):
        if allowed is None and found[row] >= 0:
            assert found[row] == reference_sample(held[row], replay.sampling[row], history)


@pytest.mark.parametrize("vocabulary, chunk", [(1, 1024), (7, 4), (300, 128), (1000, 256), (5000, 1024)])
def test_vocabularies_of_all_sizes(replays: cache[[int], CpuReplay], vocabulary: int, chunk: int) -> None:
    """Peaked and flat rows, each with every filter: what they keep fits, or the complete row is looked at."""
    replay = replays(vocabulary)
    source = np.random.default_rng(vocabulary)
    held = []
    for row in range(5):
        scale = (3.0, 0.1)[(row + vocabulary) % 2]
        held.append(put_logits(replay, row, scale * source.standard_normal(vocabulary)))
        put_params(replay, row, seed=row, position=3, **FILTERS[row])
    found = CudaRows(replay, 5, chunk=chunk, capacity=128).sample()
    assert found == on_cpu(replay, 5)
    assert found == [reference_sample(held[row], replay.sampling[row], []) for row in range(5)]


@pytest.mark.parametrize("capacity", [8, 512])
@pytest.mark.parametrize("fields", [{"top_k": 200}, {"top_p": 0.5}, {"top_p": 0.25, "min_p": 1}, {}], ids=str)
def test_the_border_of_equal_logits_is_drawn_by_id(
    replays: cache[[int], CpuReplay], fields: dict[str, float], capacity: int
) -> None:
    """All equal, equal halves (-0 and +0 among them), and equal ones at the border of the filter."""
    replay = replays(300)
    rows = [[0.0, -0.0] * 150, [1.0, 3.0] * 150, [2.0] * 100 + [0.0] * 200, [0.0] * 290 + [5.0] * 10]
    for row, logits in enumerate(rows):
        put_logits(replay, row, logits)
        put_params(replay, row, seed=1, choice=row, **fields)
    assert CudaRows(replay, 4, chunk=64, capacity=capacity).sample() == on_cpu(replay, 4)


@pytest.mark.parametrize(
    "fields, needed",
    [
        ({"top_k": 40}, lambda weights: 40),
        ({"top_k": 2, "top_p": 0.99, "min_p": 0.5}, lambda weights: 2),
        ({"top_p": 0.8}, lambda weights: 1 + (np.cumsum(weights) < 0.8 * weights.sum()).sum()),
        ({"min_p": 0.01}, lambda weights: (weights >= 0.01).sum()),
    ],
    ids=["top_k", "all", "top_p", "min_p"],
)
def test_candidates_hold_what_a_filter_keeps_and_few_more(
    replays: cache[[int], CpuReplay], fields: dict[str, float], needed: Callable[[np.ndarray], int]
) -> None:
    replay = replays(1000)
    logits = np.array(put_logits(replay, 0, 3 * np.random.default_rng(2).standard_normal(1000)))
    put_params(replay, 0, **fields)
    rows = CudaRows(replay, 1, chunk=256, capacity=1000)
    rows.sample()
    size = int(rows.memory["sizes"][0])
    ids = rows.memory["ids"][:size].numpy()
    order = np.argsort(-logits, kind="stable")
    kept = order[: needed(np.exp(logits - logits.max())[order])]
    assert set(kept) <= set(ids) and size < 12 * len(kept)
    assert (np.diff(ids) > 0).all()
    assert rows.memory["candidates"][:size].tolist() == logits[ids].tolist()


# Degenerate rows


@pytest.mark.parametrize("fields", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.0, 3e38])
def test_infinities_denormals_and_extremes_of_temperature(
    replays: cache[[int], CpuReplay], fields: dict[str, float], temperature: float
) -> None:
    replay = replays(300)
    some = np.arange(300) % 7 + 0.0
    certain, two, wide, tiny = np.full(300, -INF), some.copy(), np.full(300, -3e38), 1e-42 * (some - 3)
    certain[270] = -3e38
    two[[290, 33]] = INF
    wide[4] = 3e38
    for row, logits in enumerate([certain, two, wide, tiny]):
        put_logits(replay, row, logits)
        put_params(replay, row, seed=7, temperature=temperature, **fields)
    found = CudaRows(replay, 4, chunk=128, capacity=256).sample()
    assert found == on_cpu(replay, 4)
    assert found[0] == 270
    assert found[1] in ({33} if temperature <= 0 else {33, 290})


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_p": 0.9, "top_k": 5}], ids=str)
def test_rows_without_a_token_say_why_and_fail_alone(
    replays: cache[[int], CpuReplay], fields: dict[str, float]
) -> None:
    replay = replays(300)
    for row in range(6):
        put_logits(replay, row, [50.0 if token == 123 else 0.0 for token in range(300)])
        put_params(replay, row, allowed=[] if row == 3 else range(299) if row == 4 else None, **fields)
    replay.logits(1)[299] = math.nan
    replay.logits(4)[299] = math.nan  # a mask hides no NaN
    put_logits(replay, 2, [-INF] * 300)
    assert CudaRows(replay, 6, chunk=64).sample() == [123, -1, -2, -2, -1, 123]


def test_greedy_takes_the_lowest_of_equal_ids_wherever_it_is(replays: cache[[int], CpuReplay]) -> None:
    replay = replays(1000)
    firsts = [0, 1, 63, 64, 500, 959, 960, 998]
    for row, first in enumerate(firsts):
        put_logits(replay, row, [2.5 if token in (first, first + 1, 999) else -1.0 for token in range(1000)])
        put_params(replay, row, temperature=0)
    assert CudaRows(replay, chunk=64).sample() == firsts


@pytest.mark.parametrize("fields", [{"temperature": 0}, *FILTERS], ids=str)
def test_a_mask_can_leave_one_token(replays: cache[[int], CpuReplay], fields: dict[str, float]) -> None:
    """Also where all other logits are higher, in whatever word and chunk it lies."""
    replay = replays(300)
    tokens = [0, 31, 32, 299]
    for row, token in enumerate(tokens):
        put_logits(replay, row, np.where(np.arange(300) == token, -30.0, 5.0))
        put_params(replay, row, allowed=[token], **fields)
    assert CudaRows(replay, 4, chunk=128).sample() == tokens


# What a draw does not depend on


def test_a_row_alone_has_the_bits_that_it_has_among_others(replays: cache[[int], CpuReplay]) -> None:
    replay = replays(300)
    source = np.random.default_rng(4)
    history = source.integers(0, 300, 50).tolist()
    rows = [(3 * source.standard_normal(300), FILTERS[row % 5] | {"seed": row}) for row in range(8)]

    def put(at: int, row: int) -> None:
        logits, fields = rows[row]
        put_logits(replay, at, logits)
        put_params(replay, at, history, repetition=1 + row % 2, alternatives=row % 4 * 5, explicit=[row], **fields)

    for row in range(8):
        put(row, row)
    together = CudaRows(replay, chunk=128)
    tokens = together.sample()
    for row in (1, 2, 5, 7):
        put(0, row)
        alone = CudaRows(replay, 1, chunk=128)
        assert alone.sample() == [tokens[row]]
        assert alone.entry_bytes(0) == together.entry_bytes(row)


def test_draws_follow_the_seed_choice_and_position(replays: cache[[int], CpuReplay]) -> None:
    """24 draws from equal logits hit the tokens that the reference's uniform numbers say, and not always one."""
    replay = replays(64)
    source = random.Random(6)
    seen = set()
    for _ in range(3):
        for row in range(8):
            put_logits(replay, row, [0.0] * 64)
            put_params(replay, row, seed=source.getrandbits(64), choice=source.getrandbits(32), position=row)
        found = CudaRows(replay, chunk=32).sample()
        assert found == [reference_sample([0.0] * 64, replay.sampling[row], []) for row in range(8)]
        seen |= {*found}
    assert len(seen) > 12
