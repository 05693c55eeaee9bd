"""exp, log and random numbers of the cpu target's kernels (exponential.h, logarithm.h, philox.h), to the bit.

Every operation is IEEE's and none is fused (compile_worker.py builds with enable_fp_fusion=False, compile.py with NO_PAIRS), so
equal arguments give equal bits on both targets and on every architecture.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _hex(text: str) -> tl.constexpr:
    return tl.constexpr(float.fromhex(text))


NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))
LARGEST = _hex("0x1.fffffep127")  # FLT_MAX

VANISHED = tl.constexpr(-86.0)  # weights of exponents below are 0
_MAGIC = _hex("0x1.8p23")  # adding it rounds to an integer
_PER_LN2 = _hex("0x1.715476p0")
_LN2_HIGH = _hex("0x1.62e4p-1")
_LN2_LOW = _hex("0x1.7f7d1cp-20")
_C7 = _hex("0x1.a01a02p-13")
_C6 = _hex("0x1.6c16c2p-10")
_C5 = _hex("0x1.111112p-7")
_C4 = _hex("0x1.555556p-5")
_C3 = _hex("0x1.555556p-3")


@triton.jit
def exp_nonpositive(x):
    """exp of f32 x <= 0, within 2 units in the last place; 0 below -86 (also for -inf)."""
    y = tl.where(x < VANISHED, VANISHED, x)
    n = (y * _PER_LN2 + _MAGIC) - _MAGIC
    r = (y - n * _LN2_HIGH) - n * _LN2_LOW  # ln 2 in two parts; the first product is exact
    p = r * _C7 + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    bits = p.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)
    return tl.where(x < VANISHED, 0.0, bits.to(tl.float32, bitcast=True))


_ROOT_HALF = tl.constexpr(0x3FE6A09E667F3BCD)  # bits of sqrt(1/2): x = m * 2^n with m in [sqrt(1/2), sqrt(2))
_LN2 = _hex("0x1.62e42fefa39efp-1")


@triton.jit
def logarithm(x):
    """log of f64 x > 0 that is normal, within 1e-15 plus 2 units in the last place."""
    bits = x.to(tl.int64, bitcast=True)
    n = (bits - _ROOT_HALF) >> 52
    m = (bits - (n << 52)).to(tl.float64, bitcast=True)
    f = (m - 1.0) / (m + 1.0)
    s = f * f  # log m = 2 artanh f
    series = s * 0.0 + 1.0 / 21
    for i in tl.static_range(9):
        series = series * s + 1.0 / (19 - 2 * i)
    return n.to(tl.float64) * _LN2 + (2.0 * f + 2.0 * f * s * series)


_WORD = tl.constexpr(0xFFFFFFFF)
_MULTIPLY_0 = tl.constexpr(0xD2511F53)
_MULTIPLY_2 = tl.constexpr(0xCD9E8D57)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10: four words of a counter and a key, all 32 bits in i64."""
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * _MULTIPLY_0
        b = c2.to(tl.uint64) * _MULTIPLY_2
        c0 = ((b >> 32).to(tl.int64) & _WORD) ^ c1 ^ k0
        c1 = b.to(tl.int64) & _WORD
        c2 = ((a >> 32).to(tl.int64) & _WORD) ^ c3 ^ k1
        c3 = a.to(tl.int64) & _WORD
        k0 = (k0 + _WEYL_0) & _WORD
        k1 = (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


@triton.jit
def uniform(c0, c1, k0, k1):
    """The draw of counter (c0, c1, 0, 0) and key (k0, k1), int32 words: f64 in [0, 1), a multiple of 2^-53."""
    c0 = c0.to(tl.int64) & _WORD
    c1 = c1.to(tl.int64) & _WORD
    zero = c0 * 0
    first, second, _, _ = philox(c0, c1, zero, zero, k0.to(tl.int64) & _WORD, k1.to(tl.int64) & _WORD)
    return ((first << 21) | (second >> 11)).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
