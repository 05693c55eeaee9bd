"""Log probabilities that the cuda target tells: every byte of an entry is the cpu target's, from equal logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache

import numpy as np
import pytest

from flare.errors import CoreError
from flare.replay.cpu import CpuReplay
from tests.support.cuda_rows import CudaRows, fill_entries
from tests.support.logit_rows import open_rows, put_logits, put_params

INF = math.inf


@pytest.fixture(scope="module")
def replays() -> Iterator[cache[[int], CpuReplay]]:
    """With 14 rows, by vocabulary, opened once."""
    with ExitStack() as stack:
        yield cache(lambda vocabulary: stack.enter_context(open_rows(vocabulary, 14)))


def shapes(vocabulary: int) -> list[np.ndarray]:
    """Rows of all kinds: flat and peaked ones, extremes, equal logits, and different ones whose values round to one."""
    source = np.random.default_rng(vocabulary)
    normal = source.standard_normal(vocabulary)
    one = np.full(vocabulary, -INF)
    one[vocabulary // 2] = -7.0
    impossible = np.where(normal > 0.5, -INF, normal)
    impossible[0] = 0.0
    certain = np.where(normal > 1, INF, normal)
    certain[-1] = INF
    return [
        np.full(vocabulary, 2.5),
        0.01 * normal,
        3.0 * normal,
        30.0 * normal,
        1e5 + 3.0 * normal,
        1e30 * normal,
        np.where(normal < 0, -3.4e38, 3.4e38),
        1e-42 * normal,
        np.round(normal),
        np.where(normal > 2, 20.0, 1e-3 + 1e-9 * source.integers(0, 50, vocabulary)),
        impossible,
        one,
        certain,
        np.where(source.integers(0, 2, vocabulary) > 0, 0.0, -0.0),
    ]


def score_on_cpu(replay: CpuReplay, first: int, count: int) -> None:
    fill_entries(replay)
    with suppress(CoreError):  # rows without probabilities: their entries say so
        replay.score(first, count)


@pytest.mark.parametrize("vocabulary, chunk", [(1, 64), (7, 4), (20, 8), (300, 128), (1000, 1024), (5000, 1024)])
def test_scores_of_rows_of_all_kinds(replays: cache[[int], CpuReplay], vocabulary: int, chunk: int) -> None:
    replay = replays(vocabulary)
    source = np.random.default_rng(1)
    for row, logits in enumerate(shapes(vocabulary)):
        put_logits(replay, row, logits)
        replay.targets[row] = int(source.integers(vocabulary)) if row else vocabulary - 1
        replay.wanted[row] = (20, 5, 1, 0)[row % 4]
    score_on_cpu(replay, 0, 14)
    rows = CudaRows(replay, chunk=chunk)
    rows.score(0, 14)
    for row in range(14):
        assert rows.entry_bytes(row) == bytes(replay.logprobs[row]), row
    assert rows.memory["sampled"].tolist() == list(replay.targets)


def test_values_are_log_softmax_and_ranks_follow_them(replays: cache[[int], CpuReplay]) -> None:
    replay = replays(300)
    logits = np.array(put_logits(replay, 0, 4 * np.random.default_rng(5).standard_normal(300)))
    truth = logits - logits.max()
    truth -= math.log(np.exp(truth).sum())
    replay.targets[0], replay.wanted[0] = 17, 20
    rows = CudaRows(replay, 1, chunk=64)
    rows.score(0, 1)
    entry, best = rows.entry(0), np.argsort(-truth)[:20]
    assert entry.chosen == pytest.approx(truth[17], abs=1e-6)
    assert entry.rank == 1 + (truth > truth[17]).sum()
    assert list(entry.ids) == best.tolist()
    assert list(entry.values) == pytest.approx(truth[best].tolist(), abs=1e-6)


def test_only_the_rows_from_first_on_that_want_it_are_scored(replays: cache[[int], CpuReplay]) -> None:
    """A graph of more rows than are live stops at the last row of the logits, and leaves rows with wanted -1 alone."""
    replay = replays(20)
    for row, logits in enumerate(shapes(20)):
        put_logits(replay, row, logits)
        replay.targets[row], replay.wanted[row] = 5, 2
    for first, count, graph in [(5, 2, 4), (12, 2, 8), (0, 1, 1), (14, 0, 2)]:
        score_on_cpu(replay, first, count)
        rows = CudaRows(replay, graph, chunk=16)
        rows.score(first, count)
        for row in range(14):
            assert rows.entry_bytes(row) == bytes(replay.logprobs[row]), (first, count, row)
    assert rows.memory.untouched("sampled")


def test_rows_without_probabilities_have_rank_0_and_say_why(replays: cache[[int], CpuReplay]) -> None:
    replay = replays(300)
    for row in range(4):
        put_logits(replay, row, [-INF] * 300 if row == 2 else [0.0] * 299 + [8.0])
        replay.targets[row], replay.wanted[row] = 299, 3
    replay.logits(1)[7] = math.nan
    score_on_cpu(replay, 0, 4)
    rows = CudaRows(replay, 4, chunk=64)
    rows.score(0, 4)
    for row in range(4):
        assert rows.entry_bytes(row) == bytes(replay.logprobs[row]), row
        assert (rows.entry(row).rank == 0) == (row in (1, 2))
    assert rows.memory["sampled"].tolist()[:4] == [299, -1, -2, 299]


def test_a_draws_entry_is_of_the_logits_before_everything(replays: cache[[int], CpuReplay]) -> None:
    """Penalties, mask, temperature and explicit ids, rows that fail, and rows that want no log probabilities: all bytes."""
    replay = replays(300)
    source = np.random.default_rng(8)
    for row in range(8):
        put_logits(replay, row, np.round(4 * source.standard_normal(300)) / 2)
        put_params(
            replay,
            row,
            source.integers(0, 300, 40).tolist(),
            allowed=None if row % 2 else [] if row == 4 else source.integers(0, 300, 30).tolist(),
            explicit=source.integers(0, 300, (128, 0, 5, 1)[row % 4]).tolist(),
            alternatives=(20, -1, 0, 3)[row % 4],
            temperature=row % 3,
            seed=row,
            prompt_len=10,
            repetition=(1.0, 1.5)[row // 4],
            presence=row % 2,
        )
    replay.logits(7)[299] = math.nan
    fill_entries(replay)
    with pytest.raises(CoreError):
        replay.sample(8)
    rows = CudaRows(replay, 8, chunk=64)
    tokens = rows.sample()
    assert [max(token, -1) for token in tokens] == list(replay.sampled)[:8]
    assert tokens[4] == -2 and tokens[7] == -1
    for row in range(8):
        assert rows.entry_bytes(row) == bytes(replay.logprobs[row]), row


def test_telling_changes_nothing_of_what_is_drawn(replays: cache[[int], CpuReplay]) -> None:
    replay = replays(300)
    for row in range(4):
        put_logits(replay, row, 2 * np.random.default_rng(row // 2).standard_normal(300))
        put_params(replay, row, seed=row // 2, top_p=1 - row // 2 / 8, alternatives=(-1, 20)[row % 2], explicit=[7])
    tokens = CudaRows(replay, 4, chunk=64).sample()
    assert tokens[::2] == tokens[1::2]
