"""What Python takes to load a core's cuda target, part by part, on the fake driver: no device, and none of its costs.

    python -m benchmarks.cuda_load CORE

The core needs a target for sm_90a. Copies of the weights are ordinary memory's here, and in the replay's time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

ARCHITECTURE, MEMORY = "sm_90a", 64 << 30
KV_PAGES = 64


def measure(core: Path, rounds: int) -> list[dict[str, float]]:
    """Returns the seconds of each part, a row a round; the first has the imports in it too."""
    from flare.core.directory import open_core
    from flare.replay.cuda import CudaReplay
    from flare.replay.cuda_driver import open_device
    from flare.replay.cuda_program import CudaProgram
    from tests.support.fake_cuda.library import FakeCuda, build

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        fake = FakeCuda(build(Path(folder) / "fake"))
        for _ in range(rounds):
            fake.reset()
            fake.set("memory", MEMORY)
            laps = [time.perf_counter()]
            opened = open_core(core)
            laps.append(time.perf_counter())
            device = open_device([ARCHITECTURE])
            laps.append(time.perf_counter())
            program = CudaProgram.open(opened, ARCHITECTURE)
            laps.append(time.perf_counter())
            CudaReplay(program, device=device, kv_pages=KV_PAGES).close()
            laps.append(time.perf_counter())
            parts = [after - before for before, after in zip(laps, laps[1:], strict=False)]
            nodes = sum(
                len(bucket.nodes) for bucket in (*program.graphs.step, *program.graphs.sample, *program.graphs.score)
            )
            rows.append(dict(zip(("core", "device", "graphs", "replay"), parts, strict=True)) | {"nodes": nodes})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_load", description=__doc__.splitlines()[0])
    parser.add_argument("core", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rows = measure(arguments.core, arguments.rounds)
    print(f"{rows[0]['nodes']:.0f} nodes; seconds, the first round and the median of all")
    for part in ("core", "device", "graphs", "replay"):
        print(f"{part:8} {rows[0][part]:.3f}  {median(row[part] for row in rows):.3f}")
    print(f"{'all':8} {sum(rows[0][p] for p in rows[0] if p != 'nodes'):.3f}")


if __name__ == "__main__":
    main()
