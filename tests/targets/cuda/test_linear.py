"""linear and quantised_linear against exact products, in every format, and row by row in every company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flare.core.architectures import ABILITIES
from flare.errors import InputError
from ignition.targets.cuda.kernels.linear import linear_launch
from ignition.targets.cuda.kernels.matrix import Format, Matrix
from ignition.targets.cuda.kernels.quantised_linear import QUANTISED, quantised_linear_launch
from ignition.targets.cuda.launch import Element, Launch, Pointer, TensorMap
from ignition.targets.cuda.tiles import Tile, tile
from tests.targets.cuda.operands import (
    FLOATS,
    FORMATS,
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


def launch(
    x: Tensor,
    w: Matrix,
    out: Tensor,
    *,
    architecture: str = "sm_90a",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Launch:
    make = quantised_linear_launch if w.format in QUANTISED else linear_launch
    return make(
        pointer(x),
        w,
        pointer(out),
        tokens=len(x),
        architecture=architecture,
        label="product",
        bias=optional(bias),
        residual=optional(residual),
    )


def with_tile(made: Launch, chosen: Tile) -> Launch:
    """The same product of [tokens, n], cut into other tiles."""
    sizes = {"TOKENS": chosen.tokens, "COLUMNS": chosen.columns, "DEPTH": chosen.depth}
    args = dict(made.args)
    for name, rows in (("x", chosen.tokens), ("w", chosen.columns)):
        if isinstance(args[name], TensorMap):
            args[name] = replace(args[name], block=(rows, chosen.depth))
    grid = (-(-made.args["tokens"] // chosen.tokens), -(-made.constants["N"] // chosen.columns), 1)
    return replace(made, args=args, constants={**made.constants, **sizes}, grid=grid)


def element_of(format: Format, compute: Element) -> Element:
    """The type of activations that a weight takes, `compute` where it is free."""
    return compute if format in QUANTISED else format


@pytest.mark.parametrize("format", FORMATS)
@given(
    compute=st.sampled_from(FLOATS),
    stored=st.sampled_from(FLOATS),
    tokens=st.integers(1, 70),
    n=st.integers(1, 70),
    groups=st.integers(1, 6),
    odd=st.sampled_from([0, 8, 31]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    architecture=st.sampled_from(list(ABILITIES)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=8)
def test_every_output_is_the_exact_product_within_one_rounding(
    format: Format,
    compute: Element,
    stored: Element,
    tokens: int,
    n: int,
    groups: int,
    odd: int,
    has_bias: bool,
    has_residual: bool,
    architecture: str,
    seed: int,
) -> None:
    if format == "fp8" and architecture in ("sm_80", "sm_86"):
        architecture = "sm_89"
    k = 32 * groups + (0 if format in ("q8", "q4") else odd)
    w, exact, parts = matrix(format, n, k, seed)
    x = normal(tokens, k, seed=seed + 7, element=element_of(format, compute))
    bias = normal(n, seed=seed + 8) if has_bias else None
    residual = normal(tokens, n, seed=seed + 9) if has_residual else None
    out = empty(tokens, n, element=stored)
    before = guards(out)
    run_within(launch(x, w, out, architecture=architecture, bias=bias, residual=residual))
    wanted, magnitude = x.double() @ exact.T, x.double().abs() @ parts.T
    for term in (bias, residual):
        if term is not None:
            wanted, magnitude = wanted + term.double(), magnitude + term.double().abs()
    assert within(out, wanted, 1e-6 * magnitude)
    assert guards(out) == before


@pytest.mark.parametrize("wide", [4096, 8192, 16384])
@pytest.mark.parametrize("format", ["bf16", "q8", "q4", "fp8"])
def test_tiles_of_wide_matrices_compute_the_same_product(format: Format, wide: int) -> None:
    w, exact, parts = matrix(format, 150, 96, seed=1)
    x = normal(3, 96, seed=2, element="bf16")
    out = empty(3, 150)
    run_within(with_tile(launch(x, w, out), tile("sm_90a", format, wide)))
    assert within(out, x.double() @ exact.T, 1e-6 * (x.double().abs() @ parts.T))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_alone_among_others_and_in_every_bucket(format: Format) -> None:
    w, _, _ = matrix(format, 21, 160, seed=3)
    x = normal(40, 160, seed=4, element=element_of(format, "bf16"))
    whole = empty(40, 21)
    run_within(launch(x, w, whole))
    for row in (0, 15, 16, 39):
        alone = empty(1, 21)
        run_within(launch(x[row : row + 1].clone(), w, alone))
        assert bits(alone) == bits(whole[row])
    spoilt = x.clone()
    spoilt[1::2] = float("nan")
    found = empty(40, 21)
    run_within(launch(spoilt, w, found))
    assert bits(found[::2]) == bits(whole[::2])
    assert found[1::2].isnan().all()


@pytest.mark.parametrize("format", ["bf16", "f16"])
@pytest.mark.parametrize(("n", "wide", "k"), [(150, 16384, 104), (21, 21, 264), (40, 4096, 8)])
def test_tensor_maps_and_pointers_give_the_same_bits(format: Format, n: int, wide: int, k: int) -> None:
    """Tokens, columns and K that end inside a tile: what a map reads behind them is zeros, as what a pointer masks."""
    w, _, _ = matrix(format, n, k, seed=12)
    x, residual = normal(33, k, seed=13, element=format), normal(33, n, seed=14)
    by_map, by_pointer = empty(33, n), empty(33, n)
    made = [
        with_tile(launch(x, w, out, residual=residual), tile("sm_90a", format, wide)) for out in (by_map, by_pointer)
    ]
    run_within(made[0])
    run_within(pointed(made[1]))
    assert bits(by_map) == bits(by_pointer)


def test_the_architecture_the_format_and_k_decide_whether_products_copy_by_tensor_maps() -> None:
    for architecture, abilities in ABILITIES.items():
        for format in ("f32", "bf16", "f16"):
            for k in (8, 12, 72):
                made = [
                    linear_launch(
                        Pointer(format, None),
                        Matrix(format, 70, k, Pointer(format, None)),
                        F32,
                        tokens=tokens,
                        architecture=architecture,
                        label="",
                    )
                    for tokens in (1, 300)
                ]
                for launched in made:
                    mapped = isinstance(launched.args["x"], TensorMap)
                    assert mapped == isinstance(launched.args["w"], TensorMap) == launched.constants["MAPPED"]
                    assert mapped == (abilities.tensor_maps and format != "f32" and k % 8 == 0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a"])
def test_one_compiled_kernel_serves_every_bucket(format: Format, architecture: str) -> None:
    w, _, _ = matrix(format, 8, 64, seed=5)
    element = element_of(format, "f16")
    made = [
        launch(
            torch.empty(t, 64, dtype=normal(1, seed=0, element=element).dtype),
            w,
            empty(t, 8),
            architecture=architecture,
        )
        for t in (1, 8, 512)
    ]
    assert made[0].grid != made[2].grid
    for other in made[1:]:
        assert (other.kernel, other.constants, other.signature(), other.warps, other.stages) == (
            made[0].kernel,
            made[0].constants,
            made[0].signature(),
            made[0].warps,
            made[0].stages,
        )


@pytest.mark.parametrize("format", ["bf16", "q4"])
def test_the_residual_may_be_the_output(format: Format) -> None:
    w, _, _ = matrix(format, 33, 64, seed=6)
    x = normal(5, 64, seed=7, element="bf16")
    residual = normal(5, 33, seed=8)
    apart = empty(5, 33)
    run_within(launch(x, w, apart, residual=residual))
    run_within(launch(x, w, residual, residual=residual))
    assert bits(residual) == bits(apart)


def test_weights_of_zeros_and_extremes_stay_exact() -> None:
    """The largest quants of q8 and q4 and the smallest scales, which bf16 holds only as integers."""
    w, exact, _ = matrix("q8", 4, 32, seed=9)
    w.values.operand.fill_(-128)
    w.scale.operand.fill_(2.0**-24)
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    out = empty(1, 4)
    run_within(launch(x, w, out))
    assert out.tolist() == [[-128 * 32 * 2.0**-24] * 4]
    w, exact, _ = matrix("q4", 4, 32, seed=9)
    w.values.operand.fill_(0xF0)
    w.scale.operand.fill_(0.125)
    w.minimum.operand.fill_(-3.0)
    x[0, 16:] = 2.0
    run_within(launch(x, w, out))
    assert out.tolist() == [[16 * 2 * 15 * 0.125 - 3.0 * 48] * 4]


F32, BF16, F16, I32 = (Pointer(element, None) for element in ("f32", "bf16", "f16", "i32"))
PLAIN = Matrix("bf16", 8, 64, BF16)
Q8 = Matrix("q8", 8, 64, Pointer("i8", None), F16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": F16}, "kernel linear: x is f16, must be bf16"),
        ({"w": Q8}, "kernel linear: w is stored as q8, must be one of f32, bf16, f16"),
        ({"w": Matrix("bf16", 8, 64, F16)}, "kernel linear: w's values is f16, must be bf16"),
        ({"w": Matrix("bf16", 0, 64, BF16)}, "kernel linear: w's n is 0, must be in [1, 2147483647]"),
        ({"w": Matrix("bf16", 8, 0, BF16)}, "kernel linear: w's k is 0, must be in [1, 1073741824]"),
        ({"w": Matrix("bf16", 8, 64, BF16, F16)}, "kernel linear: w is stored as bf16 and has a scale"),
        (
            {"w": Matrix("bf16", 2**24, 64, BF16)},
            "kernel linear: the number of its weight's rows is 16777216, must be in [1, 8388480]",
        ),
        ({"out": I32}, "kernel linear: out is i32, must be f32 or bf16 or f16"),
        ({"bias": BF16}, "kernel linear: bias is bf16, must be f32"),
        ({"residual": BF16}, "kernel linear: residual is bf16, must be f32"),
        ({"tokens": 0}, "kernel linear: the number of tokens is 0, must be in [1, 2147483647]"),
        ({"architecture": "sm_75"}, "architecture 'sm_75' has no kernels; take one of sm_80, "),
    ],
)
def test_what_linear_does_not_take_is_named(change: dict[str, object], message: str) -> None:
    good = {"x": BF16, "w": PLAIN, "out": F32, "tokens": 1, "architecture": "sm_90a", "label": ""}
    linear_launch(**good)
    with pytest.raises(InputError) as raised:
        linear_launch(**{**good, **change})
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": PLAIN}, "kernel quantised_linear: w is stored as bf16, must be one of q8, q4, fp8"),
        ({"x": I32}, "kernel quantised_linear: x is i32, must be f32 or bf16 or f16"),
        (
            {"w": Matrix("q8", 8, 64, Pointer("i8", None))},
            "kernel quantised_linear: w is stored as q8 and has no scale",
        ),
        (
            {"w": Matrix("q4", 8, 64, Pointer("u8", None), F16)},
            "kernel quantised_linear: w is stored as q4 and has no minimum",
        ),
        (
            {"w": Matrix("q8", 8, 48, Pointer("i8", None), F16)},
            "kernel quantised_linear: w is stored as q8 in groups of 32 along k, which is 48; use bf16 or f32",
        ),
        (
            {"w": Matrix("q8", 8, 64, Pointer("i8", None), F32)},
            "kernel quantised_linear: w's scale is f32, must be f16",
        ),
        (
            {"w": Matrix("fp8", 8, 64, Pointer("fp8", None), F32), "architecture": "sm_86"},
            "weights in fp8 need sm_89 or newer, not sm_86; use --weights bf16 or q8",
        ),
    ],
)
def test_what_quantised_linear_does_not_take_is_named(change: dict[str, object], message: str) -> None:
    good = {"x": BF16, "w": Q8, "out": F32, "tokens": 1, "architecture": "sm_90a", "label": ""}
    quantised_linear_launch(**good)
    with pytest.raises(InputError) as raised:
        quantised_linear_launch(**{**good, **change})
    assert str(raised.value).startswith(message)


def test_an_output_in_place_of_a_residual_is_f32() -> None:
    buffer = object()
    with pytest.raises(InputError, match="kernel linear: out is bf16 and the residual too, must be f32"):
        linear_launch(
            BF16,
            PLAIN,
            Pointer("bf16", buffer),
            tokens=1,
            architecture="sm_80",
            label="",
            residual=Pointer("f32", buffer),
        )
