"""gate_up and the elementwise kernels against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flare.errors import InputError
from ignition.targets.cuda.kernels.elementwise import BLOCK, add_launch, round_launch, silu_mul_launch
from ignition.targets.cuda.kernels.gate_up import gate_up_launch
from ignition.targets.cuda.kernels.matrix import Format, Matrix
from ignition.targets.cuda.kernels.quantised_linear import QUANTISED
from ignition.targets.cuda.launch import Element, Launch, Pointer
from tests.targets.cuda.operands import (
    FLOATS,
    FORMATS,
    TYPES,
    bits,
    empty,
    guards,
    matrix,
    normal,
    optional,
    pointed,
    pointer,
    run_within,
    within,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # which silu's quotient is right for


def launch(
    x: Tensor,
    gate: Matrix,
    up: Matrix,
    out: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    architecture: str = "sm_90a",
) -> Launch:
    return gate_up_launch(
        pointer(x),
        gate,
        up,
        pointer(out),
        tokens=len(x),
        architecture=architecture,
        label="mlp",
        gate_bias=optional(gate_bias),
        up_bias=optional(up_bias),
    )


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def silu_mul_error(gate: Tensor, up: Tensor, gate_error: Tensor, up_error: Tensor) -> Tensor:
    """The error of silu(gate) * up in f32: |silu'| <= 1.1, silu is right to 1e-6 for what is not below -15."""
    own = 1e-6 * silu_mul(gate, up).abs() + 1e-12 * up.abs()
    return 1.1 * gate_error * (up.abs() + up_error) + torch.nn.functional.silu(gate).abs() * up_error + own


@pytest.mark.parametrize("format", FORMATS)
@given(
    compute=st.sampled_from(FLOATS),
    stored=st.sampled_from(FLOATS),
    tokens=st.integers(1, 40),
    n=st.integers(1, 40),
    groups=st.integers(1, 5),
    odd=st.sampled_from([0, 8, 31]),
    has_biases=st.booleans(),
    architecture=st.sampled_from(["sm_89", "sm_90a"]),
    seed=st.integers(0, 100),
)
@settings(max_examples=6)
def test_the_gated_products_are_exact_within_one_rounding(
    format: Format,
    compute: Element,
    stored: Element,
    tokens: int,
    n: int,
    groups: int,
    odd: int,
    has_biases: bool,
    architecture: str,
    seed: int,
) -> None:
    k = 32 * groups + (0 if format in ("q8", "q4") else odd)
    (gate, gate_exact, gate_parts), (up, up_exact, up_parts) = (matrix(format, n, k, seed + i) for i in (0, 10))
    x = normal(tokens, k, seed=seed + 20, element=compute if format in QUANTISED else format)
    x /= 64  # no product beyond what f16 holds
    biases = [normal(n, seed=seed + 30 + i) if has_biases else None for i in (0, 1)]
    out = empty(tokens, n, element=stored)
    before = guards(out)
    run_within(launch(x, gate, up, out, *biases, architecture=architecture))
    sums, errors = [], []
    for exact, parts, bias in zip((gate_exact, up_exact), (gate_parts, up_parts), biases, strict=True):
        sums.append(x.double() @ exact.T + (0 if bias is None else bias.double()))
        errors.append(1e-6 * (x.double().abs() @ parts.T + (0 if bias is None else bias.double().abs())))
    assert within(out, silu_mul(*sums), silu_mul_error(*sums, *errors))
    assert guards(out) == before


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_others(format: Format) -> None:
    gate, up = (matrix(format, 9, 96, seed)[0] for seed in (1, 11))
    x = normal(35, 96, seed=2, element="bf16" if format in QUANTISED else format)
    whole = empty(35, 9)
    run_within(launch(x, gate, up, whole))
    spoilt = x.clone()
    spoilt[1:] = float("nan")
    for row, source in ((0, spoilt), (16, x[16:17].clone()), (34, x[34:].clone())):
        found = empty(len(source), 9)
        made = launch(source, gate, up, found)
        assert made.constants == launch(x, gate, up, whole).constants
        run_within(made)
        assert bits(found[0]) == bits(whole[row])


@pytest.mark.parametrize(("format", "k"), [("bf16", 264), ("f16", 8)])
def test_tensor_maps_and_pointers_give_the_same_bits(format: Format, k: int) -> None:
    gate, up = (matrix(format, 9, k, seed)[0] for seed in (1, 11))
    x, bias = normal(35, k, seed=2, element=format), normal(9, seed=3)
    by_map, by_pointer = empty(35, 9), empty(35, 9)
    run_within(launch(x, gate, up, by_map, bias))
    run_within(pointed(launch(x, gate, up, by_pointer, bias)))
    assert bits(by_map) == bits(by_pointer)


@given(
    elements=st.integers(1, 3 * BLOCK),
    kinds=st.tuples(*[st.sampled_from(FLOATS)] * 3),
    seed=st.integers(0, 100),
)
@settings(max_examples=20)
def test_silu_mul_of_buffers(elements: int, kinds: tuple[Element, Element, Element], seed: int) -> None:
    gate = normal(elements, seed=seed, element=kinds[0])
    gate *= 8
    up, out = normal(elements, seed=seed + 1, element=kinds[1]), empty(elements, element=kinds[2])
    before = guards(out)
    run_within(silu_mul_launch(pointer(gate), pointer(up), pointer(out), elements=elements, label="silu"))
    none = torch.zeros(elements, dtype=torch.float64)
    wanted = gate.double(), up.double()
    assert within(out, silu_mul(*wanted), silu_mul_error(*wanted, none, none))
    assert guards(out) == before


def test_silu_of_what_exp_cannot_hold() -> None:
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e30, float("nan")])
    out = empty(6)
    run_within(silu_mul_launch(pointer(gate), pointer(torch.ones(6)), pointer(out), elements=6, label="silu"))
    assert torch.allclose(out, torch.nn.functional.silu(gate), atol=1e-40, equal_nan=True)


def test_add_in_place() -> None:
    a, b = normal(BLOCK + 3, seed=1), normal(BLOCK + 3, seed=2)
    wanted, before = bits(a + b), guards(a)
    run_within(add_launch(pointer(a), pointer(b), pointer(a), elements=BLOCK + 3, label="add"))
    assert bits(a) == wanted and guards(a) == before


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in cast"
)  # numpy's, of the interpreter: infinity is what is wanted
@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_values_are_rounded_as_torch_rounds_them(element: Element) -> None:
    """Ties to even, past the largest to infinity, NaN stays NaN."""
    x = normal(BLOCK + 3, seed=1)
    x[:8] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1e39, -65520.0, 1e-40, -0.0, float("inf")])
    out = empty(BLOCK + 3, element=element)
    before = guards(out)
    run_within(round_launch(pointer(x), pointer(out), elements=BLOCK + 3, label="round"))
    assert bits(out) == bits(x.to(TYPES[element])) and guards(out) == before
    x[0] = float("nan")
    run_within(round_launch(pointer(x), pointer(out), elements=1, label="round"))
    assert out[0].isnan()


F32, BF16, F16, I32, I8 = (Pointer(element, None) for element in ("f32", "bf16", "f16", "i32", "i8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": F16}, "x is f16, must be bf16"),
        ({"up": Matrix("q8", 8, 64, I8, F16)}, "up is stored as q8, must be one of bf16"),
        ({"up": Matrix("bf16", 8, 32, BF16)}, "up is [8, 32], must be [8, 64] as gate is"),
        ({"out": I32}, "out is i32, must be f32 or bf16 or f16"),
        ({"gate_bias": BF16}, "gate_bias is bf16, must be f32"),
        ({"up_bias": BF16}, "up_bias is bf16, must be f32"),
        ({"tokens": 0}, "the number of tokens is 0, must be in [1, 2147483647]"),
    ],
)
def test_what_gate_up_does_not_take_is_named(change: dict[str, object], message: str) -> None:
    plain = Matrix("bf16", 8, 64, BF16)
    good = {"x": BF16, "gate": plain, "up": plain, "out": F32, "tokens": 1, "architecture": "sm_90a", "label": ""}
    gate_up_launch(**good)
    with pytest.raises(InputError) as raised:
        gate_up_launch(**{**good, **change})
    assert str(raised.value) == f"kernel gate_up: {message}"


def test_what_the_elementwise_kernels_do_not_take_is_named() -> None:
    for change, message in (
        ({"gate": I32}, "kernel silu_mul: gate is i32, must be f32 or bf16 or f16"),
        ({"elements": 2**31}, "kernel silu_mul: the number of elements is 2147483648, must be in [1, 2147483647]"),
    ):
        with pytest.raises(InputError) as raised:
            silu_mul_launch(**{"gate": F32, "up": F32, "out": F32, "elements": 1, "label": "", **change})
        assert str(raised.value) == message
    with pytest.raises(InputError, match="kernel add: b is bf16, must be f32"):
        add_launch(F32, BF16, F32, elements=1, label="")
    with pytest.raises(InputError, match="kernel rounded: out is f32, must be bf16 or f16"):
        round_launch(F32, F32, elements=1, label="")
