"""The engine thread over a scripted replay: what is delivered, what is freed, and what a failure touches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.engine import Delivery, Engine, EngineLimits, QueueFull, ReplayDead, Request, SamplingParams, StopCause
from flare.errors import RequestError
from tests.support.one_by_one import one_by_one
from tests.support.scripted_replay import ScriptedReplay, scripted

GREEDY = SamplingParams(temperature=0)
PATIENCE = 20.0  # seconds until a test that waits for an event fails


class Served:
    """An engine whose steps the test lets through one by one, and everything that it delivered."""

    def __init__(self, max_waiting: int = 64, stepped: bool = True, **sizes: object) -> None:
        self.replay = ScriptedReplay(**sizes)
        self.replay.on_step = self._on_step if stepped else None
        self.engine = Engine(self.replay, EngineLimits(max_waiting=max_waiting), self._deliver)
        self.batches: list[list[Delivery]] = []
        self.finals: dict[int, Delivery] = {}
        self.replies: dict[int, list[int]] = {}
        self.submitted: list[Request] = []
        self.changed = threading.Condition()
        self.held = False
        self.permits = 0
        self.free = False

    def submit(self, request: Request) -> Request:
        self.engine.submit(request)
        self.submitted.append(request)
        return request

    def wait(self, predicate: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(predicate, PATIENCE), "the engine did not come to the expected state"

    def settle(self) -> None:
        """Returns when the engine has come to its next step, or has nothing live."""
        self.wait(lambda: self.held or len(self.finals) == len(self.submitted))

    def step(self, times: int = 1) -> None:
        """Lets steps through; each is done, and delivered, when this returns."""
        for _ in range(times):
            self.settle()
            with self.changed:
                if self.held:
                    self.held = False
                    self.permits += 1
                    self.changed.notify_all()
            self.settle()

    def run(self) -> None:
        """Lets everything through until nothing is live."""
        with self.changed:
            self.free = True
            self.changed.notify_all()
        self.wait(lambda: len(self.finals) == len(self.submitted))

    def stop(self) -> None:
        with self.changed:
            self.free = True
            self.changed.notify_all()
        self.engine.close()

    def _on_step(self, n_tokens: int, n_rows: int) -> None:
        with self.changed:
            if self.free:
                return
            self.held = True
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.permits > 0 or self.free, PATIENCE)
            self.held = False
            self.permits = max(0, self.permits - 1)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        with self.changed:
            self.batches.append(deliveries)
            for delivery in deliveries:
                key = delivery.request.id
                assert key not in self.finals, "a delivery after the final one"
                self.replies.setdefault(key, []).extend(delivery.tokens)
                if delivery.final:
                    self.finals[key] = delivery
            self.changed.notify_all()

    def assert_idle(self) -> None:
        """Exact counts with nothing live: every page and slot is free and every request is counted once."""
        stats = self.engine.stats()
        assert (stats.active, stats.waiting, stats.free_pages) == (0, 0, stats.total_pages)
        assert stats.completed + stats.cancelled + stats.failed == len(self.submitted) == len(self.finals)
        self.engine._scheduler.check_integrity()
        assert self.replay.refusals == []


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(**options: object) -> Served:
        made.append(Served(**options))
        made[-1].engine.start()
        return made[-1]

    yield make
    for served in made:
        served.stop()


def request(number: int, prompt: list[int], most: int | None, sampling: SamplingParams = GREEDY) -> Request:
    return Request(number, prompt, most, sampling)


def expected(served: Served, number: int) -> list[int]:
    wanted = served.submitted[number]
    return one_by_one(served.replay.model, wanted, served.engine.context_length)[0]


samplings = st.sampled_from(
    [
        GREEDY,
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.5, top_k=5, top_p=0.9, min_p=0.05, seed=2**63),
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5, seed=11),
    ]
)
arrivals = st.tuples(
    st.just("arrive"), st.lists(st.integers(0, 16), min_size=1, max_size=14), st.integers(1, 14), samplings
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
                case ("arrive", prompt, most, sampling):
                    room = served.engine.context_length - 1
                    number = len(served.submitted)
                    served.submit(Request(number, prompt[:room], most, sampling, choice=number % 2))
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


def test_a_stop_token_is_counted_and_flagged_but_no_text(serve: Callable[..., Served]) -> None:
    served = serve(script=scripted({(1, 2): [5, 6, 9, 7]}), stepped=False)
    for number, most in enumerate([10, 3, 2]):
        served.submit(Request(number, [1, 2], most, GREEDY, stop_tokens=frozenset([9])))
    served.run()
    finals = [served.finals[number] for number in range(3)]
    assert [final.finished for final in finals] == [StopCause.STOP_TOKEN, StopCause.STOP_TOKEN, StopCause.MAX_TOKENS]
    assert [final.stop_token for final in finals] == [9, 9, None]
    assert [served.replies[number] for number in range(3)] == [[5, 6]] * 3
    assert [final.request.generated for final in finals] == [3, 3, 2]
    assert served.engine.stats().generated_tokens == 8


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


def test_a_failed_step_ends_its_own_requests_and_no_other(serve: Callable[..., Served]) -> None:
    served = serve(slots=2)
    for number in range(4):
        served.submit(request(number, [number + 1], 5))
        served.settle()
    served.step(2)
    served.replay.fail_next_step(RuntimeError("secret of the library"))
    served.step()
    assert sorted(served.finals) == [0, 1]
    for number in (0, 1):
        assert served.finals[number].finished is None and "secret" not in served.finals[number].error
    assert served.engine.healthy
    served.run()
    assert [served.replies[number] for number in (2, 3)] == [expected(served, 2), expected(served, 3)]
    assert served.engine.stats().failed == 2
    served.assert_idle()


def test_a_failed_draw_ends_only_the_requests_that_drew(serve: Callable[..., Served]) -> None:
    served = serve(slots=2, max_step_tokens=4)
    served.submit(request(0, [1], 9))
    served.settle()
    served.submit(request(1, [2] * 9, 3))
    served.step()
    served.replay.fail_next_sample(RuntimeError("no draw"))
    served.step()
    assert list(served.finals) == [0] and served.finals[0].error
    served.run()
    assert served.replies[1] == expected(served, 1)
    served.assert_idle()


def test_a_row_without_a_token_ends_only_its_request(serve: Callable[..., Served]) -> None:
    served = serve(slots=3)
    for number in range(3):
        served.submit(request(number, [number + 1], 4))
        served.settle()
    served.step(2)
    served.replay.fail_rows(1)
    served.step()
    assert list(served.finals) == [1] and served.finals[1].error
    served.run()
    assert [served.replies[number] for number in (0, 2)] == [expected(served, 0), expected(served, 2)]
    served.assert_idle()


def test_a_dead_replay_fails_everything_and_is_seen(serve: Callable[..., Served]) -> None:
    served = serve(slots=1)
    for number in range(3):
        served.submit(request(number, [number], 5))
    served.settle()
    assert served.engine.healthy
    served.replay.fail_next_step(ReplayDead("the device is gone"))
    served.run()
    assert all(final.error and "device" not in final.error for final in served.finals.values())
    assert len(served.finals) == 3 and not served.engine.healthy
    with pytest.raises(RequestError, match="must be restarted") as refused:
        served.engine.submit(request(3, [1], 1))
    assert (refused.value.status, refused.value.type) == (503, "server_error")
    served.assert_idle()


def test_a_listener_that_raises_stops_the_engine_visibly() -> None:
    replay, seen = ScriptedReplay(), threading.Event()

    def deliver(deliveries: list[Delivery]) -> None:
        if any(delivery.error for delivery in deliveries):
            seen.set()
        raise OSError("the loop is closed")

    engine = Engine(replay, EngineLimits(), deliver)
    engine.start()
    engine.submit(request(0, [1], 5))
    assert seen.wait(PATIENCE)
    engine.close()
    assert not engine.healthy


def test_a_lost_page_is_found_when_the_engine_is_idle(serve: Callable[..., Served]) -> None:
    served = serve()
    served.submit(request(0, [1], 1))
    served.settle()
    served.engine._scheduler.pool.allocate()
    served.run()
    served.engine._thread.join(PATIENCE)
    assert not served.engine.healthy


def test_close_cancels_what_runs_and_what_waits(serve: Callable[..., Served]) -> None:
    served = serve(slots=1)
    for number in range(3):
        served.submit(request(number, [1, 2], 50))
    served.settle()
    closer = threading.Thread(target=served.stop)
    closer.start()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert [final.finished for final in served.finals.values()] == [StopCause.CANCELLED] * 3
    with pytest.raises(RequestError, match="shutting down") as refused:
        served.engine.submit(request(9, [1], 1))
    assert refused.value.status == 503
    served.engine.close()
    served.assert_idle()


def test_close_without_start_still_answers() -> None:
    served = Served()
    served.submit(request(0, [1], 5))
    served.engine.close()
    assert served.finals[0].finished is StopCause.CANCELLED
    served.assert_idle()


def test_a_full_queue_refuses_and_takes_again_later(serve: Callable[..., Served]) -> None:
    served = serve(slots=2, max_waiting=1)
    for number in range(3):
        served.submit(request(number, [1], 2))
    with pytest.raises(QueueFull, match="holds 3 requests, its limit is 2 running and 1 waiting") as refused:
        served.engine.submit(request(3, [1], 2))
    assert (refused.value.status, refused.value.code, refused.value.type) == (503, "queue_full", "server_error")
    served.engine.cancel(2)
    served.settle()
    served.step()
    served.submit(request(4, [1], 2))
    served.run()
    served.assert_idle()


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(serve: Callable[..., Served]) -> None:
    served = serve(max_context=32)
    with pytest.raises(RequestError) as refused:
        served.engine.submit(request(0, [1] * 32, 1))
    error = refused.value
    assert str(error) == "the prompt is 32 tokens and the context holds 32; compact or shorten the conversation"
    assert (error.status, error.code) == (400, "context_full")
    assert error.extra == {"flare_context": {"tokens_used": 32, "context_length": 32, "tokens_remaining": 0}}
    served.submit(request(0, [1] * 31, 1))
    served.run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1, 256]}, "token id 256, ids must be from 0 to 255"),
        ({"prompt": [1, -1]}, "token id -1"),
        ({"max_new_tokens": 0}, "max_tokens is 0, it must be at least 1"),
        ({"choice": 2**32}, "choice is 4294967296"),
    ],
)
def test_what_would_fail_a_shared_step_is_refused(
    serve: Callable[..., Served], change: dict[str, object], message: str
) -> None:
    served = serve()
    with pytest.raises(RequestError, match=message) as refused:
        served.engine.submit(replace(request(0, [1], 1), **change))
    assert refused.value.status == 400
    served.assert_idle()


def test_an_id_that_is_live_is_refused(serve: Callable[..., Served]) -> None:
    served = serve()
    served.submit(request(0, [1], 5))
    with pytest.raises(ValueError, match="request id 0 is live already"):
        served.engine.submit(request(0, [2], 5))


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
        total = done.queued_seconds + done.prefill_seconds + done.decode_seconds
        assert total == pytest.approx(done.finished_at - done.submitted_at)
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
