"""Every route against every kind of fault: one status and one shape of error each, whatever the route and the mode."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from flare.http import rebinding
from flare.http.codings import CODINGS
from flare.protocols.versions import API_VERSIONS
from tests.support.live_server import LiveServer, reply

KEY = "the-key"
BODY_LIMIT = 1 << 16
Answer = tuple[int, dict[str, str], bytes]

MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/systemone": {"model": "m", "state": "hi", "questions": {"q": {"type": "noul"}}},
    "/v1/decisions": {"input": "hi", "questions": [{"type": "predicate", "instructions": "?"}]},
    "/api/show": {"model": "org/tiny"},
}
"""A body that is answered with 200, for every POST route."""
OPEN = ("/health", "/metrics")
SCHEMA_FAULTS = "/v1/systemone"
"""The route with a form of its own for faults of the schema, which ignores unknown fields and takes forms, if with images."""
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
MESSAGES_TYPES = TYPES | {404: "not_found_error", 500: "api_error", 503: "api_error"}
LEAKS = ("Traceback", "msgspec", "aiohttp", "Error(", ".py", "/usr", "zlib", "brotli:", "Zstandard")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    settings = {"max_body_bytes": BODY_LIMIT, "api_key": KEY}
    with LiveServer(script=lambda prompt, choice: reply("ok"), settings=settings, model={"explicit_ids": 128}) as live:
        yield live
        live.idle()


def routes(server: LiveServer) -> list[tuple[str, str]]:
    """Every route of the table, by its method, and the one with a name in its path."""
    table = [(path, method) for path, methods in server.server.app.service.routes.items() for method in methods]
    return [*table, ("/v1/models/org/tiny", "GET")]


def headers_for(path: str, **more: str) -> dict[str, str]:
    """What a good client sends on a route."""
    version = {"anthropic-version": API_VERSIONS[0]} if path.startswith("/v1/messages") else {}
    return {"Authorization": f"Bearer {KEY}"} | version | {name.replace("_", "-"): text for name, text in more.items()}


def check_shape(path: str, answer: Answer, status: int) -> str:
    """Asserts that an answer is an error of the route's protocol with this status; returns its message."""
    got, headers, data = answer
    assert got == status, (path, data)
    assert headers["content-type"] == "application/json" and headers["server"] == "flare"
    assert len(data) <= 4096
    body = json.loads(data)
    if path.startswith("/v1/messages"):
        assert set(body) - {"request_id"} == {"type", "error"} and body["type"] == "error"
        error = body["error"]
        assert {"type", "message"} <= set(error) and error["type"] == MESSAGES_TYPES[status]
        message = error["message"]
    elif path.startswith("/api") and status != 401:
        assert list(body) == ["error"]
        message = body["error"]
    elif status == 422:
        assert path == SCHEMA_FAULTS and list(body) == ["detail"]
        message = body["detail"][0]["msg"]
    else:
        error = body["error"]
        assert {"message", "type", "param", "code"} <= set(error) and error["type"] == TYPES[status]
        message = error["message"]
    assert isinstance(message, str) and message and message.isprintable()
    assert not [leak for leak in LEAKS if leak in message]
    assert status not in (429, 503) or int(headers["retry-after"]) > 0
    assert (headers.get("www-authenticate") == "Bearer") == (status == 401)
    return message


def test_every_route_is_known_here(server: LiveServer) -> None:
    """A new route joins the walk, with a good body if it takes one."""
    posts = {path for path, method in routes(server) if method == "POST"}
    assert posts <= set(GOOD)
    for path in posts:
        assert server.request("POST", path, GOOD[path], headers_for(path))[0] == 200, path


def test_the_walk(server: LiveServer) -> None:
    for path, method in routes(server):
        body = GOOD[path] if method == "POST" else None
        assert server.request(method, path, body, headers_for(path))[0] == 200, path
        for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
            answer = server.request(method, path, body, headers_for(path) | {"Authorization": ""} | key)
            if path in OPEN:
                assert answer[0] == 200
            else:
                check_shape(path, answer, 401)
        check_shape(path, server.request(method, path + "/nope", body, headers_for(path)), 404)
        for other in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            if other != method:
                answer = server.request(other, path, b"", headers_for(path))
                check_shape(path, answer, 405)
                assert answer[1]["allow"] == ("GET, HEAD" if method == "GET" else method)


@pytest.mark.parametrize("stream", [False, True])
def test_the_walk_of_bodies(server: LiveServer, stream: bool) -> None:
    """What is wrong before a request reaches the model is told the same way whether it streams or not."""
    for path, method in routes(server):
        if method != "POST":
            continue
        good = GOOD[path] | ({"stream": True} if stream and can_stream(path) else {})
        data = json.dumps(good).encode()

        def post(body: Any, path: str = path, **headers: str) -> Answer:
            return server.request("POST", path, body, headers_for(path, **headers))

        for broken in (
            b"",
            b" ",
            b"{",
            data[:-1],
            data + b"}",
            b"null",
            b"[]",
            b'"x"',
            b"\xff\xfe",
            b"\xef\xbb\xbf" + data,
        ):
            of_schema = path == SCHEMA_FAULTS and broken in (b"null", b"[]", b'"x"')
            check_shape(path, post(broken), 422 if of_schema else 400)
        if path == SCHEMA_FAULTS:
            assert post(good | {"colour": 1})[0] == 200
        else:
            check_shape(path, post(good | {"colour": 1}), 400)
        for deep in (b"[" * 60_000, b'{"a":' * 9_000 + b"1" + b"}" * 9_000, data[:-1] + b', "x":' + b"[" * 50_000):
            check_shape(path, post(deep), 400)
        check_shape(path, post(b" " * (BODY_LIMIT + 1)), 413)
        check_shape(path, post(good, Content_Encoding="compress"), 415)
        check_shape(path, post(good, Content_Encoding="gzip, gzip"), 415)
        form = post(good, Content_Type="multipart/form-data; boundary=x")
        check_shape(path, form, 400 if path == SCHEMA_FAULTS else 415)
        if path == "/api/show":
            answer = post(gzip.compress(data), Content_Encoding="gzip")
            check_shape(path, answer, 415)
            assert answer[1]["accept-encoding"] == "identity"
            continue
        assert post(good, Content_Encoding="br")[0] == 400  # the coding is known, the data is not of it
        assert post(good, Content_Encoding="compress")[1]["accept-encoding"] == ", ".join(CODINGS)
        assert post(gzip.compress(data), Content_Encoding="gzip")[0] == 200
        check_shape(path, post(gzip.compress(b" " * BODY_LIMIT * 2), Content_Encoding="gzip"), 413)


def can_stream(path: str) -> bool:
    return path not in ("/api/show", "/v1/messages/count_tokens", "/v1/systemone", "/v1/decisions")


def generation(server: LiveServer) -> list[str]:
    """The routes that ask the model."""
    return [path for path, method in routes(server) if method == "POST" and path in GENERATING]


GENERATING = GOOD.keys() - {"/api/show", "/v1/messages/count_tokens"}


@pytest.mark.parametrize("stream", [False, True])
def test_the_walk_of_refusals(server: LiveServer, stream: bool) -> None:
    """No room, no model, the end of the server: 429 and 503 with the time to come again."""
    generator = server.server.generator
    for path in generation(server):
        body = GOOD[path] | ({"stream": stream} if can_stream(path) else {})
        server.idle()  # the last answer may be read before its place is given back
        capacity, generator.admission.capacity = generator.admission.capacity, 1
        generator.admission.used = 1
        check_shape(path, server.request("POST", path, body, headers_for(path)), 429)
        generator.admission.used, generator.admission.capacity = 0, capacity
        generator.closing = True
        check_shape(path, server.request("POST", path, body, headers_for(path)), 503)
        check_shape("/health", server.request("GET", "/health"), 503)
        generator.closing = False
        assert server.request("POST", path, body, headers_for(path))[0] == 200


def test_the_walk_of_failures(server: LiveServer) -> None:
    """What fails in the model says nothing of why, and leaves a server that goes on."""
    for path in generation(server):
        server.replay.fail_next_step(ValueError("a secret"))
        answer = server.request("POST", path, GOOD[path], headers_for(path))
        assert "secret" not in check_shape(path, answer, 500)
        if not can_stream(path):
            continue
        server.replay.fail_next_step(ValueError("a secret"))
        status, headers, data = server.request("POST", path, GOOD[path] | {"stream": True}, headers_for(path))
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert b"error" in data and b"secret" not in data and b"[DONE]" not in data and b"message_stop" not in data
        assert server.request("POST", path, GOOD[path], headers_for(path))[0] == 200


def test_head_is_get_without_a_body(server: LiveServer) -> None:
    for path, method in routes(server):
        if method == "GET":
            status, headers, data = server.request("HEAD", path, None, headers_for(path))
            assert (status, data) == (200, b"") and headers["server"] == "flare", path
    status, headers, data = server.request("HEAD", "/api/hello", None, headers_for(""))
    assert (status, data) == (404, b"")
    assert server.request("HEAD", "/v1/completions", None, headers_for(""))[0] == 405


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/org/tiny", 200),
        ("/v1/models/org%2Ftiny", 200),
        ("/v1/models/%6frg/tiny", 200),
        ("/v1/%6dodels", 200),
        ("/v1/models?x=1&y=%ff", 200),
        ("/v1/models/org%252Ftiny", 404),  # decoded once
        ("/v1/models/org/tiny/", 404),
        ("/v1/models/", 404),
        ("/v1/models/%", 404),
        ("/v1/models/%zz%f", 404),
        ("/v1/models/%ff%fe", 404),
        ("/v1/models/%00%0d%0aX:%20y", 404),
        ("/v1/models/../models", 404),
        ("/v1/models//org/tiny", 404),
        ("//v1/models", 404),
        ("/v1/models/" + "m" * 7000, 404),
        ("/V1/MODELS", 404),
    ],
)
def test_paths(server: LiveServer, path: str, status: int) -> None:
    answer = server.request("GET", path, None, headers_for(path))
    if status == 200:
        assert answer[0] == 200
    else:
        check_shape(path, answer, status)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/completions/", "/v1/completions"),
        ("/v1/health", "/health"),
        ("/api/generate", "discovery alone"),
        ("/x", None),
    ],
)
def test_a_slip_in_the_path_is_told(server: LiveServer, path: str, hint: str | None) -> None:
    message = check_shape(path, server.request("POST", path, {}, headers_for(path)), 404)
    assert (hint in message) if hint else "did you mean" not in message


def test_a_key_is_asked_for_before_anything_is_told(server: LiveServer) -> None:
    """Without it a stranger learns neither which routes there are nor what a body should hold."""
    for path in ("/nope", "/v1/models/nope", "/api/nope", "/v1/messages/nope", "/health/", "/metrics/x"):
        check_shape(path, server.request("GET", path, None, {}), 401)
    check_shape("/v1/completions", server.request("DELETE", "/v1/completions", b"{", {}), 401)


@pytest.mark.parametrize(
    ("headers", "openai", "messages"),
    [
        ([("Authorization", "Bearer the-key")], 200, 200),
        ([("authorization", "bearer  the-key ")], 200, 200),
        ([("x-api-key", "the-key")], 401, 200),
        ([("x-api-key", "the-key"), ("Authorization", "Bearer the-key")], 200, 200),
        ([("x-api-key", "wrong"), ("Authorization", "Bearer the-key")], 200, 401),
        ([("x-api-key", "the-key"), ("Authorization", "Bearer wrong")], 401, 401),
        ([("x-api-key", "the-key"), ("Authorization", "Basic the-key")], 401, 401),
        ([("x-api-key", "the-key"), ("Authorization", "")], 401, 401),
        ([("x-api-key", ""), ("Authorization", "Bearer the-key")], 200, 401),
        ([("x-api-key", "the-key"), ("x-api-key", "the-key")], 401, 401),
        ([("Authorization", "Bearer the-key"), ("Authorization", "Bearer the-key")], 401, 401),
        ([("Authorization", "Bearer the-key, Bearer the-key")], 401, 401),
        ([("Authorization", "Bearer the-keys")], 401, 401),
        ([("Authorization", "Bearer the-ke")], 401, 401),
        ([("Authorization", "the-key")], 401, 401),
        ([("x-api-key", "\xff")], 401, 401),
        ([], 401, 401),
    ],
)
def test_keys(server: LiveServer, headers: list[tuple[str, str]], openai: int, messages: int) -> None:
    """A stranger path below /v1/messages shows what its key check said: 404 where it passed."""
    for path, status in (("/v1/models", openai), ("/v1/messages/nope", 404 if messages == 200 else messages)):
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        assert raw(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n{lines}Connection: close\r\n\r\n") == status, path


def raw(server: LiveServer, head: str) -> int:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode("latin-1"))
        return int(connection.recv(65536).split()[1])


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        (["2023-06-01"], 200),
        (["2026-10-21"], 200),
        ([], 400),
        (["2023-01-01"], 400),
        ([""], 400),
        (["2023-06-01", "2023-06-01"], 400),
        (["2023-06-01, 2026-10-21"], 400),
        (["\xff\x1b[0m" * 50], 400),
    ],
)
def test_versions_of_the_messages_api(server: LiveServer, versions: list[str], status: int) -> None:
    if "/v1/messages" not in server.server.app.service.routes:
        pytest.fail("the Messages endpoint is not served")
    body = json.dumps(GOOD["/v1/messages"]).encode()
    lines = "".join(f"anthropic-version: {version}\r\n" for version in versions)
    head = f"POST /v1/messages?beta=true HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\n{lines}Connection: close\r\n"
    got = raw(server, f"{head}Content-Length: {len(body)}\r\n\r\n{body.decode()}")
    assert got == status


@pytest.mark.parametrize(
    ("media", "origin", "status"),
    [
        (None, None, 200),
        ("application/json", None, 200),
        ("application/json; charset=utf-8", "https://page.example", 200),
        ("application/vnd.x+json", "https://page.example", 200),
        ("application/x-www-form-urlencoded", None, 200),  # curl's and urllib's default
        ("application/octet-stream", None, 200),
        ("text/plain", "https://page.example", 415),
        ("application/x-www-form-urlencoded", "null", 415),
        ("multipart/form-data; boundary=b", None, 415),
        ("MULTIPART/related", None, 415),
        (";;;", "https://page.example", 415),
        (None, "https://page.example", 415),  # a Blob without a type
        ("", "https://page.example", 415),
        ("text/plain; application/json", "https://page.example", 415),
    ],
)
def test_media_types(server: LiveServer, media: str | None, origin: str | None, status: int) -> None:
    body = json.dumps(GOOD["/v1/completions"])
    lines = f"Content-Type: {media}\r\n" if media is not None else ""
    lines += f"Origin: {origin}\r\n" if origin else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n{lines}Connection: close\r\n"
    assert raw(server, f"{head}Content-Length: {len(body)}\r\n\r\n{body}") == status


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("media", [None, "text/plain"])
def test_a_web_page_cannot_use_a_route_unasked(server: LiveServer, path: str, media: str | None) -> None:
    """What a browser sends without asking first, with the key of a proxy in between."""
    body = json.dumps(GOOD[path])
    lines = "".join(f"{name}: {text}\r\n" for name, text in headers_for(path, Origin="https://page.example").items())
    lines += f"Content-Type: {media}\r\n" if media else ""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{lines}Connection: close\r\n"
    assert raw(server, f"{head}Content-Length: {len(body)}\r\n\r\n{body}") == 415
    assert raw(server, f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}") in (
        (200,) if media is None else (400, 415)
    )


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("evil.example:PORT", "http://evil.example:PORT", 403),
        ("evil.example:PORT", "null", 403),
        ("EVIL.example.:PORT", "http://evil.example:PORT", 403),
        ("localhost.evil.example:PORT", "http://localhost.evil.example:PORT", 403),
        ("127.0.0.1.evil.example:PORT", "http://127.0.0.1.evil.example:PORT", 403),
        ("evil.example:PORT", None, 200),  # no browser
        ("chat.example", "https://chat.example", 200),  # a proxy that keeps its site's name
        ("chat.example:443", "https://chat.example", 200),
        ("localhost:PORT", "http://localhost:PORT", 200),
        ("LocalHost.:PORT", "app://editor", 200),
        ("flare.localhost:PORT", "http://flare.localhost:PORT", 200),
        ("127.0.0.1:PORT", "https://page.example", 200),
        ("192.168.1.5:PORT", "http://192.168.1.5:PORT", 200),  # a forwarded port
        ("[::1]:PORT", "http://[::1]:PORT", 200),
        ("[::1]", "http://[::1]", 200),
        ("evil.example:", "http://evil.example", 200),  # no browser writes it so
    ],
)
def test_a_page_that_took_this_machines_address_is_refused(
    server: LiveServer, host: str, origin: str | None, status: int
) -> None:
    """A name server may answer with any address for the page's own name; the browser then asks nobody."""
    host, body = host.replace("PORT", str(server.port)), json.dumps(GOOD["/v1/completions"])
    lines = f"Origin: {origin.replace('PORT', str(server.port))}\r\n" if origin else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
    rest = f"{lines}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    assert raw(server, head + rest) == status


def test_names_that_the_server_was_given_and_other_addresses_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer(script=lambda prompt, choice: reply("ok"), settings={"host": "Models.test"}) as server:

        def post(name: str) -> int:
            page = {"Host": f"{name}:{server.port}", "Origin": f"http://{name}:{server.port}"}
            return server.request("POST", "/v1/completions", GOOD["/v1/completions"], page)[0]

        assert (post("models.test"), post("other.test")) == (200, 403)
        monkeypatch.setattr(rebinding, "open_to_others", lambda address: address == "127.0.0.1")
        assert post("other.test") == 200


def test_every_route_refuses_such_a_page(server: LiveServer) -> None:
    for path, good in GOOD.items():
        page = headers_for(path, Origin="http://evil.example", Host=f"evil.example:{server.port}")
        told = check_shape(path, server.request("POST", path, good, page), 403)
        assert told.startswith(f"Host: evil.example:{server.port} is not this machine; ask localhost or 127.0.0.1")


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "a key is required; send the header Authorization: Bearer KEY"),
        ({"Authorization": "Bearer "}, "a key is required; send the header Authorization: Bearer KEY"),
        ({"Authorization": f"Basic {KEY}"}, "a key is required; send the header Authorization: Bearer KEY"),
        ({"Authorization": "Bearer other"}, "the key is not this server's; send the header Authorization: Bearer KEY"),
    ],
)
def test_a_missing_key_and_a_wrong_one_are_told_apart(server: LiveServer, headers: dict[str, str], says: str) -> None:
    for path in ("/v1/completions", "/v1/models", "/nope", "/api/tags"):
        assert check_shape("", server.request("GET", path, None, headers), 401) == says
    told = check_shape("/v1/messages", server.request("POST", "/v1/messages", b"", headers), 401)
    assert told.startswith(says) and "x-api-key: KEY" in told


def test_the_root_says_where_to_go(server: LiveServer) -> None:
    told = check_shape("/", server.request("GET", "/", None, headers_for("/")), 404)
    assert told == "there is no route '/'; the API is under /v1, GET /openapi.json describes it"
