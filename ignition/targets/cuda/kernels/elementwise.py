"""Elementwise arithmetic between activations, for graphs in which it is not part of a product."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.checks import FLOATS, Size, require_element, require_sizes
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer

BLOCK = 1024
"""Elements of a program."""


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) of f32. exp overflows to infinity for x below -88, which gives the right -0."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_mul(gate, up, out, elements, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False):
    """gate, up -> out, `elements` each: silu(gate) * up in f32, rounded once."""
    begin(PROGRAMMATIC)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    left = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (silu(left) * right).to(out.dtype.element_ty), mask=inside)


def silu_mul_launch(gate: Pointer, up: Pointer, out: Pointer, *, elements: int, label: str) -> Launch:
    """gate, up -> out, all of `elements` f32, bf16 or f16: gate / (1 + exp(-gate)) * up."""
    for name, pointer in (("gate", gate), ("up", up), ("out", out)):
        require_element("silu_mul", name, pointer, FLOATS)
    return _elementwise("silu_mul", {"gate": gate, "up": up, "out": out}, elements, label)


@triton.jit
def add(a, b, out, elements, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False):
    """a, b -> out, `elements` f32 each: a + b."""
    begin(PROGRAMMATIC)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    tl.store(out + place, tl.load(a + place, mask=inside) + tl.load(b + place, mask=inside), mask=inside)


def add_launch(a: Pointer, b: Pointer, out: Pointer, *, elements: int, label: str) -> Launch:
    """a, b -> out, all of `elements` f32: a + b. out may be one of the two."""
    for name, pointer in (("a", a), ("b", b), ("out", out)):
        require_element("add", name, pointer, ("f32",))
    return _elementwise("add", {"a": a, "b": b, "out": out}, elements, label)


@triton.jit
def rounded(x, out, elements, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False):
    """x -> out, `elements` each, rounded to nearest."""
    begin(PROGRAMMATIC)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    tl.store(out + place, tl.load(x + place, mask=inside).to(out.dtype.element_ty), mask=inside)


def round_launch(x: Pointer, out: Pointer, *, elements: int, label: str) -> Launch:
    """x -> out, of `elements` f32, and as many bf16 or f16: the nearest, of two that are equally near the even one."""
    require_element("rounded", "x", x, ("f32",))
    require_element("rounded", "out", out, ("bf16", "f16"))
    return _elementwise("rounded", {"x": x, "out": out}, elements, label)


def elements_size(elements: int) -> Size:
    """The elements of a launch, and how many the kernels here take."""
    return Size("the number of elements", elements)


def _elementwise(kernel: str, pointers: dict[str, Pointer], elements: int, label: str) -> Launch:
    require_sizes(kernel, elements_size(elements))
    return Launch(
        kernel=f"elementwise.{kernel}",
        args={**pointers, "elements": elements},
        constants={"BLOCK": BLOCK},
        grid=(-(-elements // BLOCK), 1, 1),
        label=label,
    )
