"""embed, take_rows, linear, rms_norm, silu_mul, add, rope: each against its formula written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from ignition import ops

STORED = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == torch.float32 and torch.allclose(found.double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stored", STORED)
def test_embed_and_take_rows_copy_rows(stored: torch.dtype) -> None:
    table = normal(7, 5).to(stored)
    tokens = torch.tensor([6, 0, 6, 3], dtype=torch.int32)
    x = ops.embed(table, tokens)
    assert x.tolist() == [table[t].tolist() for t in tokens.tolist()]
    rows = torch.tensor([3, 0, 3], dtype=torch.int32)
    assert ops.take_rows(x, rows).tolist() == [x[r].tolist() for r in rows.tolist()]


@pytest.mark.parametrize("stored", STORED)
def test_linear_sums_products_of_rows(stored: torch.dtype) -> None:
    x, w, bias = normal(3, 40), normal(6, 40, seed=1).to(stored), normal(6, seed=2).to(stored)
    products = (x.double()[:, None, :] * w.double()[None, :, :]).sum(-1)
    assert close(ops.linear(x, w), products)
    assert close(ops.linear(x, w, bias), products + bias.double())


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 8)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_divides_by_the_root_of_the_mean_square(shape: tuple[int, ...], eps: float) -> None:
    x, weight = normal(*shape), normal(8, seed=1)
    for row, found in zip(x.view(-1, 8).tolist(), ops.rms_norm(x, weight, eps).view(-1, 8), strict=True):
        root = math.sqrt(sum(v * v for v in row) / 8 + eps)
        assert close(found, torch.tensor([v / root * w for v, w in zip(row, weight.tolist(), strict=True)]))


def test_silu_mul_and_add() -> None:
    a, b = 4 * normal(3, 9), normal(3, 9, seed=1)
    assert close(ops.silu_mul(a, b), a.double() / (1 + (-a.double()).exp()) * b.double())
    assert torch.equal(ops.add(a, b), a + b)


def test_rope_angles_round_the_angle_to_float32_first() -> None:
    positions = torch.tensor([0, 1, 12345, 100001], dtype=torch.int32)
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    cos, sin = ops.rope_angles(positions, inv_freq, 1.5)
    for i, position in enumerate(positions.tolist()):
        for j in range(3):
            angle = float(torch.tensor(float(position)) * inv_freq[j])
            assert abs(cos[i, j].item() - 1.5 * math.cos(angle)) < 4e-7
            assert abs(sin[i, j].item() - 1.5 * math.sin(angle)) < 4e-7


def test_rope_turns_each_pair_as_a_complex_number() -> None:
    x = normal(3, 2, 8)
    angles = normal(3, 4, seed=1)
    found = ops.rope(x, angles.cos(), angles.sin())
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(3, 4), angles)[:, None]
    assert close(found, torch.cat((turned.real, turned.imag), dim=-1))
