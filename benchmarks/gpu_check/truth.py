"""Operands of the kernels, random but for a seed, and what their exact results are, in f64, with what an error may be.

The formulas and bounds are those that the tests hold the kernels to in Triton's interpreter (tests/targets/cuda).
"""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where exact results are computed."""

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding to nearest: 2^-p for p bits of significand."""

GROUP = 32


class Source:
    """Random tensors on the cpu."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def order(self, count: int) -> Tensor:
        """0 to count - 1, shuffled."""
        return torch.randperm(count, generator=self.generator)

    def matrix(self, format: str, n: int, k: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
        """A weight: its arrays (values, scale, minimum, as many as it has), its exact values [n, k] f64, and the sum of their
        parts' magnitudes. dtype: of a float one."""
        if format in ("float", "f32", "bf16", "f16"):
            values = self.normal(n, k, dtype=dtype)
            return [values], wide(values), wide(values).abs()
        if format == "fp8":
            values, scale = self.normal(n, k).to(torch.float8_e4m3fn), self.normal(n)
            exact = wide(values.float()) * wide(scale)[:, None]
            return [values, scale], exact, exact.abs()
        scale = self.normal(n, k // GROUP, dtype=torch.float16)
        spread = wide(scale).repeat_interleave(GROUP, dim=1)
        if format == "q8":
            values = self.integers(-128, 128, n, k, dtype=torch.int8)
            exact = wide(values) * spread
            return [values, scale], exact, exact.abs()
        minimum = self.normal(n, k // GROUP, dtype=torch.float16)
        values = self.integers(0, 256, n, k // 2, dtype=torch.uint8)
        halves = values.to(DEVICE).view(n, k // GROUP, GROUP // 2)
        scaled = torch.cat((halves % 16, halves // 16), dim=-1).view(n, k).double() * spread
        least = wide(minimum).repeat_interleave(GROUP, dim=1)
        return [values, scale, minimum], scaled + least, scaled.abs() + least.abs()


def wide(tensor: Tensor) -> Tensor:
    """A tensor in f64, where exact results are computed."""
    return tensor.to(DEVICE).double()


def excess(found: Tensor, exact: Tensor, error: Tensor | float) -> float:
    """The largest error of `found` by what it may be: `error` before one rounding to its type. At most 1 is good."""
    if not found.numel():
        return 0.0
    allowed = torch.as_tensor(error, device=exact.device, dtype=torch.float64)
    allowed = allowed + ROUNDING[found.dtype] * (exact.abs() + allowed) + 2.0**-25
    off = (wide(found).view(exact.shape) - exact).abs() / allowed
    return float(torch.nan_to_num(off, nan=float("inf")).max())


def sum_error(k: int) -> float:
    """What a sum of k products may be off by, relative to the sum of their magnitudes: 1e-6 as in the tests, and what tensor
    cores cut off, which add 16 products at a time to no more than the bits of the largest among them (2^-22 each time)."""
    return 1e-6 + k / 16 * 2.0**-22


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, with eps as f32 has it."""
    exact_eps = float(torch.tensor(eps, dtype=torch.float32))
    return x / (x.square().mean(-1, keepdim=True) + exact_eps).sqrt() * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, heads, head_dim] turned by the angles of cos, sin [T, head_dim / 2]: element i with element i + head_dim / 2. And
    the sum of the magnitudes that each result is made of."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos, sin)[:, None]
    size = first.abs() + second.abs()
    return torch.cat((turned.real, turned.imag), -1), torch.cat((size, size), -1)


def silu_product(gate: Tensor, up: Tensor, gate_error: Tensor, up_error: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up and its error in f32, of sums with these errors: |silu'| <= 1.1."""
    silu = torch.nn.functional.silu(gate)
    own = 1e-6 * (silu * up).abs() + 1e-12 * up.abs()
    return silu * up, 1.1 * gate_error * (up.abs() + up_error) + silu.abs() * up_error + own
