"""rms_norm against its formula in float64, for any width, and for wanted rows only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import InputError
from ignition.targets.cuda.kernels.norm import WIDEST, rms_norm_launch
from ignition.targets.cuda.launch import Element, Launch, Pointer
from tests.targets.cuda.operands import FLOATS, bits, empty, guards, normal, optional, pointer, run_within, within


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float = 1e-5,
    rows: torch.Tensor | None = None,
) -> Launch:
    return rms_norm_launch(
        pointer(x),
        pointer(weight),
        pointer(out),
        count=len(out),
        width=x.shape[1],
        eps=eps,
        label="norm",
        rows=optional(rows),
    )


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@given(
    tokens=st.integers(1, 4),
    width=st.integers(1, 1500),
    stored=st.sampled_from(FLOATS),
    eps=st.sampled_from([1e-6, 1e-5, 0.5]),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 100),
)
@settings(max_examples=40)
def test_rows_are_divided_by_the_root_of_their_mean_square(
    tokens: int, width: int, stored: Element, eps: float, size: float, seed: int
) -> None:
    x, weight, out = (
        normal(tokens, width, seed=seed),
        normal(width, seed=seed + 1),
        empty(tokens, width, element=stored),
    )
    x *= size
    before = guards(out)
    run_within(launch(x, weight, out, eps))
    wanted = formula(x, weight, torch.tensor(eps).item())
    assert within(out, wanted, 1e-6 * wanted.abs())
    assert guards(out) == before


@pytest.mark.parametrize("width", [576, 5120, WIDEST])
def test_widths_of_models(width: int) -> None:
    x, weight, out = normal(2, width, seed=1), normal(width, seed=2), empty(2, width)
    made = launch(x, weight, out)
    assert made.warps == {576: 4, 5120: 8, WIDEST: 16}[width]
    run_within(made)
    wanted = formula(x, weight, 1e-5)
    assert within(out, wanted, 1e-6 * wanted.abs())


def test_wanted_rows_have_the_bits_that_all_rows_have_whatever_is_in_the_others() -> None:
    x, weight = normal(5, 72, seed=3), normal(72, seed=4)
    everything = empty(5, 72)
    run_within(launch(x, weight, everything))
    rows = torch.tensor([3, 0, 3], dtype=torch.int32)
    x[1], x[2] = float("nan"), float("inf")
    out = empty(3, 72)
    run_within(launch(x, weight, out, rows=rows))
    assert bits(out) == bits(everything[rows.long()])


F32, BF16, I32 = (Pointer(element, None) for element in ("f32", "bf16", "i32"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": BF16}, "x is bf16, must be f32"),
        ({"weight": BF16}, "weight is bf16, must be f32"),
        ({"out": I32}, "out is i32, must be f32 or bf16 or f16"),
        ({"rows": F32}, "rows is f32, must be i32"),
        ({"count": 0}, "the number of rows is 0, must be in [1, 2147483647]"),
        ({"width": 16_385}, "width is 16385, must be in [1, 16384]"),
        ({"eps": 0.0}, "eps is 0.0, must be above 0"),
    ],
)
def test_what_rms_norm_does_not_take_is_named(change: dict[str, object], message: str) -> None:
    good = {"x": F32, "weight": F32, "out": BF16, "count": 1, "width": 8, "eps": 1e-5, "label": ""}
    rms_norm_launch(**good)
    with pytest.raises(InputError) as raised:
        rms_norm_launch(**{**good, **change})
    assert str(raised.value) == f"kernel rms_norm: {message}"
