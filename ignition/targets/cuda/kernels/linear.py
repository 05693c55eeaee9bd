"""Products of activations with float weights, y = x w^T, and the epilogue that all linear layers share."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.checks import (
    FLOATS,
    GRID_LIMIT,
    Size,
    require,
    require_element,
    require_size,
    require_sizes,
)
from ignition.targets.cuda.kernels.matrix import Format, Matrix
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer, TensorMap
from ignition.targets.cuda.tiles import Tile, by_maps, tile


@triton.jit
def weights_at(rows, at, WIDTH: tl.constexpr, END: tl.constexpr, WHOLE: tl.constexpr):
    """[COLUMNS, WIDTH]: the elements from `at` on of the rows that `rows` points at, zeros from END on. WHOLE: there are
    none of those."""
    step = at + tl.arange(0, WIDTH)
    if WHOLE:
        return tl.load(rows[:, None] + step[None, :])
    else:
        return tl.load(rows[:, None] + step[None, :], mask=(step < END)[None, :], other=0.0)


@triton.jit
def activations_at(rows, live, at, WIDTH: tl.constexpr, END: tl.constexpr, WHOLE: tl.constexpr):
    """[TOKENS, WIDTH], like `weights_at`; rows that are not live are not read and give zeros."""
    step = at + tl.arange(0, WIDTH)
    if WHOLE:
        return tl.load(rows[:, None] + step[None, :], mask=live[:, None], other=0.0)
    else:
        return tl.load(rows[:, None] + step[None, :], mask=live[:, None] & (step < END)[None, :], other=0.0)


@triton.jit
def float_product(
    x_rows, live, w_rows, K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """Sums x w^T along K, in order, in f32. x_rows [TOKENS] and w_rows [COLUMNS] point at rows of one element type."""
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        x = activations_at(x_rows, live, k, DEPTH, K, K % DEPTH == 0)
        w = weights_at(w_rows, k, DEPTH, K, K % DEPTH == 0)
        total = tl.dot(x, w.T, total, input_precision="ieee")
    return total


@triton.jit
def mapped_product(
    x, row, w, column, K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """`float_product` of the rows of x from `row` on and those of w from `column` on, both tensor maps, whose blocks are what
    is multiplied at once. Behind an end they give zeros."""
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        total = tl.dot(x.load([row, k]), w.load([column, k]).T, total, input_precision="ieee")
    return total


@triton.jit
def finish(total, row, live, column, bias, residual, out, N: tl.constexpr):
    """out = total + bias + residual at row, column of [T, N], added in f32 in this order and rounded once."""
    inside = column < N
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    written = live[:, None] & inside[None, :]
    if residual is not None:
        total = tl.load(residual + place, mask=written, other=0.0) + total
    tl.store(out + place, total.to(out.dtype.element_ty), mask=written)


@triton.jit
def linear(
    x,
    w,
    bias,
    residual,
    out,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    MAPPED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """x [tokens, K], w [N, K] of one float type, bias [N] f32, residual [tokens, N] f32 -> out [tokens, N]. MAPPED: x and w are
    tensor maps.

    Programs of the same columns are neighbours, so that they find their weights in the cache.
    """
    begin(PROGRAMMATIC)
    first_row, first_column = tl.program_id(0) * TOKENS, tl.program_id(1) * COLUMNS
    row = first_row + tl.arange(0, TOKENS)
    live = row < tokens
    column = first_column + tl.arange(0, COLUMNS)
    if MAPPED:
        total = mapped_product(x, first_row, w, first_column, K, TOKENS, COLUMNS, DEPTH)
    else:
        # Columns behind the last read that one's weights, and are not written.
        w_rows = w + tl.minimum(column, N - 1).to(tl.int64) * K
        total = float_product(x + row.to(tl.int64) * K, live, w_rows, K, TOKENS, COLUMNS, DEPTH)
    finish(total, row, live, column, bias, residual, out, N)


def linear_launch(
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
    """x [tokens, k] of the weight's type, w [n, k] f32, bf16 or f16 -> out [tokens, n] f32, bf16 or f16: x w^T, plus bias [n]
    f32, plus residual [tokens, n] f32, which may be `out` itself."""
    w.require("linear", "w", FLOATS)
    require_element("linear", "x", x, (w.values.element,))
    chosen = require_product("linear", x, w, out, tokens, architecture, bias, residual)
    mapped = by_maps(architecture, w.format, w.k)
    return Launch(
        kernel="linear.linear",
        args={
            "x": TensorMap(x, (tokens, w.k), (chosen.tokens, chosen.depth)) if mapped else x,
            "w": TensorMap(w.values, (w.n, w.k), (chosen.columns, chosen.depth)) if mapped else w.values,
            "bias": bias,
            "residual": residual,
            "out": out,
            "tokens": tokens,
        },
        constants={
            "N": w.n,
            "K": w.k,
            "TOKENS": chosen.tokens,
            "COLUMNS": chosen.columns,
            "DEPTH": chosen.depth,
            "MAPPED": mapped,
        },
        grid=product_grid("linear", tokens, w.n, chosen.tokens, chosen.columns),
        label=label,
        warps=chosen.warps,
        stages=chosen.stages,
    )


def require_product(
    kernel: str,
    x: Pointer,
    w: Matrix,
    out: Pointer,
    tokens: int,
    architecture: str,
    bias: Pointer | None,
    residual: Pointer | None,
) -> Tile:
    """Checks what every linear layer is given besides x, and returns its tile."""
    require_element(kernel, "out", out, FLOATS)
    require_element(kernel, "bias", bias, ("f32",))
    require_element(kernel, "residual", residual, ("f32",))
    require_size(kernel, "the number of tokens", tokens)
    in_place = residual is not None and residual.operand is out.operand
    require(not in_place or out.element == "f32", kernel, f"out is {out.element} and the residual too, must be f32")
    return tile(architecture, w.format, w.n, wide=w.format != "f32" and x.element == "f32")


def product_grid(kernel: str, tokens: int, n: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Programs along tokens and along columns."""
    require_sizes(kernel, rows_size(n, columns))
    return -(-tokens // rows), -(-n // columns), 1


def rows_size(n: int, columns: int) -> Size:
    """The rows of a product's weight, of which a program takes `columns`, and how many there may be."""
    return Size("the number of its weight's rows", n, high=GRID_LIMIT * columns)


def linear_size(architecture: str, format: Format, n: int) -> Size:
    """The rows of a linear layer's weight, and how many the kernels take. Raises InputError as `tile` does."""
    return rows_size(n, tile(architecture, format, n).columns)
