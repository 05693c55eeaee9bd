"""Hundreds of clients die at random, at a server as a process: nothing of them stays, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.support.killed_clients import GENERATION, OTHERS, draw_plan, kill_clients, random, settle
from tests.support.server_process import ServerProcess

REQUESTS = 300


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--plain", "a" * 400)
    yield process
    process.close()


def test_everything_comes_back(server: ServerProcess) -> None:
    """Slots, pages, places, bytes of bodies, connections and files; whoever stayed has a whole answer."""
    assert server.post("/v1/completions", {"prompt": "x"})[0] == 200
    files, total = server.open_files(), server.numbers()["total_pages"]
    ends = asyncio.run(kill_clients(server.port, clients=64, seed=1, requests=REQUESTS))
    assert sum(ends.values()) == REQUESTS
    assert set(ends) == {"died", "200 whole", "404 whole"} and ends["died"] > 150 and ends["200 whole"] > 50
    left, _ = settle(server)
    assert not left
    numbers = server.numbers()
    assert numbers["total_pages"] == numbers["free_pages"] == total
    assert numbers["requests_cancelled_total"] > 20 and numbers["completed"] > 50 and numbers["failed"] == 0
    server.until(lambda: server.open_files() <= files)  # the first request may still have been closing
    status, data = server.post("/v1/completions", {"prompt": "x", "n": 100})
    assert status == 200 and [choice["text"] for choice in json.loads(data)["choices"]] == ["a" * 400] * 100


def test_the_plans_are_of_every_kind() -> None:
    """The drawn requests go to every route, whole and streamed, and die in every part."""
    plans = [draw_plan(random.Random(f"1 {number}")) for number in range(REQUESTS)]
    assert {plan.path for plan in plans} == {*GENERATION, *OTHERS}
    heads = [plan.data.index(b"\r\n\r\n") for plan in plans]
    assert any(plan.sent < head for plan, head in zip(plans, heads, strict=True))
    assert any(head + 4 < plan.sent < len(plan.data) for plan, head in zip(plans, heads, strict=True))
    assert {plan.read for plan in plans} == {None, 0, 1, 200, 2_000, 20_000}
    for path in GENERATION:
        bodies = [plan.data for plan in plans if plan.path == path and b"gzip" not in plan.data]
        assert {json.loads(body.partition(b"\r\n\r\n")[2])["stream"] for body in bodies} == {True, False}
