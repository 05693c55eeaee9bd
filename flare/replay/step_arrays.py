"""What every replay shares with the engine: its fixed sizes, and the arrays that the engine fills and reads."""

from __future__ import annotations

from ctypes import c_int32
from dataclasses import dataclass

from flare.core.manifest import Limits
from flare.replay.cpu_interface import RowLogprobs, SampleParams


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """The fixed sizes of a replay: counts of tokens, slots, rows and pages; `kv_page_bytes` in bytes."""

    vocabulary: int
    max_context: int
    slots: int
    max_step_tokens: int
    max_rows: int
    page_tokens: int
    page_stride: int
    kv_pages: int
    kv_page_bytes: int

    @classmethod
    def of(cls, limits: Limits, vocabulary: int, kv_pages: int, kv_page_bytes: int) -> ReplayLimits:
        """Those of a core with such limits, opened with so many pages; sizes that are out of their bounds stay so."""
        stride = -(-limits.max_context // max(limits.page_tokens, 1))
        return cls(
            vocabulary=vocabulary,
            max_context=limits.max_context,
            slots=limits.slots,
            max_step_tokens=limits.max_step_tokens,
            max_rows=limits.max_rows,
            page_tokens=limits.page_tokens,
            page_stride=stride,
            kv_pages=kv_pages,
            kv_page_bytes=kv_page_bytes,
        )


_ARRAYS = tuple("tokens positions slots rows page_table sampling sampled targets wanted logprobs".split())


class StepArrays:
    """The arrays of `flare.engine.interface.Replay`, in ordinary memory, and sizes by their own names.

    tokens, positions, slots: int32 [max_step_tokens]. page_table: int32 [slots * page_stride]. rows, sampled, targets, wanted:
    int32 [max_rows]. sampling: SampleParams [max_rows], each one greedy, without filters and log probabilities. logprobs:
    RowLogprobs [max_rows].
    """

    @property
    def waits(self) -> int:
        """Begins and ends of waits for a device: odd while one is under way."""
        return 0

    def __init__(self, limits: ReplayLimits, shared: StepArrays | None = None) -> None:
        """Makes the arrays, or takes those of `shared`, which has the same limits."""
        self.limits = limits
        self.vocabulary = limits.vocabulary
        self.max_context = limits.max_context
        self.max_step_tokens = limits.max_step_tokens
        self.max_rows = limits.max_rows
        self.page_tokens = limits.page_tokens
        self.page_stride = limits.page_stride
        self.kv_pages = limits.kv_pages
        if shared is not None:
            for name in _ARRAYS:
                setattr(self, name, getattr(shared, name))
            return
        self.tokens = (c_int32 * limits.max_step_tokens)()
        self.positions = (c_int32 * limits.max_step_tokens)()
        self.slots = (c_int32 * limits.max_step_tokens)()
        self.rows = (c_int32 * limits.max_rows)()
        self.page_table = (c_int32 * (limits.slots * limits.page_stride))()
        self.sampling = (SampleParams * limits.max_rows)()
        self.sampled = (c_int32 * limits.max_rows)()
        self.targets = (c_int32 * limits.max_rows)()
        self.wanted = (c_int32 * limits.max_rows)()
        self.logprobs = (RowLogprobs * limits.max_rows)()
        for params in self.sampling:
            params.top_p = params.repetition = 1.0
            params.alternatives = -1
