"""Replays a cpu core: opens its kernel library, owns the arrays of a step and runs steps and sampling.

Only ctypes is used: it is at hand without a costly import, and releases the interpreter lock while native code runs.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_float, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flare.core.graph import CALLED, INTERPRETED, Op, misnamed
from flare.core.manifest import Limits
from flare.errors import CoreError, InputError, ReplayDead
from flare.fallbacks import Fallbacks
from flare.replay.called_nodes import Run, called_nodes
from flare.replay.cpu_interface import (
    ROWS_FAILED,
    SEGMENTS,
    UNAVAILABLE,
    ArgStruct,
    Buffer,
    Interpret,
    NodeStruct,
    OpenArgs,
    RowLogprobs,
    SampleArgs,
    SampleParams,
    ScoreArgs,
    StepArgs,
    load_library,
)
from flare.replay.step_arrays import ReplayLimits, StepArrays

if TYPE_CHECKING:
    from flare.replay.interpreter import Interpreter

__all__ = [
    "ISA_FLAGS",
    "CpuArg",
    "CpuNode",
    "CpuProgram",
    "CpuReplay",
    "RowLogprobs",
    "SampleParams",
    "best_isa",
    "load_library",
    "machine_flags",
]

_ERROR_BYTES = 1024

# What each level demands beyond the one after it, as /proc/cpuinfo spells it; the best level first.
_V3_FLAGS = frozenset("avx2 fma f16c bmi1 bmi2 movbe abm".split())
_V4_FLAGS = _V3_FLAGS | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni".split())
ISA_FLAGS = {"x86-64-v4": _V4_FLAGS, "x86-64-v3": _V3_FLAGS, "generic": frozenset[str]()}


@dataclass(frozen=True, slots=True)
class CpuArg:
    """A node's argument: `bytes` bytes at `offset` of a segment (a key of SEGMENTS); for kv, of each page."""

    segment: str
    offset: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class CpuNode:
    """One kernel call, or an `op` to be interpreted or run on a device. Phases do not decrease along a program; nodes of one
    phase are independent."""

    kernel: str
    phase: int
    args: tuple[CpuArg, ...]
    op: Op | None = None


@dataclass(frozen=True)
class CpuProgram:
    """Everything that a cpu core's `step` graph needs to run. Sizes are bytes, limits are counts.

    `weights` is any contiguous buffer (an mmap, bytes); the segment is `weights_bytes` from `weights_offset` on and
    starts at an address that is a multiple of 64. Logits are f32 [max_rows, vocabulary] at `logits_offset` of io. The
    elements of the kv pool are of the `kv_format`, f32 or f16.
    """

    library: Path
    nodes: Sequence[CpuNode]
    weights: Any
    weights_offset: int
    weights_bytes: int
    arena_bytes: int
    io_bytes: int
    logits_offset: int
    kv_page_bytes: int
    vocabulary: int
    limits: Limits
    kv_format: str = "f32"


def machine_flags() -> frozenset[str]:
    """What the processor can do and the system lets programs use, as /proc/cpuinfo spells it; empty if unknown."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def best_isa(available: Iterable[str], flags: frozenset[str] | None = None) -> str:
    """The fastest of a core's ISA levels that this machine runs; `flags` defaults to `machine_flags()`.

    Raises CoreError that names what the core offers, and what the machine runs and lacks.
    """
    flags = machine_flags() if flags is None else flags
    offered = list(available)
    for isa, needed in ISA_FLAGS.items():
        if isa in offered and needed <= flags:
            return isa
    has = ", ".join(isa for isa, needed in ISA_FLAGS.items() if needed <= flags)
    lacks = [f"; {isa} needs {' '.join(sorted(ISA_FLAGS[isa] - flags))}" for isa in ISA_FLAGS if isa in offered]
    raise CoreError(
        f"kernels: the core offers {', '.join(offered) or 'no level'}, this machine runs {has}{''.join(lacks)}: "
        "export the core with generic among its --isa levels"
    )


class CpuReplay(StepArrays):
    """An open cpu core: native memory and threads. One thread at a time uses it; `close` (or `with`) ends it.

    The caller fills `tokens`, `positions`, `slots` (int32, `max_step_tokens`), `rows` (int32, `max_rows`), `page_table`
    (int32, slot s has the `page_stride` entries from `s * page_stride`) and `sampling` (SampleParams, `max_rows`), then
    calls `step` and `sample`; `sampled` (int32, `max_rows`) holds the chosen tokens. For `score` it fills `targets` and
    `wanted` (int32, `max_rows`) instead of `sampling`. `logprobs` (RowLogprobs, `max_rows`) has what either call found of the
    rows that wanted any. All sizes are in `limits`.
    """

    def __init__(
        self,
        program: CpuProgram,
        *,
        threads: int,
        kv_pages: int,
        huge_pages: bool = False,
        fallbacks: Fallbacks | None = None,
        instead_of_device: str = "",
        pieces: Mapping[int, Run] | None = None,
        arrays: StepArrays | None = None,
    ) -> None:
        """Opens the library and allocates the core; `huge_pages` copies the weights to transparent huge pages.

        `pieces` run the nodes whose kernel is DEVICE, by their numbers; `arrays` has a step's arrays, where others fill them.
        What runs for want of something better is recorded in `fallbacks`: each node that is interpreted, and each step under
        `instead_of_device`, where given.

        Raises CoreError if the program is bad, InputError if the system has not the memory or threads for it.
        """
        limits = ReplayLimits.of(program.limits, program.vocabulary, kv_pages, program.kv_page_bytes)
        self._fallbacks = fallbacks or Fallbacks(told=False)
        self._instead_of_device = instead_of_device
        self._handle = c_void_p()
        self._error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._name = program.library.name
        self._library = load_library(program.library)
        self.info: dict[str, Any] = json.loads(self._library.flare_library_info())
        self._interpreter = self._make_interpreter(program, limits)
        interpret = None if self._interpreter is None else self._interpreter.run
        self._called = called_nodes(program.nodes, interpret, pieces or {})
        self._weights = _pin(program)
        try:
            self._open(program, limits, threads, huge_pages)
        except BaseException:
            self._release_weights()
            raise
        if huge_pages:
            self._release_weights()

        super().__init__(limits, arrays)  # a bad program is refused by now: arrays of its sizes might not fit in memory
        if self._interpreter is not None:
            self._interpreter.attach(self.tokens, self.positions, self.slots, self.page_table, self.rows)
        self._step = StepArgs(
            struct_size=ctypes.sizeof(StepArgs),
            page_stride=self.page_stride,
            token=self.tokens,
            position=self.positions,
            slot=self.slots,
            page_table=self.page_table,
            row=self.rows,
        )
        self._sample = SampleArgs(
            struct_size=ctypes.sizeof(SampleArgs),
            params_size=ctypes.sizeof(SampleParams),
            logprobs_size=ctypes.sizeof(RowLogprobs),
            params=self.sampling,
            sampled=self.sampled,
            logprobs=self.logprobs,
        )
        self._score = ScoreArgs(
            struct_size=ctypes.sizeof(ScoreArgs),
            logprobs_size=ctypes.sizeof(RowLogprobs),
            target=self.targets,
            wanted=self.wanted,
            logprobs=self.logprobs,
        )

    def step(self, n_tokens: int, n_rows: int, meanwhile: Callable[[], None] | None = None) -> None:
        """Runs the graph on the first `n_tokens` tokens; logits of the tokens `rows[:n_rows]` are there afterwards.

        `meanwhile` is called on this thread when the others have begun, and joins them when it returns; it must not call
        the replay. What it raises is raised once the step is done. Raises ValueError, having run nothing, if an argument is
        out of its range, and ReplayDead after `close`; RequestError where a node would be interpreted and may not be.
        """
        self._fallbacks.check()
        if self._interpreter is not None:
            self._interpreter.begin(n_tokens, n_rows)
        if self._called is not None:
            self._called.begin()
        self._step.tokens = n_tokens
        self._step.rows = n_rows
        if self._library.flare_begin(self._handle, self._step, self._error, _ERROR_BYTES):
            self._refuse()
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            self._library.flare_finish(self._handle, self._error, _ERROR_BYTES)
            if self._instead_of_device:
                self._fallbacks.record(self._instead_of_device)
        if self._called is not None:
            self._called.finish()

    def sample(self, n_rows: int) -> None:
        """Chooses `sampled[:n_rows]` from the last step's logits by `sampling[:n_rows]`, and fills `logprobs` of the rows
        whose `alternatives` are not -1: `chosen` and `rank` are the chosen token's.

        Raises ValueError, having chosen nothing, if a parameter is out of its range. Raises CoreError if a row has no
        token because of its logits (NaN, or all -inf, of themselves or by the mask): that row's entry is -1, its rank 0, and
        all the others are good. Raises ReplayDead after `close`.
        """
        self._sample.rows = n_rows
        self._finish(self._library.flare_sample(self._handle, self._sample, self._error, _ERROR_BYTES))

    def score(self, first: int, count: int) -> None:
        """Fills `logprobs[row]`, all but `explicit`, for `count` rows of the last step from row `first` on: `chosen` and
        `rank` are those of the token `targets[row]`, and there are `wanted[row]` alternatives.

        Raises ValueError, having scored nothing, if an argument is out of its range. Raises CoreError if a row has no
        probabilities because of its logits (NaN, or all -inf): that row's rank is 0 and all the others are good. Raises
        ReplayDead after `close`.
        """
        self._score.first = first
        self._score.count = count
        self._finish(self._library.flare_score(self._handle, self._score, self._error, _ERROR_BYTES))

    def logits(self, row: int) -> memoryview[float]:
        """The f32 logits of a row of the last step: a view of `vocabulary` floats that changes with the next step and
        must not be used after `close`."""
        if not 0 <= row < self.max_rows:
            raise ValueError(f"row {row}: must be in [0, {self.max_rows})")
        if not self._handle:
            raise ReplayDead("the core is closed")
        address = self._library.flare_logits(self._handle) + 4 * self.vocabulary * row
        return memoryview((c_float * self.vocabulary).from_address(address)).cast("B").cast("f")

    def close(self) -> None:
        """Ends the threads and frees the memory. Closing twice is fine; closing during a call is not."""
        if self._handle:
            self._library.flare_close(self._handle)
            self._handle = c_void_p()
            self._release_weights()

    def __enter__(self) -> CpuReplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_interpreter(self, program: CpuProgram, limits: ReplayLimits) -> Interpreter | None:
        """Returns the interpreter of the nodes without a kernel, None where all have one. Raises CoreError for a bad one."""
        for index, node in enumerate(program.nodes):
            if (problem := misnamed(node)) is not None:
                raise CoreError(f"node {index}: {problem}; export the core again")
        nodes = {
            index: (node.op, node.args)
            for index, node in enumerate(program.nodes)
            if node.op is not None and node.kernel == INTERPRETED
        }
        if not nodes:
            return None
        from flare.replay.interpreter import Interpreter, Sizes

        sizes = Sizes(
            tokens=limits.max_step_tokens,
            rows=limits.max_rows,
            kv_pages=limits.kv_pages,
            kv_page_bytes=limits.kv_page_bytes,
            page_tokens=limits.page_tokens,
            page_stride=limits.page_stride,
            kv_format=program.kv_format,
        )
        interpreter = Interpreter(nodes, sizes, self._fallbacks)
        self._fallbacks.need(interpreter.causes)
        return interpreter

    def _open(self, program: CpuProgram, limits: ReplayLimits, threads: int, huge_pages: bool) -> None:
        nodes = (NodeStruct * len(program.nodes))()
        for index, (target, node) in enumerate(zip(nodes, program.nodes, strict=True)):
            if not node.kernel.isprintable():
                raise CoreError(f"node {index}: {node.kernel[:80]!r} is no name of a kernel; export the core again")
            args = (ArgStruct * len(node.args))(*(_arg(a) for a in node.args))
            target.kernel = (INTERPRETED if node.kernel in CALLED else node.kernel).encode()
            target.args = args  # the structure keeps the array alive
            target.nargs = len(node.args)
            target.phase = _bounded(f"node {index}: phase", node.phase, 31)
        for name, value in [("threads", threads), ("kv_pages", limits.kv_pages)]:
            if not 1 <= value < 1 << 31:
                raise InputError(f"{name} {value}: must be in [1, {(1 << 31) - 1}]")
        a = OpenArgs(ctypes.sizeof(OpenArgs))
        for name in ["vocabulary", "max_context", "slots", "max_step_tokens", "max_rows", "page_tokens"]:
            setattr(a, name, _bounded(name, getattr(limits, name), 31))
        for name in ["kv_page_bytes", "arena_bytes", "io_bytes", "logits_offset", "weights_bytes"]:
            setattr(a, name, _bounded(name, getattr(program, name), 64))
        a.kv_pages = limits.kv_pages
        a.threads = threads
        a.huge_pages = huge_pages
        a.node_count = len(nodes)
        if program.weights_bytes:
            a.weights = self._weights.buf + program.weights_offset
        a.nodes = nodes
        if self._called is not None:
            self._interpret = Interpret(self._called.run)  # the library calls it for as long as the core is open
            a.interpret = self._interpret
        failed = self._library.flare_open(a, ctypes.byref(self._handle), self._error, _ERROR_BYTES)
        if failed:
            raise InputError(self._text()) if failed == UNAVAILABLE else CoreError(self._text())

    def _finish(self, failed: int) -> None:
        if failed == ROWS_FAILED:
            raise CoreError(self._text())
        if failed:
            self._refuse()

    def _refuse(self) -> NoReturn:
        if not self._handle:
            raise ReplayDead("the core is closed")
        raise ValueError(self._text())

    def _release_weights(self) -> None:
        if self._weights.obj:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._weights))

    def _text(self) -> str:
        return f"{self._name}: {self._error.value.decode(errors='replace')}"


def _pin(program: CpuProgram) -> Buffer:
    """Holds the weights' buffer in place until it is released. Raises CoreError if the segment is not inside it."""
    view = Buffer()
    offset, size = program.weights_offset, program.weights_bytes
    if size == 0:
        return view
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(program.weights), ctypes.byref(view), 0)
    if min(offset, size) < 0 or offset + size > view.len:
        held = view.len
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
        raise CoreError(f"weights: {size} bytes at {offset} reach beyond the file's {held}")
    return view


def _arg(arg: CpuArg) -> ArgStruct:
    segment = SEGMENTS.get(arg.segment)
    if segment is None:
        raise CoreError(f"segment {arg.segment!r}: must be one of {', '.join(SEGMENTS)}")
    return ArgStruct(segment, 0, _bounded("offset", arg.offset, 64), _bounded("bytes", arg.bytes, 64))


def _bounded(name: str, value: int, bits: int) -> int:
    """ctypes cuts integers to size without a word; this refuses them."""
    if not 0 <= value < 1 << bits:
        raise CoreError(f"{name} {value}: must be in [0, 2^{bits})")
    return value
