"""The stream of Responses on the wire: what is sent when, and how it ends where the answer does not end well."""

from __future__ import annotations

import http.client
import json
from time import monotonic
from typing import Any

import pytest

from flare.http.sse import KEEPALIVE
from tests.support.live_server import LiveServer, reply

PATH = "/v1/responses"
ENDLESS: Any = lambda prompt, choice: [97] * 600  # noqa: E731


def decoded(data: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, each with its name before it."""
    assert b"[DONE]" not in data and data.endswith(b"\n\n")
    found = []
    for frame in data.decode().removesuffix("\n\n").split("\n\n"):
        name, value = frame.split("\n")
        found.append(json.loads(value.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def stream(server: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    status, headers, data = server.request("POST", PATH, {"input": "x", "stream": True, **fields})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    return decoded(data)


def test_headers_come_at_once_and_events_with_the_first_token() -> None:
    """A long prefill is silent but for comments; the response begins when there is something of it."""
    with LiveServer(script=lambda prompt, choice: reply("ok")) as server:
        server.replay.pause()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("POST", PATH, json.dumps({"input": "x", "stream": True}))
        response = connection.getresponse()
        server.replay.wait_until_held()
        keeper = server.server.app.keeper

        async def be_silent() -> None:
            keeper.look(monotonic() + 2 * keeper.silence_s)

        server.on_loop(be_silent())
        assert response.status == 200 and response.read1() == KEEPALIVE
        server.replay.resume()
        found = decoded(response.read())
        assert found[0]["type"] == "response.created" and found[0]["response"]["id"] == response.headers["x-request-id"]
        connection.close()


def test_the_context_ends_the_answer() -> None:
    """Whole and streamed: incomplete, as with a limit; only `stop_reason` tells them apart."""
    with LiveServer(script=ENDLESS) as server:
        _, whole = server.post(PATH, {"input": "x" * 400})
        last = stream(server, input="x" * 400)[-1]
        assert last["type"] == "response.incomplete"
        for answer in (whole, last["response"]):
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            assert answer["status"] == "incomplete" and answer["stop_reason"] == "context_full"
            assert answer["flare_context"]["tokens_remaining"] == 0 and answer["usage"]["total_tokens"] == 512
        limited = stream(server, max_output_tokens=3)[-1]["response"]
        assert limited["stop_reason"] == "max_tokens" and limited["usage"]["output_tokens"] == 3
        server.idle()


@pytest.mark.parametrize("step", [1, 3])
def test_a_failure_ends_in_a_failed_response(step: int) -> None:
    """Before the first token and behind it alike; nothing of the cause is told, and the next request is answered."""
    with LiveServer(script=ENDLESS) as server:
        failures: list[int] = []

        def on_step(tokens: int, rows: int) -> None:
            if server.replay.steps >= step and not failures:
                failures.append(server.replay.steps)
                raise ValueError("a secret")

        server.replay.on_step = on_step
        found = stream(server)
        assert failures and "secret" not in json.dumps(found)
        assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
        failed = found[-1]["response"]
        assert found[-1]["type"] == "response.failed" and failed["error"]["code"] == "server_error"
        assert ("response.output_text.delta" in {event["type"] for event in found}) == bool(failed["output"])
        failures.clear()
        status, body = server.post(PATH, {"input": "x"})
        assert status == 500 and body["error"]["type"] == "server_error"
        server.idle()
        assert server.post(PATH, {"input": "x", "max_output_tokens": 1})[0] == 200


def test_an_empty_answer_is_an_answer() -> None:
    with LiveServer(script=lambda prompt, choice: reply("")) as server:
        found = stream(server)
        kinds = [event["type"] for event in found]
        assert kinds == ["response.created", "response.in_progress", "response.completed"]
        assert found[-1]["response"]["output"] == [] and found[-1]["response"]["usage"]["output_tokens"] == 1
