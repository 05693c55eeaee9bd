"""Root-mean-square normalisation of whole rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.checks import (
    FLOATS,
    Size,
    power_of_two,
    require,
    require_element,
    require_size,
    require_sizes,
)
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer

WIDEST = 16_384
"""Elements of a row, which one program holds in registers: 16 warps of 32 threads with 32 elements each."""


@triton.jit
def rms_norm(x, rows, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False):
    """x [T, WIDTH] f32, weight [WIDTH] f32 -> out [T, WIDTH]: x / sqrt(mean(x^2) + eps) * weight, rounded once.

    With rows [R] i32 only those rows, in the order named -> out [R, WIDTH].
    """
    begin(PROGRAMMATIC)
    place = tl.program_id(0).to(tl.int64)
    row = place
    if rows is not None:
        row = tl.load(rows + place).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0)
    # Correctly rounded, so that no architecture's approximation shows.
    mean_square = tl.div_rn(tl.sum(value * value, 0), WIDTH * 1.0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    scaled = value * inverse * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + place * WIDTH + column, scaled.to(out.dtype.element_ty), mask=inside)


def norm_size(width: int) -> Size:
    """The elements of a row, and how many the kernel takes."""
    return Size("width", width, high=WIDEST)


def rms_norm_launch(
    x: Pointer,
    weight: Pointer,
    out: Pointer,
    *,
    count: int,
    width: int,
    eps: float,
    label: str,
    rows: Pointer | None = None,
) -> Launch:
    """x [T, width] f32, weight [width] f32 -> out [count, width] f32, bf16 or f16. count is T without `rows`; with rows
    [count] i32, each in [0, T), it is how many rows are wanted."""
    require_element("rms_norm", "x", x, ("f32",))
    require_element("rms_norm", "weight", weight, ("f32",))
    require_element("rms_norm", "out", out, FLOATS)
    require_element("rms_norm", "rows", rows, ("i32",))
    require_size("rms_norm", "the number of rows", count)
    require_sizes("rms_norm", norm_size(width))
    require(eps > 0, "rms_norm", f"eps is {eps}, must be above 0")
    block = power_of_two(width)
    return Launch(
        kernel="norm.rms_norm",
        args={"x": x, "rows": rows, "weight": weight, "out": out, "eps": float(eps)},
        constants={"WIDTH": width, "BLOCK": block},
        grid=(count, 1, 1),
        label=label,
        warps=min(16, max(4, block // 1024)),
        stages=1,
    )
