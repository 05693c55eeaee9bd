"""The API within a process: every route answers as over HTTP, and `flare.open` loads a core with the settings it is given."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flare
from flare.api import Event, EventReply, InProcess, parse_events
from flare.config import RuntimeSettings, ServerSettings
from flare.errors import FlareError, InputError
from flare.runtime import Runtime
from flare.service.exchange import Reply
from flare.settings import SETTINGS
from tests.support.in_process import Local, stream
from tests.support.live_server import LiveServer, reply
from tests.support.scripted_server import make_runtime

CHAT, RAW, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
VERSION = {"anthropic-version": "2023-06-01"}
HI = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CALL = '<think>why</think>Before <tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'

ASKED: list[tuple[str, str, Any]] = [
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/org/tiny", None),
    ("GET", "/v1/models/org%2Ftiny", None),
    ("GET", "/v1/models/other", None),
    ("GET", "/v1/flare/model_info", None),
    ("GET", "/health", None),
    ("GET", "/openapi.json", None),
    ("GET", "/api/tags", None),
    ("POST", "/api/show", {"model": "org/tiny"}),
    ("POST", "/api/show", {"model": "other"}),
    ("POST", "/api/show", {}),
    ("GET", "/metrics?format=xml", None),
    ("GET", "/nope", None),
    ("POST", "/chat/completions", {}),
    ("DELETE", CHAT, None),
    ("GET", RAW, None),
    ("POST", CHAT, {"messages": HI}),
    ("POST", CHAT, {"messages": HI, "n": 2, "return_token_ids": True}),
    ("POST", CHAT, {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}]}),
    (
        "POST",
        CHAT,
        {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False},
    ),
    ("POST", CHAT, {"messages": HI, "colour": 1}),
    ("POST", CHAT, {"messages": HI, "temperature": float("nan")}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}),
    ("POST", CHAT, {"messages": HI, "response_format": {"type": "json_object"}}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}),
    ("POST", CHAT, {"messages": HI, "n": 99}),
    ("POST", CHAT, None),
    ("POST", CHAT, b"{"),
    ("POST", CHAT, []),
    ("POST", CHAT, "text"),
    ("POST", RAW, {"prompt": ["a", "bb"], "n": 2, "echo": True, "max_tokens": 3}),
    ("POST", RAW, {"prompt": "a", "max_tokens": 0}),
    ("POST", RAW, {"prompt": [1, 99999]}),
    ("POST", RAW, b'{"prompt": "bytes are taken as they are"}'),
    ("POST", MESSAGES, {"messages": HI, "max_tokens": 100}),
    (
        "POST",
        MESSAGES,
        {"messages": HI, "max_tokens": 100, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ),
    ("POST", MESSAGES, {"messages": HI}),
    ("POST", MESSAGES + "/nope", {}),
    ("POST", MESSAGES + "/count_tokens", {"messages": HI}),
    ("POST", MESSAGES + "/count_tokens", {"messages": 1}),
    ("POST", RESPONSES, {"input": "hi", "metadata": {"a": "b"}}),
    ("POST", RESPONSES, {"input": HI, "tools": [{"type": "function", **FUNCTION}]}),
    ("POST", RESPONSES, {"input": []}),
    ("POST", "/v1/systemone", {"model": "m", "state": [1], "questions": {"q": {"type": "noul"}}}),
    ("POST", "/v1/systemone", {"model": "m", "questions": {}}),
    ("POST", "/v1/systemone", b"{"),
    ("POST", "/v1/decisions", {"input": "hi", "questions": [{"type": "predicate", "instructions": "Good?"}]}),
    ("POST", "/v1/decisions", {"input": "hi", "questions": []}),
]
"""Requests to every route, good and bad."""
STREAMS = [
    (path, body) for _, path, body in ASKED if path in (CHAT, RAW, MESSAGES, RESPONSES) and isinstance(body, dict)
]
MEASURED = {"id", "created", "created_at", "completed_at", "timings", "call_id", "item_id", "token_timestamps"}
"""Members that differ from one answer to the next."""


def scripted() -> Runtime:
    """A runtime of a model that reasons, and calls when it may."""
    return make_runtime([CALL], "<think>hm</think>Hëllo 😊.", endless=False, context=2048, slots=4, explicit_ids=128)


def same(value: Any) -> Any:
    """A value of JSON with what is drawn or measured made the same; its type stays."""
    if isinstance(value, dict):
        return {k: type(v).__name__ if k in MEASURED and v is not None else same(v) for k, v in value.items()}
    return [same(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[LiveServer, InProcess]]:
    """The same model over HTTP and in process."""
    settings = {"max_requests": 8}
    with LiveServer(runtime=scripted(), settings=settings) as server:
        with InProcess(scripted(), ServerSettings(**settings)) as model:
            yield server, model
        server.idle()


def compact(body: Any) -> bytes:
    """The JSON that a body becomes in process: refusals say the place in it."""
    return json.dumps(body, separators=(",", ":")).encode()


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
def test_a_reply_is_that_of_http(both: tuple[LiveServer, InProcess], method: str, path: str, body: Any) -> None:
    server, model = both
    sent = body if isinstance(body, bytes) or body is None else compact(body)
    status, headers, data = server.request(method, path, sent, VERSION)
    answer = model.request(path, body, method=method)
    assert isinstance(answer, Reply)
    assert (answer.status, same(answer.json())) == (status, same(json.loads(data)))
    ids = {"x-request-id", "request-id", "x-typesafe-request-id"}
    told = {name: value for name, value in answer.headers.items() if name not in ids}
    assert told.items() <= headers.items() and ids & set(headers) == ids & set(answer.headers)
    if same(json.loads(data)) == json.loads(data):
        assert answer.body == data


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_stream_is_that_of_http(both: tuple[LiveServer, InProcess], path: str, body: dict[str, Any]) -> None:
    server, model = both
    streamed = body | {"stream": True}
    status, headers, data = server.request("POST", path, compact(streamed), VERSION)
    answer = model.request(path, streamed)
    assert answer.status == status and answer.headers["content-type"] == headers["content-type"]
    if status != 200:
        assert isinstance(answer, Reply) and answer.json() == json.loads(data)
        return
    assert isinstance(answer, EventReply)
    found = list(answer)
    assert [(event.name, same(event.data)) for event in found] == events_of(data)
    assert len(found) >= 2 and list(answer) == []
    assert answer.headers["x-request-id"].partition("_")[0][:4] in ("msg", "resp", "chat", "cmpl")


def events_of(data: bytes) -> list[tuple[str, Any]]:
    """The events of a stream by the standard's rules, for a stream without comments."""
    found = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        value = fields["data"] if fields["data"] == "[DONE]" else same(json.loads(fields["data"]))
        found.append((fields.get("event", "message"), value))
    return found


def test_every_route_is_asked_here(both: tuple[LiveServer, InProcess]) -> None:
    asked = {(path, method) for method, path, _ in ASKED} | {("/metrics", "GET"), ("/v1/flare/status", "GET")}
    assert {(path, method) for path, methods in both[1].service.routes.items() for method in methods} <= asked


def test_reports(both: tuple[LiveServer, InProcess]) -> None:
    """What counts differs between the two; its shape and type do not, and Accept chooses the form."""
    server, model = both

    def shape(value: Any) -> Any:
        return {k: shape(v) for k, v in value.items()} if isinstance(value, dict) else isinstance(value, str)

    status = model.request("/v1/flare/status").json()
    assert shape(status) == shape(json.loads(server.request("GET", "/v1/flare/status")[2]))
    assert status["connections"] == {"used": 0, "capacity": 0}
    numbers = model.request("/metrics", headers={"Accept": "application/json"}).json()
    assert set(numbers) == set(json.loads(server.request("GET", "/metrics?format=json")[2]))
    assert model.request("/metrics?format=json").json().keys() == numbers.keys()
    text = model.request("/metrics")
    assert isinstance(text, Reply) and text.headers["content-type"].startswith("text/plain")
    assert "flare_requests_submitted_total" in text.text
    with pytest.raises(FlareError, match="not JSON"):
        text.json()


def test_heads_and_headers() -> None:
    with Local(lambda p, c: reply("ok")) as model:
        head = model.request("/v1/models", method="HEAD")
        assert isinstance(head, Reply) and (head.status, head.body, head.text) == (200, b"", "")
        with pytest.raises(FlareError, match="no body, as HEAD asks"):
            head.json()
        body = {"messages": HI, "max_tokens": 5}
        for headers, status in (({}, 200), (VERSION, 200), ({"Anthropic-Version": "1999-01-01"}, 400)):
            assert model.request(MESSAGES, body, headers=headers).status == status
        assert model.request(RAW, b"x", headers={"content-encoding": "gzip"}).status == 415
        assert model.request(RAW, {"prompt": "x"}, headers={"Authorization": "Bearer any"}).status == 200
        with pytest.raises(TypeError):
            model.request(RAW, {"prompt": {1, 2}})


def test_wrong_uses_of_a_reply_are_told() -> None:
    with Local(lambda p, c: reply("ok")) as model:
        refused = model.request(CHAT, {"messages": [], "stream": True})
        with pytest.raises(FlareError, match="status 400"):
            list(refused)
        answer = stream(model, RAW, {"prompt": "x"})
        with pytest.raises(FlareError, match="iterate"):
            answer.json()
        answer.close()


def test_a_real_core(tiny_core: Path) -> None:
    """`flare.open` loads a core as `flare serve` does; its settings act."""
    with flare.open(tiny_core, threads=1, max_tokens=3, aliases=("tiny",), kv_memory="64MiB", max_requests=2) as model:
        body = {"messages": HI, "temperature": 0}
        answer = model.request(CHAT, body)
        assert answer.status == 200, answer
        assert answer.json()["model"] == "tiny" and answer.json()["usage"]["completion_tokens"] <= 3
        events = list(stream(model, CHAT, body))
        said = "".join(event.data["choices"][0]["delta"].get("content", "") for event in events[:-1])
        assert said == answer.json()["choices"][0]["message"]["content"]
        assert model.request(CHAT, body | {"max_tokens": 4}).json()["error"]["param"] == "max_tokens"
        assert model.request(CHAT, body | {"n": 3}).status == 400


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"threads": 0}, "threads: 0 is not a whole number"),
        ({"threads": "4"}, "threads: '4' is not"),
        ({"max_body_bytes": 4096, "max_bodies_bytes": 2048}, "max_bodies_bytes: 2048 is less"),
        ({"port": 80}, "port: a setting of the HTTP server"),
        ({"api_key": "k"}, "api_key: a setting of the HTTP server"),
        ({"max_token": 5}, "is max_tokens meant"),
        ({"kv_memory": "much"}, "kv_memory: 'much' is not"),
        ({"aliases": [""] * 3, "nonsense": 1}, "nonsense: no setting"),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        flare.open("cores/none", **settings)


def test_a_core_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FlareError, match=str(tmp_path)):
        flare.open(tmp_path)


def test_the_settings_here_are_all_that_do_not_speak_of_sockets() -> None:
    """They are those that the documentation lists, and all of the runtime's are among them."""
    here = {setting.name for setting in SETTINGS if not setting.listens and setting.name != "core"}
    text = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    listed = text.partition("`flare.open(core, **settings)` takes ")[2].partition(", as a configuration")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == here >= set(RuntimeSettings.__slots__) - {"core"}


def test_what_cannot_be_had_is_named_by_its_argument(tiny_core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLARE_KV_MEMORY", "1GiB")
    with pytest.raises(InputError, match=r"^kv_memory: 0\.0 MiB: they hold 0 pages"):
        flare.open(tiny_core, kv_memory="1KB")
    with pytest.raises(InputError, match="^core: no/core: no such core directory"):
        flare.open("no/core")


def test_imports_are_few() -> None:
    """`import flare` loads none of its parts; the API in process comes without the HTTP library."""
    program = (
        "import sys, flare\n"
        "heavy = {'msgspec', 'numpy', 'asyncio', 'tokenizers', 'aiohttp', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import flare.api\n"
        "assert not {name for name in sys.modules if name.startswith('flare.http')}\n"
        "assert 'aiohttp' not in sys.modules and 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_events_are_read_as_they_are_written() -> None:
    frames = b'event: a\ndata: {"x": "\\n\\n: "}\n\ndata: [1]\n\ndata: [DONE]\n\n'
    wanted = [Event("a", {"x": "\n\n: "}), Event("message", [1]), Event("message", "[DONE]")]
    assert list(parse_events(frames)) == wanted
