"""Steps side by side: flare's replay and llama.cpp's decode on the same weight files, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine


@dataclass(frozen=True)
class Side:
    """One engine with one weight file: `command` prints a JSON line of figures, see workload.py."""

    engine: str
    weights: str
    command: list[str]


def sides(python: str, peer_python: str, weights: str, core: Path, gguf: Path, threads: int) -> list[Side]:
    """flare and llama.cpp on the same bits, in this order."""
    common = ["--threads", str(threads)]
    return [
        Side("flare", weights, [python, "-m", "benchmarks.step_flare", str(core), *common]),
        Side("llama.cpp", weights, [peer_python, "-m", "benchmarks.step_llama", str(gguf), *common]),
    ]


def compare(contestants: list[Side], rounds: int, *, neighbour: bool = False) -> list[dict[str, Any]]:
    """Runs every side once a round, the order reversed every other round; with `neighbour`, only decode at 1."""
    results = []
    for round_number in range(rounds):
        for side in contestants if round_number % 2 == 0 else reversed(contestants):
            machine.wait_for_quiet()
            load = machine.ForeignLoad()
            figures = measure_beside_a_neighbour(side) if neighbour else measure(side, [])
            head = {"weights": side.weights, "engine": side.engine, "round": round_number, "foreign": load.share()}
            results.append(head | figures)
            shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
            print(f"  {side.engine:10} {side.weights}  {shown}", flush=True)
    return results


def measure_beside_a_neighbour(side: Side) -> dict[str, float]:
    """Decode at 1 alone, then with one busy process on the machine."""
    options = ["--batches", "1", "--repeats", "0"]
    alone = measure(side, options)["decode_1"]
    with machine.busy_neighbour():
        beside = measure(side, options)["decode_1"]
    return {"decode_1_alone": alone, "decode_1_busy": beside, "kept": beside / alone}


def measure(side: Side, options: list[str]) -> dict[str, float]:
    result = subprocess.run([*side.command, *options], capture_output=True, text=True, timeout=900)
    if result.returncode:
        raise RuntimeError(f"{side.engine} {side.weights} ended with code {result.returncode}: {result.stderr[-400:]}")
    return json.loads(result.stdout.splitlines()[-1])
