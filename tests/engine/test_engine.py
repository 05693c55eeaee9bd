"""The engine thread over a scripted replay: what is delivered, what is freed, and what a failure touches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flare.engine import ForcedToken, Request, SamplingParams, StopCause
from flare.text.stops import StopMatcher, StopSet
from tests.engine.served import GREEDY, PATIENCE, Served, expected, request
from tests.support.one_by_one import one_by_one
from tests.support.scripted_replay import scripted

samplings = st.sampled_from(
    [
        GREEDY,
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.5, top_k=5, top_p=0.9, min_p=0.05, seed=2**63),
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5, seed=11),
    ]
)
forced = st.none() | st.builds(
    lambda after, token: ForcedToken(after, token, lambda reply: sum(reply) % 3 > 0),
    st.integers(1, 14),
    st.integers(0, 16),
)
arrivals = st.tuples(
    st.just("arrive"), st.lists(st.integers(0, 16), min_size=1, max_size=14), st.integers(1, 14), samplings, forced
)
schedules = st.lists(
    st.one_of(
        arrivals,
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=80, deadline=None)
@given(
    schedule=schedules,
    slots=st.integers(1, 4),
    extra=st.integers(0, 6),
    page_tokens=st.integers(1, 4),
    kv_pages=st.integers(5, 12),
)
def test_any_schedule_equals_one_by_one(
    schedule: list, slots: int, extra: int, page_tokens: int, kv_pages: int
) -> None:
    served = Served(
        vocabulary=17,
        slots=slots,
        max_step_tokens=slots + extra,
        page_tokens=page_tokens,
        kv_pages=kv_pages,
        max_context=24,
    )
    served.engine.start()
    cancelled = set()
    try:
        for event in schedule:
            match event:
                case ("arrive", prompt, most, sampling, token):
                    room = served.engine.context_length - 1
                    number = len(served.submitted)
                    served.submit(Request(number, prompt[:room], most, sampling, choice=number % 2, forced=token))
                case ("cancel", which) if served.submitted:
                    served.engine.cancel(which % len(served.submitted))
                    cancelled.add(which % len(served.submitted))
                case ("step", times):
                    served.step(times)
        served.run()
        for number, final in served.finals.items():
            reply, cause = one_by_one(served.replay.model, served.submitted[number], served.engine.context_length)
            got = served.replies[number]
            if final.finished is StopCause.CANCELLED:
                assert number in cancelled and got == reply[: len(got)]
            else:
                assert (got, final.finished, final.error) == (reply, cause, None)
        served.assert_idle()
    finally:
        served.stop()


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd(serve: Callable[..., Served]) -> None:
    sampling = SamplingParams(temperature=1.0, seed=42)
    crowd = serve(slots=4, kv_pages=12, page_tokens=4, stepped=False)
    for number in range(12):
        crowd.submit(Request(number, [7, 8, 9], 20, sampling, choice=number % 3))
    crowd.run()
    lonely = serve(slots=1, stepped=False)
    for choice in range(3):
        lonely.submit(Request(choice, [7, 8, 9], 20, sampling, choice=choice))
    lonely.run()
    assert crowd.engine.stats().preemptions > 0
    for number in range(12):
        assert crowd.replies[number] == lonely.replies[number % 3]
    assert len({tuple(reply) for reply in lonely.replies.values()}) == 3, "choices must differ"


def test_penalties_see_every_token_of_a_long_reply(serve: Callable[..., Served]) -> None:
    served = serve(stepped=False)
    served.submit(request(0, [5], 150, SamplingParams(temperature=0, frequency_penalty=0.3)))
    served.run()
    assert served.replies[0] == expected(served, 0)
    served.assert_idle()


def test_one_delivery_a_step_holds_everything(serve: Callable[..., Served]) -> None:
    served = serve(slots=3)
    for number in range(3):
        served.submit(request(number, [number], 3))
        served.settle()
    served.step(1)
    served.step(1)
    assert [sorted(d.request.id for d in batch) for batch in served.batches] == [[0], [0, 1, 2]]
    served.run()
    assert all(len({d.request.id for d in batch}) == len(batch) for batch in served.batches)


def test_a_token_is_forced_once_and_behind_so_many(serve: Callable[..., Served]) -> None:
    """The model goes on from the forced token, also after it lost its pages; a reply that ends before it never asks."""
    served = serve(slots=4, kv_pages=12, page_tokens=4, vocabulary=64, stepped=False)
    asked: list[list[int]] = []

    def applies(reply: Sequence[int]) -> bool:
        asked.append(list(reply))
        return True

    for number in range(8):
        sampling = SamplingParams(temperature=1.0, seed=number, repetition_penalty=1.2)
        served.submit(Request(number, [7, 8, 9], 20, sampling, forced=ForcedToken(10, 33, applies)))
    served.submit(Request(8, [7, 8, 9], 10, GREEDY, forced=ForcedToken(10, 33, applies)))
    served.submit(Request(9, [7, 8, 9], 11, GREEDY, forced=ForcedToken(10, 33, applies)))
    served.run()
    assert served.engine.stats().preemptions > 0
    assert sorted(asked) == sorted(served.replies[number][:10] for number in range(10) if number != 8)
    assert all(served.replies[number][10] == 33 and len(served.replies[number]) == 20 for number in range(8))
    assert len(served.replies[8]) == 10 and served.replies[9][10:] == [33]
    assert served.engine.stats().forced == 9
    for number in range(10):
        assert served.replies[number] == expected(served, number)
    served.assert_idle()


def test_a_forced_stop_token_ends_the_reply(serve: Callable[..., Served]) -> None:
    served = serve(script=scripted({(1, 2): [5, 6, 7, 8]}), stepped=False)
    token = ForcedToken(2, 9, lambda reply: True)
    served.submit(Request(0, [1, 2], 4, GREEDY, stop_tokens=frozenset([9]), forced=token))
    served.run()
    assert (served.replies[0], served.finals[0].stop_tokens) == ([5, 6], (9,))


def test_a_stop_token_is_counted_and_flagged_but_no_text(serve: Callable[..., Served]) -> None:
    served = serve(script=scripted({(1, 2): [5, 6, 9, 7]}), stepped=False)
    for number, most in enumerate([10, 3, 2]):
        served.submit(Request(number, [1, 2], most, GREEDY, stop_tokens=frozenset([9])))
    served.run()
    finals = [served.finals[number] for number in range(3)]
    assert [final.finished for final in finals] == [StopCause.STOP_TOKEN, StopCause.STOP_TOKEN, StopCause.MAX_TOKENS]
    assert [final.stop_tokens for final in finals] == [(9,), (9,), ()]
    assert [served.replies[number] for number in range(3)] == [[5, 6]] * 3
    assert [final.request.generated for final in finals] == [3, 3, 2]
    assert served.engine.stats().generated_tokens == 8


TOKENS = st.integers(0, 2)


@settings(max_examples=150, deadline=None)
@given(
    reply=st.lists(TOKENS, min_size=1, max_size=12),
    sequences=st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=3),
    singles=st.frozensets(st.integers(2, 3)),
    most=st.integers(1, 12),
)
@example([0, 1, 2], [(0, 1, 2)], frozenset({2}), 3)  # all three end it: the sequence counts
@example([0, 1, 0, 1, 2], [(0, 1, 2)], frozenset(), 5)
@example([0, 1, 2], [(0, 1, 0)], frozenset({2}), 5)
@example([0, 1, 1, 1], [(0, 1, 0)], frozenset(), 2)
def test_a_sequence_of_tokens_ends_a_reply(
    reply: list[int], sequences: list[tuple[int, ...]], singles: frozenset[int], most: int
) -> None:
    """The first end of a stop counts, there the longest; nothing else is left out, and it comes in order."""
    served = Served(script=scripted({(1, 2): [*reply, *[3] * 12]}), vocabulary=4, stepped=False)
    served.engine.start()
    try:
        asked = Request(0, [1, 2], most, GREEDY, stop_tokens=singles, stop_sequences=StopMatcher(StopSet(sequences)))
        served.submit(asked)
        served.run()
    finally:
        served.stop()
    made = [*reply, *[3] * 12][:most]
    stops = [*sequences, *((token,) for token in singles)]
    ends = [(end, stop) for end in range(1, most + 1) for stop in stops if tuple(made[:end])[-len(stop) :] == stop]
    final = served.finals[0]
    if not ends:
        assert (served.replies[0], final.stop_tokens, final.finished) == (made, (), StopCause.MAX_TOKENS)
        return
    end, stop = min(ends, key=lambda found: (found[0], -len(found[1])))
    assert (served.replies[0], final.stop_tokens) == (made[: end - len(stop)], stop)
    assert (final.finished, final.request.generated) == (StopCause.STOP_TOKEN, end)


def test_tokens_that_may_end_a_reply_wait(serve: Callable[..., Served]) -> None:
    served = serve(script=scripted({(1, 2): [5, 6, 7, 6, 9, 6]}))
    served.submit(Request(0, [1, 2], 6, GREEDY, stop_sequences=StopMatcher(StopSet([(6, 7, 8), (7, 6, 6)]))))
    shown = []
    for _ in range(6):
        served.step()
        shown.append(list(served.replies.get(0, [])))
    assert shown == [[5], [5], [5], [5, 6], [5, 6, 7, 6, 9], [5, 6, 7, 6, 9, 6]]


def test_without_a_limit_a_reply_fills_the_context(serve: Callable[..., Served]) -> None:
    served = serve(max_context=40, kv_pages=2, page_tokens=16, stepped=False)
    assert served.engine.context_length == 32, "the pool is smaller than the core's context"
    only = served.submit(request(0, [3], None))
    served.run()
    assert served.finals[0].finished is StopCause.CONTEXT_FULL and len(only.tokens) == 32
    served.assert_idle()


def state(request: Request) -> str:
    if request.slot < 0:
        return "preempted" if request.preemptions else "queued"
    return "prefilling" if request.computed < len(request.prompt) else "decoding"


@pytest.mark.parametrize("when", ["queued", "prefilling", "decoding", "preempted"])
def test_cancel_frees_everything_wherever_the_request_is(serve: Callable[..., Served], when: str) -> None:
    served = serve(slots=2, max_step_tokens=4, page_tokens=4, kv_pages=6, max_context=24)
    prompts = [[1] * 4, [2] * 7, [3] * 4]
    for number, prompt in enumerate(prompts):
        served.submit(request(number, prompt, 12))
    victim = served.submitted[2 if when == "queued" else 1]
    served.settle()
    while state(victim) != when:
        served.step()
    served.engine.cancel(victim.id)
    served.step()  # the one that runs; the cancel is obeyed before the next one, which is held now
    assert (victim.slot, victim.pages) == (-1, [])
    held = served.engine.stats()
    assert held.total_pages - held.free_pages == sum(len(other.pages) for other in served.submitted)
    served.step()
    final = served.finals[victim.id]
    assert final.finished is StopCause.CANCELLED and final.tokens == []
    served.run()
    for number in {0, 1, 2} - {victim.id}:
        assert served.replies[number] == expected(served, number)
    served.assert_idle()


def test_cancel_carries_the_callers_cause_and_forgets_who_is_gone(serve: Callable[..., Served]) -> None:
    served = serve()
    served.submit(request(0, [1], 50))
    served.engine.cancel(0, StopCause.STOP_SEQUENCE)
    served.run()
    assert served.finals[0].finished is StopCause.STOP_SEQUENCE
    served.engine.cancel(0)
    served.engine.cancel(99)
    served.submit(request(1, [1], 2))
    served.run()
    assert served.engine.stats().completed == 2
    served.assert_idle()


def test_callers_are_never_blocked_by_a_running_graph(serve: Callable[..., Served]) -> None:
    served = serve(slots=2)
    served.submit(request(0, [1], 3))
    served.settle()  # the engine is inside a step from here on
    served.submit(request(1, [2], 3))
    served.engine.cancel(1)
    stats = served.engine.stats()
    assert (stats.active, stats.waiting, stats.steps, stats.healthy) == (1, 1, 0, True)
    served.run()
    assert served.finals[1].finished is StopCause.CANCELLED


def test_an_idle_engine_uses_no_processor_time(serve: Callable[..., Served]) -> None:
    served = serve(stepped=False)
    served.submit(request(0, [1], 3))
    served.run()
    clock = time.pthread_getcpuclockid(served.engine._thread.ident)
    for _ in range(50):  # on a busy machine it may still be on its way to sleep
        before = time.clock_gettime(clock)
        threading.Event().wait(0.05)
        if time.clock_gettime(clock) == before:
            break
    else:
        pytest.fail("the idle engine keeps running")
    served.submit(request(1, [1], 3))
    served.run()


def test_times_are_in_order_and_add_up(serve: Callable[..., Served]) -> None:
    served = serve(slots=1, stepped=False)
    for number in range(2):
        served.submit(request(number, [1, 2], 4))
    served.run()
    for done in served.submitted:
        assert 0 < done.submitted_at <= done.admitted_at <= done.first_token_at <= done.finished_at
        assert done.queued_seconds + done.prefill_seconds == pytest.approx(done.first_token_at - done.submitted_at)
    assert served.submitted[1].admitted_at >= served.submitted[0].finished_at


def test_many_threads_submit_and_cancel_and_nothing_is_left(serve: Callable[..., Served]) -> None:
    served = serve(slots=4, max_step_tokens=8, page_tokens=4, kv_pages=10, max_waiting=100, stepped=False)
    served.submitted = [request(number, [number % 5 + 1] * 3, 15) for number in range(48)]

    def client(numbers: range) -> None:
        for number in numbers:
            served.engine.submit(served.submitted[number])
            if number % 3 == 0:
                served.engine.cancel(number)

    clients = [threading.Thread(target=client, args=(range(first, 48, 4),)) for first in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(PATIENCE)
    served.run()
    for number, final in served.finals.items():
        if final.finished is StopCause.CANCELLED:
            assert number % 3 == 0
        else:
            assert served.replies[number] == expected(served, number)
    served.assert_idle()


def test_the_replays_pause_holds_the_engine(serve: Callable[..., Served]) -> None:
    served = serve(stepped=False)
    served.replay.pause()
    served.submit(request(0, [1], 3))
    served.replay.wait_until_held()
    assert served.replay.steps == 0
    served.replay.allow()
    served.replay.wait_until_held()
    assert served.replay.steps == 1 and len(served.replies[0]) == 1
    served.replay.resume()
    served.run()
    served.assert_idle()
