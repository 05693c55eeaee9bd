"""What real clients send: 332 recorded requests, each with its headers in their order and case, against the real server.

`tests/recorded/CLIENT.jsonl` holds them; REFUSED says which are refused, with what, and why. Everything else is answered.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.server.refusals import REFUSED, Refusal
from tests.support.live_server import LiveServer
from tests.support.scripted_server import make_runtime

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RECORDED = Path(__file__).parent.parent / "recorded"
CONTEXT = 1 << 18
NOT_HERE = Refusal(404, "route", "the route is not served")
UNSERVED = ("/v1/responses/compact", "/api/chat", "/tokenizer_info", "/api/hello")
DECISIONS = ("/v1/systemone", "/v1/decisions")
REPLY = (
    '<think>Hm.</think>Yes.\n<tool_call>{"name": "$TOOL", "arguments": {"file_path": "/project/hello.py"}}</tool_call>'
)


@cache
def recorded() -> dict[tuple[str, int], dict[str, Any]]:
    requests = {}
    for file in sorted(RECORDED.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            request = json.loads(line)
            requests[file.stem, request["seq"]] = request
    return requests


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    names = ("local-model", "org/name")
    special = [f"<|{number}|>" for number in range(32)]  # so that ids of other vocabularies are tokens
    rated = {"max_top_logprobs": 20, "explicit_ids": 128, "scores_prompts": True}
    sizes = {"context": CONTEXT, "slots": 4}
    runtime = make_runtime([REPLY], "Fine.", endless=False, aliases=names, special=special, **sizes, **rated)
    with LiveServer(runtime=runtime) as live:
        yield live
        live.idle()


def wire(request: dict[str, Any]) -> bytes:
    """The request as the client sent it; only the body's length and form are made anew."""
    value = request["body"]
    body = b"" if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    if isinstance(value, dict) and "_raw" in value:  # no JSON
        body = value["_raw"].encode()
    headers = [(name, value) for name, value in request["headers"] if name.lower() != "transfer-encoding"]
    if any(name.lower() == "content-encoding" and value == "zstd" for name, value in headers):
        body = zstd.compress(body)
    target = request["path"] + (f"?{request['query']}" if request["query"] else "")
    lines = [f"{request['method']} {target} HTTP/1.1"]
    replaced = {"content-length": str(len(body)), "connection": "close"}
    lines += [f"{name}: {replaced.pop(name.lower(), value)}" for name, value in headers]
    if not body:
        replaced.pop("content-length", None)
    lines += [f"{name}: {value}" for name, value in replaced.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def send(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(data)
        received = bytearray()
        while piece := sock.recv(1 << 16):
            received += piece
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = unchunked(body)
    return int(status.split(" ")[1]), headers, body


def unchunked(body: bytes) -> bytes:
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            return whole
        whole, body = whole + body[:count], body[count + 2 :]


def frames(body: bytes) -> list[tuple[str | None, Any]]:
    """(event name, data) of every frame; the sentinel stays as text."""
    found = []
    for frame in body.decode().split("\n\n"):
        lines = [line for line in frame.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        data = fields["data"]
        found.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


def expected(client: str, seq: int, request: dict[str, Any]) -> Refusal | None:
    if request["path"] in UNSERVED:
        return NOT_HERE
    return REFUSED.get((client, seq))


def check_answer(path: str, stream: bool, body: bytes) -> None:
    """The shape of a good answer."""
    if not stream:
        answer = json.loads(body)
        want = {
            "/v1/chat/completions": ("object", "chat.completion"),
            "/v1/completions": ("object", "text_completion"),
            "/v1/messages": ("type", "message"),
            "/v1/responses": ("object", "response"),
        }
        if path in DECISIONS:
            assert answer["model"] and answer["answers"] and answer["usage"]["output_tokens"] > 0
        elif path in want:
            name, value = want[path]
            assert answer[name] == value and answer["usage"]
        return
    found = frames(body)
    assert not any(isinstance(data, dict) and data.get("error") for _, data in found), found[-1]
    if path == "/v1/messages":
        assert found[0][0] == "message_start" and found[-1][0] == "message_stop"
        assert all(name == data["type"] for name, data in found)
    elif path == "/v1/responses":
        assert found[0][0] == "response.created" and found[-1][0] in ("response.completed", "response.incomplete")
        assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    else:
        assert found[-1] == (None, "[DONE]") and all(name is None for name, _ in found)


def check_refusal(path: str, body: bytes, refusal: Refusal) -> None:
    """The shape of an error; it names what is wrong."""
    answer = json.loads(body)
    assert len(body) <= 4096
    if refusal.status == 422:
        assert [".".join(map(str, entry["loc"])) for entry in answer["detail"]] == [refusal.names]
        return
    error = answer["error"]
    message = error if path.startswith("/api/") and isinstance(error, str) else error["message"]
    assert refusal.names in message
    if path.startswith("/v1/messages"):
        assert answer["type"] == "error"


@pytest.mark.parametrize("client", sorted({client for client, _ in recorded()}))
def test_requests_of_real_clients(server: LiveServer, client: str) -> None:
    for (name, seq), request in recorded().items():
        if name != client:
            continue
        status, _, body = send(server.port, wire(request))
        refusal = expected(client, seq, request)
        where = f"{client} {seq} {request['method']} {request['path']}: {body[:400]!r}"
        assert status == (refusal.status if refusal else 200), where
        if request["method"] == "HEAD":
            assert body == b"", where
        elif refusal:
            check_refusal(request["path"], body, refusal)
        elif request["path"] != "/metrics":
            check_answer(request["path"], bool(request["stream"]), body)


def test_every_refusal_is_of_a_recorded_request() -> None:
    assert REFUSED.keys() <= recorded().keys()
