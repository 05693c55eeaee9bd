"""Gathers of rows: the embedding table by token, and the tokens whose logits are wanted."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.checks import (
    GRID_LIMIT,
    Size,
    power_of_two,
    require_element,
    require_size,
    require_sizes,
)
from ignition.targets.cuda.kernels.matrix import FORMATS, GROUP, Matrix
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer
from ignition.targets.cuda.tiles import require_format

BLOCK = 1024
"""Elements of a row that one program copies: more programs a token than one, so that a single token fills memory's pipes."""


def row_size(width: int) -> Size:
    """The elements of a row, and how many the kernels here take."""
    return Size("width", width, high=BLOCK * GRID_LIMIT)


@triton.jit
def embed(
    values,
    scale,
    minimum,
    tokens,
    out,
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """values [V, WIDTH] by FORMAT, tokens [T] i32 -> out [T, WIDTH] f32, the exact value of each stored element."""
    begin(PROGRAMMATIC)
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + place).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if FORMAT == "q4":
        byte = column // GROUP * (GROUP // 2) + column % (GROUP // 2)
        pair = tl.load(values + token * (WIDTH // 2) + byte, mask=inside, other=0)
        half = column % GROUP // (GROUP // 2)
        value = (pair.to(tl.int32) >> (4 * half) & 15).to(tl.float32)
    else:
        value = tl.load(values + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if FORMAT == "q8" or FORMAT == "q4":
        group = token * (WIDTH // GROUP) + column // GROUP
        value *= tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
        if FORMAT == "q4":
            value += tl.load(minimum + group, mask=inside, other=0.0).to(tl.float32)
    elif FORMAT == "fp8":
        value *= tl.load(scale + token)
    tl.store(out + place * WIDTH + column, value, mask=inside)


def embed_launch(table: Matrix, tokens: Pointer, out: Pointer, *, count: int, architecture: str, label: str) -> Launch:
    """The rows of `tokens` [count] i32, each in [0, n), of a table [n, k] in any format -> out [count, k] f32."""
    table.require("embed", "table", FORMATS)
    require_format(architecture, table.format)
    require_element("embed", "tokens", tokens, ("i32",))
    require_element("embed", "out", out, ("f32",))
    require_size("embed", "the number of tokens", count)
    require_sizes("embed", row_size(table.k))
    block = min(BLOCK, power_of_two(table.k))
    return Launch(
        kernel="embedding.embed",
        args={
            "values": table.values,
            "scale": table.scale,
            "minimum": table.minimum,
            "tokens": tokens,
            "out": out,
        },
        constants={"FORMAT": table.format, "WIDTH": table.k, "GROUP": GROUP, "BLOCK": block},
        grid=(count, -(-table.k // block), 1),
        label=label,
    )


@triton.jit
def take_rows(x, rows, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False):
    """x [T, WIDTH] f32, rows [R] i32 -> out [R, WIDTH]."""
    begin(PROGRAMMATIC)
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    tl.store(out + place * WIDTH + column, tl.load(x + row * WIDTH + column, mask=inside), mask=inside)


def take_rows_launch(x: Pointer, rows: Pointer, out: Pointer, *, count: int, width: int, label: str) -> Launch:
    """The rows [count] i32, each in [0, T), of x [T, width] f32 -> out [count, width] f32, in the order named."""
    require_element("take_rows", "x", x, ("f32",))
    require_element("take_rows", "rows", rows, ("i32",))
    require_element("take_rows", "out", out, ("f32",))
    require_size("take_rows", "the number of rows", count)
    require_sizes("take_rows", row_size(width))
    block = min(BLOCK, power_of_two(width))
    return Launch(
        kernel="embedding.take_rows",
        args={"x": x, "rows": rows, "out": out},
        constants={"WIDTH": width, "BLOCK": block},
        grid=(count, -(-width // block), 1),
        label=label,
    )
