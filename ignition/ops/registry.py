"""How an op is registered with torch, and the checks that all ops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flare.errors import InputError

_LIBRARY = torch.library.Library("ignition", "DEF")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What a weight may be stored as."""

SCALARS = (1e-37, 1e38)
"""The least and the greatest positive attribute."""


def define(schema: str, *, shape: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an op and returns the callable that dispatches to it.

    `schema` is torch's signature without the namespace. `shape` computes empty outputs and raises InputError for what
    the op does not take; it also guards the reference, so both refuse the same calls. `reference` computes.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)

    def checked(*args: Any) -> Any:
        shape(*args)
        return reference(*args)

    _LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ignition::{name}", shape, lib=_LIBRARY)
    return getattr(torch.ops.ignition, name).default


def require(condition: bool, op: str, problem: str) -> None:
    """Raises InputError with the op's name in front unless the condition holds."""
    if not condition:
        raise InputError(f"op {op}: {problem}")


def require_activation(op: str, name: str, tensor: Tensor, *dims: int | None) -> None:
    """A contiguous float32 tensor of these dimensions (None: any)."""
    require(tensor.dtype == torch.float32, op, f"{name} is {dtype_name(tensor)}, must be float32")
    require_shape(op, name, tensor, *dims)


def require_weight(op: str, name: str, tensor: Tensor, *dims: int | None) -> None:
    """A contiguous float32, bfloat16 or float16 tensor of these dimensions."""
    require(tensor.dtype in FLOATS, op, f"{name} is {dtype_name(tensor)}, must be float32, bfloat16 or float16")
    require_shape(op, name, tensor, *dims)


def require_index(op: str, name: str, tensor: Tensor, *dims: int | None) -> None:
    """A contiguous int32 tensor of these dimensions."""
    require(tensor.dtype == torch.int32, op, f"{name} is {dtype_name(tensor)}, must be int32")
    require_shape(op, name, tensor, *dims)


def require_shape(op: str, name: str, tensor: Tensor, *dims: int | None) -> None:
    """These dimensions (None: any), contiguous."""
    fits = tensor.dim() == len(dims) and all(d is None or d == n for d, n in zip(dims, tensor.shape, strict=True))
    wanted = ", ".join("*" if d is None else str(d) for d in dims)
    require(fits, op, f"{name} is {list(tensor.shape)}, must be [{wanted}]")
    require(tensor.is_contiguous(), op, f"{name} is not contiguous")


def require_scalar(op: str, name: str, value: float) -> None:
    """A positive number that f32 holds with all its digits, as targets compute with it."""
    low, high = SCALARS
    require(low <= value <= high, op, f"{name} is {value}, must be in [{low:g}, {high:g}]")


def require_range(op: str, name: str, index: Tensor, limit: int) -> None:
    """All indices in [0, limit). For references only: it reads the values."""
    if index.numel():
        low, high = int(index.min()), int(index.max())
        require(0 <= low and high < limit, op, f"{name} has {low if low < 0 else high}, must be in [0, {limit})")


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
