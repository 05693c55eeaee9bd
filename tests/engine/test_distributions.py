"""Log probabilities, prompt scores and masks through the engine: the same for any schedule, and without effect on the draws."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from math import exp, inf, log, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.engine import Delivery, ForcedToken, LogprobsWanted, Request, SamplingParams, StopCause, TokenLogprobs
from flare.engine.arrays import StepArrays
from flare.errors import MaskError, RequestError
from flare.text.stops import StopMatcher, StopSet
from tests.engine.served import GREEDY, Served, expected, request
from tests.support.one_by_one import one_by_one
from tests.support.scripted_replay import ScriptedReplay, scripted

VOCABULARY = 17
DRAWN = SamplingParams(temperature=0.9, top_k=9, repetition_penalty=1.2, seed=5)


def table(served: Served, tokens: Sequence[int]) -> list[float]:
    """The log probability of every token behind `tokens`, in f32, computed apart from the replay's own way."""
    model = served.replay.model
    logits = [ctypes.c_float(value).value for value in model.logits(model.extend([], tokens))]
    total = log(sum(exp(value) for value in logits))
    return [ctypes.c_float(value - total).value for value in logits]


def entry(served: Served, tokens: Sequence[int], token: int, wanted: LogprobsWanted) -> TokenLogprobs:
    """What the contract says of `token` behind `tokens`."""
    values = table(served, tokens)
    rank = 1 + sum(value > values[token] for value in values)
    ids = tuple(sorted(range(len(values)), key=lambda t: (-values[t], t))[: wanted.alternatives])
    if wanted.ids:
        ids = wanted.ids if token in wanted.ids else (*wanted.ids, token)
    return TokenLogprobs(token, values[token], rank, ids, tuple(values[t] for t in ids))


def same(found: Sequence[TokenLogprobs | None], right: Sequence[TokenLogprobs | None]) -> bool:
    """Equal but for the last bits that the sum's order decides."""
    return len(found) == len(right) and all(
        (a is None) == (b is None)
        and (
            a is None
            or b is None
            or ((a.token, a.ids) == (b.token, b.ids) and a.values == pytest.approx(b.values, abs=1e-6))
            and a.logprob == pytest.approx(b.logprob, abs=1e-6)
            and a.rank == b.rank
        )
        for a, b in zip(found, right, strict=True)
    )


def entries(served: Served, number: int) -> list[TokenLogprobs | None]:
    return [e for batch in served.batches for d in batch if d.request.id == number for e in d.logprobs]


def scores(served: Served, number: int) -> list[TokenLogprobs]:
    return [e for batch in served.batches for d in batch if d.request.id == number for e in d.scores]


def of(served: Served, number: int) -> list[Delivery]:
    return [d for batch in served.batches for d in batch if d.request.id == number]


wanteds = st.one_of(
    st.none(),
    st.integers(0, 20).map(LogprobsWanted),
    st.lists(st.integers(0, 16), min_size=1, max_size=8, unique=True).map(lambda ids: LogprobsWanted(0, tuple(ids))),
)
requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 16), min_size=1, max_size=14),
        st.integers(0, 8),
        st.sampled_from([GREEDY, DRAWN]),
        wanteds,
        st.none() | st.integers(0, 5),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, deadline=None)
@given(
    wishes=requests,
    slots=st.integers(1, 4),
    more_rows=st.integers(0, 5),
    extra=st.integers(0, 6),
    page_tokens=st.integers(1, 4),
    kv_pages=st.integers(4, 12),
)
def test_any_schedule_gives_the_same_entries(
    wishes: list, slots: int, more_rows: int, extra: int, page_tokens: int, kv_pages: int
) -> None:
    """Rows that are short, pages that are lost and company change neither tokens nor entries nor scores."""
    served = Served(
        vocabulary=VOCABULARY,
        slots=slots,
        max_rows=slots + more_rows,
        max_step_tokens=slots + more_rows + extra,
        page_tokens=page_tokens,
        kv_pages=kv_pages,
        max_context=64,
    )
    served.engine.start()
    try:
        for number, (prompt, most, sampling, wanted, score, cancel, step) in enumerate(wishes):
            prompt = prompt[: served.engine.context_length - 1]
            most = max(most, 0 if score is not None else 1)
            wish = Request(number, prompt, most, sampling, logprobs=wanted, score=score)
            served.submit(wish)
            served.step(step)
            if cancel:
                served.engine.cancel(number)
        served.run()
        for number, (_, _, _, wanted, score, cancel, _) in enumerate(wishes):
            wish = served.submitted[number]
            reply = served.replies[number]
            whole = served.finals[number].finished is not StopCause.CANCELLED
            assert whole or cancel
            if wish.max_new_tokens and whole:
                assert reply == one_by_one(served.replay.model, wish, served.engine.context_length)[0]
            right = [entry(served, wish.prompt + reply[:i], t, wanted) for i, t in enumerate(reply)] if wanted else []
            assert same(entries(served, number), right)
            if score is None:
                assert scores(served, number) == []
                continue
            right = [
                entry(served, wish.prompt[: i + 1], t, LogprobsWanted(score)) for i, t in enumerate(wish.prompt[1:])
            ]
            found = scores(served, number)
            assert same(found, right[: len(found)]) and (len(found) == len(right) or not whole)
        served.assert_idle()
    finally:
        served.stop()


def test_scores_come_before_the_reply_chunk_by_chunk(serve: Callable[..., Served]) -> None:
    """Every slot has a row of its own; the others are the prompt's, so that nobody else waits for it."""
    served = serve(vocabulary=VOCABULARY, slots=2, max_rows=5, max_step_tokens=16)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    served.submit(Request(0, prompt, 2, GREEDY, score=1))
    served.submit(request(1, [3], 3))
    served.run()
    assert [(len(d.scores), len(d.tokens)) for d in of(served, 0)] == [(4, 0), (4, 0), (1, 0), (0, 1), (0, 1)]
    assert served.replies[1] == expected(served, 1)
    assert served.engine.stats().scored_tokens == 9
    served.assert_idle()


def test_prompts_that_are_scored_at_once_share_the_rows(serve: Callable[..., Served]) -> None:
    served = serve(vocabulary=VOCABULARY, slots=3, max_rows=5, max_step_tokens=16)
    for number in range(3):
        served.submit(Request(number, [number + 1] * 9, 2, GREEDY, score=1))
    served.run()
    assert all(len(scores(served, number)) == 8 for number in range(3))
    served.assert_idle()


def test_what_is_scored_stays_scored_when_pages_are_lost(serve: Callable[..., Served]) -> None:
    served = serve(
        vocabulary=VOCABULARY, slots=2, max_rows=3, max_step_tokens=3, page_tokens=2, kv_pages=10, max_context=20
    )
    served.submit(request(0, [1, 2], 16))
    served.submit(Request(1, [3, 4, 5, 6, 7], 12, GREEDY, score=1))
    served.run()
    assert served.engine.stats().preemptions > 0
    assert [e.token for e in scores(served, 1)] == [4, 5, 6, 7]
    assert served.replies[1] == expected(served, 1)
    served.assert_idle()


def test_a_prompt_alone_is_scored_without_its_last_token(serve: Callable[..., Served]) -> None:
    served = serve(vocabulary=VOCABULARY, slots=1, max_step_tokens=16, max_rows=1)
    served.submit(Request(0, [1, 2, 3], 0, GREEDY, score=0))
    served.submit(Request(1, [4], 0, GREEDY, score=3))
    served.run()
    assert [e.token for e in scores(served, 0)] == [2, 3] and served.replay.processed == 2
    assert scores(served, 1) == []
    assert {final.finished for final in served.finals.values()} == {StopCause.MAX_TOKENS}
    assert served.engine.stats().generated_tokens == 0
    served.assert_idle()


def test_terminators_have_no_entry_and_held_tokens_keep_theirs(serve: Callable[..., Served]) -> None:
    """Of a sequence that may end the reply, and of a token that does."""
    served = serve(vocabulary=VOCABULARY, script=scripted({(1,): [5, 6, 7, 8, 9]}, [5, 6, 5, 6, 7, 9]))
    by_token = Request(0, [1], 9, GREEDY, stop_tokens=frozenset({8}), logprobs=LogprobsWanted(2))
    by_sequence = Request(1, [2], 9, GREEDY, logprobs=LogprobsWanted(2))
    by_sequence.stop_sequences = StopMatcher(StopSet([(5, 6, 7)]))
    for wish in (by_token, by_sequence):
        served.submit(wish)
    served.run()
    for number, reply in ((0, [5, 6, 7]), (1, [5, 6])):
        assert served.replies[number] == reply
        assert [e and e.token for e in entries(served, number)] == reply
        assert all(len(d.logprobs) == len(d.tokens) for d in of(served, number))


def test_a_forced_token_has_no_entry(serve: Callable[..., Served]) -> None:
    served = serve(vocabulary=VOCABULARY)
    served.submit(Request(0, [1], 4, GREEDY, forced=ForcedToken(2, 3, lambda reply: True), logprobs=LogprobsWanted(1)))
    served.run()
    found = entries(served, 0)
    assert [e is None for e in found] == [False, False, True, False] and served.replies[0][2] == 3


def test_logprobs_change_no_token(serve: Callable[..., Served]) -> None:
    served = serve(vocabulary=VOCABULARY, slots=4)
    for number, wanted in enumerate([None, LogprobsWanted(0), LogprobsWanted(20), LogprobsWanted(0, (3, 1))]):
        served.submit(Request(number, [1, 2], 12, DRAWN, logprobs=wanted))
    served.run()
    assert len({tuple(reply) for reply in served.replies.values()}) == 1


class Even:
    """Lets even tokens come, or odd ones, after `free` of any kind; complains when told of another."""

    def __init__(self, free: int = 0, gives_up_after: int | None = None, odd: bool = False) -> None:
        self.odd = odd
        self.free = free
        self.gives_up_after = gives_up_after
        self.taken: list[int] = []

    def fill(self, address: int, words: int) -> bool:
        if self.gives_up_after == len(self.taken):
            raise MaskError("the grammar takes too much")
        if len(self.taken) < self.free:
            return False
        (ctypes.c_uint32 * words).from_address(address)[:] = [0xAAAAAAAA if self.odd else 0x55555555] * words
        return True

    def accept(self, token: int) -> None:
        assert len(self.taken) < self.free or token % 2 == self.odd
        self.taken.append(token)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_a_mask_bounds_its_own_request_alone(serve: Callable[..., Served], sampling: SamplingParams) -> None:
    served = serve(vocabulary=VOCABULARY, slots=3)
    masks = {0: Even(), 2: Even(free=3)}
    for number in range(3):
        served.submit(Request(number, [number, 7], 10, sampling, grammar=masks.get(number)))
    served.run()
    assert all(token % 2 == 0 for token in served.replies[0]) and masks[0].taken == served.replies[0]
    assert served.replies[1] == expected(served, 1)
    assert all(token % 2 == 0 for token in served.replies[2][3:])
    assert served.replies[2][:3] == one_by_one(served.replay.model, served.submitted[2], 64)[0][:3]
    assert served.engine.stats().masked_tokens == 10 + 7
    served.assert_idle()


def test_entries_under_a_mask_are_of_the_model_alone(serve: Callable[..., Served]) -> None:
    """Forbidden tokens keep their log probability, and the drawn one its rank among all."""
    served = serve(vocabulary=VOCABULARY)
    served.submit(Request(0, [1, 2], 6, GREEDY, grammar=Even(), logprobs=LogprobsWanted(20)))
    served.run()
    reply = served.replies[0]
    right = [entry(served, [1, 2, *reply[:i]], t, LogprobsWanted(20)) for i, t in enumerate(reply)]
    assert same(entries(served, 0), right)
    assert any(e is not None and e.ids[0] % 2 and e.rank > 1 for e in entries(served, 0))


def test_a_mask_that_fails_ends_its_request_alone(serve: Callable[..., Served]) -> None:
    served = serve(vocabulary=VOCABULARY, slots=2)
    served.submit(Request(0, [1], 9, GREEDY, grammar=Even(gives_up_after=2)))
    served.submit(request(1, [2], 9))
    served.run()
    assert served.finals[0].error == "the grammar takes too much" and len(served.replies[0]) == 2
    assert served.replies[1] == expected(served, 1)
    served.assert_idle()


def test_a_mask_that_breaks_is_not_shown_to_the_client(serve: Callable[..., Served]) -> None:
    served = serve(vocabulary=VOCABULARY)
    broken = Even()
    broken.accept = lambda token: 1 / 0  # type: ignore[method-assign, assignment]
    served.submit(Request(0, [1], 9, GREEDY, grammar=broken))
    served.run()
    error = served.finals[0].error
    assert error is not None and "the model failed" in error and "division" not in error


def test_a_forced_token_that_the_grammar_forbids_does_not_come(serve: Callable[..., Served]) -> None:
    served = serve(vocabulary=VOCABULARY)
    for number, odd in enumerate((False, True)):
        forced = ForcedToken(2, 3, lambda reply: True)
        served.submit(Request(number, [1], 4, GREEDY, forced=forced, grammar=Even(odd=odd)))
    served.run()
    assert served.replies[0][2] % 2 == 0 and served.replies[1][2] == 3
    assert served.engine.stats().forced == 1


@pytest.mark.parametrize("bad", [nan, -inf])
def test_rows_that_are_no_distribution_end_their_request_alone(serve: Callable[..., Served], bad: float) -> None:
    def logits(tokens: tuple[int, ...]) -> list[float] | None:
        return [bad] * VOCABULARY if tokens[:2] == (9, 9) else None

    served = serve(vocabulary=VOCABULARY, slots=2, max_rows=6, logits=logits)
    served.submit(Request(0, [9, 9, 9, 1], 3, GREEDY, score=2))
    served.submit(Request(1, [5, 6, 7], 3, GREEDY, score=2))
    served.run()
    assert served.finals[0].error is not None and served.replies[0] == []
    assert served.finals[1].finished is StopCause.MAX_TOKENS
    assert len(scores(served, 1)) == 2
    served.assert_idle()


def test_scoring_that_fails_ends_the_scored_requests_only(serve: Callable[..., Served]) -> None:
    served = serve(vocabulary=VOCABULARY, slots=2, max_rows=6)

    def fail(first: int, count: int) -> None:
        raise ValueError("no")

    served.replay.score = fail  # type: ignore[method-assign]
    served.submit(Request(0, [9, 9, 9, 1], 3, GREEDY, score=2))
    served.submit(request(1, [5, 6, 7], 3))
    served.run()
    assert served.finals[0].error is not None and served.replies[1] == expected(served, 1)
    served.assert_idle()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"score": 21}, "score is 21 alternatives, it must be from 0 to 20"),
        ({"score": -1}, "score is -1"),
        ({"logprobs": LogprobsWanted(21)}, "logprobs is 21 alternatives"),
        ({"logprobs": LogprobsWanted(0, (1, 1))}, "2 ids, they must be at most 128 and each once"),
        ({"logprobs": LogprobsWanted(0, tuple(range(129)))}, "129 ids"),
        ({"logprobs": LogprobsWanted(0, (17,))}, "token id 17, ids must be from 0 to 16"),
        ({"logprobs": LogprobsWanted(0, (-1,))}, "token id -1"),
        ({"max_new_tokens": 0}, "max_tokens is 0, it must be at least 1"),
        ({"max_new_tokens": -1, "score": 1}, "max_tokens is -1, it must be at least 0"),
    ],
)
def test_what_a_step_could_not_take_is_refused(serve: Callable[..., Served], options: dict, text: str) -> None:
    served = serve(vocabulary=VOCABULARY)
    with pytest.raises(RequestError, match=text):
        served.engine.submit(Request(0, [1], **{"max_new_tokens": 1, "sampling": GREEDY} | options))


def test_no_alternatives_are_computed_where_ids_take_their_place() -> None:
    arrays = StepArrays(ScriptedReplay())
    rows = []
    for wanted in (LogprobsWanted(5), LogprobsWanted(5, (7, 8)), None):
        request = Request(1, [1], 5, logprobs=wanted)
        arrays.admit(request)
        rows.append((request.row.alternatives, request.row.explicit))
    assert rows == [(5, 0), (0, 2), (-1, 0)]
