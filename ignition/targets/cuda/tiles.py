"""How products with weights are cut into tiles, by architecture, weight format and the matrix's size. Never by the tokens.

Where a tile's limits come from:

- **Tokens never choose.** A tensor core instruction adds K in its own order and rounding, and another tile may get another
  instruction. So one tile serves a single token and a prompt's 512 alike, and a row has the same bits in both.
- **Decoding reads weights, at memory's speed.** About 30 KB must be on their way to each multiprocessor of an H200 (4.8 TB/s
  times 0.8 us, over 132) for that, which is what `columns` * `depth` * `stages` aims at; and there must be programs for all
  multiprocessors (58 to 170, here taken for 128), so narrow matrices get narrow tiles. Splitting K would give small matrices
  more programs as well, but costs a second node for the ordered sum, of about as many microseconds as it saves.
- **Masked token rows load nothing**, but are multiplied. A tile of M token rows does 2 M / (bytes of an element) operations
  on a byte of weights; times memory's speed that may be a third of what the tensor cores do with f32 sums:
  M = 64 needs 300 of an H200's 990 TFLOPS (bf16), 32 needs 64 of an A100's 312, 32 of a 4090's 165 and 57 of a 5090's 209;
  32 would need 30 of a 3090's 71, so M is 16 on sm_86. q8 doubles and q4 quadruples the need, and both scale each group's
  partial sums on the ordinary cores, M / 32 fused multiplications for a weight: M is less there.
- **A prompt's tokens re-read the weights** from the L2 cache, T / M times, and M as large as decoding lets it be keeps that
  near what the tensor cores need anyway.
- **Warp-group instructions** (sm_90a) and tensor memory (sm_100a, sm_103a) want M = 64; what is not copied but made in
  registers (widened q8, q4 and fp8) would have to pass through shared memory for them, so those keep to smaller M.

No figure here was measured: no GPU was at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flare.core.architectures import ABILITIES
from flare.errors import InputError
from ignition.targets.cuda.kernels.matrix import Format

_PROGRAMS = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """tokens x columns: what one program computes, of T x N. depth: elements along K of one turn of its loop. stages: how
    many turns' loads are in flight or in use. warps: of 32 threads."""

    tokens: int
    columns: int
    depth: int
    warps: int
    stages: int


def require_format(architecture: str, format: Format) -> None:
    """Raises InputError for an architecture that is not one of ours, and for fp8 where no instruction widens it."""
    if architecture not in ABILITIES:
        raise InputError(f"architecture {architecture!r} has no kernels; take one of {', '.join(ABILITIES)}")
    if format == "fp8" and not ABILITIES[architecture].fp8:
        oldest = next(name for name, abilities in ABILITIES.items() if abilities.fp8)
        raise InputError(f"weights in fp8 need {oldest} or newer, not {architecture}; use --weights bf16 or q8")


def tile(architecture: str, format: Format, n: int, wide: bool = False) -> Tile:
    """The tile for a product with a weight [n, K]; `wide`: of f32 with a quantised one. Raises InputError as `require_format`
    does."""
    chosen = _tile(architecture, format, n)
    # Activations, most of what a turn of narrow tiles loads, are then twice the bytes: as many would not fit shared memory.
    return replace(chosen, stages=chosen.stages // 2) if wide else chosen


def _tile(architecture: str, format: Format, n: int) -> Tile:
    require_format(architecture, format)
    columns = next((c for c in (128, 64, 32) if n >= _PROGRAMS * c), 16)
    match format:
        case "f32":
            columns = min(columns, 64)
            return Tile(16, columns, 2048 // columns, warps=4, stages=3)
        case "bf16" | "f16" if ABILITIES[architecture].matrix != "mma.sync" and columns >= 64:
            return Tile(64, columns, 64, warps=4, stages=4)
        case "bf16" | "f16":
            columns = min(columns, 64)
            return _narrow(16 if architecture == "sm_86" else 32, columns, 4096 // columns)
        case "fp8":
            return _narrow(32, min(columns, 64), 128)
        case "q8" | "q4":
            columns = min(columns, 64)
            rows = 32 if format == "q8" and architecture != "sm_86" else 16
            # A thread then copies two scales at a time: fewer cannot be copied while others are computed with.
            return Tile(rows, columns, 128, warps=columns // 16, stages={64: 4, 32: 6, 16: 8}[columns])


def by_maps(architecture: str, format: Format, k: int) -> bool:
    """Whether products with a weight [n, k] copy their tiles by tensor maps: of halves, where the architecture has maps and can
    have one of such rows, which are multiples of 16 bytes. Like tiles, never by the tokens."""
    return ABILITIES[architecture].tensor_maps and format in ("bf16", "f16") and k % 8 == 0


def two_products(whole: Tile) -> Tile:
    """The tile of two products with half the columns each, in one loop. The compiler then spreads warps over rows alone, 16 a
    warp: more of them would multiply the same again. Who copies by tensor maps needs them for nothing else."""
    warps = whole.warps if whole.tokens >= 64 else whole.tokens // 16
    return replace(whole, columns=whole.columns // 2, warps=warps)


def _narrow(tokens: int, columns: int, depth: int) -> Tile:
    """For instructions of one warp, 16 x 8: as many warps, up to four, as have two of them."""
    return Tile(tokens, columns, depth, warps=min(4, tokens * columns // 128), stages=4)
