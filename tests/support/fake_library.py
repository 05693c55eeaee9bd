"""Kernel libraries of `fake_kernels.cc`, compiled once a run, and programs over them: native code without a model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flare.core.manifest import Limits
from flare.replay.cpu import CpuArg, CpuNode, CpuProgram, CpuReplay, best_isa
from ignition.targets.cpu.compile import compile_libraries
from ignition.targets.cpu.source import headers
from tests.support.shared import shared

SOURCE = Path(__file__).parent / "fake_kernels.cc"
ISAS = ("x86-64-v4", "x86-64-v3", "generic")


def fake_library(isa: str = "") -> Path:
    """The library of an ISA level; the best of this machine by default."""
    return _compiled(isa or best_isa(ISAS))


@cache
def _compiled(isa: str) -> Path:
    source = SOURCE.read_text().replace("FAKE_ISA", f'"{isa}"')

    def compile(folder: Path) -> None:
        library = compile_libraries({isa: source}, headers())[isa]
        folder.mkdir()
        (folder / f"{isa}.so").write_bytes(library.data)

    return shared(f"fake-kernels-{isa}", compile) / f"{isa}.so"


def node(kernel: str, phase: int, *args: CpuArg) -> CpuNode:
    return CpuNode(kernel, phase, args)


def program(nodes: Sequence[CpuNode], *, library: Path | None = None, **changes: Any) -> CpuProgram:
    """A program with small limits. io has 1024 bytes of logits and 64 KiB behind them; weights are f32 0, 1, 2, ..."""
    weights = aligned((ctypes.c_float * 65536)(*range(65536)))
    fields: dict[str, Any] = dict(
        library=library or fake_library(),
        nodes=nodes,
        weights=weights,
        weights_offset=0,
        weights_bytes=len(weights),
        arena_bytes=65536,
        io_bytes=1024 + 65536,
        logits_offset=0,
        kv_page_bytes=128,
        vocabulary=64,
    )
    limits = dict(max_context=160, slots=4, max_step_tokens=64, max_rows=4, page_tokens=16)
    limits = {name: changes.pop(name, value) for name, value in limits.items()}
    return CpuProgram(**(fields | changes), limits=Limits(**limits))


def aligned(data: Any) -> memoryview:
    """A copy of the bytes at an address that is a multiple of 64."""
    size = ctypes.sizeof(data) if isinstance(data, ctypes.Array) else len(data)
    block = (ctypes.c_char * (size + 64))()
    start = -ctypes.addressof(block) % 64
    view = memoryview(block)[start : start + size]
    view.cast("B")[:] = memoryview(data).cast("B")
    return view


def io(replay: CpuReplay, kind: Any, count: int, offset: int = 1024) -> Any:
    """`count` elements of the io segment at `offset` (logits lie before it): a ctypes array over the memory itself."""
    address = replay._library.flare_logits(replay._handle) + offset
    return (kind * count).from_address(address)


def fill(replay: CpuReplay, tokens: Sequence[int], *, slot: int = 0, position: int = 0) -> None:
    """Writes one slot's tokens from `position` on, on pages slot * 10, slot * 10 + 1, ..."""
    for i, token in enumerate(tokens):
        replay.tokens[i], replay.positions[i], replay.slots[i] = token, position + i, slot
    stride = replay.limits.page_stride
    replay.page_table[slot * stride : (slot + 1) * stride] = range(slot * 10, slot * 10 + stride)
