"""Hostile bytes at the real server as a process: refused at once, in bounded memory, and nothing of them stays."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import brotli
import pytest

from flare.http import codings
from flare.http.connections import REFUSED_S
from flare.protocols.completions import Completions
from tests.support.live_server import LiveServer, reply
from tests.support.server_process import ServerProcess

zstd = codings.zstd_module()
ROOT = Path(__file__).parents[2]
MIB = 1 << 20
BODY_LIMIT = 32 * MIB  # the server's default
CHAT, RAW, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
PATHS = (CHAT, RAW, MESSAGES, RESPONSES)
VERSION = {"anthropic-version": "2023-06-01"}


def check_alive(process: ServerProcess) -> None:
    status, data = process.post(RAW, {"prompt": "hi"})
    assert status == 200 and json.loads(data)["choices"][0]["text"] == "Fine."


@pytest.fixture(scope="module")
def process() -> Iterator[ServerProcess]:
    process = ServerProcess()
    check_alive(process)
    yield process
    check_alive(process)
    process.close()


def packed(coding: str, size: int) -> bytes:
    """`size` spaces, compressed a thousand times or more, in a stream that does not say how many they are."""
    piece = b" " * MIB
    if coding == "zstd":
        packer: Any = zstd.ZstdCompressor()
    elif coding == "br":
        br = brotli.Compressor(quality=4)
        return b"".join([*(br.process(piece) for _ in range(size // MIB)), br.finish()])
    else:
        packer = zlib.compressobj(1, wbits=zlib.MAX_WBITS | (16 if coding == "gzip" else 0))
    return b"".join([*(packer.compress(piece) for _ in range(size // MIB)), packer.flush()])


def test_bombs_are_refused_in_bounded_memory(process: ServerProcess) -> None:
    """The server's peak grows by the limit on bodies and the copy of a growing array at most, for all of them."""
    bombs = [(coding, packed(coding, 64 * MIB)) for coding in ("br", "deflate", "gzip", "zstd")]
    bombs.append(("zstd", zstd.compress(b"a" * (512 * MIB))))
    member = gzip.compress(b" " * (BODY_LIMIT // 2 + 1))
    bombs.append(("gzip", member * 2))
    for path in PATHS:
        process.post(path, gzip.compress(b" " * BODY_LIMIT), Content_Encoding="gzip")  # as large as one may be
    before = process.peak_bytes()
    for path in PATHS:
        for coding, body in bombs:
            status, data = process.post(path, body, Content_Encoding=coding)
            assert status == 413 and len(data) < 4096, (path, coding)
            assert json.loads(data)["error"]["type"] == "request_too_large"
    assert process.peak_bytes() - before < 2 * BODY_LIMIT
    check_alive(process)


def test_deep_and_wide_json_is_refused_in_bounded_memory(process: ServerProcess) -> None:
    before = process.peak_bytes()
    deep = b"[" * (10 * MIB)
    good: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "x"}]},
        RAW: {"prompt": "x"},
        MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
        RESPONSES: {"input": "x"},
    }
    for path in PATHS:
        start = json.dumps(good[path])[:-1].encode()
        for body in (deep, start + b', "metadata": ' + deep, start + b', "x": ' + b'{"a":' * (2 * MIB)):
            status, data = process.post(path, body)
            assert status == 400 and len(data) < 4096, (path, data[:200])
    for fields in (
        {"n": 10**9},
        {"n": 129},
        {"prompt": ["a"] * 100_000},
        {"prompt": ["a"] * 64, "n": 3},
        {"prompt": [[1]] * 100_000, "n": 128},
    ):
        status, data = process.post(RAW, {"prompt": "x"} | fields)
        assert status == 400 and len(data) < 4096, data
    assert process.post(CHAT, good[CHAT] | {"n": 10**9})[0] == 400
    assert process.peak_bytes() - before < 8 * BODY_LIMIT
    check_alive(process)


def test_heads_are_bounded(process: ServerProcess) -> None:
    before = process.peak_bytes()
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    for head in (
        start + b"A: x\r\n" * 100_000 + b"\r\n",
        start + b"A: " + b"x" * (8 * MIB),
        start + b"x" * (8 * MIB),
        b"POST /" + b"x" * (8 * MIB),
        start + b"A: x\r\n B: folded" * 10_000 + b"\r\n",
    ):
        assert process.send(head) == 400
    assert process.peak_bytes() - before < BODY_LIMIT
    check_alive(process)


def test_chunks_of_one_byte_are_cheap(process: ServerProcess) -> None:
    """A chunk costs six bytes on the wire and no more memory than its byte's place."""
    body = json.dumps({"prompt": "hi"}).encode() + b" " * 200_000
    before = process.peak_bytes()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert process.send(head + chunks + b"0\r\n\r\n") == 200
    assert process.peak_bytes() - before < 16 * MIB


def test_an_extension_of_a_chunk_that_never_ends_is_no_body() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with LiveServer(settings={"body_silence_s": 0.2}) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head + b"1;" + b"e" * 1_000_000)
            assert b"did not go on for 0.2 s" in connection.recv(65536)
        server.idle()


def test_connections_over_the_limit_are_told_so() -> None:
    """They get a whole response even when they send a body that nobody reads; a place that is given up is free."""
    with LiveServer(script=lambda p, c: reply("ok"), settings={"max_connections": 3}) as server:
        connections = server.server.connections
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(3)]
        server.until(lambda: connections.used == 3)
        for body in (b"", b'{"prompt": "hi"}', b" " * 1_000_000):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
                connection.sendall(f"POST {RAW} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
                connection.sendall(body)
                response = http.client.HTTPResponse(connection)
                response.begin()
                error = json.loads(response.read())["error"]
                assert response.status == 503 and response.getheader("retry-after") == "1"
                assert error["code"] == "too_many_connections" and "3 connections" in error["message"]
        held.pop().close()
        server.until(lambda: connections.used == 2 and not connections.refused)
        assert server.request("GET", "/health")[0] == 200
        for connection in held:
            connection.close()
        server.until(lambda: connections.used == 0)


def test_a_refused_connection_that_stays_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.http.connections.REFUSED_S", 0.1)
    monkeypatch.setattr("flare.http.connections.MAX_REFUSED", 2)
    assert REFUSED_S > 0.1
    with LiveServer(settings={"max_connections": 1}) as server:
        connections = server.server.connections
        held = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        server.until(lambda: connections.used == 1)
        crowd = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(6)]
        server.until(lambda: not connections.refused)
        answered = 0
        for connection in crowd:
            try:
                answered += connection.recv(65536).startswith(b"HTTP/1.1 503")
            except ConnectionError:
                pass  # closed without a word
            connection.close()
        assert 2 <= answered < 6
        held.close()


@pytest.mark.parametrize("head", [b"", b"GET /health HT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA: "])
def test_a_head_that_does_not_come_is_not_waited_for(head: bytes) -> None:
    with LiveServer(settings={"keepalive_s": 0.2}) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(head)
            assert connection.recv(100) == b""
        server.until(lambda: server.server.connections.used == 0)


def test_a_connection_serves_many_requests() -> None:
    """One after the other, and several sent at once, which are answered in their order."""
    with LiveServer(script=lambda p, c: reply("ok")) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        for _ in range(5):
            connection.request("POST", RAW, b'{"prompt": "hi"}')
            assert json.loads(connection.getresponse().read())["choices"][0]["text"] == "ok"
            connection.request("GET", "/nope")
            assert b"no route" in connection.getresponse().read()
        assert server.server.connections.used == 1
        connection.close()
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as pipe:
            pipe.sendall(b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(100)))
            data = b""
            while data.count(b"HTTP/1.1 404") < 100 or b"'/99'" not in data:
                data += pipe.recv(65536)
        assert re.findall(rb"no route '/(\d+)'", data) == [b"%d" % i for i in range(100)]


@pytest.mark.parametrize(
    ("start", "status"),
    [
        ("OPTIONS * HTTP/1.1\r\nHost: x", 404),
        ("CONNECT a:1 HTTP/1.1\r\nHost: x", 404),
        ("TRACE /health HTTP/1.1\r\nHost: x", 405),
        ("GET http://h/health HTTP/1.1\r\nHost: x", 200),
        ("GET /health HTTP/1.0", 200),
        ("GET /health HTTP/1.1", 400),  # no Host
        ("GET /health HTTP/1.1\r\nHost: a\r\nHost: b", 400),
        ("GET ?x HTTP/1.1\r\nHost: x", 400),
        ("GET http://[bad/health HTTP/1.1\r\nHost: x", 400),
        ("GET /health HTTP/1.1\r\nHost: x\r\nA b: c", 400),
        ("GET /health HTTP/1.1\r\nHost: x\r\nA: b\0c", 400),
        ("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6", 400),
        ("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked", 400),
        ("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip", 400),
        ("GET /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket", 405),
    ],
)
def test_heads(process: ServerProcess, start: str, status: int) -> None:
    assert process.send(start.encode() + b"\r\n\r\n") == status


def test_a_client_that_would_rather_speak_http2_is_answered(process: ServerProcess) -> None:
    """Java's client asks so with its first request."""
    body = b'{"prompt": "hi"}'
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        f"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    assert process.send(head.encode() + body) == 200


def test_no_exception_can_forge_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes from: a handler, the text of an answer, the engine, the loop itself."""
    forged = "x\n2026-01-01 INFO all is well\r\n\x1b[2K\u2028ok\n" + "long " * 20_000

    def fails() -> object:
        raise ValueError(forged)

    def step_fails(tokens: int, rows: int) -> None:
        raise ValueError(forged)

    class Encoder:
        """Fails with every event, the failure too."""

        ended = False

        def encode(self, event: object) -> bytes:
            raise ValueError(forged)

    async def task_fails() -> None:
        task = asyncio.ensure_future(asyncio.sleep(0))
        asyncio.get_running_loop().call_soon(fails)
        await task

    with LiveServer(script=lambda p, c: reply("ok")) as server:
        server.server.app.service.get("/fails", fails)
        status, _, data = server.request("GET", "/fails")
        assert status == 500 and b"well" not in data and len(data) < 4096
        server.on_loop(task_fails())
        monkeypatch.setattr(Completions, "stream", lambda self, response: Encoder())
        assert server.request("POST", RAW, {"prompt": "x", "stream": True})[2] == b""
        server.replay.on_step = step_fails
        assert server.request("POST", RAW, {"prompt": "x"})[0] == 500
    found = {}
    for record in caplog.records:
        first, *lines = record.getMessage().split("\n")
        found[first] = record.name
        assert len(record.getMessage()) < 25_000 and record.exc_info is None
        assert all(line.startswith("  | ") and line.isprintable() for line in lines)
        assert any("ValueError" in line for line in lines)
    assert {
        "a handler failed": "flare.service",
        "an answer failed while its tokens became text": "flare.runtime",
        "an answer's failure could not be reported": "flare.generation",
        "a step of 1 tokens failed; its 1 requests end": "flare.engine",
    }.items() <= found.items()
    assert any(first.startswith("Exception in callback") for first in found)
