"""Sampling parameters, the history for penalties, and the reference that samplers are held against."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.engine import Request
from flare.engine.arrays import StepArrays
from flare.engine.checks import check_requests
from flare.engine.sampling import History, SamplingParams
from flare.errors import RequestError
from flare.replay.cpu import SampleParams
from tests.support.philox import philox4x32_10, uniform
from tests.support.reference_sampler import filtered, penalised, reference_sample
from tests.support.scripted_replay import ScriptedReplay

ONES = 0xFFFFFFFF


def row(params: SamplingParams, position: int = 3, choice: int = 0, prompt_len: int = 0) -> SampleParams:
    written = SampleParams()
    params.write(written, choice, prompt_len)
    written.position = position
    return written


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Known answers published with Random123.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    assert philox4x32_10(counter, key) == words


def test_uniform_is_spread_and_depends_on_seed_choice_and_position() -> None:
    draws = [uniform(7, 0, position) for position in range(2000)]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.03
    assert len({uniform(1, 0, 0), uniform(2, 0, 0), uniform(1 << 32, 0, 0), uniform(1, 1, 0), uniform(1, 0, 1)}) == 5


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_values_that_would_break_arithmetic_are_refused(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{name} is .*, it must be from") as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name and refused.value.status == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -2), ("top_k", 2**31), ("seed", -1), ("seed", 2**64), ("repetition_penalty", 0), ("top_p", 1.01)],
)
def test_values_outside_the_native_fields_are_refused(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


POINTERS = ("history", "mask", "explicit_ids")


def test_write_fills_the_row_exactly() -> None:
    written = row(SamplingParams(0.5, 40, 0.25, 0.125, 1.5, 0.75, -0.5, 2**64 - 1), choice=2**32 - 1, prompt_len=9)
    fields = {name: getattr(written, name) for name, *_ in SampleParams._fields_ if name not in POINTERS}
    assert fields == {
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition": 1.5,
        "presence": 0.75,
        "frequency": -0.5,
        "top_k": 40,
        "seed": 2**64 - 1,
        "choice": 2**32 - 1,
        "position": 3,
        "history_len": 0,
        "prompt_len": 9,
        "reserved": 0,
        "explicit": 0,
        "alternatives": 0,
    }


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=80), st.integers(0, 300))
def test_history_keeps_every_token_while_it_grows(prompt: list[int], added: int) -> None:
    history = History(array("i", prompt))
    for token in range(added):
        history.append(token)
    assert history.array[: history.length] == prompt + list(range(added))


class Watched(list[int]):
    """A prompt that counts how often somebody goes through it."""

    looks = 0

    def __iter__(self) -> Iterator[int]:
        self.looks += 1
        return super().__iter__()


def test_the_choices_of_a_prompt_do_not_repeat_its_work() -> None:
    """Nothing goes through the whole prompt once a choice: 128 of 131072 tokens held the loop and the engine for seconds."""
    prompt, other = Watched([1, 2, 3]), Watched([4, 5])
    penalties = SamplingParams(presence_penalty=1)
    group = [Request(number, prompt if number < 9 else other, 5, penalties) for number in range(12)]
    check_requests(group, context=99, vocabulary=9)
    assert prompt.looks == other.looks == 2  # its least and its greatest id
    arrays = StepArrays(ScriptedReplay())
    for request in group:
        arrays.admit(request)
    assert max(prompt.looks, other.looks) <= 3 and arrays._ids_of(prompt) is arrays._ids_of(prompt)
    for request in group:
        history = request.history
        assert history is not None and history.array[: history.length] == list(request.prompt)
    first, second = group[0].history, group[1].history
    assert first is not None and second is not None
    first.append(7)
    assert second.array[second.length] == 0
    with pytest.raises(RequestError, match="token id 9"):
        check_requests([*group, Request(13, [9], 5)], context=99, vocabulary=9)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert reference_sample([1.0, 3.0, 3.0], row(SamplingParams(temperature=0)), []) == 1


def test_penalties_act_on_what_they_name() -> None:
    params = row(SamplingParams(repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25), prompt_len=2)
    # 0 and 1 are the prompt, 1 and 2 (twice) the reply; 3 is new.
    assert penalised([4.0, 4.0, -4.0, 4.0], params, [0, 1, 1, 2, 2]) == [2.0, 1.25, -9.0, 4.0]


def test_filters_keep_the_likeliest_and_the_lower_id_of_a_tie() -> None:
    logits = [math.log(p) for p in (0.1, 0.3, 0.3, 0.2, 0.1)]
    assert filtered(logits, row(SamplingParams()))[0] == [0, 1, 2, 3, 4]
    assert filtered(logits, row(SamplingParams(top_k=1)))[0] == [1]
    assert filtered(logits, row(SamplingParams(top_k=4)))[0] == [1, 2, 3, 0]
    assert filtered(logits, row(SamplingParams(top_p=0.5)))[0] == [1, 2]
    assert filtered(logits, row(SamplingParams(top_p=0.0)))[0] == [1]
    assert filtered(logits, row(SamplingParams(min_p=0.6)))[0] == [1, 2, 3]
    assert filtered(logits, row(SamplingParams(top_k=3, top_p=0.7)))[0] == [1, 2]


def test_draws_follow_the_probabilities() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    drawn = Counter(reference_sample(logits, row(SamplingParams(seed=5), position), []) for position in range(3000))
    # Three standard deviations of 3000 draws are at most 0.028.
    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert abs(drawn[token] / 3000 - share) < 0.028
