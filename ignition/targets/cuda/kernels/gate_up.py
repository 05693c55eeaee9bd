"""The first half of a gated MLP: two products of the same activations, and silu of the one times the other."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.checks import FLOATS, Size, require, require_element, require_size
from ignition.targets.cuda.kernels.elementwise import silu
from ignition.targets.cuda.kernels.linear import float_product, product_grid, rows_size
from ignition.targets.cuda.kernels.matrix import FORMATS, Format, Matrix
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.kernels.quantised_linear import QUANTISED, quantised_product, quantised_rows
from ignition.targets.cuda.launch import Launch, Pointer, TensorMap
from ignition.targets.cuda.tiles import by_maps, tile, two_products


@triton.jit
def alternating(gate_rows, up_rows, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers [COLUMNS] to rows of gate, up, gate, up, ..., each a multiple of ALIGNED bytes, which the compiler cannot see
    of a choice."""
    return tl.multiple_of(tl.where(tl.arange(0, COLUMNS) % 2 == 0, gate_rows, up_rows), ALIGNED)


@triton.jit
def mapped_products(
    x, row, gate, up, column, K: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr, DEPTH: tl.constexpr
):
    """`mapped_product` with two weights, of HALF rows each."""
    left, right = tl.zeros((TOKENS, HALF), tl.float32), tl.zeros((TOKENS, HALF), tl.float32)
    for k in range(0, K, DEPTH):
        tile = x.load([row, k])
        left = tl.dot(tile, gate.load([column, k]).T, left, input_precision="ieee")
        right = tl.dot(tile, up.load([column, k]).T, right, input_precision="ieee")
    return left, right


@triton.jit
def gate_up(
    x,
    gate,
    gate_scale,
    gate_minimum,
    up,
    up_scale,
    up_minimum,
    gate_bias,
    up_bias,
    out,
    tokens,
    FORMAT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    MAPPED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """x [tokens, K], gate and up [N, K] by FORMAT, biases [N] f32 -> out [tokens, N]. MAPPED: x, gate and up are tensor maps.

    One product of COLUMNS rows of weights, of gate and up in turn: so x is read once, and both sums of a column end in the
    same thread. With maps there are two products, whose sums end there too.
    """
    begin(PROGRAMMATIC)
    HALF: tl.constexpr = COLUMNS // 2
    first_row, first_column = tl.program_id(0) * TOKENS, tl.program_id(1) * HALF
    row = first_row + tl.arange(0, TOKENS)
    live = row < tokens
    if MAPPED:
        left, right = mapped_products(x, first_row, gate, up, first_column, K, TOKENS, HALF, DEPTH)
    else:
        x_rows = x + row.to(tl.int64) * K
        read = tl.minimum(first_column + tl.arange(0, COLUMNS) // 2, N - 1).to(tl.int64)
        ROW: tl.constexpr = 16 if K % 16 == 0 else 1
        if FORMAT == "float":
            w_rows = alternating(gate + read * K, up + read * K, COLUMNS, ROW)
            total = float_product(x_rows, live, w_rows, K, TOKENS, COLUMNS, DEPTH)
        else:
            gate_rows = quantised_rows(gate, gate_scale, gate_minimum, read, FORMAT, K)
            up_rows = quantised_rows(up, up_scale, up_minimum, read, FORMAT, K)
            FACTORS: tl.constexpr = 4 if FORMAT == "fp8" else 8 if K % 128 == 0 else 4 if K % 64 == 0 else 2
            w_rows = alternating(gate_rows[0], up_rows[0], COLUMNS, ROW)
            scale_rows = alternating(gate_rows[1], up_rows[1], COLUMNS, FACTORS)
            minimum_rows = scale_rows
            if FORMAT == "q4":
                minimum_rows = alternating(gate_rows[2], up_rows[2], COLUMNS, FACTORS)
            total = quantised_product(
                x_rows, live, w_rows, scale_rows, minimum_rows, FORMAT, K, TOKENS, COLUMNS, DEPTH, STAGES
            )
        left, right = tl.split(tl.reshape(total, (TOKENS, HALF, 2)))
    column = first_column + tl.arange(0, HALF)
    inside = column < N
    if gate_bias is not None:
        left += tl.load(gate_bias + column, mask=inside, other=0.0)[None, :]
    if up_bias is not None:
        right += tl.load(up_bias + column, mask=inside, other=0.0)[None, :]
    value = (silu(left) * right).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * N + column[None, :], value, mask=live[:, None] & inside[None, :])


def gate_up_size(architecture: str, format: Format, n: int) -> Size:
    """The rows of either weight, and how many the kernel takes. Raises InputError as `tile` does."""
    return rows_size(n, tile(architecture, format, 2 * n).columns // 2)


def gate_up_launch(
    x: Pointer,
    gate: Matrix,
    up: Matrix,
    out: Pointer,
    *,
    tokens: int,
    architecture: str,
    label: str,
    gate_bias: Pointer | None = None,
    up_bias: Pointer | None = None,
) -> Launch:
    """x [tokens, k], gate and up [n, k] of one format -> out [tokens, n] f32, bf16 or f16: silu(x gate^T + gate_bias) *
    (x up^T + up_bias), in f32, rounded once. x has a float weight's type, and any float type for q8, q4 and fp8."""
    gate.require("gate_up", "gate", FORMATS)
    up.require("gate_up", "up", (gate.format,))
    shapes = (gate.n, gate.k), (up.n, up.k)
    require(shapes[0] == shapes[1], "gate_up", f"up is {list(shapes[1])}, must be {list(shapes[0])} as gate is")
    quantised = gate.format in QUANTISED
    require_element("gate_up", "x", x, FLOATS if quantised else (gate.values.element,))
    require_element("gate_up", "out", out, FLOATS)
    require_element("gate_up", "gate_bias", gate_bias, ("f32",))
    require_element("gate_up", "up_bias", up_bias, ("f32",))
    require_size("gate_up", "the number of tokens", tokens)
    chosen = tile(architecture, gate.format, 2 * gate.n, wide=quantised and x.element == "f32")
    warps, mapped = chosen.warps, by_maps(architecture, gate.format, gate.k)
    values: list[Pointer | TensorMap] = [gate.values, up.values]
    if mapped:
        half = two_products(chosen)
        warps = half.warps
        values = [TensorMap(each.values, (each.n, each.k), (half.columns, half.depth)) for each in (gate, up)]
    return Launch(
        kernel="gate_up.gate_up",
        args={
            "x": TensorMap(x, (tokens, gate.k), (chosen.tokens, chosen.depth)) if mapped else x,
            "gate": values[0],
            "gate_scale": gate.scale,
            "gate_minimum": gate.minimum,
            "up": values[1],
            "up_scale": up.scale,
            "up_minimum": up.minimum,
            "gate_bias": gate_bias,
            "up_bias": up_bias,
            "out": out,
            "tokens": tokens,
        },
        constants={
            "FORMAT": gate.format if quantised else "float",
            "N": gate.n,
            "K": gate.k,
            "TOKENS": chosen.tokens,
            "COLUMNS": chosen.columns,
            "DEPTH": chosen.depth,
            "STAGES": chosen.stages,
            "MAPPED": mapped,
        },
        grid=product_grid("gate_up", tokens, gate.n, chosen.tokens, chosen.columns // 2),
        label=label,
        warps=warps,
        stages=chosen.stages,
    )
