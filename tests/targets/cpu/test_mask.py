"""A mask of the tokens that may be drawn: as if the vocabulary held no others."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import CoreError
from flare.replay.cpu import CpuReplay
from tests.support.logit_rows import mask_of, open_rows, put_logits, put_params, runnable_levels

INF = math.inf
VOCABULARY = 75  # two whole words and a part, one whole block and a part


@pytest.fixture(scope="module")
def replays() -> Iterator[cache[[int], CpuReplay]]:
    """By vocabulary, opened once."""
    with ExitStack() as stack:
        yield cache(lambda vocabulary: stack.enter_context(open_rows(vocabulary, 2)))


@settings(max_examples=300)
@given(data=st.data())
def test_a_masked_draw_is_one_from_the_allowed_tokens_alone(
    replays: cache[[int], CpuReplay], data: st.DataObject
) -> None:
    """The same logits, penalties and filters over a vocabulary of the allowed tokens, renumbered in their order."""
    allowed = sorted(data.draw(st.sets(st.integers(0, VOCABULARY - 1), min_size=1)))
    source = random.Random(data.draw(st.integers(0, 2**32)))
    logits = [source.randint(-40, 40) / 8 for _ in range(VOCABULARY)]  # with ties
    history = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=30))
    prompt_len = data.draw(st.integers(0, len(history)))
    fields = dict(
        temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 3.0])),
        top_k=data.draw(st.sampled_from([-1, 1, 3, 20])),
        top_p=data.draw(st.sampled_from([1.0, 0.0, 0.37, 0.9])),
        min_p=data.draw(st.sampled_from([0.0, 0.07, 1.0])),
        repetition=data.draw(st.sampled_from([1.0, 1.3])),
        presence=data.draw(st.sampled_from([0.0, 0.75])),
        frequency=data.draw(st.sampled_from([0.0, 0.25])),
        seed=data.draw(st.integers(0, 2**64 - 1)),
        position=data.draw(st.integers(0, 2**32 - 1)),
    )
    masked = replays(VOCABULARY)
    put_logits(masked, 0, logits)
    put_params(masked, 0, history, allowed=allowed, prompt_len=prompt_len, **fields)
    masked.sample(1)

    number = {token: index for index, token in enumerate(allowed)}
    kept = [number[token] for token in history if token in number]
    kept_prompt = sum(token in number for token in history[:prompt_len])
    alone = replays(len(allowed))
    put_logits(alone, 0, [logits[token] for token in allowed])
    put_params(alone, 0, kept, prompt_len=kept_prompt, **fields)
    alone.sample(1)
    assert masked.sampled[0] == allowed[alone.sampled[0]]
    assert list(masked.logits(0)) == logits, "the mask changed the logits"


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 63, 64, 65, 1000, 49_152])
def test_every_token_can_be_the_only_one(vocabulary: int, fields: dict[str, float]) -> None:
    """Also where all other logits are higher, in whatever word and block it lies."""
    source = random.Random(vocabulary)
    with open_rows(vocabulary, 1) as replay:
        put_logits(replay, 0, [source.gauss(0, 3) for _ in range(vocabulary)])
        for token in {0, vocabulary - 1, vocabulary // 2, *(source.randrange(vocabulary) for _ in range(12))}:
            replay.logits(0)[token] = -30.0
            put_params(replay, 0, allowed=[token], seed=token, **fields)
            replay.sample(1)
            assert replay.sampled[0] == token


def test_a_mask_of_all_tokens_changes_nothing(replays: cache[[int], CpuReplay]) -> None:
    """Nor do bits beyond the vocabulary allow anything."""
    replay = replays(VOCABULARY)
    source = random.Random(1)
    put_logits(replay, 0, [source.gauss(0, 2) for _ in range(VOCABULARY)])
    put_logits(replay, 1, list(replay.logits(0)))
    for seed in range(300):
        put_params(replay, 0, seed=seed)
        params = put_params(replay, 1, seed=seed, allowed=range(VOCABULARY))
        params.mask[2] = 2**32 - 1
        replay.sample(2)
        assert replay.sampled[0] == replay.sampled[1]
    params = put_params(replay, 1, allowed=[])
    params.mask[2] = 2**32 - 2**11
    with pytest.raises(CoreError, match="row 1: all its logits are -inf"):
        replay.sample(2)


def test_rows_have_masks_of_their_own() -> None:
    with open_rows(VOCABULARY, 64, threads=2) as replay:
        for row in range(64):
            put_params(replay, row, temperature=row % 2, allowed=None if row % 3 == 0 else [row, row + 1])
        replay.sample(64)
        for row in range(64):
            assert row % 3 == 0 or replay.sampled[row] in (row, row + 1)
            assert row % 6 or replay.sampled[row] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_left_where_the_mask_and_the_logits_leave_nothing(
    replays: cache[[int], CpuReplay], temperature: float
) -> None:
    replay = replays(VOCABULARY)
    put_logits(replay, 0, [-INF if token < 40 else 1.0 for token in range(VOCABULARY)])
    for allowed in ([], range(40)):
        put_params(replay, 0, allowed=allowed, temperature=temperature)
        with pytest.raises(CoreError, match="row 0: all its logits are -inf"):
            replay.sample(1)
        assert replay.sampled[0] == -1
    put_params(replay, 0, allowed=range(41), temperature=temperature)
    replay.sample(1)
    assert replay.sampled[0] == 40


@pytest.mark.parametrize("isa", runnable_levels())
@pytest.mark.parametrize("token", [7, 70])
def test_forbidden_tokens_hide_no_nan_and_no_infinity(isa: str, token: int) -> None:
    """A NaN fails the row whether or not its token may come, so that a mask never decides what is a fault; +inf is an
    ordinary logit."""
    with open_rows(VOCABULARY, 1, isa=isa) as replay:
        logits = [0.0] * VOCABULARY
        logits[token] = math.nan
        put_logits(replay, 0, logits)
        for allowed in ([3], [3, token]):
            put_params(replay, 0, allowed=allowed)
            with pytest.raises(CoreError, match="row 0: its logits hold NaN"):
                replay.sample(1)
        replay.logits(0)[token] = INF
        for allowed, drawn in (([3], 3), ([3, token], token)):
            put_params(replay, 0, allowed=allowed)
            replay.sample(1)
            assert replay.sampled[0] == drawn


def test_a_masks_words_are_little_endian_in_tokens() -> None:
    """Token t is bit t % 32 of word t // 32, as the interface says, spelled out once without arithmetic."""
    assert list(mask_of([0, 1, 31, 32, 74], VOCABULARY)) == [0x80000003, 0x00000001, 0x00000400]
