"""`flare_warnings`: where each route has them, whole and streamed, and that nothing has them that nothing happened to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.decisions.served import deciding
from tests.http.test_decide import BODIES as DECISIONS
from tests.http.test_decide import WEIGHTS
from tests.support.live_server import LiveServer, reply

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    "/v1/messages": CHAT | {"model": "m"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
}
CAUSE = "op silu_mul has no kernel"
VERSION = {"anthropic-version": "2023-06-01"}


def falling_back(server: LiveServer) -> None:
    """From now on each step records one cause, as a replay does while it runs."""
    server.replay.on_step = lambda tokens, rows: server.runtime.fallbacks.record(CAUSE)


def warned(count: int) -> list[dict[str, Any]]:
    return [{"type": "cpu_fallback", "cause": CAUSE, "count": count}]


def frames(data: bytes) -> list[Any]:
    """The objects of a stream's data lines, however its events are named."""
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def with_warnings(value: Any) -> list[Any]:
    """Every list of warnings within a value."""
    if isinstance(value, list):
        return [found for item in value for found in with_warnings(item)]
    if not isinstance(value, dict):
        return []
    own = [value["flare_warnings"]] if "flare_warnings" in value else []
    return own + [found for item in value.values() for found in with_warnings(item)]


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_and_the_end_of_a_stream_have_them(path: str) -> None:
    with LiveServer(script=lambda prompt, choice: reply("ok")) as server:
        assert with_warnings(server.post(path, BODIES[path], **VERSION)[1]) == []
        falling_back(server)
        status, answer = server.post(path, BODIES[path], **VERSION)
        steps = server.replay.steps
        first = steps // 2  # both answers took as many
        assert status == 200 and first == 3 and answer["flare_warnings"] == warned(first)
        _, _, data = server.request("POST", path, BODIES[path] | {"stream": True}, VERSION)
        *before, end = frames(data)
        if path == "/v1/messages":  # message_stop says nothing
            *before, end = before
        assert with_warnings(end) == [warned(2 * first)] and with_warnings(before) == []


def test_every_choice_of_a_stream_has_its_own_and_an_answer_the_latest() -> None:
    def script(prompt: tuple[int, ...], choice: int) -> list[int]:
        return reply("ok" if choice % 2 == 0 else "ok, and more")

    body = {"prompt": "hi", "n": 2, "seed": 0, "max_tokens": 20}
    with LiveServer(script=script) as server:
        falling_back(server)
        answer = server.post("/v1/completions", body)[1]
        steps = server.replay.steps
        assert answer["flare_warnings"] == warned(steps)
        _, _, data = server.request("POST", "/v1/completions", body | {"stream": True})
        ends = [frame for frame in frames(data) if "flare_warnings" in frame]
        counts = [frame["flare_warnings"][0]["count"] for frame in ends]
        assert [frame["choices"][0]["index"] for frame in ends] == [0, 1]
        assert steps < counts[0] <= counts[1] == 2 * steps


@pytest.mark.parametrize("path", DECISIONS)
def test_decisions_have_them(path: str) -> None:
    server, _ = deciding(WEIGHTS)
    with server:
        assert "flare_warnings" not in server.post(path, DECISIONS[path])[1]
        falling_back(server)
        answer = server.post(path, DECISIONS[path])[1]
        assert answer["flare_warnings"] == warned(server.replay.steps // 2)


def test_an_answer_that_took_no_step_has_none() -> None:
    with LiveServer(script=lambda prompt, choice: reply("ok")) as server:
        falling_back(server)
        server.post("/v1/completions", BODIES["/v1/completions"])
        body = {"prompt": "a", "max_tokens": 0, "echo": True}
        assert "flare_warnings" not in server.post("/v1/completions", body)[1]


def test_the_description_has_them() -> None:
    with LiveServer(script=lambda prompt, choice: reply("ok")) as server:
        document = json.loads(server.request("GET", "/openapi.json")[2])
        falling_back(server)
        schemas = document["components"]["schemas"]
        names = ("ChatCompletion", "TextCompletion", "Message", "Response")
        for name, (path, body) in zip(names, BODIES.items(), strict=True):
            answer = server.post(path, body, **VERSION)[1]
            schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
            Draft202012Validator(schema).validate(answer)
            broken = answer | {"flare_warnings": [{"type": "cpu_fallback", "cause": CAUSE}]}
            assert not Draft202012Validator(schema).is_valid(broken)
