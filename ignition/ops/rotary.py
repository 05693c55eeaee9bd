"""Rotary position embedding (Su et al., "RoFormer", 2021), in the rotate-half order of Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from ignition.ops.registry import define, require, require_activation, require_index, require_scalar, require_shape


def _rope_angles_shape(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    require_index("rope_angles", "positions", positions, None)
    require_activation("rope_angles", "inv_freq", inv_freq, None)
    require_scalar("rope_angles", "scale", scale)
    shape = (positions.shape[0], inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


def _rope_angles(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    angles = positions[:, None].float() * inv_freq
    return angles.cos() * scale, angles.sin() * scale


def _rope_shape(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    require_activation("rope", "x", x, None, None, None)
    require(x.shape[2] % 2 == 0, "rope", f"x has head size {x.shape[2]}, must be even")
    for name, table in (("cos", cos), ("sin", sin)):
        require_shape("rope", name, table, x.shape[0], x.shape[2] // 2)
        require_activation("rope", name, table, *table.shape)
    return torch.empty_like(x)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


_rope_angles_op = define(
    "rope_angles(Tensor positions, Tensor inv_freq, float scale) -> (Tensor, Tensor)",
    shape=_rope_angles_shape,
    reference=_rope_angles,
)
_rope_op = define("rope(Tensor x, Tensor cos, Tensor sin) -> Tensor", shape=_rope_shape, reference=_rope)


def rope_angles(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """positions [T] int32, inv_freq [D2] f32 -> cos, sin [T, D2] f32.

    The angle is float32(position) * inv_freq, rounded to float32; `scale` (YaRN's attention factor) multiplies both.
    """
    return _rope_angles_op(positions, inv_freq, scale)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, DH] f32, cos and sin [T, DH/2] -> [T, H, DH]: element i of a head is rotated with element i + DH/2.

    y[i] = x[i] cos[i] - x[i + DH/2] sin[i],  y[i + DH/2] = x[i + DH/2] cos[i] + x[i] sin[i]
    """
    return _rope_op(x, cos, sin)
