"""Products of activations with quantised weights: q8 and q4 group by group, fp8 widened.

A group's 32 small integers are exact in bf16, f16 and f32; their products with activations are summed in f32, and only that
sum is multiplied with the group's scale. So nothing is rounded by dequantising.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.checks import FLOATS, require_element
from ignition.targets.cuda.kernels.linear import (
    activations_at,
    finish,
    product_grid,
    require_product,
    weights_at,
)
from ignition.targets.cuda.kernels.matrix import Format, Matrix
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer

QUANTISED: tuple[Format, ...] = ("q8", "q4", "fp8")


@triton.jit
def quantised_product(
    x_rows,
    live,
    w_rows,
    scale_rows,
    minimum_rows,
    FORMAT: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums x w^T along K, in order, in f32. x_rows [TOKENS] point at rows of floats; w_rows, scale_rows and minimum_rows
    [COLUMNS] at rows of the weight's parts by FORMAT (fp8: scale_rows at the rows' scales)."""
    if FORMAT == "q8":
        return q8_product(x_rows, live, w_rows, scale_rows, K, TOKENS, COLUMNS, DEPTH, STAGES)
    elif FORMAT == "q4":
        return q4_product(x_rows, live, w_rows, scale_rows, minimum_rows, K, TOKENS, COLUMNS, DEPTH, STAGES)
    else:
        return fp8_product(x_rows, live, w_rows, scale_rows, K, TOKENS, COLUMNS, DEPTH, STAGES)


@triton.jit
def quarters(tile, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, 4 * WIDTH] -> four [ROWS, WIDTH], in order. Takes registers apart: one wide load serves four groups."""
    apart = tl.permute(tl.reshape(tile, (ROWS, 2, 2, WIDTH)), (0, 3, 2, 1))
    first, second = tl.split(apart)
    a, b = tl.split(first)
    c, d = tl.split(second)
    return a, b, c, d


@triton.jit
def group_factors(rows, at, COLUMNS: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """The f16 scales or minimums of the four groups from element `at` on -> four [1, COLUMNS] f32."""
    a, b, c, d = quarters(weights_at(rows, at // 32, 4, K // 32, WHOLE).to(tl.float32), COLUMNS, 1)
    return a.T, b.T, c.T, d.T


@triton.jit
def q8_product(
    x_rows,
    live,
    w_rows,
    scale_rows,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """w: 32 i8 a group, one f16 scale."""
    tl.static_assert(DEPTH == 4 * 32, "a turn takes four groups")
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    WHOLE: tl.constexpr = K % DEPTH == 0
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        x = quarters(activations_at(x_rows, live, k, DEPTH, K, WHOLE), TOKENS, 32)
        w = quarters(weights_at(w_rows, k, DEPTH, K, WHOLE), COLUMNS, 32)
        scales = group_factors(scale_rows, k, COLUMNS, K, WHOLE)
        for group in tl.static_range(4):
            sums = tl.dot(x[group], w[group].to(x[group].dtype).T, input_precision="ieee")
            total += sums * scales[group]
    return total


@triton.jit
def q4_product(
    x_rows,
    live,
    w_rows,
    scale_rows,
    minimum_rows,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """w: 16 bytes a group, with the first 16 elements in their low halves; one f16 scale, one f16 minimum."""
    tl.static_assert(DEPTH == 4 * 32, "a turn takes four groups")
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    WHOLE: tl.constexpr = K % DEPTH == 0
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        x = quarters(activations_at(x_rows, live, k, DEPTH, K, WHOLE), TOKENS, 32)
        w = quarters(weights_at(w_rows, k // 2, DEPTH // 2, K // 2, WHOLE), COLUMNS, 16)
        scales = group_factors(scale_rows, k, COLUMNS, K, WHOLE)
        minimums = group_factors(minimum_rows, k, COLUMNS, K, WHOLE)
        for group in tl.static_range(4):
            low, high = tl.split(tl.permute(tl.reshape(x[group], (TOKENS, 2, 16)), (0, 2, 1)))
            ones = tl.full((16, COLUMNS), 1.0, low.dtype)
            sums = tl.dot(low, (w[group] & 15).to(low.dtype).T, input_precision="ieee")
            sums = tl.dot(high, (w[group] >> 4).to(low.dtype).T, sums, input_precision="ieee")
            # The group's activations are summed by the same instructions: that leaves the sums where they are needed.
            inputs = tl.dot(low, ones, input_precision="ieee")
            inputs = tl.dot(high, ones, inputs, input_precision="ieee")
            total += sums * scales[group] + inputs * minimums[group]
    return total


@triton.jit
def fp8_product(
    x_rows,
    live,
    w_rows,
    scale_rows,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """w: e4m3, exact in every float type; one f32 scale a row."""
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        x = activations_at(x_rows, live, k, DEPTH, K, K % DEPTH == 0)
        w = weights_at(w_rows, k, DEPTH, K, K % DEPTH == 0)
        total = tl.dot(x, w.to(x.dtype).T, total, input_precision="ieee")
    return total * tl.load(scale_rows)[None, :]


@triton.jit
def quantised_rows(values, scale, minimum, row, FORMAT: tl.constexpr, K: tl.constexpr):
    """Pointers to rows of the parts of a weight: values, scales, minimums (of q4 only)."""
    if FORMAT == "q8":
        return values + row * K, scale + row * (K // 32), None
    elif FORMAT == "q4":
        return values + row * (K // 2), scale + row * (K // 32), minimum + row * (K // 32)
    else:
        return values + row * K, scale + row, None


@triton.jit
def quantised_linear(
    x,
    w,
    scale,
    minimum,
    bias,
    residual,
    out,
    tokens,
    FORMAT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """x [tokens, K] f32, bf16 or f16, w [N, K] by FORMAT, bias [N] f32, residual [tokens, N] f32 -> out [tokens, N]."""
    begin(PROGRAMMATIC)
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = row < tokens
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    read = tl.minimum(column, N - 1).to(tl.int64)
    w_rows, scale_rows, minimum_rows = quantised_rows(w, scale, minimum, read, FORMAT, K)
    x_rows = x + row.to(tl.int64) * K
    total = quantised_product(x_rows, live, w_rows, scale_rows, minimum_rows, FORMAT, K, TOKENS, COLUMNS, DEPTH, STAGES)
    finish(total, row, live, column, bias, residual, out, N)


def quantised_linear_launch(
    x: Pointer,
    w: Matrix,
    out: Pointer,
    *,
    tokens: int,
    architecture: str,
    label: str,
    bias: Pointer | None = None,
    residual: Pointer | None = None,
) -> Launch:
    """x [tokens, k] f32, bf16 or f16, w [n, k] q8, q4 or fp8 -> out [tokens, n] f32, bf16 or f16: x w^T, plus bias [n] f32,
    plus residual [tokens, n] f32, which may be `out` itself."""
    w.require("quantised_linear", "w", QUANTISED)
    require_element("quantised_linear", "x", x, FLOATS)
    chosen = require_product("quantised_linear", x, w, out, tokens, architecture, bias, residual)
    return Launch(
        kernel="quantised_linear.quantised_linear",
        args={
            "x": x,
            "w": w.values,
            "scale": w.scale,
            "minimum": w.minimum,
            "bias": bias,
            "residual": residual,
            "out": out,
            "tokens": tokens,
        },
        constants={
            "FORMAT": w.format,
            "N": w.n,
            "K": w.k,
            "TOKENS": chosen.tokens,
            "COLUMNS": chosen.columns,
            "DEPTH": chosen.depth,
            "STAGES": chosen.stages,
        },
        grid=product_grid("quantised_linear", tokens, w.n, chosen.tokens, chosen.columns),
        label=label,
        warps=chosen.warps,
        stages=chosen.stages,
    )
