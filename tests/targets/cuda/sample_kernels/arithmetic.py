"""Two kernels that compile: a sum, and a product that uses shared memory."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.programmatic import begin


@triton.jit
def add(x, y, out, count, scale, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    begin(PROGRAMMATIC)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + place, mask=place < count)
    if y is not None:
        total += tl.load(y + place, mask=place < count)
    tl.store(out + place, total * scale, mask=place < count)


@triton.jit
def product(x, w, out, K: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    begin(PROGRAMMATIC)
    rows, inner = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        left = tl.load(x + rows[:, None] * K + k + inner[None, :])
        right = tl.load(w + rows[:, None] * K + k + inner[None, :])
        total += tl.dot(left, tl.trans(right))
    tl.store(out + rows[:, None] * BLOCK + rows[None, :], total)
