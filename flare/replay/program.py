"""From an opened core to a running replay: which library, which memory, which nodes."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from flare.core.directory import Core
from flare.core.graph import Graph
from flare.core.manifest import CpuTarget, KernelLibrary, Manifest
from flare.errors import CoreError
from flare.fallbacks import Fallbacks
from flare.replay.cpu import ISA_FLAGS, CpuArg, CpuNode, CpuProgram, CpuReplay, best_isa, load_library, machine_flags


def open_replay(
    core: Core,
    *,
    threads: int,
    kv_pages: int,
    huge_pages: bool = False,
    isa: str | None = None,
    fallbacks: Fallbacks | None = None,
    instead_of_device: str = "",
) -> CpuReplay:
    """Opens the core's `step` graph on the best instruction set of this machine, or on `isa`.

    `kv_pages` is the pool's size in pages; `huge_pages` copies the weights into huge pages; the last two are `CpuReplay`'s.
    Raises CoreError when the core offers nothing that this machine runs.
    """
    level = isa or choose_isa(cpu_target(core.manifest))
    program = make_program(core.manifest, core.graph("step"), core.path, level)
    return CpuReplay(
        program,
        threads=threads,
        kv_pages=kv_pages,
        huge_pages=huge_pages,
        fallbacks=fallbacks,
        instead_of_device=instead_of_device,
    )


def choose_isa(target: CpuTarget) -> str:
    """The fastest of the target's instruction sets that this machine runs. Raises CoreError when it runs none."""
    return best_isa(library.isa for library in target.libraries)


def cpu_target(manifest: Manifest) -> CpuTarget:
    """The cpu target of a core. Raises CoreError when it has none."""
    if manifest.cpu is None:
        raise CoreError(f"targets: core {manifest.model.id} has no cpu target; export it with --target cpu as well")
    return manifest.cpu


def make_program(
    manifest: Manifest, graph: Graph, folder: Path, isa: str, target: CpuTarget | None = None
) -> CpuProgram:
    """The program of a core's graph for one instruction set; the weights are mapped, not read. target: whose graph it is, the
    cpu target unless told otherwise."""
    target = target or cpu_target(manifest)
    library = next(library for library in target.libraries if library.isa == isa)
    segments = target.segments
    nodes = [
        CpuNode(
            node.kernel, node.phase, tuple(CpuArg(arg.segment, arg.offset, arg.bytes) for arg in node.args), node.op
        )
        for node in graph.nodes
    ]
    return CpuProgram(
        library=folder / library.file,
        nodes=nodes,
        weights=_map(folder / target.weights.file),
        weights_offset=segments.weights_offset,
        weights_bytes=segments.weights_bytes,
        arena_bytes=segments.arena_bytes,
        io_bytes=segments.io_bytes,
        logits_offset=0,
        kv_page_bytes=segments.kv_page_bytes,
        vocabulary=manifest.model.vocabulary,
        limits=manifest.limits,
        kv_format=target.weights.kv_format,
    )


def runnable_isas(levels: Iterable[str]) -> list[str]:
    """Those of `levels` that this machine runs, in the order given."""
    flags = machine_flags()
    return [isa for isa in levels if ISA_FLAGS[isa] <= flags]


def library_kernels(core: Core, library: KernelLibrary) -> set[str]:
    """The kernels that a library of the core contains. Raises CoreError when it does not load or is of another level.

    Loading runs none of its kernels, so a level that this machine lacks can be looked into too.
    """
    info = json.loads(load_library(core.file(library.file)).flare_library_info())
    if info.get("isa") != library.isa:
        raise CoreError(
            f"{library.file}: built for {info.get('isa')!r}, the manifest says {library.isa}; export the core again"
        )
    return set(info["kernels"])


def _map(path: Path) -> mmap.mmap:
    """Maps a file for reading, in huge pages where the file system's cache holds it in such."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(file, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    # What is not in the cache yet is then read two MiB at a time. A wish: a kernel without huge pages refuses it.
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
