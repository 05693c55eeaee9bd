"""Servers side by side under load: streaming chat from a closed loop of clients, 128 tokens in and 64 out."""

from __future__ import annotations

from typing import Any

from benchmarks import clients, machine
from benchmarks.contestants import Contestant, Server

PROMPT_TOKENS, NEW_TOKENS = 128, 64
LOADS = {1: 8, 8: 32, 32: 64}  # clients: requests in all


def compare(contestants: list[Contestant], rounds: int) -> list[dict[str, Any]]:
    """Starts every server once a round, the order reversed every other round, and puts each of LOADS on it."""
    results = []
    for round_number in range(rounds):
        for contestant in contestants if round_number % 2 == 0 else reversed(contestants):
            with Server(contestant) as server:
                server.wait_until_ready()
                for number, requests in LOADS.items():
                    machine.wait_for_quiet()
                    load = machine.ForeignLoad()
                    figures = clients.run(
                        server, clients=number, requests=requests, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS,
                        seed=1000 * round_number + number,
                    )  # fmt: skip
                    head = {"server": contestant.name, "weights": contestant.weights, "clients": number}
                    head |= {"round": round_number, "foreign": load.share()}
                    results.append(head | figures | machine.memory_mb(server.process.pid))
                    tokens_s = f"{figures['tokens_s']:.1f} tokens/s"
                    print(f"  {contestant.name} {contestant.weights}, {number} clients: {tokens_s}", flush=True)
    return results
