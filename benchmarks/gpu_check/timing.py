"""How long a core takes on a device: to load, a step by bucket, a draw, and each kernel of a decode step.

Device time is that of graphs launched one behind the other, so that the host's part is hidden; wall time is that of one call of
the replay, as a server makes it. Torch is not imported here, since loading is timed.
"""

from __future__ import annotations

import time

_STARTED = time.perf_counter()

import ctypes  # noqa: E402  what is imported below is part of what is timed
from collections.abc import Callable, Sequence  # noqa: E402
from ctypes import c_int32  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

from msgspec import structs  # noqa: E402

from benchmarks.gpu_check.findings import Checks, Finding, at_most, measured  # noqa: E402
from benchmarks.gpu_check.program_memory import ProgramMemory  # noqa: E402
from flare.core.cuda_graph import Bucket, CopyNode, Edge, FillNode, KernelNode, Pointer  # noqa: E402
from flare.core.directory import Core, open_core  # noqa: E402
from flare.replay.cpu_interface import SampleParams  # noqa: E402
from flare.replay.cuda import CudaReplay  # noqa: E402
from flare.replay.cuda_driver import CudaDevice, open_device  # noqa: E402
from flare.replay.cuda_program import CudaProgram  # noqa: E402

CONTEXT = 128
"""Position at which slots decode while they are timed, or the last one of a smaller context."""

COPY_BYTES = 1 << 30
"""Of a copy that is to be larger than any cache, where the device has room for it."""

Node = KernelNode | CopyNode | FillNode

LEAST_S, MOST_RUNS = 0.05, 1000

CHAIN = 64
"""Nodes of a graph that takes longer than its launch."""


def check_timing(checks: Checks, path: Path) -> None:
    """Measures a core; all is good that could be measured, but edges are to change no bit."""
    imported = time.perf_counter() - _STARTED
    core = open_core(path)
    opened = time.perf_counter() - _STARTED
    limits = core.manifest.limits
    position = min(CONTEXT, limits.max_context - 1)
    each = position // limits.page_tokens + 1
    stage = Stage(core, each, position)

    def load() -> Finding:
        assert core.manifest.cuda is not None
        device = open_device(core.manifest.cuda.architectures)
        ready = time.perf_counter() - _STARTED
        program = CudaProgram.open(core, device.architecture)  # type: ignore[arg-type]
        checked = time.perf_counter() - _STARTED
        stage.planned = program.reserved_bytes + program.segments.kv_page_bytes * each * limits.slots
        stage.device, stage.free = device, device.memory()[0]
        stage.replay = CudaReplay(program, device=device, kv_pages=each * limits.slots)
        loaded = time.perf_counter() - _STARTED
        stage.step(1)
        return measured(
            "seconds since the first import: modules, core opened, device opened, graphs checked, loaded, one step done",
            imported_s=imported,
            opened_s=opened,
            device_s=ready,
            checked_s=checked,
            loaded_s=loaded,
            first_step_s=time.perf_counter() - _STARTED,
            weights_bytes=program.segments.weights_bytes,
        )

    try:
        checks.run("load", load)
        checks.run("calls of the replay", stage.calls)
        checks.run("memory of the replay", stage.taken)
        checks.run("bandwidth of a copy", stage.bandwidth)
        checks.run("steps on the device", stage.steps)
        checks.run("programmatic edges", stage.edges)
        checks.run("kernels of a decode step", stage.kernels)
    finally:
        stage.close()


@dataclass
class Stage:
    """What is timed: the replay, and beside it the program's memory on the same device. device: the replay's; free: bytes of
    its memory before the replay took any; planned: those that its plan says it takes."""

    core: Core
    pages: int
    position: int
    replay: CudaReplay | None = None
    device: CudaDevice | None = None
    memory: ProgramMemory | None = None
    copied: float = 0.0
    free: int = 0
    planned: int = 0

    def step(self, tokens: int) -> None:
        """One step of the replay at the beginning of every slot's context, of which nothing else was written."""
        replay = self.replay
        assert replay is not None
        slots = replay.limits.slots
        for slot in range(slots):
            for page in range(self.pages):
                replay.page_table[slot * replay.page_stride + page] = slot * self.pages + page
        share = -(-tokens // slots)
        positions = [(i // share, i % share) for i in range(tokens)]
        rows = min(tokens, replay.max_rows, slots)
        for i, (slot, position) in enumerate(positions):
            replay.tokens[i], replay.positions[i], replay.slots[i] = i % replay.vocabulary, position, slot
        replay.rows[:rows] = list(range(rows))
        replay.step(tokens, rows)

    def places(self, tokens: int, slots: int) -> list[tuple[int, int]]:
        """Slot and position of each token of a timed step: as many consecutive positions of a slot as it takes."""
        share = -(-tokens // slots)
        first = max(0, self.position + 1 - share)
        return [(i // share, first + i % share) for i in range(tokens)]

    def calls(self) -> Finding:
        """Wall time of steps and draws."""
        replay, found = self.replay, {}
        assert replay is not None
        steps = self._fitting()
        for bucket in steps:
            found[f"step_{bucket.tokens}_us"] = 1e6 * timed(lambda n=bucket.tokens: self.step(n))  # type: ignore[misc]
        for rows in sorted({1, replay.max_rows}):
            self.step(rows)
            for alternatives, name in ((-1, "greedy"), (20, "logprobs")):
                fields = {"top_p": 1.0, "repetition": 1.0, "alternatives": alternatives}
                for row in range(rows):
                    replay.sampling[row] = SampleParams(**fields)
                found[f"{name}_{rows}_us"] = 1e6 * timed(lambda n=rows: replay.sample(n))  # type: ignore[misc]
        return measured("wall time of one call, by tokens of a step and rows of a draw", **found)

    def taken(self) -> Finding:
        """Memory of the device that the replay has taken once its steps have run, such as for registers that kernels spill."""
        assert self.device is not None
        taken = self.free - self.device.memory()[0]
        return measured("memory that was taken, and the plan's", taken_bytes=taken, planned_bytes=self.planned)

    def bandwidth(self) -> Finding:
        """Bytes that a copy in device memory reads and writes a second."""
        memory = self._memory()
        size = min(COPY_BYTES, memory.device.memory()[0] // 8) // 256 * 256
        base = memory.device.allocate(2 * size, "a copy")
        memory.addresses["arena"], kept = base, memory.addresses["arena"]
        try:
            ends = [Pointer(segment="arena", offset=offset, bytes=size) for offset in (0, size)]
            copy = memory.build([CopyNode(source=ends[0], target=ends[1], label="copy", after=[])])
        finally:
            memory.addresses["arena"] = kept
        self.copied = 2 * size / on_device(memory, copy)
        return measured("a copy's bytes, read and written", bytes=size, gigabytes_per_s=self.copied / 1e9)

    def steps(self) -> Finding:
        """Device time of each bucket, and of a decode step the share of the copy's bandwidth that its bytes reach."""
        memory, figures = self._memory(), {}
        assert self.core.manifest.cuda is not None
        cuda = self.core.manifest.cuda
        for bucket in self._fitting():
            self._put_step(memory, bucket)
            seconds = on_device(memory, memory.build(bucket.nodes, bucket.tokens, bucket.rows))
            figures[f"step_{bucket.tokens}_us"] = 1e6 * seconds
            if bucket.tokens == 1:
                pages = cuda.segments.kv_page_bytes / self.core.manifest.limits.page_tokens * (self.position + 1)
                moved = cuda.weights.decode_weight_bytes + pages
                figures |= {"decode_bytes": moved, "decode_gigabytes_per_s": moved / seconds / 1e9}
                figures["decode_share_of_copy"] = moved / seconds / self.copied if self.copied else None
        for bucket in memory.graphs.sample:
            self._put_params(memory, bucket)
            figures[f"sample_{bucket.rows}_us"] = 1e6 * on_device(memory, memory.build(bucket.nodes, rows=bucket.rows))
        return measured("device time, by tokens of a step and rows of a draw", **figures)

    def edges(self) -> Finding:
        """Device time of a decode step as it is and with full edges, and whether all buckets give the same bits with both, in
        every run: what is wrong with early launches may show in one of many."""
        memory, figures = self._memory(), {}
        differing = runs = 0
        for bucket in self._fitting():
            self._put_step(memory, bucket)
            size = 4 * bucket.rows * self.core.manifest.model.vocabulary
            logits: set[bytes] = set()
            for name, nodes in (("programmatic", bucket.nodes), ("full", with_full_edges(bucket.nodes))):
                executable = memory.build(nodes, bucket.tokens, bucket.rows)
                found = left_by_runs(memory, executable, size)
                logits |= set(found)
                runs += len(found)
                if bucket.tokens == 1:
                    figures[f"step_1_{name}_us"] = 1e6 * on_device(memory, executable)
            if bucket.tokens == 1:
                figures["programmatic"] = sum(edge.programmatic for node in bucket.nodes for edge in node.after)
            differing += len(logits) > 1
        note = "buckets whose logits have other bits with full edges, or in another run"
        return at_most(differing, 0, note, runs=runs, **figures)

    def kernels(self) -> Finding:
        """Device time of each kernel of a decode step: all its nodes, one behind the other, so that layers' weights differ."""
        memory = self._memory()
        bucket = memory.graphs.step[0]
        self._put_step(memory, bucket)
        memory.run(memory.build(bucket.nodes, bucket.tokens, bucket.rows))
        nodes: dict[int, list[KernelNode]] = {}
        for node in bucket.nodes:
            if isinstance(node, KernelNode):
                nodes.setdefault(node.kernel, []).append(node)
        table = [
            {
                "kernel": memory.graphs.kernels[number].source,
                "first": some[0].label,
                "nodes": len(some),
                "us": 1e6 * of_nodes(memory, some),
            }
            for number, some in nodes.items()
        ]
        return measured("device time of a decode step's nodes, by kernel", kernels=table)

    def close(self) -> None:
        if self.memory is not None:
            self.memory.device.close()
        if self.replay is not None:
            self.replay.close()

    def _memory(self) -> ProgramMemory:
        if self.memory is None:
            assert self.core.manifest.cuda is not None
            device = open_device(self.core.manifest.cuda.architectures)
            program = CudaProgram.open(self.core, device.architecture)  # type: ignore[arg-type]
            self.memory = ProgramMemory(device, program, self.pages * self.core.manifest.limits.slots)
        return self.memory

    def _fitting(self) -> list[Bucket]:
        """The step's buckets whose tokens find places at the timed positions."""
        slots = self.core.manifest.limits.slots
        graphs = self.memory.graphs if self.memory else None
        steps = graphs.step if graphs else self.core.cuda_graphs(self._architecture()).step
        return [bucket for bucket in steps if -(-bucket.tokens // slots) <= self.position + 1]

    def _architecture(self) -> Any:
        assert self.core.manifest.cuda is not None
        return next(iter(self.core.manifest.cuda.architectures))

    def _put_step(self, memory: ProgramMemory, bucket: Bucket) -> None:
        """Puts a bucket's inputs to where its graph copies them from, and the page table."""
        limits = self.core.manifest.limits
        stride = -(-limits.max_context // limits.page_tokens)
        places = self.places(bucket.tokens, limits.slots)
        vocabulary = self.core.manifest.model.vocabulary
        arrays = {
            "tokens": [i % vocabulary for i in range(bucket.tokens)],
            "positions": [position for _, position in places],
            "slots": [slot for slot, _ in places],
            "rows": [i % bucket.tokens for i in range(bucket.rows)],
        }
        for name, values in arrays.items():
            memory.put(name, bytes((c_int32 * len(values))(*values)))
        table = (c_int32 * (limits.slots * stride))()
        for slot in range(limits.slots):
            table[slot * stride : slot * stride + self.pages] = range(slot * self.pages, (slot + 1) * self.pages)
        memory.put("page_table", bytes(table))

    def _put_params(self, memory: ProgramMemory, bucket: Bucket) -> None:
        params = SampleParams(temperature=1.0, top_p=0.95, repetition=1.0, alternatives=-1)
        memory.put("params", bytes((SampleParams * bucket.rows)(*[params] * bucket.rows)))
        size = 4 * bucket.rows * self.core.manifest.model.vocabulary
        memory.put("logits", ctypes.string_at(ctypes.create_string_buffer(size), size))


def with_full_edges(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, none of which begins before those that it waits for have ended."""
    return [structs.replace(node, after=[Edge(node=edge.node) for edge in node.after]) for node in nodes]


def left_by_runs(memory: ProgramMemory, executable: Any, size: int) -> list[bytes]:
    """The logits that runs of a step's graph leave, of as many runs as there are in LEAST_S."""
    found: list[bytes] = []
    started = time.perf_counter()
    while not found or (time.perf_counter() - started < LEAST_S and len(found) < MOST_RUNS):
        memory.run(executable)
        found.append(memory.get("logits", 0, size))
    return found


def timed(call: Callable[[], object]) -> float:
    """The median wall time of a call, in seconds: of as many as there are in LEAST_S, after one that is not counted."""
    call()
    found: list[float] = []
    while sum(found) < LEAST_S and len(found) < MOST_RUNS:
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return median(found)


def on_device(memory: ProgramMemory, executable: Any) -> float:
    """The device time of a graph, in seconds: of launches one behind the other, the median of three series."""
    memory.run(executable)
    started = time.perf_counter()
    memory.run(executable)
    once = time.perf_counter() - started
    count = min(MOST_RUNS, int(LEAST_S / once))
    if count < 2:
        return once
    series = []
    for _ in range(3):
        started = time.perf_counter()
        memory.run(executable, count)
        series.append((time.perf_counter() - started) / count)
    return median(series)


def of_nodes(memory: ProgramMemory, nodes: list[KernelNode]) -> float:
    """The device time of launches one behind the other, in seconds: repeated in one graph, where that is short."""
    seconds = on_device(memory, memory.chain(nodes))
    if seconds > 1e-3:
        return seconds
    times = -(-CHAIN // len(nodes))
    return on_device(memory, memory.chain(nodes * times)) / times
