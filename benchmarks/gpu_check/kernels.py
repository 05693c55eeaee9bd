"""Every kernel of a core's step graphs, in every bucket, on random data: against exact results, and bit by bit.

The rows of the largest bucket run first. Then every bucket runs some of them, in another order and beside others; attention
over few tokens and over many are different kernels there, whose bits must be equal all the same.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from benchmarks.gpu_check.bench import Bench, Unit, units
from benchmarks.gpu_check.cases import Case, make_case
from benchmarks.gpu_check.findings import Checks, Finding, at_most
from benchmarks.gpu_check.truth import Source
from flare.core.directory import Core, open_core
from flare.replay.cuda_driver import open_device
from flare.replay.cuda_program import CudaProgram


def check_kernels(checks: Checks, path: Path) -> None:
    """Checks what a core's step launches; two checks a kernel."""
    core = open_core(path)
    assert core.manifest.cuda is not None
    device = open_device(core.manifest.cuda.architectures)
    try:
        program = CudaProgram.open(core, device.architecture)  # type: ignore[arg-type]
        graphs = program.graphs
        bench = Bench(device, graphs, program.cubins)
        buckets = [units(graphs, bucket) for bucket in reversed(graphs.step)]
        seen = set()
        for number, largest in enumerate(buckets[0]):
            kind = (largest.kernels, largest.same("out", "residual"))
            if kind not in seen:
                seen.add(kind)
                _check_unit(checks, bench, core, [bucket[number] for bucket in buckets])
    finally:
        device.close()


def _check_unit(checks: Checks, bench: Bench, core: Core, buckets: list[Unit]) -> None:
    largest, limits = buckets[0], core.manifest.limits
    name = f"{largest.sources[0]} of {largest.label}"

    @cache
    def found() -> tuple[float, int, int]:
        source = Source(len(largest.label))
        case = make_case(largest, source, max(_given(largest), 1), limits.slots, limits.max_context)
        return compare(bench, case, buckets, source)

    def exact() -> Finding:
        return at_most(found()[0], 1.0, "largest error by what it may be", buckets=len(buckets))

    def bits() -> Finding:
        _, differing, compared = found()
        return at_most(differing, 0, "rows whose bits depend on their bucket or neighbours", rows_compared=compared)

    checks.run(f"{name}: exact", exact)
    checks.run(f"{name}: same bits in every bucket", bits)


def compare(bench: Bench, case: Case, buckets: list[Unit], source: Source) -> tuple[float, int, int]:
    """Runs a case in each of the buckets, the largest first. Returns the largest error by what it may be, how many rows had
    other bits than in the first run, and how many were compared."""
    first: dict[int, bytes] = {}
    worst, differing, compared = 0.0, 0, 0
    total = _given(buckets[0])
    # The whole largest bucket, then again in another order with some of it spoilt, then every other one.
    plans = [(buckets[0], list(range(total)), 0)]
    if total > 1:
        plans.append((buckets[0], source.order(total).tolist(), -(-total // 4)))
    plans += [(unit, _some(total, _given(unit), source), 0) for unit in buckets[1:]]
    for unit, keys, spoilt in plans:
        run = case.run(unit, keys, spoilt)
        left = bench.run(unit, run.inputs, run.outputs)
        worst = max(worst, case.excess(run, left))
        for key, row in zip(run.keys, case.rows(run, left), strict=True):
            data = row.numpy().tobytes()
            compared += key in first
            differing += first.setdefault(key, data) != data
    return worst, differing, compared


def _given(unit: Unit) -> int:
    """Rows that go into a unit: one for each token, or for each row of logits where only those are looked at."""
    rows = unit.arguments.get("tokens")
    return unit.tokens if rows is None or hasattr(rows, "segment") else int(unit.scalar("tokens"))


def _some(total: int, count: int, source: Source) -> list[int]:
    """`count` neighbours of `total` keys, and so, where there are slots, tokens that can be in a step."""
    start = int(torch.randint(0, total - count + 1, (1,), generator=source.generator))
    return list(range(start, start + count))
