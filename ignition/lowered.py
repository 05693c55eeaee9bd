"""Lowered graphs: kernel calls over buffers, before they have addresses. Targets make them, planning places them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from flare.core.graph import INTERPRETED, Op
from flare.core.manifest import Limits
from ignition.graph import Value

GROUP = 32


@dataclass(frozen=True, slots=True)
class Buffer:
    """A temporary: `count` is "T" or "R", `width` elements a row, stored as f32 ("float") or int8 groups ("quant")."""

    id: int
    count: str
    width: int
    storage: str
    output: bool = False

    def row_bytes(self) -> int:
        return quantised_row_bytes(self.width) if self.storage == "quant" else 4 * self.width

    def bytes(self, limits: Limits) -> int:
        return self.row_bytes() * (limits.max_step_tokens if self.count == "T" else limits.max_rows)


@dataclass(frozen=True, slots=True)
class Weight:
    """A packed weight, by its recipe name."""

    name: str


@dataclass(frozen=True, slots=True)
class PageRange:
    """Bytes inside each kv page."""

    offset: int
    bytes: int


Operand = Buffer | Weight | PageRange | None


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call. `kernel` is the C++ type; `reads`/`writes` name buffers ("%id") and kv state, for ordering.

    `in_place` is (output, residual) where the kernel allows both to be the same memory. A call with an `op` is
    interpreted, or stands for a piece that a device runs, as its kernel says.
    """

    kernel: str
    label: str
    operands: tuple[Operand, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    in_place: tuple[int, int] | None = None
    op: Op | None = None


@dataclass(slots=True)
class Lowered:
    """What lowering returns: calls in order, their buffers by id, bytes of one kv page."""

    calls: list[Call] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    kv_page_bytes: int = 0

    @property
    def kernels(self) -> list[str]:
        """The kernels of the calls, each once, in their order."""
        return list(dict.fromkeys(call.kernel for call in self.calls if call.op is None))

    @property
    def interpreted(self) -> dict[str, int]:
        """How many calls have no kernel, by their op."""
        return dict(Counter(call.op.name for call in self.calls if call.op is not None and call.kernel == INTERPRETED))


def quantised_row_bytes(width: int) -> int:
    """Bytes of one row of `width` int8 activations with scale, sum and correction for each group of 32."""
    return -(-(width + 12 * (width // GROUP)) // 64) * 64


def lay_out_kv(
    states: Iterable[Value], page_tokens: int, element_bytes: int
) -> tuple[dict[str, tuple[PageRange, PageRange]], int]:
    """Places every state's K and V inside a page, in the order of the states, 64-byte aligned. Returns them and the page's
    bytes, 64 where there is no state."""
    ranges: dict[str, tuple[PageRange, PageRange]] = {}
    offset = 0
    for state in states:
        size = int(state.shape[2]) * page_tokens * int(state.shape[4]) * element_bytes
        padded = -(-size // 64) * 64
        ranges[state.name] = (PageRange(offset, size), PageRange(offset + padded, size))
        offset += 2 * padded
    return ranges, offset or 64
