"""Matrix product with a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from ignition.ops.registry import define, require_activation, require_weight


def _linear_shape(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    require_activation("linear", "x", x, None, None)
    require_weight("linear", "w", w, None, x.shape[1])
    if bias is not None:
        require_weight("linear", "bias", bias, w.shape[0])
    return x.new_empty((x.shape[0], w.shape[0]))


def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, w.float(), None if bias is None else bias.float())


_linear_op = define("linear(Tensor x, Tensor w, Tensor? bias) -> Tensor", shape=_linear_shape, reference=_linear)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] or [R, K] f32, w [N, K] weight, bias [N] or None -> [T, N]: x w^T + bias, summed in float32."""
    return _linear_op(x, w, bias)
