"""What happens around an answer: clients that leave, pause or are too many; silence; the end of the server."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import struct
import threading
from typing import Any

import pytest

from flare.http.sse import KEEPALIVE, Keeper
from flare.service.stream import EventStream
from tests.support.live_server import LiveServer, events, reply
from tests.support.scripted_replay import ReplayDead

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
ENDLESS: Any = lambda prompt, choice: [97] * 400  # noqa: E731


def send(connection: socket.socket, **fields: Any) -> None:
    """Sends a request to Completions."""
    body = json.dumps({"prompt": "hi", **fields}).encode()
    head = f"POST {RAW} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def connect(server: LiveServer, **fields: Any) -> socket.socket:
    """Sends a request and returns its connection without reading."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    send(connection, **fields)
    return connection


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream": True, "n": 2}])
def test_a_client_that_leaves_ends_its_request(fields: dict[str, Any]) -> None:
    with LiveServer(script=ENDLESS) as server:
        server.replay.pause()
        connection = connect(server, **fields)
        server.replay.wait_until_held()
        assert len(server.server.generator.answers) == 1
        connection.close()
        server.until(lambda: not server.server.generator.answers)
        server.replay.resume()
        server.idle()
        assert server.runtime.stats().cancelled == fields.get("n", 1)
        assert server.runtime.stats().generated_tokens < 50


def test_a_client_that_leaves_the_queue() -> None:
    with LiveServer(script=ENDLESS, replay={"slots": 1}) as server:
        server.replay.pause()
        first = connect(server, stream=True)
        server.replay.wait_until_held()
        second = connect(server, stream=True)
        server.until(lambda: len(server.server.generator.answers) == 2)
        second.close()
        server.until(lambda: len(server.server.generator.answers) == 1)
        first.close()
        server.until(lambda: not server.server.generator.answers)
        server.replay.resume()
        server.idle()


def test_clients_that_leave_at_every_point() -> None:
    """Connections dropped after any number of steps leave nothing behind, and the next request works."""
    with LiveServer(script=ENDLESS) as server:
        for steps in range(8):
            server.replay.pause()
            connection = connect(server, stream=True, n=2)
            for _ in range(steps):
                server.replay.wait_until_held()
                server.replay.allow()
            server.replay.wait_until_held()
            connection.close()
            server.replay.resume()
            server.idle()
        status, answer = server.post(RAW, {"prompt": "x", "max_tokens": 3})
        assert status == 200 and answer["choices"][0]["text"] == "aaa"


@pytest.mark.parametrize("seed", range(3))
def test_clients_killed_at_random(seed: int) -> None:
    """Clients go away in the middle of heads, bodies and answers, politely or not, while others are answered: then every
    place, page, byte and connection is free again, and nobody else noticed."""
    draw = random.Random(seed)
    settings = {"max_requests": 16, "body_silence_s": 5.0}
    with LiveServer(script=lambda p, c: reply("a" * 40), replay={"slots": 3}, settings=settings) as server:
        answers: list[tuple[int, bytes]] = []

        def ask() -> None:
            for _ in range(6):
                status, _, data = server.request("POST", RAW, {"prompt": "x"})
                answers.append((status, data))

        patient = threading.Thread(target=ask)
        patient.start()
        crowd: list[socket.socket] = []
        for _ in range(60):
            body = json.dumps(
                {"prompt": "x" * draw.randint(1, 90), "n": draw.randint(1, 3), "stream": draw.random() < 0.5}
            )
            whole = f"POST {RAW} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            crowd.append(connection)
            connection.sendall(whole if draw.random() < 0.7 else whole[: draw.randrange(len(whole))])
            if draw.random() < 0.3:
                connection.settimeout(0.002)
                try:
                    connection.recv(draw.randint(1, 300))
                except TimeoutError:
                    pass
            while len(crowd) > draw.randint(0, 8):
                leaver = crowd.pop(draw.randrange(len(crowd)))
                if draw.random() < 0.5:  # a reset instead of an end
                    leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                leaver.close()
        patient.join()
        for connection in crowd:
            connection.close()
        server.until(lambda: server.server.connections.used == 0)
        server.idle()  # after that: a request ends one turn of the loop behind its connection
        assert all(status == 200 and b"a" * 40 in data for status, data in answers if status != 429)
        assert len(answers) == 6
        status, answer = server.post(RAW, {"prompt": "x", "n": 16})
        assert status == 200 and len(answer["choices"]) == 16  # all the places there are


def test_a_paused_reader_loses_nothing() -> None:
    """The reader takes nothing until the model is done, with buffers too small for the answer; then all is there."""
    with LiveServer(script=ENDLESS) as server:
        server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", server.port))
        send(connection, stream=True, max_tokens=400)
        server.until(lambda: server.runtime.stats().completed == 1)
        (answer,) = server.server.generator.answers  # done, but not delivered
        assert answer.ended and server.server.generator.admission.used == 1
        response = http.client.HTTPResponse(connection, method="POST")
        response.begin()
        chunks = events(response.read())
        connection.close()
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "a" * 400
        server.idle()


def test_a_finished_answer_counts_until_its_reader_has_it() -> None:
    """A whole answer that waits in the server's buffers holds the places of its choices, as a stream does."""
    with LiveServer(script=ENDLESS, settings={"max_requests": 40}) as server:
        server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", server.port))
        send(connection, n=40, max_tokens=400)
        server.until(lambda: server.server.app.service.metrics.completed == 40)
        assert server.server.generator.admission.used == 40 and not server.server.generator.answers
        assert server.request("POST", RAW, {"prompt": "x"})[0] == 429
        response = http.client.HTTPResponse(connection, method="POST")
        response.begin()
        assert [choice["text"] for choice in json.loads(response.read())["choices"]] == ["a" * 400] * 40
        connection.close()
        server.idle()
        assert server.post(RAW, {"prompt": "x", "max_tokens": 1})[0] == 200


def test_tokens_are_sent_as_they_come() -> None:
    """Each step's text reaches the client before the next step is allowed; nothing before the first token."""
    with LiveServer(script=lambda p, c: reply("abc")) as server:
        server.replay.pause()
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        response = http.client.HTTPResponse(connection, method="POST")
        response.begin()  # headers come before the prompt is computed
        assert response.status == 200
        server.replay.wait_until_held()
        server.replay.allow()
        read = b""
        while read.count(b"\n\n") < 2:  # the role, and the first text
            read += response.read1()
        role, first = events(read)
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert first["choices"][0]["delta"] == {"content": "a"}
        server.replay.wait_until_held()
        server.replay.allow()
        assert events(response.read1())[0]["choices"][0]["delta"] == {"content": "b"}
        server.replay.resume()
        rest = events(response.read())
        assert rest[0]["choices"][0]["delta"] == {"content": "c"} and rest[-1] == "[DONE]"
        connection.close()


def test_a_failure_while_streaming_ends_the_stream() -> None:
    with LiveServer(script=ENDLESS) as server:
        failed = threading.Event()

        def on_step(tokens: int, rows: int) -> None:
            if server.replay.steps == 3 and not failed.is_set():
                failed.set()
                raise ValueError("a secret")

        server.replay.on_step = on_step
        _, _, data = server.request("POST", CHAT, {"messages": [{"role": "user", "content": "x"}], "stream": True})
        chunks = events(data)
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["error"]["type"] == "server_error" and "secret" not in data.decode()
        server.idle()
        assert server.post(RAW, {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_dead_replay_makes_the_server_unhealthy() -> None:
    with LiveServer(script=ENDLESS) as server:
        server.replay.die()
        status, _, data = server.request("POST", RAW, {"prompt": "x"})
        assert status == 500 and json.loads(data)["error"]["type"] == "server_error"
        server.until(lambda: not server.runtime.engine.healthy)
        for path, method in ((RAW, "POST"), (CHAT, "POST"), ("/health", "GET")):
            status, headers, data = server.request(method, path, {"prompt": "x"})
            assert status == 503 and "retry-after" in headers
            assert json.loads(data)["error"]["type"] == "server_error"
        assert server.request("GET", "/v1/models")[0] == 200
        assert issubclass(ReplayDead, Exception)


def test_a_full_queue_is_503_and_frees_up() -> None:
    with LiveServer(script=ENDLESS, replay={"slots": 1}, max_waiting=1) as server:
        server.replay.pause()
        held = [connect(server, stream=True) for _ in range(2)]
        server.until(lambda: len(server.server.generator.answers) == 2)
        for stream in (False, True):
            status, headers, data = server.request("POST", RAW, {"prompt": "x", "stream": stream})
            assert (status, json.loads(data)["error"]["code"]) == (503, "queue_full") and headers["retry-after"] == "1"
        assert server.request("POST", RAW, {"prompt": "x", "n": 2})[0] == 503
        for fields in ({"n": 3}, {"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b"], "n": 2, "stream": True}):
            status, headers, data = server.request("POST", RAW, {"prompt": "x"} | fields)
            assert status == 400 and "retry-after" not in headers  # it would never fit
            error = json.loads(data)["error"]
            assert "choices in all, the limit is 2; ask for less" in error["message"] and "x-request-id" not in headers
            assert error["param"] == ("n" if "n" in fields else "prompt")
        assert len(server.server.generator.answers) == 2  # all choices or none
        for connection in held:
            connection.close()
        server.replay.resume()
        server.idle()
        assert server.post(RAW, {"prompt": "x", "max_tokens": 2})[0] == 200


def test_admission_is_429_and_frees_up() -> None:
    with LiveServer(script=ENDLESS, settings={"max_requests": 2}) as server:
        server.replay.pause()
        held = connect(server, stream=True)
        server.until(lambda: server.server.generator.admission.used == 1)
        status, headers, data = server.request("POST", RAW, {"prompt": "x", "n": 2})
        assert (status, json.loads(data)["error"]["type"]) == (429, "rate_limit_error") and headers[
            "retry-after"
        ] == "1"
        assert server.request("POST", RAW, {"prompt": "x", "n": 3})[0] == 400
        assert server.server.generator.admission.used == 1
        held.close()
        server.replay.resume()
        server.idle()


def test_stopping_ends_every_answer() -> None:
    with LiveServer(script=ENDLESS) as server:
        server.replay.pause()
        results: list[tuple[int, bytes]] = []

        def ask(stream: bool) -> None:
            status, _, data = server.request("POST", RAW, {"prompt": "x", "stream": stream})
            results.append((status, data))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        server.until(lambda: len(server.server.generator.answers) == 2)
        server.on_loop(server.server.stop())
        for thread in threads:
            thread.join()
        server.replay.resume()
        (streamed, buffered) = sorted(results)
        assert streamed[0] == 200 and "shutting down" in events(streamed[1])[-1]["error"]["message"]
        assert buffered[0] == 503 and "shutting down" in json.loads(buffered[1])["error"]["message"]
        with pytest.raises(ConnectionError):
            server.request("GET", "/health")


def test_health_and_generation_give_one_reason() -> None:
    """Whatever keeps the server from generating, both say the same of it."""

    def reasons(server: LiveServer) -> set[str]:
        found = set()
        for method, path in (("POST", RAW), ("GET", "/health")):
            status, headers, data = server.request(method, path, {"prompt": "x"})
            assert status == 503 and headers["retry-after"] == "1"
            found.add(json.loads(data)["error"]["message"])
        return found

    with LiveServer(script=ENDLESS) as server:
        server.server.generator.closing = True
        assert reasons(server) == {"the server is shutting down"}
        server.server.generator.closing = False
        assert server.request("GET", "/health")[0] == 200
        server.replay.die()
        server.request("POST", RAW, {"prompt": "x"})
        server.until(lambda: server.runtime.engine.healthy is False)
        assert reasons(server) == {"the model can run no more requests; the server must be restarted"}


def test_silent_streams_get_comments() -> None:
    """The keeper is told the time: a comment each time nothing has gone out for as long as the limit, and none before."""
    with LiveServer(script=lambda p, c: reply("ab")) as server:
        server.replay.pause()
        connection = connect(server, stream=True)
        server.replay.wait_until_held()
        keeper = server.server.app.keeper
        server.until(lambda: len(keeper.streams) == 1)

        (silent,) = keeper.streams

        async def silence() -> None:
            for _ in range(2):
                begun, limit = silent.sent_at, keeper.silence_s
                assert keeper.look(begun + 0.8 * limit) == pytest.approx(0.2 * limit) and silent.drained
                assert keeper.look(begun + limit) == limit and not silent.drained
                await asyncio.sleep(0)
                assert silent.drained and silent.sent_at > begun

        server.on_loop(silence())
        server.replay.resume()
        response = http.client.HTTPResponse(connection, method="POST")
        response.begin()
        data = response.read()
        assert data.startswith(2 * KEEPALIVE + b"data: ")
        assert events(data)[-1] == "[DONE]"
        connection.close()


def test_a_reader_that_pauses_collects_one_comment() -> None:
    keeper, stream = Keeper(15.0), EventStream()
    keeper.streams.add(stream)
    for second in range(300):
        keeper.look(stream.sent_at + second)
    assert stream._frames == [KEEPALIVE]


def test_one_delivery_is_one_call_to_the_loop() -> None:
    """However many choices a step serves, the engine wakes the loop once a step."""
    calls: list[int] = []
    with LiveServer(script=lambda p, c: reply("abcdef")) as server:
        dispatch = server.runtime._dispatch

        def counted(batch: list[Any]) -> None:
            calls.append(len(batch))
            dispatch(batch)

        server.runtime._dispatch = counted
        assert server.post(RAW, {"prompt": "x", "n": 4})[0] == 200
        assert len(calls) <= server.replay.steps and max(calls) == 4 and sum(calls) == 4 * 7


def test_failures_after_submission_have_a_request_id() -> None:
    with LiveServer(script=ENDLESS, replay={"slots": 1}, max_waiting=1) as server:
        server.replay.fail_next_step(ValueError("a secret"))
        status, headers, _ = server.request("POST", RAW, {"prompt": "x"})
        assert status == 500 and headers["x-request-id"].startswith("cmpl-")
        server.replay.pause()
        held = [connect(server, stream=True) for _ in range(2)]
        server.until(lambda: len(server.server.generator.answers) == 2)
        for stream in (False, True):
            status, headers, _ = server.request("POST", RAW, {"prompt": "x", "stream": stream})
            assert status == 503 and headers["x-request-id"].startswith("cmpl-") and headers["retry-after"] == "1"
        status, headers, _ = server.request("POST", RAW, {"prompt": 1})
        assert status == 400 and "x-request-id" not in headers
        for connection in held:
            connection.close()
        server.replay.resume()
        server.idle()
