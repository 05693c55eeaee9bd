"""Bodies under bounds: what many gzip members cost, what all bodies hold together, and how long one may take."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import threading
import time
import tracemalloc
import zlib
from typing import Any

import pytest

from flare.errors import RequestError
from flare.http import codings
from flare.http.codings import CHUNK_BYTES, MAX_MEMBERS, decompress
from flare.service.admission import Quota
from flare.service.generate import Generator
from tests.support.live_server import LiveServer, reply

RAW = "/v1/completions"
GOOD = json.dumps({"prompt": "hi"}).encode()
HEAD = f"POST {RAW} HTTP/1.1\r\nHost: x\r\n".encode()


def test_the_number_of_gzip_members_is_bounded() -> None:
    empty = gzip.compress(b"")
    assert decompress(empty * MAX_MEMBERS, "gzip", 1000) == b""
    before = time.process_time()
    with pytest.raises(RequestError, match=f"more than {MAX_MEMBERS} gzip members"):
        decompress(bytearray(empty * ((32 << 20) // len(empty))), "gzip", 32 << 20)
    assert time.process_time() - before < 5  # tens of minutes when each member copied all that follows


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7])
def test_members_across_slices(size: int) -> None:
    """Stored (incompressible) members whose ends fall anywhere around the slices that zlib gets."""
    data = bytes(i * 7 & 255 for i in range(size))
    members = gzip.compress(data, 0) + gzip.compress(b"x" * 300_000) + gzip.compress(data, 0)
    assert decompress(members, "gzip", 1 << 20) == data + b"x" * 300_000 + data
    assert decompress(zlib.compress(data, 0), "deflate", 1 << 20) == data


def test_a_cut_stream_gives_all_its_output_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a stream is cut, what zlib makes of it counts: one byte over the limit is too large, else it is cut."""
    monkeypatch.setattr(codings, "CHUNK_BYTES", 100)  # less than one match of 258 bytes, so that zlib holds some back
    whole = gzip.compress(b" " * 20_000 + b"ab" * 10_000)
    for end in range(11, len(whole) - 8):
        size = len(zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(whole[:end]))
        for limit, status in ((size - 1, 413), (size, 400)):
            with pytest.raises(RequestError) as caught:
                decompress(whole[:end], "gzip", max(limit, 0))
            assert caught.value.status == (status if size else 400)


@pytest.mark.parametrize("tail", [b"\0", zlib.compress(b"{}"), b"x" * CHUNK_BYTES])
def test_deflate_has_no_tail(tail: bytes) -> None:
    with pytest.raises(RequestError, match="goes on after the end"):
        decompress(zlib.compress(b"{}") + tail, "deflate", 1 << 20)


def test_all_bodies_together_are_bounded() -> None:
    """Each body is under its own limit; the one that does not fit beside the others is asked to come again."""
    settings = {"max_body_bytes": 60_000, "max_bodies_bytes": 100_000}
    with LiveServer(script=lambda prompt, choice: reply("ok"), settings=settings) as server:
        held = server.server.generator.bodies
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
            slow.sendall(HEAD + b"Content-Length: 55000\r\n\r\n" + b" " * 54_000)
            server.until(lambda: held.used == 54_000)
            status, headers, data = server.request("POST", RAW, GOOD + b" " * 50_000)
            assert status == 429 and headers["retry-after"] == "1"
            error = json.loads(data)["error"]
            assert error["code"] == "rate_limit_exceeded"
            assert re.search(r"holds \d+ bytes of bodies and at most 100000; try again", error["message"])
            assert server.request("POST", RAW, GOOD + b" " * 40_000)[0] == 200
            assert held.used == 54_000
        server.idle()
        assert held.used == 0
        assert server.request("POST", RAW, GOOD + b" " * 50_000)[0] == 200


def test_a_share_is_given_back_once() -> None:
    quota = Quota(10, "seats")
    with quota.share() as first, quota.share() as second:
        first.take(6)
        with pytest.raises(RequestError, match="holds 6 seats and at most 10; try again later") as refused:
            second.take(5)
        assert refused.value.status == 429
        second.take(4)
        with pytest.raises(RequestError, match="asks for 11 seats, this server holds 10 at a time") as refused:
            second.take(7)
        assert refused.value.status == 400
        assert quota.used == 10
    assert quota.used == 0


class Busy:
    """All frontend threads of a server, held until the end of the block."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.release = threading.Event()
        self.threads = server.settings.frontend_threads
        self.begun = threading.Semaphore(0)

    def _work(self) -> None:
        self.begun.release()
        self.release.wait(30)

    def __enter__(self) -> Busy:
        workers = self.server.server.generator.workers
        loop = self.server._loop
        self.held = [asyncio.run_coroutine_threadsafe(workers.run(self._work), loop) for _ in range(self.threads)]
        for _ in self.held:
            assert self.begun.acquire(timeout=10)
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        for work in self.held:
            work.result(30)


@pytest.mark.parametrize("path", [RAW, "/v1/messages/count_tokens"])
def test_clients_that_leave_while_their_body_waits_for_a_thread_leave_nothing(path: str) -> None:
    """Neither the body in some queue, which nobody would count, nor the place; not for a moment, and no thread is needed."""
    size, head = 1 << 20, f"POST {path} HTTP/1.1\r\nHost: x\r\nanthropic-version: 2023-06-01\r\n"
    settings = {"max_body_bytes": size, "max_bodies_bytes": 2 * size}
    with LiveServer(script=lambda prompt, choice: reply("ok"), settings=settings) as server:
        bodies = server.server.generator.bodies
        with Busy(server):
            tracemalloc.start()
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
                    connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + b" " * size)
                    server.until(lambda: bodies.used == size)
                server.until(lambda: bodies.used == 0 and server.server.generator.admission.used == 0)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert held < 2 * size
        server.idle()
        assert server.request("POST", RAW, GOOD)[0] == 200


def test_a_body_counts_until_the_thread_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client leaves while its body is being decoded: what the thread holds is held."""
    begun, release = threading.Event(), threading.Event()
    prepare = Generator._prepare

    def slow(*arguments: Any) -> Any:
        begun.set()
        release.wait(30)
        return prepare(*arguments)

    with LiveServer(script=lambda prompt, choice: reply("ok")) as server:
        monkeypatch.setattr(Generator, "_prepare", slow)
        bodies, connections = server.server.generator.bodies, server.server.connections
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD)
            assert begun.wait(10)
        server.until(lambda: connections.used == 0)
        assert bodies.used == len(GOOD) and server.server.generator.admission.used == 1
        release.set()
        server.idle()
        assert bodies.used == 0 and server.runtime.stats().steps == 0


def test_a_body_that_trickles_is_ended_by_the_total_limit() -> None:
    """A byte before every silence limit does not keep a place for ever."""
    with LiveServer(settings={"body_silence_s": 30.0, "body_total_s": 0.5}) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
            server.until(lambda: server.server.generator.admission.used == 1)
            connection.sendall(b"{")
            answer = connection.recv(65536)
        assert answer.split()[1] == b"400" and b"not complete after 0.5 s" in answer
        server.idle()


def test_closing_does_not_wait_for_a_worker() -> None:
    """The loop that closes the server is free although a worker is still busy."""
    with LiveServer() as server:
        with Busy(server):
            closing = threading.Thread(target=server.server.generator.workers.close)
            closing.start()
            closing.join(5)
            closed = not closing.is_alive()
        closing.join()
        assert closed
