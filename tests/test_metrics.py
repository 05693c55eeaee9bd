"""What is counted of answers, and the window of first responses."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import Called, Failed, Finished, Observed, Reasoning, Text, Timings, ToolCall
from flare.errors import RequestError
from flare.fallbacks import Fallbacks
from flare.metrics import AnswerMeter, Load, Metrics, Window
from tests.support.live_server import make_model
from tests.support.readings import make_reading

NOTHING_HELD = Load(admission_used=0, admission_capacity=1, body_bytes=0, body_bytes_capacity=1)
BROKEN = RequestError("broken", status=500)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def text(choice: int = 0, content: str = "a") -> Text:
    return Text(choice, content, 1, 0)


def finished(choice: int = 0, cause: Any = "stop_token", content: str = "") -> Finished:
    return Finished(choice, content, 1, cause, None, 3, 0, 2, Timings())


def read(metrics: Metrics) -> Any:
    return metrics.read(make_model(), make_reading().engine, NOTHING_HELD, Fallbacks())


def counts(metrics: Metrics) -> tuple[int, int, int]:
    """Completed, cancelled and failed; together they are what was submitted."""
    reading = read(metrics)
    assert reading.completed + reading.cancelled + reading.failed == reading.submitted
    return reading.completed, reading.cancelled, reading.failed


def play(meter: AnswerMeter, *events: Any) -> list[Any]:
    heard: list[Any] = []
    listen = meter.over(heard.append)
    for event in events:
        listen(event)
    return heard


def test_every_event_is_passed_on_as_it_is() -> None:
    metrics = Metrics()
    call = Called(0, ToolCall("call_1", "f", "{}"), 1, 0)
    events = [Observed(0, [1], 1.0), Reasoning(0, "r", 1, 0), text(), call, finished()]
    with metrics.answer(1, 0.0) as meter:
        assert all(a is b for a, b in zip(play(meter, *events), events, strict=True))
    assert counts(metrics) == (1, 0, 0)


@pytest.mark.parametrize("cause", ["stop_token", "stop_sequence", "max_tokens", "context_full"])
def test_choices_end_one_by_one(cause: str) -> None:
    metrics = Metrics()
    with metrics.answer(3, 0.0) as meter:
        play(meter, text(1), finished(1, cause), finished(0, cause), finished(2, "cancelled"))
    assert counts(metrics) == (2, 1, 0)


def test_a_failure_ends_those_that_are_still_open() -> None:
    metrics = Metrics()
    with pytest.raises(RequestError), metrics.answer(3, 0.0) as meter:
        play(meter, finished(1), Failed(BROKEN))
        raise BROKEN  # as a buffered answer does
    assert counts(metrics) == (1, 0, 2)


@pytest.mark.parametrize("error", [RequestError("the queue is full", status=503), RuntimeError("a bug")])
def test_what_the_model_did_not_take_failed(error: Exception) -> None:
    metrics = Metrics()
    with pytest.raises(type(error)), metrics.answer(2, 0.0):
        raise error
    assert counts(metrics) == (0, 0, 2)


@pytest.mark.parametrize("error", [ConnectionResetError(), asyncio.CancelledError(), GeneratorExit()])
def test_a_client_that_is_gone_cancelled(error: BaseException) -> None:
    metrics = Metrics()
    with pytest.raises(type(error)), metrics.answer(2, 0.0) as meter:
        play(meter, text(), finished(1))
        raise error
    assert counts(metrics) == (1, 1, 0)


def test_an_end_that_could_not_be_told_failed() -> None:
    """The listener raises, the answer fails: the choice counts once."""
    metrics = Metrics()

    def listener(event: Any) -> None:
        if isinstance(event, Finished):
            raise ValueError

    with metrics.answer(1, 0.0) as meter:
        listen = meter.over(listener)
        with pytest.raises(ValueError):
            listen(finished())
        listen(Failed(BROKEN))
    assert counts(metrics) == (0, 0, 1)


@pytest.mark.parametrize(
    "first",
    [text(), Reasoning(1, "r", 1, 0), finished(content="all at once")],
    ids=["answer", "reasoning", "end"],
)
def test_the_first_text_is_timed_once_for_all_choices(first: Any) -> None:
    clock = Clock()
    metrics = Metrics(clock)
    with metrics.answer(2, arrived_at=99.0) as meter:
        listen = meter.over(lambda event: None)
        for silent in (text(content=""), Observed(0, [1], 1.0), Called(1, ToolCall("c", "f", "{}"), 1, 0)):
            listen(silent)
            assert read(metrics).first_responses == 0
        clock.now = 101.5
        listen(first)
        clock.now = 200.0
        listen(text(1))
    reading = read(metrics)
    assert (reading.first_responses, reading.first_response_seconds) == (1, 2.5)


def test_an_answer_without_text_has_no_first_response() -> None:
    metrics = Metrics()
    with metrics.answer(1, 0.0) as meter:
        play(meter, Called(0, ToolCall("c", "f", "{}"), 1, 0), finished())
    assert read(metrics).first_response.median_seconds is None


STEPS = st.lists(st.tuples(st.sampled_from([0, 1, 20, 30, 60]), st.integers(0, 9), st.booleans()), max_size=60)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(STEPS, st.integers(1, 6))
def test_the_window_is_the_latest_of_the_last_minute(steps: list[tuple[int, int, bool]], capacity: int) -> None:
    clock = Clock()
    window = Window(60, capacity, clock)
    history: list[tuple[float, int]] = []
    for wait, value, read_now in steps:
        clock.now += wait
        window.add(value)
        history.append((clock.now, value))
        if not read_now:
            continue
        recent = [v for at, v in history if at >= clock.now - 60]
        kept = recent[-capacity:]
        found = window.read()
        assert (found.samples, found.median_seconds) == (len(kept), median(kept))
        assert found.truncated == (len(recent) > capacity)
        assert (found.window_seconds, found.capacity) == (60, capacity)
    clock.now += 61
    assert window.read().samples == 0 and window.read().median_seconds is None and not window.read().truncated


def test_http_requests_by_route_and_status() -> None:
    metrics = Metrics()
    for route, status in [("/health", 200), ("/health", 200), ("/health", 503), ("/metrics", 200)]:
        metrics.request_finished(route, status)
    assert read(metrics).http == {("/health", 200): 2, ("/health", 503): 1, ("/metrics", 200): 1}


def test_uptime() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    clock.now += 7.5
    assert read(metrics).uptime_seconds == 7.5
