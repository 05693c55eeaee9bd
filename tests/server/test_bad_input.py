"""What is wrong with a body is told in one way by every endpoint that takes one: status, type, field and code; and nothing
that a client sends becomes a line, or a part of one, in the server's log."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from flare.protocols.openapi import ROUTES, document
from tests.server.process import Process, scripted
from tests.support.scripted_server import make_runtime

HI = [{"role": "user", "content": "hi"}]
CHAT, RAW, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    RAW: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 5},
    COUNT: {"messages": HI},
}
OPENAI = (CHAT, RAW, RESPONSES)
LIMITED = {CHAT: "max_tokens", RAW: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
VERSION = {"anthropic-version": "2023-06-01"}
HUGE = "1" + "0" * 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with scripted(tmp_path_factory.mktemp("bad"), {"BREAK": None}, context=4096) as up:
        yield up


def merged(path: str, fields: str) -> bytes:
    """The good body of a path with raw text in front of its closing brace."""
    return f"{json.dumps(GOOD[path])[:-1]}, {fields}}}".encode()


def check_refused(server: Process, path: str, body: bytes, param: str | None, code: str | None = None) -> str:
    """Asserts that a body is refused as the path's protocol has it; returns the message. Messages tell the field in it."""
    status, headers, data = server.request("POST", path, body, VERSION)
    assert status == 400, (path, body[:200], data[:200])
    assert headers["content-type"] == "application/json" and len(data) <= 4096
    answer = json.loads(data)
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    message: str = error["message"]
    assert message and message.isprintable()
    if path in OPENAI:
        assert (error["param"], error["code"]) == (param, code), (path, body[:200], error)
    else:
        assert answer["type"] == "error"
    if param is not None:
        assert message.startswith(f"{param}: "), (path, body[:200], error)
    return message


NO_REQUESTS = {
    "empty": b"",
    "blank": b" \n",
    "null": b"null",
    "an array": b"[]",
    "an array of requests": b"[@]",
    "a string": b'"@"',
    "a number": b"5",
    "true": b"true",
    "a brace too many": b"@}",
    "two requests": b"@@",
    "a comma too many": b'{"model": "x",}',
    "a single quote": b"{'model': 'x'}",
    "a comment": b"/**/@",
    "a byte order mark": b"\xef\xbb\xbf@",
    "UTF-16": '{"model": "x"}'.encode("utf-16-le"),
    "Latin-1": b'{"model": "\xe9"}',
    "an overlong character": b'{"model": "\xc0\xaf"}',
    "a character beyond Unicode": b'{"model": "\xf4\x90\x80\x80"}',
    "half a character": b'{"model": "\xed\xa0\x80"}',
    "an escaped half": rb'{"model": "\ud800"}',
    "a NUL byte behind": b"@\x00",
    "a NUL byte within": b'{"model": "\x00"}',
    "a raw line break": b'{"model": "a\nb"}',
    "a wrong escape": rb'{"model": "\x41"}',
    "arrays without end": b"[" * 100_000,
    "objects without end": b'{"chat_template_kwargs": ' + b'{"a":' * 100_000,
    "a deep value": b'{"chat_template_kwargs": {"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}",
}


@pytest.mark.parametrize("path", GOOD)
def test_what_is_no_request_at_all(server: Process, path: str) -> None:
    good = json.dumps(GOOD[path]).encode()
    for name, body in NO_REQUESTS.items():
        message = check_refused(server, path, body.replace(b"@", good), None)
        assert "body" in message, (name, message)
    for size in range(1, len(good)):
        check_refused(server, path, good[:size], None)
    for literal in ("NaN", "Infinity", "-Infinity", "nan", "01", "+1", ".5", "1.", "0x1", "1e", "--1", "True"):
        body = merged(path, f'"chat_template_kwargs": {{"k": {literal}}}')
        assert "body" in check_refused(server, path, body, None), literal


FIELDS: list[tuple[str, str, str | None]] = [
    ("top_k: 1.0", "top_k", None),
    ("top_k: 1e2", "top_k", None),
    ("top_k: true", "top_k", None),
    (f"top_k: {HUGE}", "top_k", None),
    (f"top_k: -{HUGE}", "top_k", None),
    (f"temperature: {HUGE}", "temperature", None),
    ("temperature: 1e999", "temperature", None),
    ("temperature: false", "temperature", None),
    (f"seed: {HUGE}", "seed", None),
    ("seed: -1", "seed", None),
    ("stream: 1", "stream", None),
    ('stream: "true"', "stream", None),
    ("model: 5", "model", None),
    ("model: []", "model", None),
    ("stop_token_ids: [-1]", "stop_token_ids[0]", None),
    (f"stop_token_ids: [0, {HUGE}]", "stop_token_ids[1]", None),
    ("stop_token_ids: [1.0]", "stop_token_ids[0]", None),
    ("colour: 1", "colour", "unknown_parameter"),
    (r"a\u0000b: 1", "a?b", "unknown_parameter"),
    (r"a\nb\u001b[2J\u2028: 1", "a?b?[2J?", "unknown_parameter"),
]
"""A field and its raw value; the field that is named, and the code."""


@pytest.mark.parametrize("path", GOOD)
def test_wrong_values_are_told_with_their_field(server: Process, path: str) -> None:
    for fragment, param, code in FIELDS:
        name, value = fragment.rsplit(": ", 1)
        check_refused(server, path, merged(path, f'"{name}": {value}'), param, code)
    if path in LIMITED:
        for value in ("-1", "5.0", "1e30", HUGE, '"5"', "true", "[]"):
            check_refused(server, path, merged(path, f'"{LIMITED[path]}": {value}'), LIMITED[path])
    assert server.request("POST", path, GOOD[path], VERSION)[0] == 200


@pytest.mark.parametrize("path", GOOD)
def test_every_field_refuses_every_other_type(server: Process, path: str) -> None:
    """Every field of the API's description with one value of each kind of JSON: what its schema forbids is refused, and the
    field is named."""
    described = json.loads(document(make_runtime([], "", endless=False, context=8, slots=1).model))["components"]
    (route,) = [route for route in ROUTES if route.path == path]
    properties = described["schemas"][route.body]["properties"]
    tried = 0
    for name, schema in properties.items():
        valid = Draft202012Validator(schema | {"components": described})
        for value in (None, True, 7, -1.5, 1 << 70, "x", [], ["x"], [[1]], {}, {"x": 1}, [{}]):
            if not valid.is_valid(value):
                status, _, data = server.request("POST", path, GOOD[path] | {name: value}, VERSION)
                error = json.loads(data)["error"]
                assert status == 400 and error["type"] == "invalid_request_error", (name, value, data)
                assert error["message"].startswith(name), (name, value, error)
                assert path not in OPENAI or error["param"].startswith(name), (name, value, error)
                tried += 1
    assert tried > 4 * len(properties)


@pytest.mark.parametrize("path", GOOD)
def test_any_character_may_stand_in_a_name_and_in_text(server: Process, path: str) -> None:
    """The loaded model answers to every name, with its own; and what is text stays text."""
    for name in (
        "nope",
        "",
        "a\0b",
        "a\r\nb\x1b[2J\u2028",
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    ):
        status, _, data = server.request("POST", path, GOOD[path] | {"model": name}, VERSION)
        assert status == 200, data
        assert path == COUNT or json.loads(data)["model"] == "org/tiny"
    text = "a\0b\r\n\x1b[2J\u2028\u2029\x7f"
    field = next(iter(GOOD[path]))
    body = GOOD[path] | {field: [{"role": "user", "content": text}] if field == "messages" else text}
    assert server.request("POST", path, body, VERSION)[0] == 200
    assert path == COUNT or text.replace("\0", "\\0") in server.prompts()[-1].replace("\0", "\\0")


FORGED = "FORGED 2026-01-01 ERROR flare: all is lost"
SPLITS = ("\r\n", "\n", "\r", "\x1b[2J\x1b[H", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\0")


def test_nothing_that_a_client_sends_reaches_the_log_as_a_line(server: Process) -> None:
    """Bodies, names, paths, queries, header values and what is no HTTP, beside failures that are logged."""
    for split in SPLITS:
        word = f"x{split}{FORGED}"
        quoted = "".join(f"%{byte:02X}" for byte in word.encode())
        for path in GOOD:
            for body in ({"model": word, word: 1}, {"model": word}, {"metadata": {word: word}}, {"stop": word}):
                assert server.request("POST", path, GOOD[path] | body, VERSION)[0] in (200, 400)
        for target in (
            f"/v1/models/{quoted}",
            f"/{quoted}",
            f"/metrics?format={quoted}",
            f"/v1/chat/{quoted}?{quoted}",
        ):
            assert server.request("GET", target)[0] in (400, 404)
        host, port = server.url.removeprefix("http://").split(":")
        for head in (
            f"GET /health HTTP/1.1\r\nHost: x\r\nUser-Agent: {word}\r\n\r\n",
            f"GET /health HTTP/1.1\r\nHost: {word}\r\nanthropic-version: {word}\r\n\r\n",
            f"GET /{word} HTTP/1.1\r\nHost: x\r\n\r\n",
            f"{word} / HTTP/1.1\r\nHost: x\r\n\r\n",
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: {word}\r\nContent-Length: 0\r\n\r\n",
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {word}\r\nContent-Length: {word}\r\n\r\n",
        ):
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                connection.sendall(head.encode())
                assert connection.recv(65536).startswith(b"HTTP/1.")
    broken = f"BREAK\n{FORGED}"
    for path in (CHAT, MESSAGES, RESPONSES):
        body = GOOD[path] | (
            {"input": broken} if path == RESPONSES else {"messages": [{"role": "user", "content": broken}]}
        )
        assert server.request("POST", path, body | {"model": broken}, VERSION)[0] == 500
    logged = server.log.read_bytes().decode()
    assert "ValueError" in logged, "the failures were not logged, so that nothing is proved"
    assert FORGED not in logged
    assert not [c for c in logged if not c.isprintable() and c != "\n"]
