"""Kernels that must not get into a core, and one that takes the compiler with it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wrong_types(x, out):
    tl.store(out, tl.load(x).no_such_method())


@triton.jit
def wrong_assembly(out):
    value = tl.inline_asm_elementwise("nonsense.u32 $0;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out, value)


@triton.jit
def scratch(out, K: tl.constexpr):
    described = tl.make_tensor_descriptor(out, shape=[K, K], strides=[K, 1], block_shape=[16, 16])
    described.store([0, 0], tl.zeros((16, 16), tl.float32))
