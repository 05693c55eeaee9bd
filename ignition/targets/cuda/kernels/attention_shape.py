"""The sizes of one layer's paged attention, and the tiles they are computed in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flare.core.architectures import ABILITIES
from flare.errors import InputError
from ignition.targets.cuda.kernels.checks import GRID_LIMIT, Size, power_of_two
from ignition.targets.cuda.launch import BYTES, Constant

LOG2_E = 1.4426950408889634
LARGEST_HEAD, PAGE_TOKENS = 512, (16, 1024)
LARGEST_CONTEXT = 1 << 30
"""Positions and the ends of their blocks are 32-bit."""

MOST_SPLITS, SMALLEST_SPLIT = 64, 256
VALUE_COLUMNS = 128
"""Most columns of values of one program: a warp's registers then hold 16 rows of sums in f32."""


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: of queries (a token's head each) that are computed together, by so many warps."""

    rows: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """few, many: of steps of few and of many tokens. block: key positions, in both, since sums over a block are rounded on
    their own. stages: of loads."""

    few: Tile
    many: Tile
    block: int
    stages: int = 2


LITTLE_SHARED = 100 << 10
"""With at most so many bytes of shared memory for a block, heads of more than VALUE_COLUMNS are read in smaller blocks, and
those of more than WIDE_HEAD by fewer queries together."""

WIDE_HEAD = 256
"""Wider heads are read in smaller blocks everywhere."""


def tiles(architecture: str, element: str, head_dim: int) -> Tiles:
    """Returns the tiles for an architecture, an element of the KV pool and a head size.

    Rows are such that both kernels multiply by one instruction: `mma.sync` (16 rows; all but the following), `wgmma` (64;
    sm_90) and `tcgen05.mma` (128; sm_100 and sm_103) are rounded differently.
    """
    wide = head_dim > WIDE_HEAD
    if element == "f32":  # no tensor cores: sums in order
        return Tiles(Tile(16, 4), Tile(16, 4), 16 if wide else 32)
    many, block = Tile(128, 8), 32 if wide else 64
    abilities = ABILITIES[architecture]
    if abilities.matrix == "tcgen05":
        return Tiles(many, many, block)
    if abilities.matrix == "wgmma":
        return Tiles(Tile(64, 4), many, block)
    little = abilities.shared_bytes <= LITTLE_SHARED
    if wide:  # a tile's queries pass through shared memory beside the keys
        return Tiles(Tile(16, 4), Tile(32, 4) if little else Tile(64, 8), block)
    return Tiles(Tile(16, 4), many, 32 if head_dim > VALUE_COLUMNS and little else block)


def attention_sizes(architecture: str, element: str, heads: int, kv_heads: int, head_dim: int) -> list[Size]:
    """The sizes of a layer's attention, and which the kernels take: of heads whole groups of 16 bytes, also of halves."""
    rows = tiles(architecture, element, head_dim).few.rows
    return [
        Size("head_dim", head_dim, 16, LARGEST_HEAD, multiple=8),
        Size("the number of a token's programs", _programs(heads, kv_heads, head_dim, rows), high=GRID_LIMIT),
    ]


def _programs(heads: int, kv_heads: int, head_dim: int, rows: int) -> int:
    """KV heads x runs of as many of a KV head's query heads as are computed together x parts of the values' columns."""
    group = heads // kv_heads
    return kv_heads * -(-group // min(group, rows)) * -(-head_dim // _columns(head_dim))


def _columns(head_dim: int) -> int:
    return min(power_of_two(head_dim), VALUE_COLUMNS)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """A layer's attention over pages, for one architecture.

    page_stride: elements from a page to the next in the pool. pages: entries of a slot's row in the page table. max_context:
    tokens of a slot. scale: of the dot products. window: positions that a token sees, itself included; 0: all. element: of
    the KV pool, bf16, f16 or f32. Raises InputError for sizes that the kernels do not take.
    """

    architecture: str
    element: str
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    page_stride: int
    pages: int
    max_context: int
    scale: float
    window: int = 0

    def __post_init__(self) -> None:
        low, high = PAGE_TOKENS
        _require(
            self.architecture in ABILITIES,
            f"architecture is {self.architecture!r}, must be one of {', '.join(ABILITIES)}",
        )
        _require(
            self.element in ("bf16", "f16", "f32"), f"the KV pool holds {self.element!r}, must be bf16, f16 or f32"
        )
        _require(self.kv_heads > 0, f"there are {self.kv_heads} KV heads, must be 1 or more")
        _require(
            self.heads > 0 and self.heads % self.kv_heads == 0,
            f"{self.heads} query heads are not a multiple of {self.kv_heads} KV heads",
        )
        for size in attention_sizes(self.architecture, self.element, self.heads, self.kv_heads, self.head_dim):
            _require(size.taken, f"{size.name} is {size.value}, must be {size.wanted}")
        _require(low <= self.page_tokens <= high, f"a page has {self.page_tokens} tokens, must have {low} to {high}")
        size = self.kv_heads * self.page_tokens * self.head_dim
        _require(
            self.page_stride >= size and self.page_stride * BYTES[self.element] % 64 == 0,
            f"page_stride is {self.page_stride} elements, must be {size} or more and a multiple of 64 bytes",
        )
        _require(
            0 < self.max_context <= LARGEST_CONTEXT,
            f"max_context is {self.max_context} tokens, must be 1 to {LARGEST_CONTEXT}",
        )
        _require(
            self.pages * self.page_tokens >= self.max_context,
            f"{self.pages} pages of {self.page_tokens} tokens hold less than max_context, {self.max_context} tokens",
        )
        _require(self.scale > 0 and math.isfinite(self.scale), f"scale is {self.scale}, must be above 0 and finite")
        _require(self.window >= 0, f"window is {self.window}, must be 0 (none) or more")

    @property
    def tiles(self) -> Tiles:
        """What is computed at once."""
        return tiles(self.architecture, self.element, self.head_dim)

    def share(self, tile: Tile) -> int:
        """Returns the query heads of one program: those of a KV head, as far as they fit a tile."""
        return min(self.heads // self.kv_heads, tile.rows)

    def programs(self, tile: Tile) -> int:
        """Returns the programs of a token."""
        return _programs(self.heads, self.kv_heads, self.head_dim, tile.rows)

    @property
    def narrow_window(self) -> int:
        """The window, 0 where it hides nothing of a whole context."""
        return self.window if self.window < self.max_context else 0

    @property
    def columns(self) -> int:
        """Columns of values of one program, a power of two."""
        return _columns(self.head_dim)

    @property
    def parts(self) -> int:
        """Programs among which a head's columns of values are shared out."""
        return -(-self.head_dim // self.columns)

    @property
    def split(self) -> int:
        """Positions that are summed up on their own: whatever runs side by side, results are put together of these."""
        return max(SMALLEST_SPLIT, power_of_two(-(-self.max_context // MOST_SPLITS)))

    @property
    def splits(self) -> int:
        """Splits of a whole context, 64 at most."""
        return -(-self.max_context // self.split)

    @property
    def partial(self) -> int:
        """f32 of one head's partial result over one split: sums, then of each part its maximum and total."""
        return self.head_dim + 8

    @property
    def exponent(self) -> float:
        """What takes a dot product to the exponent of 2."""
        return self.scale * LOG2_E

    def constants(self, tile: Tile) -> Mapping[str, Constant]:
        """Returns the constants of a kernel over tiles."""
        return {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "PAGE_TOKENS": self.page_tokens,
            "PAGE_STRIDE": self.page_stride,
            "PAGES": self.pages,
            "WINDOW": self.narrow_window,
            "SPLIT": self.split,
            "BLOCK": self.tiles.block,
            "ROWS": tile.rows,
            "SHARE": self.share(tile),
            "WIDTH": power_of_two(self.head_dim),
            "COLUMNS": self.columns,
        }


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise InputError(f"attention on cuda: {problem}")
