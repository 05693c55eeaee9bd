"""Refusals: every route and every kind of fault has one shape, and the server goes on."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.live_server import LiveServer, reply

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
GOOD = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, RAW: {"prompt": "hi"}}
BODY_LIMIT = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    settings = {"max_body_bytes": BODY_LIMIT, "api_key": "the-key"}
    with LiveServer(script=lambda prompt, choice: reply("ok"), settings=settings) as live:
        yield live
        live.idle()


AUTH = {"Authorization": "Bearer the-key"}


def check_error(answer: tuple[int, dict[str, str], bytes], status: int, type: str = "invalid_request_error") -> Any:
    got, headers, data = answer
    assert got == status, data
    assert headers["content-type"] == "application/json" and headers["server"] == "flare"
    assert len(data) <= 4096
    error = json.loads(data)["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["type"] == type and error["message"] and "\n" not in error["message"]
    for leak in ("Traceback", "msgspec", "aiohttp", "Error(", ".py", "/usr", "zlib"):
        assert leak not in data.decode()
    return error


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat", "/v1/models/", "/v1/nope", "/favicon.ico", "/v1/chat/completions/"]
)
def test_unknown_routes(server: LiveServer, method: str, path: str) -> None:
    answer = server.request(method, path, b"", AUTH)
    check_error(answer, answer[0])
    assert answer[0] in (404, 405)
    check_error(server.request(method, path, b""), 401, "authentication_error")


def test_methods(server: LiveServer) -> None:
    status, headers, data = server.request("DELETE", "/v1/models", b"", AUTH)
    check_error((status, headers, data), 405)
    assert headers["allow"] == "GET, HEAD"
    assert server.request("HEAD", "/v1/models", None, AUTH)[0] == 200
    assert server.request("HEAD", "/health")[0] == 200


def test_health_is_open(server: LiveServer) -> None:
    assert server.request("GET", "/health")[0] == 200
    assert json.loads(server.request("GET", "/health")[2]) == {"status": "ok"}


def raw_status(server: LiveServer, data: bytes) -> int:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(data)
        return int(connection.recv(65536).split()[1])


def test_a_body_is_refused_by_its_announced_length(server: LiveServer) -> None:
    head = f"POST {RAW} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer the-key\r\nContent-Length: {1 << 40}\r\n\r\n"
    assert raw_status(server, head.encode()) == 413


def test_a_chunked_body_is_counted_while_it_is_read(server: LiveServer) -> None:
    head = f"POST {RAW} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer the-key\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode())
        for _ in range(BODY_LIMIT // 65536):
            connection.sendall(chunk)
        connection.sendall(b"1\r\n \r\n")  # the last byte over the limit; the body never ends
        assert connection.recv(65536).split()[1] == b"413"


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def test_compressed_bodies(server: LiveServer) -> None:
    good = json.dumps(GOOD[CHAT]).encode()
    for coding, packed in (
        ("gzip", gzip.compress(good, mtime=0)),
        ("x-gzip", gzip.compress(good, mtime=0)),
        ("GZIP", gzip.compress(good[:9], mtime=0) + gzip.compress(good[9:])),
        ("deflate", zlib.compress(good)),
        ("identity", good),
        ("", good),
    ):
        assert server.request("POST", CHAT, packed, AUTH | {"Content-Encoding": coding})[0] == 200, coding


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", b""),
        ("gzip", b"{}"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4]),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"tail"),
        ("deflate", zlib.compress(b"{}") + b"tail"),
        ("deflate", zlib.compress(b"{}")[:-1]),
        ("deflate", raw_deflate(b"{}")),
    ],
)
def test_damaged_compressed_bodies(server: LiveServer, coding: str, body: bytes) -> None:
    check_error(server.request("POST", CHAT, body, AUTH | {"Content-Encoding": coding}), 400)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(b" " * (400 << 20), 1)),
        ("gzip", gzip.compress(b" " * (BODY_LIMIT // 2 + 1)) * 2),
        ("deflate", zlib.compress(b" " * (BODY_LIMIT + 1))),
    ],
)
def test_bodies_that_grow_over_the_limit(server: LiveServer, coding: str, body: bytes) -> None:
    answer = server.request("POST", CHAT, body[: BODY_LIMIT - 1], AUTH | {"Content-Encoding": coding})
    check_error(answer, 413, "request_too_large")


def test_long_names_make_no_long_errors(server: LiveServer) -> None:
    body = {"messages": [{"role": "r" * 100_000, "content": "x"}], "x" * 10: 1}
    check_error(server.request("POST", CHAT, body, AUTH), 400)
    check_error(server.request("POST", CHAT, GOOD[CHAT] | {"k" * 500_000: 1}, AUTH), 400)
    check_error(server.request("GET", "/v1/models/" + "m" * 7000, None, AUTH), 404)


BROKEN_HTTP = {
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "words": b"garbage\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 20_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: x\r\n" * 100_000 + b"\r\n",
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("name", BROKEN_HTTP)
def test_broken_http(server: LiveServer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(BROKEN_HTTP[name])
        data = connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400" and b"Server: flare" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and "not well-formed HTTP" in error["message"]
    assert not caplog.records


@pytest.mark.parametrize("rest", [b"", b"zz\r\n"])
def test_a_body_that_never_ends_gives_its_place_back(rest: bytes) -> None:
    """A body that stops, or whose chunks break in the middle, is refused when nothing more of it has come in time."""
    head = f"POST {RAW} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with LiveServer(settings={"body_silence_s": 0.5}) as live:
        with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
            connection.sendall(head.encode() + b"2\r\n{ \r\n")
            live.until(lambda: live.server.generator.admission.used == 1)
            connection.sendall(rest)
            answer = connection.recv(65536)
            assert answer.split()[1] == b"400" and b"did not go on for 0.5 s" in answer
        live.idle()


def test_a_client_that_asks_before_it_sends(server: LiveServer) -> None:
    """The body is asked for only once the head is accepted."""
    body = json.dumps(GOOD[RAW]).encode()
    for key, length, first in (
        (b"the-key", len(body), b"100"),
        (b"bad", len(body), b"401"),
        (b"the-key", 1 << 40, b"413"),
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nAuthorization: Bearer %b\r\n" % key
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % length)
            assert connection.recv(65536).split()[1] == first
            if first == b"100":
                connection.sendall(body)
                assert connection.recv(65536).split()[1] == b"200"
