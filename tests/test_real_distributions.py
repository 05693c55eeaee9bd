"""Draws and log probabilities of SmolLM2 through the engine: one request alone, in company, and with more threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from flare.core.directory import open_core
from flare.engine import Delivery, Engine, EngineLimits, LogprobsWanted, Request, SamplingParams, TokenLogprobs
from flare.replay.program import open_replay

PROMPT = [504, 2520, 3575, 282, 7042, 314]
SETTINGS = (
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(temperature=1.3, top_k=40, min_p=0.02, seed=3, repetition_penalty=1.1),
    SamplingParams(temperature=0.9, presence_penalty=0.5, frequency_penalty=0.2, seed=4),
)
TOKENS = 12
WANTED = LogprobsWanted(20)

Answer = tuple[list[int], list[TokenLogprobs]]


def answers(core: Path, requests: Sequence[Request], threads: int) -> list[Answer]:
    """Runs requests together; returns the tokens and entries of each."""
    found: dict[int, Answer] = {request.id: ([], []) for request in requests}
    left, done = set(found), threading.Event()

    def deliver(batch: list[Delivery]) -> None:
        for delivery in batch:
            assert delivery.error is None
            tokens, entries = found[delivery.request.id]
            tokens += delivery.tokens
            entries += [entry for entry in delivery.logprobs if entry is not None]
            if delivery.final:
                left.discard(delivery.request.id)
        if not left:
            done.set()

    with open_replay(open_core(core), threads=threads, kv_pages=64) as replay:
        engine = Engine(replay, EngineLimits(), deliver)
        engine.submit(*requests)
        engine.start()
        try:
            assert done.wait(300)
        finally:
            engine.close()
    return [found[request.id] for request in requests]


@pytest.fixture(scope="module")
def alone(smollm2_core: Path) -> list[Answer]:
    """Each setting's answer by itself, with one thread."""
    return [
        answers(smollm2_core, [Request(0, list(PROMPT), TOKENS, sampling, logprobs=WANTED)], threads=1)[0]
        for sampling in SETTINGS
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_seed_gives_the_same_tokens_and_values_among_fifteen_others(
    smollm2_core: Path, alone: list[Answer], threads: int
) -> None:
    """Others of every length, greedy and drawn, with log probabilities and without, one of them scored."""
    mine = [Request(i, list(PROMPT), TOKENS, sampling, logprobs=WANTED) for i, sampling in enumerate(SETTINGS)]
    others = [
        Request(
            100 + i,
            [(7 * i + 13 * j) % 40_000 for j in range(1 + 9 * i)],
            4 + i,
            SamplingParams(temperature=i % 3 * 0.6, seed=i),
            logprobs=LogprobsWanted(i) if i % 2 else None,
            score=2 if i == 7 else None,
        )
        for i in range(12)
    ]
    together = answers(smollm2_core, [*others[:6], *mine, *others[6:]], threads)
    assert together[6:10] == alone


def test_logprobs_change_no_token(smollm2_core: Path, alone: list[Answer]) -> None:
    requests = [Request(i, list(PROMPT), TOKENS, sampling) for i, sampling in enumerate(SETTINGS)]
    assert [tokens for tokens, _ in answers(smollm2_core, requests, threads=2)] == [tokens for tokens, _ in alone]


def test_scores_are_what_generation_says_of_the_same_tokens(smollm2_core: Path, alone: list[Answer]) -> None:
    """The reply, scored as a prompt in one chunk or many, has the bits that it had when it was drawn token by token."""
    scored: list[list[TokenLogprobs]] = []
    left, done = set(range(len(alone))), threading.Event()

    def deliver(batch: list[Delivery]) -> None:
        for delivery in batch:
            scored[delivery.request.id] += delivery.scores
            if delivery.final:
                left.discard(delivery.request.id)
        if not left:
            done.set()

    with open_replay(open_core(smollm2_core), threads=2, kv_pages=64) as replay:
        engine = Engine(replay, EngineLimits(), deliver)
        for i, (tokens, _) in enumerate(alone):
            scored.append([])
            engine.submit(Request(i, PROMPT + tokens, 0, score=20))
        engine.start()
        try:
            assert done.wait(300)
        finally:
            engine.close()
    for (_, entries), found in zip(alone, scored, strict=True):
        assert found[len(PROMPT) - 1 :] == entries
