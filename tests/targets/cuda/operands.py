"""Operands of the kernels' tests: tensors as pointers, guarded buffers, weights in every format with their exact values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from ignition.targets.cuda.kernels.matrix import Format, Matrix
from ignition.targets.cuda.launch import Element, Launch, Pointer, TensorMap
from tests.support.triton_interpreter import Builder, run

TYPES: dict[Element, torch.dtype] = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
}
ELEMENTS = {type_: element for element, type_ in TYPES.items()}
FLOATS: tuple[Element, ...] = ("f32", "bf16", "f16")
FORMATS: tuple[Format, ...] = get_args(Format)

ROUNDING: dict[Element, float] = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
"""Largest relative error of one rounding to nearest: 2^-p for p bits of significand."""

GUARD = 96


def pointer(tensor: Tensor | None) -> Pointer:
    assert tensor is not None and tensor.is_contiguous()
    return Pointer(ELEMENTS[tensor.dtype], tensor)


def optional(tensor: Tensor | None) -> Pointer | None:
    return None if tensor is None else pointer(tensor)


def normal(*shape: int, seed: int, element: Element = "f32") -> Tensor:
    return guarded(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(TYPES[element]))


def integers(low: int, high: int, *shape: int, seed: int, element: Element = "i32") -> Tensor:
    values = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
    return guarded(values.to(TYPES[element]))


def guarded(values: Tensor) -> Tensor:
    """A copy between guards: NaN, or what is largest, lies before its first and behind its last element."""
    size = values.numel()
    whole = torch.empty(size + 2 * GUARD, dtype=values.dtype)
    whole.view(torch.uint8).fill_(0x7F)
    if values.dtype.is_floating_point and values.dtype.itemsize > 1:
        whole.fill_(float("nan"))
    inner = whole[GUARD : GUARD + size]
    inner.copy_(values.reshape(-1))
    return inner.view(values.shape)


def empty(*shape: int, element: Element = "f32") -> Tensor:
    """A guarded output, full of NaN."""
    return guarded(torch.full(shape, float("nan"), dtype=TYPES[element]))


def guards(tensor: Tensor) -> bytes:
    """What lies before and behind a guarded tensor."""
    size = tensor.element_size()
    raw = np.frombuffer(bytes(tensor.untyped_storage()), np.uint8)
    start = tensor.storage_offset() * size
    return bytes(raw[:start]) + bytes(raw[start + tensor.numel() * size :])


def run_within(launch: Launch) -> None:
    """Runs a launch, and fails if it reads or writes an element that lies in none of its operands."""
    values = [value.pointer if isinstance(value, TensorMap) else value for value in launch.args.values()]
    operands = [value.operand for value in values if isinstance(value, Pointer)]
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in operands]

    def check(places: np.ndarray, wanted: np.ndarray) -> None:
        places = np.broadcast_to(places, wanted.shape)[wanted]
        inside = np.zeros(places.shape, bool)
        for first, last in ranges:
            inside |= (places >= first) & (places < last)
        assert inside.all(), f"{launch.kernel} touches memory that is not its own"

    def load(self: Builder, places: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        check(places.data, mask.data)
        return masked_load(self, places, mask, *rest, **more)

    def store(self: Builder, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(places.data, mask.data)
        return masked_store(self, places, value, mask, *rest)

    masked_load, masked_store = Builder.create_masked_load, Builder.create_masked_store
    with patch.multiple(Builder, create_masked_load=load, create_masked_store=store):
        run(launch)


def pointed(launch: Launch) -> Launch:
    """The same launch with pointers in the place of its tensor maps."""
    args = {name: value.pointer if isinstance(value, TensorMap) else value for name, value in launch.args.items()}
    assert args != launch.args
    return replace(launch, args=args, constants={**launch.constants, "MAPPED": False})


def bits(tensor: Tensor) -> list[int]:
    width = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()]
    return tensor.contiguous().view(width).reshape(-1).tolist()


def matrix(format: Format, n: int, k: int, seed: int) -> tuple[Matrix, Tensor, Tensor]:
    """A random weight, its exact values [n, k] f64, and the sum of their parts' magnitudes [n, k] f64 (for q4 |scale * quant|
    + |minimum|, else the values')."""
    if format in ("f32", "bf16", "f16"):
        values = normal(n, k, seed=seed, element=format)
        return Matrix(format, n, k, pointer(values)), values.double(), values.double().abs()
    if format == "fp8":
        values = guarded(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn))
        scale = normal(n, seed=seed + 1)
        exact = values.float().double() * scale.double()[:, None]
        return Matrix("fp8", n, k, pointer(values), pointer(scale)), exact, exact.abs()
    scale = normal(n, k // 32, seed=seed + 1, element="f16")
    spread = scale.double().repeat_interleave(32, dim=1)
    if format == "q8":
        quant = integers(-128, 128, n, k, seed=seed, element="i8")
        exact = quant.double() * spread
        return Matrix("q8", n, k, pointer(quant), pointer(scale)), exact, exact.abs()
    minimum = normal(n, k // 32, seed=seed + 2, element="f16")
    packed = integers(0, 256, n, k // 2, seed=seed, element="u8")
    halves = packed.view(n, k // 32, 16)
    quant = torch.cat((halves % 16, halves // 16), dim=-1).view(n, k)
    scaled, least = quant.double() * spread, minimum.double().repeat_interleave(32, dim=1)
    return (
        Matrix("q4", n, k, pointer(packed), pointer(scale), pointer(minimum)),
        scaled + least,
        scaled.abs() + least.abs(),
    )


def within(found: Tensor, exact: Tensor, error: Tensor | float) -> bool:
    """Whether `found` is `exact`, computed with an error of at most `error` and then rounded once to its type."""
    rounding = (
        ROUNDING[ELEMENTS[found.dtype]] * (exact.abs() + error) + 2.0**-25
    )  # the last for halves without normal form
    return bool(((found.double() - exact).abs() <= error + rounding).all())
