"""Answers that fail between the model and the client: counted as failed, and told or closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from flare.conversation import Finished
from flare.protocols.chat import ChatCompletions
from flare.protocols.endpoint import Collected
from tests.support.live_server import LiveServer, events, reply

CHAT, RAW = "/v1/chat/completions", "/v1/completions"


def broken_after(events: int) -> Any:
    """A stream encoder that takes some events and then none, not even a failure."""

    class Broken:
        ended = False
        seen = 0

        def encode(self, event: Any) -> bytes:
            self.seen += 1
            if self.seen > events:
                raise ValueError("a secret")
            return b"data: {}\n\n"

    return Broken()


def test_a_stream_that_cannot_be_encoded_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client is not left waiting, and the answers beside it in the same batches lose nothing."""
    with LiveServer(script=lambda p, c: reply("abcdef")) as server:
        monkeypatch.setattr(ChatCompletions, "stream", lambda self, response: broken_after(2))
        server.replay.pause()
        results: dict[str, tuple[int, dict[str, str], bytes]] = {}
        bodies = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, RAW: {"prompt": "x"}}

        def ask(path: str) -> None:
            results[path] = server.request("POST", path, bodies[path] | {"stream": True})

        threads = [threading.Thread(target=ask, args=(path,)) for path in bodies]
        for count, thread in enumerate(threads, 1):
            thread.start()
            server.until(lambda count=count: len(server.server.generator.answers) == count)
        server.replay.resume()
        for thread in threads:
            thread.join(20)
        assert results[CHAT][2] == b"data: {}\n\n" * 2
        chunks = events(results[RAW][2])
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "abcdef" and chunks[-1] == "[DONE]"
        server.idle()


@pytest.mark.parametrize("last_only", [True, False])
def test_a_collection_that_fails_is_answered(monkeypatch: pytest.MonkeyPatch, last_only: bool) -> None:
    """The buffered answer's listener raises, at the last event or at all: the client gets a 500 either way."""
    add = Collected.add

    def broken(self: Collected, event: Any) -> bool:
        if not last_only or type(event) is Finished:
            raise ValueError("a secret")
        return add(self, event)

    with LiveServer(script=lambda p, c: reply("ab")) as server:
        monkeypatch.setattr(Collected, "add", broken)
        status, headers, data = server.request("POST", RAW, {"prompt": "x"})
        assert status == 500 and b"secret" not in data and headers["x-request-id"].startswith("cmpl-")
        server.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_encoded_has_failed(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """The model did its part; the client got none of it, and that is what is counted."""

    def broken(self: Any, response: Any, collected: Any = None) -> Any:
        if stream:
            return broken_after(0)
        raise ValueError("a secret")

    with LiveServer(script=lambda p, c: reply("ab")) as server:
        monkeypatch.setattr(ChatCompletions, "stream" if stream else "encode", broken)
        body = {"messages": [{"role": "user", "content": "x"}], "n": 3, "stream": stream}
        status, headers, data = server.request("POST", CHAT, body)
        assert status == (200 if stream else 500) and b"secret" not in data
        assert headers["x-request-id"].startswith("chatcmpl-")
        server.idle()
        counted = server.server.app.service.metrics
        assert (counted.submitted, counted.completed, counted.cancelled, counted.failed) == (3, 0, 0, 3)
