"""Kernels that must not get into a core, and one that takes the compiler with it."""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.programmatic import begin


@triton.jit
def wrong_types(x, out, PROGRAMMATIC: tl.constexpr):
    tl.store(out, tl.load(x).no_such_method())


@triton.jit
def wrong_assembly(out, PROGRAMMATIC: tl.constexpr):
    value = tl.inline_asm_elementwise("nonsense.u32 $0;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out, value)


@triton.jit
def scratch(out, K: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    described = tl.make_tensor_descriptor(out, shape=[K, K], strides=[K, 1], block_shape=[16, 16])
    described.store([0, 0], tl.zeros((16, 16), tl.float32))


@triton.jit
def knows_nothing_of_edges(x, out):
    tl.store(out, tl.load(x))


@triton.jit
def never_waits(x, out, PROGRAMMATIC: tl.constexpr):
    tl.store(out, tl.load(x))


@triton.jit
def reads_before_it_waits(x, out, PROGRAMMATIC: tl.constexpr):
    value = tl.load(x)
    begin(PROGRAMMATIC)
    tl.store(out, value)


@triton.jit
def returns_before_it_waits(x, out, PROGRAMMATIC: tl.constexpr):
    if tl.program_id(0) > 3:
        return
    begin(PROGRAMMATIC)
    tl.store(out, tl.load(x))


@triton.jit
def waits_in_a_branch(x, out, count, PROGRAMMATIC: tl.constexpr):
    if count > 3:
        begin(PROGRAMMATIC)
    tl.store(out, tl.load(x))
