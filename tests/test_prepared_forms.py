"""The tables for forms of answers: made when the server is idle after its first answer, and once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from threading import Event, Semaphore, Thread, current_thread
from typing import Any

import pytest

from flare.constraints import Vocabulary
from flare.engine import engine as engines
from flare.runtime import Runtime
from tests.support.live_server import LiveServer, reply

RAW = "/v1/completions"
FORM = {"prompt": "a", "structured_outputs": {"regex": "x{1,3}"}}
PATIENCE = 20.0


class Watched:
    """The making of tables, which a test may hold up or let fail; `by` are the threads that did it, `threads` those that the
    runtime made for it, and `rests` counts how often it was told that nothing runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by: list[str] = []
        self.threads: list[Thread] = []
        self.rests = Semaphore(0)
        self.begun, self.may_end, self.ended = Event(), Event(), Event()
        self.may_end.set()
        self.error: Exception | None = None
        make, settled = Vocabulary._make, Runtime._settled

        def watched(vocabulary: Vocabulary) -> Any:
            self.by.append(current_thread().name)
            self.begun.set()
            assert self.may_end.wait(PATIENCE)
            try:
                if self.error is not None:
                    raise self.error
                return make(vocabulary)
            finally:
                self.ended.set()

        def counted(runtime: Runtime) -> None:
            settled(runtime)
            self.rests.release()

        def threaded(**given: Any) -> Thread:
            self.threads.append(Thread(**given))
            return self.threads[-1]

        monkeypatch.setattr(Vocabulary, "_make", watched)
        monkeypatch.setattr(Runtime, "_settled", counted)
        monkeypatch.setattr("flare.runtime.Thread", threaded)


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(engines, "SETTLED_S", 0.01)
    return Watched(monkeypatch)


@pytest.fixture
def server(making: Watched) -> Iterator[LiveServer]:
    with LiveServer(script=lambda prompt, choice: reply("xx")) as up:
        yield up
        making.may_end.set()


def ask(server: LiveServer, **fields: Any) -> str:
    status, answer = server.post(RAW, {"prompt": "a"} | fields)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def test_made_once_after_the_first_answer(server: LiveServer, making: Watched) -> None:
    assert not making.by
    for _ in range(2):
        assert ask(server) == "xx"
        assert making.rests.acquire(timeout=PATIENCE)
    assert making.ended.wait(PATIENCE)
    assert ask(server, **FORM) == "xx"
    assert making.by == ["flare-forms"]
    assert [(thread.name, thread.daemon) for thread in making.threads] == [("flare-forms", False)]


def test_others_are_answered_meanwhile_and_a_form_waits_for_the_same(server: LiveServer, making: Watched) -> None:
    making.may_end.clear()
    assert ask(server) == "xx"
    assert making.begun.wait(PATIENCE)
    assert ask(server) == "xx" and not making.ended.is_set()
    waiting = server.runtime.constraints
    making.may_end.set()
    assert ask(server, **FORM) == "xx"
    assert making.by == ["flare-forms"] and waiting.vocabulary.native is waiting.vocabulary.native


def test_the_first_request_makes_them_where_there_was_no_rest(making: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SETTLED_S", 1000.0)
    with LiveServer(script=lambda prompt, choice: reply("xx")) as up:
        assert ask(up) == ask(up, **FORM) == "xx"
        assert len(making.by) == 1 and making.by != ["flare-forms"]


def test_a_failure_is_told_and_tried_again(
    server: LiveServer, making: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    making.error = RuntimeError("out of luck")
    with caplog.at_level(logging.ERROR, "flare.runtime"):
        assert ask(server) == "xx"
        assert making.ended.wait(PATIENCE)
        server.runtime._preparing.join(PATIENCE)  # type: ignore[union-attr]
    assert "the tables for forms of answers could not be made" in caplog.text
    making.error = None
    assert ask(server, **FORM) == "xx" and len(making.by) == 2


def test_closing_waits_for_them(making: Watched) -> None:
    with LiveServer(script=lambda prompt, choice: reply("xx")) as up:
        assert ask(up) == "xx"
        assert making.begun.wait(PATIENCE)
    assert making.ended.is_set() and not up.runtime._preparing.is_alive()  # type: ignore[union-attr]


def test_a_runtime_that_nobody_asks_for_forms_makes_none(making: Watched) -> None:
    up = LiveServer()
    try:
        up.runtime.start()
        up.runtime._settled()
        assert up.runtime._preparing is None and not making.by
    finally:
        up.runtime.close()
        up.sock.close()


def test_a_model_whose_replies_have_no_end_needs_none(making: Watched) -> None:
    with LiveServer(script=lambda prompt, choice: reply("xx"), model={"eos": frozenset()}) as up:
        assert ask(up, max_tokens=2) == "xx"
        up.runtime._settled()
        assert up.runtime._preparing is None and not making.by
