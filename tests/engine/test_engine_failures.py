"""What a failure of the engine, its replay or its callers touches, and what is refused before it could."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from flare.engine import Delivery, Engine, EngineLimits, ForcedToken, QueueFull, ReplayDead, StopCause
from flare.errors import RequestError
from tests.engine.served import PATIENCE, Served, expected, request
from tests.support.scripted_replay import ScriptedReplay


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


def test_a_forced_token_that_cannot_be_decided_ends_only_its_request(serve: Callable[..., Served]) -> None:
    def fails(reply: object) -> bool:
        raise RuntimeError("secret of the caller")

    served = serve(slots=3)
    for number in range(3):
        asked = request(number, [number + 1], 4)
        asked.forced = ForcedToken(2, 5, fails) if number == 1 else None
        served.submit(asked)
        served.settle()
    served.run()
    assert served.finals[1].error and "secret" not in served.finals[1].error
    assert [served.replies[number] for number in (0, 2)] == [expected(served, 0), expected(served, 2)]
    served.assert_idle()


@pytest.mark.parametrize(("after", "token"), [(0, 1), (1, -1), (1, 256)])
def test_an_impossible_forced_token_is_refused(serve: Callable[..., Served], after: int, token: int) -> None:
    served = serve()
    asked = request(0, [1], 4)
    asked.forced = ForcedToken(after, token, lambda reply: True)
    with pytest.raises(RequestError, match=f"token {token} is forced behind {after} tokens"):
        served.engine.submit(asked)


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


def test_a_group_is_taken_whole_or_not_at_all(serve: Callable[..., Served]) -> None:
    """Whatever is wrong with one of it."""
    served = serve(slots=2, max_waiting=1)
    assert served.engine.capacity == 3
    served.submit(request(0, [1], 2))
    with pytest.raises(QueueFull, match="holds 1 requests, .* no room for 3 more") as full:
        served.engine.submit(*(request(number, [1], 2) for number in range(1, 4)))
    assert full.value.status == 503
    with pytest.raises(RequestError, match="token id -1"):
        served.engine.submit(request(1, [1], 2), request(2, [-1], 2))
    with pytest.raises(ValueError, match="request id 0 is live"):
        served.engine.submit(request(1, [1], 2), request(0, [1], 2))
    with pytest.raises(ValueError, match="request id 1 is live"):
        served.engine.submit(request(1, [1], 2), request(1, [1], 2))
    assert served.engine.stats().active + served.engine.stats().waiting == 1
    group = [request(number, [1], 2) for number in (1, 2)]
    served.engine.submit(*group)
    served.submitted += group
    served.run()
    assert [final.finished for final in served.finals.values()] == [StopCause.MAX_TOKENS] * 3
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
