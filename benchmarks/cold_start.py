"""Cold starts side by side: from process start to the first streamed token, and the memory in use at that moment.

Weights and programs are in the page cache: one start of each contestant that is not counted comes first.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import machine
from benchmarks.contestants import Contestant, Server

REQUEST = {
    "max_tokens": 8,
    "temperature": 0,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


def compare(contestants: list[Contestant], rounds: int) -> list[dict[str, Any]]:
    """Starts every contestant once a round, the order reversed every other round."""
    results = []
    for contestant in contestants:
        start(contestant)
    for round_number in range(rounds):
        for contestant in contestants if round_number % 2 == 0 else reversed(contestants):
            machine.wait_for_quiet()
            load = machine.ForeignLoad()
            figures = start(contestant)
            head = {"server": contestant.name, "weights": contestant.weights, "round": round_number}
            results.append(head | {"foreign": load.share()} | figures)
            name = f"{contestant.name} {contestant.weights}"
            print(f"  {name}: first token {figures['token_s']:.3f} s after process start", flush=True)
    return results


def start(contestant: Contestant, limit_s: float = 180.0) -> dict[str, float]:
    """Starts the server once; `ready_s` and `token_s` count from process start, memory is the process tree's in MiB."""
    with Server(contestant) as server:
        ready = server.wait_until_ready(limit_s)
        while not server.first_text(REQUEST):
            server.check_alive(limit_s)
        token = time.perf_counter() - server.started
        return {"ready_s": ready, "token_s": token} | machine.memory_mb(server.process.pid)
