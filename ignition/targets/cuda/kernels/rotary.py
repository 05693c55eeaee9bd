"""The angles of rotary positions, once a step for all layers."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.checks import (
    Size,
    power_of_two,
    require,
    require_element,
    require_size,
    require_sizes,
)
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer


@triton.jit
def rope_angles(
    positions, inv_freq, cos, sin, scale, HALF: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False
):
    """positions [T] i32, inv_freq [HALF] f32 -> cos, sin [T, HALF] f32 of the angles rounded to f32, times scale."""
    begin(PROGRAMMATIC)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    position = tl.load(positions + token).to(tl.float32)
    angle = position * tl.load(inv_freq + column, mask=inside, other=0.0)
    tl.store(cos + token * HALF + column, tl.cos(angle) * scale, mask=inside)
    tl.store(sin + token * HALF + column, tl.sin(angle) * scale, mask=inside)


def frequencies_size(half: int) -> Size:
    """The frequencies of a head, and how many the kernel takes."""
    return Size("the number of frequencies", half, high=8192)


def rope_angles_launch(
    positions: Pointer,
    inv_freq: Pointer,
    cos: Pointer,
    sin: Pointer,
    *,
    tokens: int,
    half: int,
    scale: float,
    label: str,
) -> Launch:
    """positions [tokens] i32, inv_freq [half] f32 -> cos, sin [tokens, half] f32: cos(position * inv_freq) * scale and sin."""
    require_element("rope_angles", "positions", positions, ("i32",))
    for name, pointer in (("inv_freq", inv_freq), ("cos", cos), ("sin", sin)):
        require_element("rope_angles", name, pointer, ("f32",))
    require_size("rope_angles", "the number of tokens", tokens)
    require_sizes("rope_angles", frequencies_size(half))
    require(scale > 0, "rope_angles", f"scale is {scale}, must be above 0")
    return Launch(
        kernel="rotary.rope_angles",
        args={"positions": positions, "inv_freq": inv_freq, "cos": cos, "sin": sin, "scale": float(scale)},
        constants={"HALF": half, "BLOCK": power_of_two(half)},
        grid=(tokens, 1, 1),
        label=label,
        warps=1,
        stages=1,
    )
