"""embed and take_rows: the very values that are stored, in every format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import InputError
from ignition.targets.cuda.kernels.embedding import BLOCK, embed_launch, take_rows_launch
from ignition.targets.cuda.kernels.matrix import Format, Matrix
from ignition.targets.cuda.launch import Pointer
from tests.targets.cuda.operands import FORMATS, bits, empty, guards, integers, matrix, normal, pointer, run_within


@pytest.mark.parametrize("format", FORMATS)
@given(
    vocabulary=st.integers(1, 40),
    groups=st.integers(1, 8),
    odd=st.integers(0, 31),
    count=st.integers(1, 5),
    seed=st.integers(0, 100),
)
@settings(max_examples=4)
def test_embed_gives_the_value_of_each_stored_element(
    format: Format, vocabulary: int, groups: int, odd: int, count: int, seed: int
) -> None:
    width = 32 * groups + (0 if format in ("q8", "q4") else odd)
    table, exact, _ = matrix(format, vocabulary, width, seed)
    tokens = integers(0, vocabulary, count, seed=seed)
    out = empty(count, width)
    before = guards(out)
    run_within(embed_launch(table, pointer(tokens), pointer(out), count=count, architecture="sm_90a", label="embed"))
    wanted = exact[tokens.long()]
    # Products of a quant and a f16 scale are exact in f32; the sum with a minimum, and fp8's product, are rounded once.
    assert bits(out) == bits(wanted.float())
    assert guards(out) == before


def test_rows_wider_than_a_program_and_places_beyond_an_i32() -> None:
    table, exact, _ = matrix("bf16", 3, 2 * BLOCK + 7, seed=1)
    tokens = torch.tensor([2, 0, 2], dtype=torch.int32)
    out = empty(3, table.k)
    made = embed_launch(table, pointer(tokens), pointer(out), count=3, architecture="sm_80", label="embed")
    assert made.grid == (3, 3, 1)
    run_within(made)
    assert bits(out) == bits(exact[tokens.long()].float())


def test_take_rows_copies_rows_in_the_order_named() -> None:
    x = normal(6, 1030, seed=3)
    x[4, 5] = float("nan")
    rows = torch.tensor([4, 0, 4, 5], dtype=torch.int32)
    out = empty(4, 1030)
    before = guards(out)
    run_within(take_rows_launch(pointer(x), pointer(rows), pointer(out), count=4, width=1030, label="rows"))
    assert bits(out) == bits(x[rows.long()])
    assert guards(out) == before


F32, I32, BF16 = (Pointer(element, None) for element in ("f32", "i32", "bf16"))
FP8 = Matrix("fp8", 8, 64, Pointer("fp8", None), F32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": F32}, "kernel embed: tokens is f32, must be i32"),
        ({"out": BF16}, "kernel embed: out is bf16, must be f32"),
        ({"count": 0}, "kernel embed: the number of tokens is 0, must be in [1, 2147483647]"),
        (
            {"table": FP8, "architecture": "sm_86"},
            "weights in fp8 need sm_89 or newer, not sm_86; use --weights bf16 or q8",
        ),
        (
            {"table": Matrix("bf16", 8, 2**27, BF16)},
            "kernel embed: width is 134217728, must be in [1, 67107840]",
        ),
    ],
)
def test_what_embed_does_not_take_is_named(change: dict[str, object], message: str) -> None:
    table = Matrix("bf16", 8, 64, BF16)
    good = {"table": table, "tokens": I32, "out": F32, "count": 1, "architecture": "sm_90a", "label": ""}
    embed_launch(**good)
    with pytest.raises(InputError) as raised:
        embed_launch(**{**good, **change})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": BF16}, "kernel take_rows: x is bf16, must be f32"),
        ({"rows": F32}, "kernel take_rows: rows is f32, must be i32"),
        ({"out": BF16}, "kernel take_rows: out is bf16, must be f32"),
        ({"count": 0}, "kernel take_rows: the number of rows is 0, must be in [1, 2147483647]"),
        ({"width": 0}, "kernel take_rows: width is 0, must be in [1, 67107840]"),
    ],
)
def test_what_take_rows_does_not_take_is_named(change: dict[str, object], message: str) -> None:
    good = {"x": F32, "rows": I32, "out": F32, "count": 1, "width": 8, "label": ""}
    take_rows_launch(**good)
    with pytest.raises(InputError) as raised:
        take_rows_launch(**{**good, **change})
    assert str(raised.value) == message
