"""Penalties and masks on cuda: the logits that a token is chosen from, against their definition in numpy's f32."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from flare.replay.cpu import CpuReplay
from ignition.targets.cuda.kernels.penalties import clear_counts_launch, count_history_launch
from ignition.targets.cuda.launch import Pointer
from tests.support.cuda_rows import CudaRows
from tests.support.logit_rows import open_rows, put_logits, put_params
from tests.support.triton_interpreter import run

INF = math.inf
VOCABULARY = 75  # two whole words of a mask and a part
LARGEST = float(np.finfo(np.float32).max)


@pytest.fixture(scope="module")
def replay() -> Iterator[CpuReplay]:
    with open_rows(VOCABULARY, 8) as replay:
        yield replay


def defined(
    logits: np.ndarray,
    history: Sequence[int],
    prompt_len: int,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    allowed: Sequence[int] | None = None,
) -> np.ndarray:
    """Steps 1 and 2 of sampler.h, one token after the other."""
    values, repetition, presence, frequency = logits.copy(), *map(np.float32, (repetition, presence, frequency))
    with np.errstate(all="ignore"):
        for token in set(history):
            values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
        for token, count in Counter(history[prompt_len:]).items():
            values[token] = (values[token] - frequency * np.float32(count)) - presence
    if allowed is not None:
        forbidden = np.isin(np.arange(len(values)), allowed, invert=True)
        values[forbidden & ~np.isnan(values)] = -INF
    return values


def special(seed: int) -> np.ndarray:
    source = np.random.default_rng(seed)
    logits = (4 * source.standard_normal(VOCABULARY)).astype(np.float32)
    edges = [0.0, -0.0, INF, -INF, LARGEST, -LARGEST, 1e-42, -1e-42]
    logits[source.permutation(VOCABULARY)[: len(edges)]] = edges
    return logits


CASES = [
    dict(repetition=1.3),
    dict(repetition=0.7, presence=0.5),
    dict(frequency=-0.375),
    dict(repetition=3.4e38, presence=-3e38, frequency=1e38),
    dict(repetition=1.2e-38),
    dict(allowed=[3, 31, 32, 63, 64, 74]),
    dict(allowed=[]),
    dict(repetition=1.1, presence=0.1, frequency=0.3, allowed=range(0, VOCABULARY, 2)),
]


@pytest.mark.parametrize("chunk", [16, 128])
def test_adjusted_logits_are_the_definitions(replay: CpuReplay, chunk: int) -> None:
    source = np.random.default_rng(chunk)
    expected = []
    for row, case in enumerate(CASES):
        logits = special(row)
        history = source.integers(0, VOCABULARY // (1 + row % 2), 60).tolist()
        prompt_len = (0, 60, 25)[row % 3]
        put_logits(replay, row, logits)
        put_params(replay, row, history, prompt_len=prompt_len, temperature=0, **case)
        expected.append(defined(logits, history, prompt_len, **case))
    rows = CudaRows(replay, chunk=chunk)
    rows.sample()
    for row, found in enumerate(rows.memory["adjusted"].view(8, VOCABULARY).numpy()):
        nan = np.isnan(found)
        assert np.array_equal(nan, np.isnan(expected[row])), row
        assert found[~nan].tobytes() == expected[row][~nan].tobytes(), row


def test_a_nan_stays_one_under_a_mask_and_penalties(replay: CpuReplay) -> None:
    logits = special(9)
    logits[[5, 70]] = math.nan
    put_logits(replay, 0, logits)
    put_params(replay, 0, [5, 6, 7], allowed=[6], repetition=2, presence=1)
    rows = CudaRows(replay, 1)
    assert rows.sample() == [-1]
    assert np.flatnonzero(np.isnan(rows.memory["adjusted"].numpy())).tolist() == [5, 70]


def test_rows_without_penalties_and_mask_are_left_alone(replay: CpuReplay) -> None:
    for row in range(8):
        put_logits(replay, row, special(row))
        put_params(replay, row, [1, 2, 3] * 5)
    rows = CudaRows(replay)
    rows.sample()
    assert rows.memory.untouched("counts") and rows.memory.untouched("adjusted")
    put_params(replay, 3, [1, 2, 3] * 5, repetition=2)
    put_params(replay, 5, allowed=[1])
    rows.sample()
    for name, written in [("counts", {3}), ("adjusted", {3, 5})]:
        filled = rows.memory[name].view(8, VOCABULARY).view(torch.uint8) == 0x5B
        assert {row for row in range(8) if not filled[row].all()} == written, name


@pytest.mark.parametrize("length, prompt_len", [(0, 0), (1, 0), (64, 64), (64, 0), (199, 100), (200, 3), (200, 200)])
def test_histories_are_counted_whole_and_tokens_beyond_the_vocabulary_not(length: int, prompt_len: int) -> None:
    """Histories of one block, of several a program, and of the complete context; what lies behind them counts for nothing."""
    source = np.random.default_rng(length)
    history = torch.from_numpy(source.integers(0, VOCABULARY, (3, 200), np.int32))
    history[:, 150] = -1
    history[:, 151] = VOCABULARY
    params = torch.zeros(3, 22, dtype=torch.int32)
    params[:, 3] = 0x3F800000  # repetition 1
    params[:2, 4] = 0x3F800000  # presence 1
    params[:, 11], params[:, 12] = length, prompt_len
    counts = torch.full((3, VOCABULARY), 77, dtype=torch.int32)
    pointers = [Pointer("i32", tensor) for tensor in (params, history, counts)]
    sizes = dict(rows=3, vocabulary=VOCABULARY)
    run(clear_counts_launch(pointers[0], pointers[2], **sizes, chunk=32))
    run(count_history_launch(*pointers, **sizes, max_context=200, block=16, programs=3))
    for row in range(2):
        tokens = [token for token in history[row, :length].tolist() if 0 <= token < VOCABULARY]
        known = prompt_len - sum(at in (150, 151) for at in range(prompt_len))
        generated, prompt = Counter(tokens[known:]), set(tokens[:known])
        expected = [generated[token] - (2**31 if token in prompt else 0) for token in range(VOCABULARY)]
        assert counts[row].tolist() == expected
    assert (counts[2] == 77).all(), "this row has no penalties"
