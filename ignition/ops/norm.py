"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from ignition.ops.registry import define, require, require_activation, require_scalar, require_weight


def _rms_norm_shape(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    require(x.dim() in (2, 3), "rms_norm", f"x is {list(x.shape)}, must be [T, D] or [T, H, D]")
    require_activation("rms_norm", "x", x, *x.shape)
    require_weight("rms_norm", "weight", weight, x.shape[-1])
    require_scalar("rms_norm", "eps", eps)
    return torch.empty_like(x)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return weight.float() * (x * torch.rsqrt(mean_square + eps))


_rms_norm_op = define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", shape=_rms_norm_shape, reference=_rms_norm
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D] or [T, H, D] f32, weight [D] -> x's shape: x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; the mean and the division are float32.
    """
    return _rms_norm_op(x, weight, eps)
