"""Elementwise arithmetic between activations."""

from __future__ import annotations

import torch
from torch import Tensor

from ignition.ops.registry import define, require_activation


def _silu_mul_shape(gate: Tensor, up: Tensor) -> Tensor:
    require_activation("silu_mul", "gate", gate, None, None)
    require_activation("silu_mul", "up", up, *gate.shape)
    return torch.empty_like(gate)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _add_shape(a: Tensor, b: Tensor) -> Tensor:
    require_activation("add", "a", a, None, None)
    require_activation("add", "b", b, *a.shape)
    return torch.empty_like(a)


def _add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


_silu_mul_op = define("silu_mul(Tensor gate, Tensor up) -> Tensor", shape=_silu_mul_shape, reference=_silu_mul)
_add_op = define("add(Tensor a, Tensor b) -> Tensor", shape=_add_shape, reference=_add)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [T, N] f32 -> [T, N]: gate / (1 + exp(-gate)) * up, the gated half of an MLP."""
    return _silu_mul_op(gate, up)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a, b [T, N] f32 -> [T, N]: a + b. No broadcasting."""
    return _add_op(a, b)
