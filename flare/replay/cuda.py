"""Replays a cuda core: plans and fills device memory, makes the executable graphs, and runs steps, draws and scores.

The arrays that the engine writes are ordinary memory. A call checks them and copies what it needs into pinned twins before
anything starts on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_float, c_int32, memmove, memset, sizeof
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from flare.core.cuda_graph import Bucket
from flare.core.manifest import MAX_ALTERNATIVES
from flare.errors import CoreError, ReplayDead
from flare.fallbacks import Fallbacks
from flare.replay.cpu_interface import RowLogprobs
from flare.replay.cuda_arrays import DeviceArrays, PageTable
from flare.replay.cuda_draws import DrawArrays
from flare.replay.cuda_driver import KV_REMEDY, CudaDevice
from flare.replay.cuda_executables import GraphBuilder, load_functions
from flare.replay.cuda_host import HostPart
from flare.replay.cuda_program import CudaProgram
from flare.replay.cuda_weights import load_weights
from flare.replay.step_arrays import ReplayLimits, StepArrays

_NAN = -1  # what a draw gives for a row whose logits hold NaN; other negative numbers: all of them are -inf
_LOGPROBS_BYTES = sizeof(RowLogprobs)


@dataclass(frozen=True, slots=True)
class _Executable:
    """graphs: one for each piece of the step, None for a piece without nodes; one in all where there is no host part."""

    tokens: int
    rows: int
    graphs: Sequence[Any]


class CudaReplay(StepArrays):
    """An open cuda core on a device, which it closes with itself. One thread at a time uses it; `close` (or `with`) ends it.

    Arrays and calls are those of `flare.engine.interface.Replay`. Every call raises ReplayDead after `close`, or once the
    device is lost; DeviceError means that the call gave nothing, and that the next one may.
    """

    def __init__(
        self,
        program: CudaProgram,
        *,
        device: CudaDevice,
        kv_pages: int,
        threads: int = 1,
        huge_pages: bool = False,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        """Takes the device's memory, loads weights and kernels, and makes all executable graphs.

        The last three are for a host part: its threads, whether its weights are copied into huge pages, and where each step is
        recorded that needs it.

        Raises InputError if the device or the system has not the memory for it, and CoreError if the core is bad. The device is
        closed then.
        """
        super().__init__(ReplayLimits.of(program.limits, program.vocabulary, kv_pages, program.segments.kv_page_bytes))
        self._at = {
            name: addressof(getattr(self, name))
            for name in ("tokens", "positions", "slots", "rows", "sampled", "targets", "wanted", "logprobs")
        }

        self._name = program.name
        self._device = device
        self._dead = ""
        self._live_rows = 0
        self._host: HostPart | None = None
        try:
            addresses = self._open(program, kv_pages)
            if program.host is not None:
                self._host = HostPart(
                    program.host,
                    program.graphs.step[-1].host,
                    device,
                    addresses,
                    self,
                    threads=threads,
                    huge_pages=huge_pages,
                    fallbacks=fallbacks or Fallbacks(told=False),
                )
        except BaseException:
            device.close()
            raise

    @property
    def waits(self) -> int:
        return self._device.waits

    def step(self, n_tokens: int, n_rows: int, meanwhile: Callable[[], None] | None = None) -> None:
        """Runs the graph on the first `n_tokens` tokens; logits of the tokens `rows[:n_rows]` are there afterwards.

        `meanwhile` is called on this thread while the device works, with a host part as `HostPart.step` says; what it raises
        is raised once the device is done, and nothing can be drawn then. Raises ValueError, having run nothing, if an argument
        is out of its range, and RequestError where a node of the host part may not run.
        """
        self._check_alive()
        moved = self._check_step(n_tokens, n_rows)
        bucket = self._smallest(self._steps, n_tokens, n_rows)
        self._copy_in("tokens", n_tokens, bucket.tokens)
        self._copy_in("positions", n_tokens, bucket.tokens, padding=0xFF)
        self._copy_in("slots", n_tokens, bucket.tokens)
        self._copy_in("rows", n_rows, bucket.rows)
        self._live_rows = 0
        try:
            self._pages.send(moved)
            if self._host is not None:
                self._host.step(bucket.graphs, n_tokens, n_rows, meanwhile)
            else:
                self._device.launch(bucket.graphs[0])
                try:
                    if meanwhile is not None:
                        meanwhile()
                finally:
                    self._device.synchronise()
        except BaseException as error:
            self._settle(error)
            self._pages.forget(moved)
            raise
        self._live_rows = n_rows

    def sample(self, n_rows: int) -> None:
        """Chooses `sampled[:n_rows]` from the last step's logits by `sampling[:n_rows]`, and fills `logprobs` of the rows
        whose `alternatives` are not -1: `chosen` and `rank` are the chosen token's.

        Raises ValueError, having chosen nothing, if a parameter is out of its range. Raises CoreError if a row has no
        token because of its logits (NaN, or all -inf, of themselves or by the mask): that row's entry is -1, its rank 0, and
        all the others are good.
        """
        self._check_alive()
        if not 0 <= n_rows <= self._live_rows:
            raise ValueError(f"rows {n_rows}: the last step left {self._live_rows} rows of logits")
        if not n_rows:
            return
        drawn = self._draws.check(self.sampling, n_rows)
        bucket = self._smallest(self._samples, 0, n_rows)
        try:
            self._draws.send(drawn, self.sampling, n_rows, bucket.rows)
            self._device.launch(bucket.graphs[0])
            self._device.synchronise()
        except BaseException as error:
            self._settle(error)
            self._draws.forget()
            raise
        memmove(self._at["sampled"], self._arrays.host("sampled"), 4 * n_rows)
        for row in drawn.wanting:
            self._copy_logprobs(row, 1)
        self._report_draws(n_rows)

    def score(self, first: int, count: int) -> None:
        """Fills `logprobs[row]`, all but `explicit`, for `count` rows of the last step from row `first` on: `chosen` and
        `rank` are those of the token `targets[row]`, and there are `wanted[row]` alternatives.

        Raises ValueError, having scored nothing, if an argument is out of its range. Raises CoreError if a row has no
        probabilities because of its logits (NaN, or all -inf): that row's rank is 0 and all the others are good.
        """
        self._check_alive()
        self._check_score(first, count)
        if not count:
            return
        bucket = self._smallest(self._scores, 0, count)
        padded = min(bucket.rows, self.max_rows - first)
        arrays = self._arrays
        c_int32.from_address(arrays.host("first")).value = first
        try:
            arrays.send("first", 0, 4)
            for name, sent in (("targets", count), ("wanted", padded)):
                self._copy_in(name, count, sent, padding=0xFF, first=first)
                arrays.send(name, 4 * first, 4 * sent)
            self._device.launch(bucket.graphs[0])
            arrays.fetch("logprobs", first * _LOGPROBS_BYTES, count * _LOGPROBS_BYTES)
            self._device.synchronise()
        except BaseException as error:
            self._settle(error)
            raise
        self._copy_logprobs(first, count)
        for row in range(first, first + count):
            if self.logprobs[row].rank < 1:
                raise CoreError(f"{self._name}: row {row}: its logits hold NaN, or all of them are -inf")

    def logits(self, row: int) -> memoryview[float]:
        """A copy of the `vocabulary` f32 logits of a row of the last step."""
        if not 0 <= row < self.max_rows:
            raise ValueError(f"row {row}: must be in [0, {self.max_rows})")
        self._check_alive()
        found = (c_float * self.vocabulary)()
        try:
            self._device.read(addressof(found), self._arrays.address["logits"] + sizeof(found) * row, sizeof(found))
        except ReplayDead as error:
            self._settle(error)
            raise
        return memoryview(found).cast("B").cast("f")

    def close(self) -> None:
        """Frees the device's memory and the device. Closing twice is fine; closing during a call is not."""
        self._dead = self._dead or "the core is closed"
        if self._host is not None:
            self._host.close()
        self._device.close()

    def __enter__(self) -> CudaReplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, program: CudaProgram, kv_pages: int) -> dict[str, int]:
        """Returns where each segment lies."""
        device, segments, graphs = self._device, program.segments, program.graphs
        program.check_memory(kv_pages, device.memory()[0], device.name)
        addresses = {"none": 0}
        addresses["weights"] = device.allocate(segments.weights_bytes, "weights")
        addresses["arena"] = device.allocate(segments.arena_bytes, "arena")
        addresses["io"] = device.allocate(segments.io_bytes, "io")
        addresses["kv"] = device.allocate(segments.kv_page_bytes * kv_pages, f"{kv_pages} kv pages", KV_REMEDY)
        addresses["host"] = device.allocate_host(segments.host_bytes, "host")
        load_weights(device, program.weights, segments.weights_offset, segments.weights_bytes, addresses["weights"])
        builder = GraphBuilder(device, graphs, load_functions(device, graphs, program.cubins), addresses)

        def executables(kind: str, buckets: Sequence[Bucket]) -> list[_Executable]:
            return [
                _Executable(
                    bucket.tokens, bucket.rows, builder.build_pieces(bucket, f"{program.name}: {kind}[{index}]")
                )
                for index, bucket in enumerate(buckets)
            ]

        self._steps = executables("step", graphs.step)
        self._samples = executables("sample", graphs.sample)
        self._scores = executables("score", graphs.score)
        self._arrays = DeviceArrays(device, graphs.io, addresses)
        self._pages = PageTable(self._arrays, self.page_table, self.page_stride, kv_pages)
        self._draws = DrawArrays(self._arrays, self.max_rows, self.vocabulary, self.max_context)
        device.synchronise()
        return addresses

    def _check_alive(self) -> None:
        if self._dead:
            raise ReplayDead(self._dead)
        self._device.attach()

    def _settle(self, error: BaseException) -> None:
        """Waits for what a call started before it failed: that uses the arrays. Raises ReplayDead if the device is lost."""
        self._device.settle()
        self._dead = self._device.lost
        if self._dead and not isinstance(error, ReplayDead):
            raise ReplayDead(self._dead) from None

    def _smallest(self, buckets: list[_Executable], tokens: int, rows: int) -> _Executable:
        """Returns the smallest bucket that holds so many tokens and rows."""
        for bucket in buckets:
            if bucket.tokens >= tokens and bucket.rows >= rows:
                return bucket
        raise CoreError(f"{self._name}: no graph for {tokens} tokens and {rows} rows; export the core again")

    def _copy_in(self, name: str, count: int, padded: int, padding: int = 0, first: int = 0) -> None:
        """Copies entries of an array, those from `first` on, to its twin, and sets the bytes of `padded - count` behind them to
        `padding`."""
        host = self._arrays.host(name) + 4 * first
        memmove(host, self._at[name] + 4 * first, 4 * count)
        memset(host + 4 * count, padding, 4 * (padded - count))

    def _copy_logprobs(self, first: int, count: int) -> None:
        offset = first * _LOGPROBS_BYTES
        memmove(self._at["logprobs"] + offset, self._arrays.host("logprobs") + offset, count * _LOGPROBS_BYTES)

    def _report_draws(self, n_rows: int) -> None:
        """Raises CoreError about the first row that gave no token."""
        drawn = self.sampled[:n_rows]
        if min(drawn) >= 0:
            return
        failed = [row for row, token in enumerate(drawn) if token < 0]
        reason = "its logits hold NaN" if drawn[failed[0]] == _NAN else "all its logits are -inf"
        for row in failed:
            self.sampled[row] = -1
        raise CoreError(f"{self._name}: row {failed[0]}: {reason}")

    def _check_step(self, n_tokens: int, n_rows: int) -> list[tuple[int, int]]:
        """Returns which slots' rows of the page table have changed, with how many entries are in use. Linear in the tokens, and
        in the pages of their slots. Raises ValueError."""
        limits = self.limits
        if not 1 <= n_tokens <= limits.max_step_tokens:
            raise ValueError(f"tokens {n_tokens}: must be in [1, {limits.max_step_tokens}]")
        most_rows = min(n_tokens, limits.max_rows)
        if not 0 <= n_rows <= most_rows:
            raise ValueError(f"rows {n_rows}: must be in [0, {most_rows}]")
        _check_range("token", self.tokens[:n_tokens], limits.vocabulary)
        positions = self.positions[:n_tokens]
        _check_range("position", positions, limits.max_context)
        seen: set[int] = set()
        moved: list[tuple[int, int]] = []
        begin = 0
        for slot, run in groupby(self.slots[:n_tokens]):
            end = begin + len(list(run))
            if not 0 <= slot < limits.slots:
                raise ValueError(f"slot[{begin}] {slot}: must be in [0, {limits.slots})")
            if slot in seen:
                raise ValueError(f"slot[{begin}] {slot}: the slot's tokens are not contiguous")
            seen.add(slot)
            start = positions[begin]
            if end - begin > 1 and positions[begin:end] != list(range(start, start + end - begin)):
                at = next(i for i in range(begin + 1, end) if positions[i] != positions[i - 1] + 1)
                raise ValueError(
                    f"position[{at}] {positions[at]}: must follow {positions[at - 1]}, slot {slot}'s one before"
                )
            pages = positions[end - 1] // limits.page_tokens + 1
            if self._pages.changed(slot, pages):
                moved.append((slot, pages))
            begin = end
        _check_range("row", self.rows[:n_rows], n_tokens)
        return moved

    def _check_score(self, first: int, count: int) -> None:
        if first < 0 or count < 0 or first + count > self._live_rows:
            raise ValueError(f"rows {count} from {first} on: the last step left {self._live_rows} rows of logits")
        _check_range("target", self.targets[first : first + count], self.vocabulary, first)
        for row, wanted in enumerate(self.wanted[first : first + count], first):
            if not 0 <= wanted <= MAX_ALTERNATIVES:
                raise ValueError(f"wanted[{row}] {wanted}: must be in [0, {MAX_ALTERNATIVES}]")


def _check_range(name: str, values: list[int], end: int, first: int = 0) -> None:
    """Raises ValueError about the first of the values, those from index `first` on, that is not in [0, end)."""
    if values and (min(values) < 0 or max(values) >= end):
        at = next(i for i, value in enumerate(values) if not 0 <= value < end)
        raise ValueError(f"{name}[{first + at}] {values[at]}: must be in [0, {end})")
