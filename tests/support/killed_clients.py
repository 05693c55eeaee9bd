"""Clients that go away wherever they are: `python -m tests.support.killed_clients --seconds 60` runs them against a server
of its own and prints what is left of them.

Each of a number of clients asks one thing after another, of every route, whole and streamed, plain and compressed, and dies at
a place that the seed draws: inside its head or body, behind it, at some byte of the answer; or it stays to the end. It dies
with an end or with a reset.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.support.server_process import ServerProcess

CHAT, RAW, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
GENERATION = (CHAT, RAW, MESSAGES, RESPONSES)
OTHERS = (
    "/v1/messages/count_tokens",
    "/api/show",
    "/v1/models",
    "/metrics",
    "/v1/flare/status",
    "/openapi.json",
    "/nope",
)
RESET = struct.pack("ii", 1, 0)
STAYS = 0.25
"""The part of the requests whose clients read their answer to the end."""


@dataclass(frozen=True)
class Plan:
    """One request, and where its client dies: behind `sent` bytes of it, and `read` bytes of its answer (None: never)."""

    path: str
    data: bytes
    sent: int
    read: int | None
    reset: bool


def draw_plan(draw: random.Random) -> Plan:
    path = draw.choice(GENERATION if draw.random() < 0.8 else OTHERS)
    body = draw_body(draw, path)
    stays = draw.random() < STAYS
    headers = "anthropic-version: 2023-06-01\r\n"
    if not stays:
        headers += "Connection: close\r\n"  # so that an answer ends before a client that wanted more of it
    data = b"" if body is None else json.dumps(body).encode()
    if data and path != "/api/show" and draw.random() < 0.3:
        data, headers = gzip.compress(data), headers + "Content-Encoding: gzip\r\n"
    method = "GET" if body is None else "POST"
    whole = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data
    if stays:
        return Plan(path, whole, len(whole), None, False)
    sent = draw.randrange(len(whole)) if draw.random() < 0.3 else len(whole)
    read = draw.choice((0, 1, 200, 2_000, 20_000)) if sent == len(whole) else 0
    return Plan(path, whole, sent, read, draw.random() < 0.5)


def draw_body(draw: random.Random, path: str) -> dict[str, Any] | None:
    text = "x" * draw.choice((1, 50, 2_000, 50_000))
    messages = [{"role": "user", "content": text}]
    common = {"stream": draw.random() < 0.5, "max_tokens": draw.choice((1, 20, 300))}
    if path == CHAT:
        return common | {"messages": messages, "n": draw.randint(1, 3)}
    if path == RAW:
        return common | {"prompt": [text] * draw.randint(1, 3), "n": draw.randint(1, 2), "echo": draw.random() < 0.3}
    if path == MESSAGES:
        return common | {"messages": messages}
    if path == RESPONSES:
        return {"input": text, "stream": common["stream"], "max_output_tokens": common["max_tokens"]}
    if path == "/v1/messages/count_tokens":
        return {"messages": messages}
    return {"model": "org/tiny"} if path == "/api/show" else None


async def follow(plan: Plan, port: int) -> str:
    """Does what a plan says; returns how that ended: "died", or the status and "whole" of an answer that came complete."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(plan.data[: plan.sent])
        await writer.drain()
        if plan.read is None:
            head = await reader.readuntil(b"\r\n\r\n")
            await read_body(head, reader)
            return f"{head.split()[1].decode()} whole"
        left = plan.read
        while left > 0 and (data := await reader.read(left)):
            left -= len(data)
        return "died"
    except ConnectionError:
        assert plan.read is not None, "the connection of a client that stays was lost"
        return "died"
    finally:
        if plan.reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()


async def read_body(head: bytes, reader: asyncio.StreamReader) -> None:
    lines = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in head.split(b"\r\n"))}
    if b"content-length" in lines:
        await reader.readexactly(int(lines[b"content-length"]))
        return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)


async def kill_clients(port: int, *, clients: int, seed: int, requests: int = 0, seconds: float = 0.0) -> Counter[str]:
    """Runs clients until they have sent `requests` in all, or for some time; returns how their requests ended."""
    ends: Counter[str] = Counter()
    until = time.monotonic() + seconds
    numbers = iter(range(requests)) if requests else iter(int, 1)

    async def client() -> None:
        for number in numbers:
            if not requests:
                number = sum(ends.values())
                if time.monotonic() > until:
                    return
            plan = draw_plan(random.Random(f"{seed} {number}"))
            ends[await asyncio.wait_for(follow(plan, port), 60)] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return ends


IDLE = {
    "active": 0,
    "pending": 0,
    "http_admission_used": 0,
    "http_body_bytes": 0,
    "http_connections": 1,  # that which asks
}


def left_behind(numbers: dict[str, Any]) -> dict[str, Any]:
    """Returns what differs from an idle server; nothing when all has come back."""
    found = {name: numbers[name] for name, idle in IDLE.items() if numbers[name] != idle}
    if numbers["free_pages"] != numbers["total_pages"]:
        found["pages"] = numbers["total_pages"] - numbers["free_pages"]
    ended = numbers["completed"] + numbers["requests_cancelled_total"] + numbers["failed"]
    if ended != numbers["requests_submitted_total"]:
        found["not ended"] = numbers["requests_submitted_total"] - ended
    return found


def settle(server: ServerProcess, patience_s: float = 30.0) -> tuple[dict[str, Any], float]:
    """Asks until nothing is left, or patience is; returns what is left, and how long that took."""
    begun = time.monotonic()
    while (left := left_behind(server.numbers())) and time.monotonic() < begun + patience_s:
        time.sleep(0.02)
    return left, time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    server = ServerProcess("--plain", "a" * 400)
    server.post(RAW, {"prompt": "x"})
    print(f"before: {server.resident_bytes() >> 20} MiB, {server.open_files()} files")
    ends = asyncio.run(kill_clients(server.port, clients=options.clients, seed=options.seed, seconds=options.seconds))
    left, seconds = settle(server)
    print(f"{sum(ends.values())} requests: {dict(ends)}; left after {seconds:.2f} s: {left or 'nothing'}")
    numbers = server.numbers()
    counted = {name: numbers[name] for name in ("completed", "requests_cancelled_total", "failed")}
    print(f"choices: {counted}; pages: {numbers['free_pages']} free of {numbers['total_pages']}")
    print(
        f"after: {server.resident_bytes() >> 20} MiB, peak {server.peak_bytes() >> 20} MiB, {server.open_files()} files"
    )
    server.close()


if __name__ == "__main__":
    main()
