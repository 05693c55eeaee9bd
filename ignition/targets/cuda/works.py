"""A lowered step of the cuda target, before its memory has addresses and its buckets have sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ignition.targets.cuda.launch import Launch
from ignition.targets.cuda.operands import Buffer

Launches = Callable[[int, int], list[Launch]]
"""Makes the launches for a bucket of so many tokens and rows."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What goes to the host where it runs nodes, and what comes from there, as f32."""

    gives: tuple[Buffer, ...]
    takes: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Launches that follow each other, and what they read and write together, as `ignition.plan.Work` has it; or a `cut`,
    without launches."""

    label: str
    launches: Launches
    reads: frozenset[str]
    writes: frozenset[str]
    in_place: tuple[int, int] | None
    cut: Cut | None = None


@dataclass(frozen=True, slots=True)
class Lowered:
    """Works in order, their buffers by id, bytes of one kv page, and the packed weights: which of the recipe's weights each one
    joins, in the order of their first use. tables: packed weights in which a row is looked up for each token."""

    works: list[Work]
    buffers: list[Buffer]
    kv_page_bytes: int
    weights: dict[str, tuple[str, ...]]
    tables: set[str]
