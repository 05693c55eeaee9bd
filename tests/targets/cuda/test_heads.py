"""heads and rope_angles: norms and rotation against float64, and every key and value at its place in the pages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flare.errors import InputError
from ignition.targets.cuda.kernels.heads import Pages, heads_launch
from ignition.targets.cuda.kernels.rotary import rope_angles_launch
from ignition.targets.cuda.launch import Element, Pointer
from tests.targets.cuda.operands import FLOATS, bits, empty, guarded, guards, normal, pointer, run_within, within

EPS = 1e-5


def head_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.tensor(EPS).double()).sqrt() * weight.double()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of elements half a head apart as one complex number, times cos + i sin."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def rotated_magnitude(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    both = x[..., :half].abs() + x[..., half:].abs()
    return torch.cat((both, both), dim=-1)


@given(
    tokens=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    half=st.integers(1, 24),
    stored=st.sampled_from(FLOATS),
    projected=st.sampled_from(FLOATS),
    joint=st.booleans(),
    has_norms=st.booleans(),
    has_angles=st.booleans(),
    page_tokens=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
@settings(max_examples=25)
def test_queries_keys_and_values_arrive_where_they_belong(
    tokens: int,
    kv_heads: int,
    group: int,
    half: int,
    stored: Element,
    projected: Element,
    joint: bool,
    has_norms: bool,
    has_angles: bool,
    page_tokens: int,
    data: st.DataObject,
) -> None:
    heads, head_dim = kv_heads * group, 2 * half
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    whole = normal(tokens, sum(widths), seed=1, element=projected)
    parts = [guarded(part) for part in whole.split(widths, dim=1)]
    norms = (normal(head_dim, seed=2), normal(head_dim, seed=3)) if has_norms else None
    angle = normal(tokens, half, seed=4)
    angles = (angle.cos(), angle.sin()) if has_angles else None

    # Slots 1 and 0, the last tokens padding; a pool of pages with room before, between and behind the layer's part.
    live = data.draw(st.integers(0, tokens))
    first = data.draw(st.integers(0, live))
    start = data.draw(st.integers(0, 2 * page_tokens))
    positions = [start + i for i in range(first)] + list(range(live - first)) + [-1] * (tokens - live)
    slots = [1] * first + [0] * (tokens - first)
    own_pages = (start + tokens) // page_tokens + 1
    order = data.draw(st.permutations(range(2 * own_pages)))
    table = torch.tensor(order, dtype=torch.int32).view(2, own_pages)
    part = kv_heads * page_tokens * head_dim
    page_stride, k_start, v_start = 2 * part + 64 + 32, 32, 32 + part + 64
    pool = empty(2 * own_pages, page_stride, element=stored)
    untouched = pool.clone()
    pool_end = pool.reshape(-1)
    out = empty(tokens, heads * head_dim, element=stored)
    before = guards(out), guards(pool)

    pages = Pages(
        k=Pointer(stored, pool_end[k_start:]),
        v=Pointer(stored, pool_end[v_start:]),
        table=pointer(table),
        page_tokens=page_tokens,
        page_stride=page_stride,
        table_stride=own_pages,
    )
    run_within(
        heads_launch(
            pointer(whole) if joint else tuple(pointer(part) for part in parts),
            pointer(out),
            pages,
            pointer(torch.tensor(positions, dtype=torch.int32)),
            pointer(torch.tensor(slots, dtype=torch.int32)),
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            label="heads",
            norms=tuple(pointer(norm) for norm in norms) if norms else None,
            eps=EPS,
            angles=tuple(pointer(table) for table in angles) if angles else None,
        )
    )

    exact = [part.double().view(tokens, -1, head_dim) for part in parts]
    errors = [torch.zeros_like(part) for part in exact]
    for i in (0, 1):
        if norms:
            exact[i] = head_norm(exact[i], norms[i])
            errors[i] = 1e-6 * exact[i].abs()
        if angles:
            errors[i] = 1e-6 * rotated_magnitude(exact[i])
            exact[i] = rotated(exact[i], *angles)
    assert within(out.view(tokens, heads, head_dim), exact[0], errors[0])
    for token in range(live):
        page, place = table[slots[token], positions[token] // page_tokens], positions[token] % page_tokens
        for i, begin in ((1, k_start), (2, v_start)):
            part_of_page = pool[page, begin : begin + part].view(kv_heads, page_tokens, head_dim)
            assert within(part_of_page[:, place], exact[i][token], errors[i][token])
            part_of_page[:, place] = float("nan")
    assert bits(pool) == bits(untouched)
    assert (guards(out), guards(pool)) == before


def test_a_token_has_the_same_bits_alone_and_beside_padding_of_nan() -> None:
    def step(source: Tensor, positions: list[int]) -> tuple[list[int], list[int]]:
        count = len(positions)
        pool, out = torch.zeros(1, 2 * 8 * 32, dtype=torch.bfloat16), empty(count, 64, element="bf16")
        angle = torch.tensor(positions).float()[:, None] * torch.linspace(1, 0.1, 16)
        pages = Pages(
            pointer(pool), Pointer("bf16", pool[0, 256:]), pointer(torch.zeros(1, 1, dtype=torch.int32)), 8, 512, 1
        )
        run_within(
            heads_launch(
                pointer(source),
                pointer(out),
                pages,
                pointer(torch.tensor(positions, dtype=torch.int32)),
                pointer(torch.zeros(count, dtype=torch.int32)),
                tokens=count,
                heads=2,
                kv_heads=1,
                head_dim=32,
                label="heads",
                norms=(pointer(torch.ones(32)),) * 2,
                angles=(pointer(angle.cos()), pointer(angle.sin())),
            )
        )
        return bits(out[0]), bits(pool)

    whole = normal(3, 128, seed=5)
    whole[1:] = float("nan")
    assert step(whole, [3, -1, -1]) == step(whole[:1].clone(), [3])


@given(
    positions=st.lists(st.integers(0, 2**20), min_size=1, max_size=4),
    half=st.integers(1, 70),
    scale=st.sampled_from([1.0, 1.3]),
)
@settings(max_examples=10)
def test_angles_are_those_of_the_position_rounded_to_f32(positions: list[int], half: int, scale: float) -> None:
    inv_freq = torch.logspace(0, -4, half)
    cos, sin = empty(len(positions), half), empty(len(positions), half)
    before = guards(cos), guards(sin)
    run_within(
        rope_angles_launch(
            pointer(torch.tensor(positions, dtype=torch.int32)),
            pointer(inv_freq),
            pointer(cos),
            pointer(sin),
            tokens=len(positions),
            half=half,
            scale=scale,
            label="angles",
        )
    )
    angle = (torch.tensor(positions).float()[:, None] * inv_freq).double()
    assert torch.allclose(cos.double(), scale * angle.cos(), rtol=0, atol=4e-7)
    assert torch.allclose(sin.double(), scale * angle.sin(), rtol=0, atol=4e-7)
    assert (guards(cos), guards(sin)) == before
    assert math.isclose(cos[0, 0].item(), scale * math.cos(positions[0]), abs_tol=4e-7)


F32, BF16, F16, I32 = (Pointer(element, None) for element in ("f32", "bf16", "f16", "i32"))
PAGES = Pages(BF16, BF16, I32, page_tokens=16, page_stride=2 * 16 * 64, table_stride=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projections": I32}, "q is i32, must be f32 or bf16 or f16"),
        ({"projections": (F32, F32, I32)}, "v is i32, must be f32 or bf16 or f16"),
        ({"out": I32}, "out is i32, must be f32 or bf16 or f16"),
        ({"pages": replace(PAGES, k=I32)}, "the pages' k is i32, must be f32 or bf16 or f16"),
        ({"pages": replace(PAGES, v=F16)}, "the pages' v is f16, must be bf16"),
        ({"pages": replace(PAGES, table=F32)}, "the page table is f32, must be i32"),
        ({"pages": replace(PAGES, page_stride=2047)}, "page_stride is 2047, must hold 2048"),
        ({"pages": replace(PAGES, page_tokens=0)}, "page_tokens is 0, must be in [1, 2147483647]"),
        ({"positions": F32}, "positions is f32, must be i32"),
        ({"slots": F32}, "slots is f32, must be i32"),
        ({"norms": (F32, BF16)}, "norms is bf16, must be f32"),
        ({"angles": (F32, BF16)}, "angles is bf16, must be f32"),
        ({"tokens": 0}, "the number of tokens is 0, must be in [1, 2147483647]"),
        ({"head_dim": 63}, "head_dim is 63, must be a multiple of 2 from 2 to 16384"),
        ({"head_dim": 2**15}, "head_dim is 32768, must be a multiple of 2 from 2 to 16384"),
        ({"heads": 65_536}, "heads and twice the KV heads together is 65538, must be in [1, 65535]"),
        ({"norms": (F32, F32), "eps": 0.0}, "eps is 0.0, must be above 0"),
    ],
)
def test_what_heads_does_not_take_is_named(change: dict[str, object], message: str) -> None:
    good = {
        "projections": F32,
        "out": BF16,
        "pages": PAGES,
        "positions": I32,
        "slots": I32,
        "tokens": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 64,
        "label": "",
    }
    heads_launch(**good)
    with pytest.raises(InputError) as raised:
        heads_launch(**{**good, **change})
    assert str(raised.value) == f"kernel heads: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": F32}, "positions is f32, must be i32"),
        ({"inv_freq": BF16}, "inv_freq is bf16, must be f32"),
        ({"tokens": 0}, "the number of tokens is 0, must be in [1, 2147483647]"),
        ({"half": 0}, "the number of frequencies is 0, must be in [1, 8192]"),
        ({"scale": 0.0}, "scale is 0.0, must be above 0"),
    ],
)
def test_what_rope_angles_does_not_take_is_named(change: dict[str, object], message: str) -> None:
    good = {
        "positions": I32,
        "inv_freq": F32,
        "cos": F32,
        "sin": F32,
        "tokens": 1,
        "half": 8,
        "scale": 1.0,
        "label": "",
    }
    rope_angles_launch(**good)
    with pytest.raises(InputError) as raised:
        rope_angles_launch(**{**good, **change})
    assert str(raised.value) == f"kernel rope_angles: {message}"
