"""What happens around an answer within a process: bounds, readers that stop or pause, failures, threads, the end."""

from __future__ import annotations

import contextlib
import threading
import tracemalloc
from concurrent.futures import Future
from typing import Any

import pytest

from flare.api import InProcess
from flare.errors import FlareError
from flare.service.exchange import Reply
from tests.support.in_process import Local, stream
from tests.support.live_server import reply

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
ENDLESS: Any = lambda prompt, choice: [97] * 400  # noqa: E731


def test_a_body_over_its_limit() -> None:
    with Local(lambda p, c: reply("ok"), max_body_bytes=2000, max_bodies_bytes=2000) as model:
        answer = model.request(RAW, {"prompt": "x" * 2000})
        assert answer.status == 413 and answer.json()["error"]["type"] == "request_too_large"
        model.service.generator.bodies.used = 1990
        assert model.request(RAW, {"prompt": "x"}).status == 429
        model.service.generator.bodies.used = 0
        assert model.request(RAW, {"prompt": "x"}).status == 200
        model.idle()


def test_a_stream_does_not_keep_its_body() -> None:
    """Neither what was sent nor what it was made from: only the tokens of its prompt are needed."""
    body = '{"stream": true, "prompt": "x"' + " " * (1 << 22) + "}"
    with Local(ENDLESS) as model:
        model.replay.pause()
        tracemalloc.start()
        streams = [model.request(RAW, body.encode()) for _ in range(4)]
        assert model.service.generator.bodies.used == 0
        model.until(lambda: tracemalloc.get_traced_memory()[0] < 1 << 22)  # the worker drops its last one in a moment
        tracemalloc.stop()
        model.replay.resume()
        for answer in streams:
            answer.close()
        model.idle()


def test_a_finished_answer_is_not_one_that_waits() -> None:
    """Its caller has it: only what is still to be read counts."""
    with Local(lambda p, c: reply("ok"), max_requests=1) as model:
        kept = [model.request(RAW, {"prompt": "x"}) for _ in range(3)]
        assert [answer.status for answer in kept] == [200] * 3


def test_events_come_as_they_are_made() -> None:
    with Local(lambda p, c: reply("abc")) as model:
        model.replay.pause()
        with stream(model, CHAT, {"messages": HI}) as answer:
            for letter in "abc":
                model.replay.wait_until_held()
                model.replay.allow()
                if letter == "a":
                    assert next(answer).data["choices"][0]["delta"] == {"role": "assistant", "content": ""}
                name, data = next(answer)
                assert name == "message" and data["choices"][0]["delta"] == {"content": letter}
            model.replay.resume()
            assert [event.data for event in answer][-1] == "[DONE]"
        model.idle()


@pytest.mark.parametrize("leave", ["close", "with", "drop"])
@pytest.mark.parametrize("taken", [0, 3])
def test_who_stops_reading_ends_the_answer(leave: str, taken: int) -> None:
    with Local(ENDLESS) as model:
        model.replay.pause()
        model.replay.allow(taken)
        answer = stream(model, RAW, {"prompt": "x", "n": 2})
        for _ in range(taken):
            assert next(answer).data["choices"][0]["text"] == "a"
        if leave == "drop":
            del answer
            model.until(lambda: not model._calls)
        else:
            with answer if leave == "with" else contextlib.closing(answer):
                pass
            assert list(answer) == []
        assert model.service.generator.admission.used == 0
        model.replay.resume()
        model.idle()
        counted = model.service.metrics
        assert (counted.submitted, counted.cancelled, counted.failed) == (2, 2, 0)
        assert model.runtime.stats().cancelled == 2 and model.runtime.stats().generated_tokens < 50


def test_a_stream_that_is_not_read_holds_its_place_until_it_is() -> None:
    with Local(lambda p, c: reply("abc"), max_requests=1) as model:
        answer = stream(model, RAW, {"prompt": "x"})
        model.until(lambda: model.runtime.stats().completed == 1)
        refused = model.request(RAW, {"prompt": "x"})
        assert refused.status == 429 and refused.headers["retry-after"] == "1"
        assert "".join(event.data["choices"][0]["text"] for event in list(answer)[:-1]) == "abc"
        model.idle()
        assert model.request(RAW, {"prompt": "x"}).status == 200


def test_a_failure_while_streaming_is_the_last_event() -> None:
    with Local(ENDLESS) as model:
        failed = threading.Event()

        def on_step(tokens: int, rows: int) -> None:
            if model.replay.steps == 3 and not failed.is_set():
                failed.set()
                raise ValueError("a secret")

        model.replay.on_step = on_step
        found = list(stream(model, CHAT, {"messages": HI}))
        assert found[-1].data["error"]["type"] == "server_error" and "secret" not in str(found)
        assert model.request(RAW, {"prompt": "x", "max_tokens": 1}).status == 200
        model.idle()


def test_many_threads() -> None:
    """Answers go to the threads that asked, whole and streamed, while other threads leave theirs."""

    def script(prompt: tuple[int, ...], choice: int) -> list[int]:
        return reply(bytes(prompt).decode() * 3)

    wrong: list[Any] = []
    with Local(script) as model:

        def ask(name: str) -> None:
            for turn in range(6):
                text = f"{name}{turn};"
                answer = model.request(RAW, {"prompt": text})
                got = answer.json()["choices"][0]["text"]
                events = list(stream(model, RAW, {"prompt": text}))
                said = "".join(event.data["choices"][0]["text"] for event in events[:-1])
                next(left := stream(model, RAW, {"prompt": text}))
                left.close()
                if (got, said) != (text * 3, text * 3):
                    wrong.append((text, got, said))

        threads = [threading.Thread(target=ask, args=(name,)) for name in "abcdef"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong and not any(thread.is_alive() for thread in threads)
        model.idle()


def test_the_end_of_the_runtime() -> None:
    """A whole answer becomes a 503, a reader gets the last event, a stream that nobody reads is lost, and all is told."""
    model = Local(ENDLESS, shutdown_s=600.0)  # nobody waits for the stream that nobody reads
    model.replay.pause()
    results: list[Any] = []
    unread = stream(model, RAW, {"prompt": "x"})
    read = stream(model, RAW, {"prompt": "x"})
    threads = [
        threading.Thread(target=lambda: results.append(model.request(RAW, {"prompt": "x"}))),
        threading.Thread(target=lambda: results.append(list(read))),
    ]
    for thread in threads:
        thread.start()
    model.until(lambda: len(model.service.generator.answers) == 3 and any(call._readers for call in model._calls))
    closing = threading.Thread(target=lambda: InProcess.close(model))  # the engine is held until the answers have ended
    closing.start()
    for thread in threads:
        thread.join(20)
    model.replay.resume()
    closing.join(20)
    assert not closing.is_alive()
    whole = next(result for result in results if isinstance(result, Reply))
    events = next(result for result in results if isinstance(result, list))
    assert whole.status == 503 and "shutting down" in whole.json()["error"]["message"]
    assert "shutting down" in events[-1].data["error"]["message"]
    with pytest.raises(FlareError, match="closed"):
        next(unread)
    with pytest.raises(FlareError, match="closed"):
        model.request("/health")
    model.close()
    unread.close()


@pytest.mark.parametrize("where", ["stop", "join", "core"])
def test_closing_goes_on_after_an_interrupt(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Ctrl-C at any of the places where closing waits; the next call does the rest."""
    model = Local(ENDLESS)
    model.replay.pause()
    unread = stream(model, RAW, {"prompt": "x"})

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "stop":
            patch.setattr(Future, "result", interrupted)
        else:
            patch.setattr(*((threading.Thread, "join") if where == "join" else (model.runtime, "close")), interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.close()
    with pytest.raises(FlareError, match="closed"):
        model.request("/health")
    for _ in range(2):
        model.close()
    assert model.replay._dead and not model._thread.is_alive() and model._loop.is_closed()
    with pytest.raises(FlareError, match="closed"):
        next(unread)


def test_a_reader_is_woken_when_its_stream_is_closed_elsewhere() -> None:
    with Local(ENDLESS) as model:
        model.replay.pause()
        answer = stream(model, RAW, {"prompt": "x"})
        told: list[str] = []

        def read() -> None:
            try:
                next(answer)
            except FlareError as error:
                told.append(str(error))

        reader = threading.Thread(target=read)
        reader.start()
        model.until(lambda: any(call._readers for call in model._calls))
        answer.close()
        reader.join(20)
        assert told and "closed" in told[0]
        model.replay.resume()
        model.idle()


def test_an_interrupt_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a call waits: the answer does not go on without anyone to take it."""
    with Local(ENDLESS) as model:
        model.replay.pause()
        result = Future.result

        def interrupted(self: Any, timeout: Any = None) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return result(self, timeout)
            model.replay.wait_until_held()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.request(RAW, {"prompt": "x"})
        model.until(lambda: not model._calls)
        model.replay.resume()
        model.idle()
