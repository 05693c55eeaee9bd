"""What a replay of a cuda core needs, and whether a device has the memory for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flare.config import MIB
from flare.core.architectures import Architecture, kernels_remedy
from flare.core.cubin import read_cubin
from flare.core.cuda_checks import open_cuda_graphs
from flare.core.cuda_graph import CudaGraphs
from flare.core.manifest import CudaSegments, Limits
from flare.errors import InputError
from flare.memory import check_reserved
from flare.replay.cuda_driver import CudaDevice, NoDevice
from flare.replay.cuda_host import HostProgram, pinned_bytes

if TYPE_CHECKING:
    from flare.core.directory import Core

NODE_BYTES = 4096
"""Device memory that is set aside for each node of an executable graph; about 3 KB on an H100 (Foundry, arXiv 2604.06664)."""


@dataclass(frozen=True)
class CudaProgram:
    """Everything that a core's graphs for one architecture need to run. Sizes are bytes, limits are counts.

    `name` is the graph file's, for messages; `cubins` maps files of the core to their bytes; the weights are
    `segments.weights_bytes` of the file `weights`, from `segments.weights_offset` on. `host` runs what has no kernel.
    """

    name: str
    graphs: CudaGraphs
    cubins: Mapping[str, bytes]
    weights: Path
    segments: CudaSegments
    vocabulary: int
    limits: Limits
    host: HostProgram | None = None

    @classmethod
    def open(cls, core: Core, architecture: Architecture) -> CudaProgram:
        """The program of a core's cuda target for one of its architectures. Raises CoreError when its graphs are malformed, or
        `flare.core.cuda_checks` finds that they cannot run as they say, or this machine runs none of a host part's
        libraries."""
        manifest = core.manifest
        target = manifest.cuda
        assert target is not None
        graphs, cubins = open_cuda_graphs(core, architecture)
        return cls(
            name=target.architectures[architecture],
            graphs=graphs,
            cubins=cubins,
            weights=core.file(target.weights.file),
            segments=target.segments,
            vocabulary=manifest.model.vocabulary,
            limits=manifest.limits,
            host=_host_program(core),
        )

    @property
    def reserved_bytes(self) -> int:
        """Device memory that a replay takes beside its kv pages: weights, work areas, kernels and executable graphs."""
        segments, graphs = self.segments, self.graphs
        nodes = sum(len(bucket.nodes) for buckets in (graphs.step, graphs.sample, graphs.score) for bucket in buckets)
        kernels = sum(map(len, self.cubins.values()))
        return segments.weights_bytes + segments.arena_bytes + segments.io_bytes + kernels + nodes * NODE_BYTES

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory of this machine that a replay takes: for the arrays of `io`, and for what a host part's piece takes and
        gives."""
        return self.segments.host_bytes + pinned_bytes(self.graphs.step[-1].host)

    def check_shared(self, device: CudaDevice) -> None:
        """Raises NoDevice when a kernel takes more shared memory, static included, than the device gives a block: cubins also
        run on devices of a greater minor version, which may have less of it than those that they were made for."""
        read = {file: read_cubin(data, file).kernels for file, data in self.cubins.items()}
        for kernel in self.graphs.kernels:
            taken = kernel.shared + read[kernel.cubin][kernel.name].shared
            if taken > device.shared_bytes:
                raise NoDevice(
                    f"{device} gives a block {device.shared_bytes} bytes of shared memory, kernel {kernel.source} of "
                    f"{self.graphs.arch} takes {taken}; {kernels_remedy(device.capability)}"
                )

    def check_memory(self, kv_pages: int, free: int, device: str) -> None:
        """Raises InputError when a device of that name and so many free bytes cannot hold the core with so many kv pages."""
        if not 1 <= kv_pages < 1 << 31:
            raise InputError(f"kv_pages {kv_pages}: must be in [1, {(1 << 31) - 1}]")
        page, reserved = self.segments.kv_page_bytes, self.reserved_bytes
        check_reserved(reserved, free, device)
        needed = reserved + kv_pages * page
        if needed <= free:
            return
        fitting = (free - reserved) // page
        remedy = (
            f"at most {fitting} pages fit: ask for less kv memory" if fitting else "free some, or take a larger device"
        )
        raise InputError(
            f"kv_pages {kv_pages}: {needed / MIB:.1f} MiB are needed ({reserved / MIB:.1f} MiB beside the pages of "
            f"{page / MIB:.3f} MiB), {device} has {free / MIB:.1f} MiB free; {remedy}"
        )


def _host_program(core: Core) -> HostProgram | None:
    """The program of a core's host part, for the best instruction set of this machine; None where the core has none."""
    assert core.manifest.cuda is not None
    host = core.manifest.cuda.host
    if host is None:
        return None
    from flare.replay.program import choose_isa, make_program

    isa = choose_isa(host.program)
    return HostProgram(make_program(core.manifest, core.host_graph(), core.path, isa, host.program), host.ops)
