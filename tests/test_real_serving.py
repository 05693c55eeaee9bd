"""A real core behind the real server: the same tokens at any load, and exact idle counts after clients that vanish."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from flare.config import MemorySize, RuntimeSettings, ServerSettings
from flare.http.server import Server
from flare.http.startup import bind
from flare.runtime import Runtime
from tests.support.live_server import LiveServer

QUESTIONS = ["Name three colors.", "What is 2 + 2?", "Write a haiku about rain.", "Who wrote Hamlet?", "Count to five."]


class CoreServer(LiveServer):
    """The server over a core on disk instead of a script."""

    def __init__(self, core: Path, *, threads: int = 2, kv_memory: MemorySize | None = None) -> None:
        self.runtime = Runtime.load(RuntimeSettings(core=str(core), threads=threads, kv_memory=kv_memory))
        self.replay = self.runtime.replay
        self.replay.resume = lambda: None
        self.settings = ServerSettings(port=0)
        self.server = Server(self.runtime, self.settings)
        self.sock = bind("127.0.0.1", 0)
        self.port = self.sock.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)


@pytest.fixture(scope="module")
def server(smollm2_core: Path) -> Iterator[CoreServer]:
    # 40 pages hold 640 tokens in all: with eight requests at once some must give way and be computed again.
    with CoreServer(smollm2_core, kv_memory=MemorySize(bytes=40 * 368_640)) as running:
        yield running


def body(index: int, **more: Any) -> dict[str, Any]:
    question = QUESTIONS[index % len(QUESTIONS)]
    settings = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": index},
        {"top_p": 0.9, "seed": 7},
        {"top_k": 5, "seed": 1},
    ]
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 48, **settings[index % 4], **more}


def answer(server: CoreServer, request: dict[str, Any]) -> tuple[str, str, int]:
    status, reply = server.post("/v1/chat/completions", request)
    assert status == 200, reply
    choice = reply["choices"][0]
    return choice["message"]["content"], choice["stop_reason"], reply["usage"]["completion_tokens"]


async def stream(port: int, request: dict[str, Any], stop_after: int | None = None) -> str | None:
    """The streamed text; with `stop_after` the connection is dropped after so many events and None is returned."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({**request, "stream": True}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
    )
    text, events, finished = [], 0, False
    try:
        while (line := await reader.readline()) or not reader.at_eof():
            if not line.startswith(b"data: "):
                continue
            events += 1
            if stop_after is not None and events > stop_after:
                return None
            if line.startswith(b"data: [DONE]"):
                finished = True
                break
            for choice in json.loads(line[6:])["choices"]:
                text.append(choice["delta"].get("content") or "")
    finally:
        writer.close()
    assert finished, "the stream ended without its sentinel"
    return "".join(text)


def test_answers_are_the_same_alone_and_among_others(server: CoreServer) -> None:
    requests = [body(index, max_tokens=90, ignore_eos=True) for index in range(12)]
    alone = [answer(server, request) for request in requests]

    async def together() -> list[str | None]:
        return await asyncio.gather(*(stream(server.port, request) for request in requests))

    assert asyncio.run(together()) == [text for text, _, _ in alone]
    assert server.runtime.stats().preemptions > 0, "the pool was meant to be too small for all of them"
    server.idle()


def test_a_conversation_through_the_openai_sdk(server: CoreServer) -> None:
    """Several turns, each streamed and whole with one seed; then a stop string that the model is known to write."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
    turns: list[Any] = [{"role": "system", "content": "Answer in one short sentence."}]
    for question in ("Name a capital in Europe.", "Which country is it in?", "Name another city there."):
        turns.append({"role": "user", "content": question})
        asked: dict[str, Any] = {
            "model": "smollm2",
            "messages": turns,
            "seed": 11,
            "temperature": 0.7,
            "max_tokens": 40,
        }
        whole = client.chat.completions.create(**asked)
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
        said, why = whole.choices[0].message.content or "", whole.choices[0].finish_reason
        assert said and "".join(choice.delta.content or "" for choice in chunks) == said
        assert chunks[-1].finish_reason == why
        turns.append({"role": "assistant", "content": said})
    said = turns[-1]["content"]
    middle = said[len(said) // 3 : len(said) // 3 + 6]
    for streamed in (False, True):
        # The stop string crosses tokens, since it was cut out of the text without regard to them.
        stopped = client.chat.completions.create(**asked | {"messages": turns[:-1]}, stop=[middle], stream=streamed)
        if streamed:
            choices = [chunk.choices[0] for chunk in stopped if chunk.choices]
            text, end = "".join(choice.delta.content or "" for choice in choices), choices[-1]
        else:
            end = stopped.choices[0]
            text = end.message.content
        assert text == said[: said.index(middle)] and end.finish_reason == "stop"
        assert end.model_extra["stop_reason"] == "stop_sequence"
    server.idle()


def test_more_threads_give_the_same_answers(server: CoreServer, smollm2_core: Path) -> None:
    requests = [body(index) for index in range(4)]
    wanted = [answer(server, request) for request in requests]
    with CoreServer(smollm2_core, threads=1) as other:
        assert [answer(other, request) for request in requests] == wanted


def soak(server: CoreServer, *, clients: int, requests: int, seed: int) -> None:
    """Streams from many clients of which some vanish at random moments; checks every answer that was read to its end."""
    wanted = [answer(server, body(index)) for index in range(len(QUESTIONS) * 4)]
    server.idle()
    rng = random.Random(seed)
    work = [(rng.randrange(len(wanted)), rng.choice([None, 0, 1, 3, 9, 20])) for _ in range(requests)]

    async def client(jobs: Iterator[tuple[int, int | None]]) -> None:
        for index, stop_after in jobs:
            text = await stream(server.port, body(index), stop_after)
            assert text is None or text == wanted[index][0]

    async def run() -> None:
        jobs = iter(work)  # shared: each client takes the next one
        await asyncio.gather(*(client(jobs) for _ in range(clients)))

    asyncio.run(run())
    server.idle()
    stats = server.runtime.stats()
    assert stats.failed == 0 and stats.free_pages == stats.total_pages


def test_clients_that_vanish_leave_nothing_behind(server: CoreServer) -> None:
    soak(server, clients=32, requests=96, seed=5)
