"""The part of a cuda core's step that runs on the processor: a program of the cpu target, whose nodes call the device's pieces.

A piece takes what the host made, runs as one graph, gives what the host reads, and is waited for. It runs on whichever thread
of the program comes to it, and never beside another piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_uint64, memmove
from dataclasses import dataclass
from typing import Any

from flare.core.cuda_graph import HostCut, HostRows
from flare.core.graph import DEVICE, without_kernel
from flare.fallbacks import Fallbacks
from flare.replay.cpu import CpuProgram, CpuReplay
from flare.replay.cuda_driver import CudaDevice
from flare.replay.step_arrays import StepArrays


@dataclass(frozen=True, slots=True)
class HostProgram:
    """The program of a core's host part, and `ops`: how many nodes it runs that no kernel of the device does, by op."""

    program: CpuProgram
    ops: Mapping[str, int]

    @property
    def causes(self) -> tuple[str, ...]:
        """What every step of it records, in sentences."""
        return tuple(
            f"{without_kernel(name, count, 'cuda')}, the processor runs it" for name, count in self.ops.items()
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Values of a piece's argument: their address on the device, in pinned memory, their bytes for each token or row."""

    device: int
    pinned: int
    row_bytes: int
    count: str


def pinned_bytes(cuts: Sequence[HostCut]) -> int:
    """Bytes of pinned memory that a host part takes with the largest bucket's `cuts`: what one piece takes and gives."""
    return max(sum(rows.buffer.bytes for rows in (*takes, *gives)) for takes, gives in _crossing(cuts))


def _crossing(cuts: Sequence[HostCut]) -> list[tuple[Sequence[HostRows], Sequence[HostRows]]]:
    """For each piece, what it takes and gives."""
    return list(zip([[], *(cut.takes for cut in cuts)], [*(cut.gives for cut in cuts), []], strict=True))


class HostPart:
    """An open host part. One thread at a time uses it; `close` ends it, before the device is closed."""

    def __init__(
        self,
        host: HostProgram,
        cuts: Sequence[HostCut],
        device: CudaDevice,
        addresses: Mapping[str, int],
        arrays: StepArrays,
        *,
        threads: int,
        huge_pages: bool,
        fallbacks: Fallbacks,
    ) -> None:
        """`cuts` are those of the largest bucket, `addresses` the segments', and `arrays` the step's, which are checked before
        each.

        Raises CoreError if the program is bad, InputError if the system has not the memory or threads for it.
        """
        self._device = device
        self._fallbacks = fallbacks
        self._causes = host.causes
        self._graphs: Sequence[Any] = ()
        self._live = {"T": 0, "R": 0}
        fallbacks.need(host.causes)
        self._pieces = self._place(cuts, addresses)
        nodes = [index for index, node in enumerate(host.program.nodes) if node.kernel == DEVICE]
        self._numbers = {index: number for number, index in enumerate(nodes)}
        self._replay = CpuReplay(
            host.program,
            threads=threads,
            kv_pages=arrays.kv_pages,
            huge_pages=huge_pages,
            fallbacks=fallbacks,
            pieces=dict.fromkeys(nodes, self._run),
            arrays=arrays,
        )

    def step(self, graphs: Sequence[Any], tokens: int, rows: int, meanwhile: Callable[[], None] | None) -> None:
        """Runs a step of so many tokens and rows, with a bucket's executable graphs, one a piece, None for one without nodes.

        `meanwhile` is called on this thread while the others run the step, which this one joins afterwards; with one thread
        nothing runs before `meanwhile` returns. Raises RequestError, having run nothing, where nodes may not run here; what
        `meanwhile` raised, once the step is done, or the first piece or node that failed. No piece begins behind one that
        failed.
        """
        self._fallbacks.check()
        self._graphs = graphs
        self._live = {"T": tokens, "R": rows}
        for cause in self._causes:
            self._fallbacks.record(cause)
        self._replay.step(tokens, rows, meanwhile)

    def close(self) -> None:
        """Ends the threads and frees the memory. Closing twice is fine; closing during a step is not."""
        self._replay.close()

    def _place(self, cuts: Sequence[HostCut], addresses: Mapping[str, int]) -> list[tuple[list[_Rows], list[_Rows]]]:
        """For each piece, what it takes and gives; pinned memory is the same for all pieces."""
        most = pinned_bytes(cuts)
        pinned = self._device.allocate_host(most, "values between the device and the host") if most else 0

        def placed(values: Sequence[HostRows], begin: int) -> tuple[list[_Rows], int]:
            found = []
            for rows in values:
                address = addresses[rows.buffer.segment] + rows.buffer.offset
                found.append(_Rows(address, begin, rows.row_bytes, rows.count))
                begin += rows.buffer.bytes
            return found, begin

        pieces = []
        for a, b in _crossing(cuts):
            taken, end = placed(a, pinned)
            pieces.append((taken, placed(b, end)[0]))
        return pieces

    def _run(self, index: int, arguments: int, kv: int) -> None:
        """Runs a piece: a node of the program, with the addresses of what it takes and gives."""
        number, device = self._numbers[index], self._device
        takes, gives = self._pieces[number]
        addresses = (c_uint64 * (len(takes) + len(gives))).from_address(arguments) if takes or gives else ()
        device.attach()
        for rows, address in zip(takes, addresses, strict=False):
            if size := rows.row_bytes * self._live[rows.count]:
                memmove(rows.pinned, address, size)
                device.upload(rows.device, rows.pinned, size)
        if self._graphs[number] is not None:
            device.launch(self._graphs[number])
        for rows in gives:
            if size := rows.row_bytes * self._live[rows.count]:
                device.download(rows.pinned, rows.device, size)
        device.synchronise()
        for rows, address in zip(gives, addresses[len(takes) :], strict=True):
            memmove(address, rows.pinned, rows.row_bytes * self._live[rows.count])
