// Sixteen lanes of float and of int32, the only vector width the kernels know.
//
// Each instruction set gives the same small vocabulary, so that a kernel is written once. x86-64-v3 and v4 give the same
// bits: both fuse where `fma` is written and nowhere else, both reduce sixteen lanes by the same tree (halves of 8, 4, 2,
// 1), and integer dots are exact. The generic version rounds products before adding, so its last bits may differ.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#define FLARE_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

namespace flare::simd {

constexpr int kLanes = 16;

// max(a, b) and min(a, b) are b where either is NaN, in every version: a clamp names its bound first, and NaN passes.

// Asks for the cache line at `address`; any address is allowed, also one past the end of a mapping.
FLARE_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

// Adding this leaves the nearest integer n, with the exponent's bias, in the low bits of the sum: shifted left by
// 23 they are the number 2^n.
constexpr float kShift = 0x1.8p+23f + 127.0f;

// e^x with an error of about one unit in the last place; NaN for NaN. x is clamped to [-86.5, 88], so the result is a
// positive normal number: callers that need an exact zero select it.
FLARE_INLINE Floats exp(Floats x) {
  x = min(splat(88.0f), max(splat(-86.5f), x));
  // x = n ln 2 + r.
  const Floats shifted = fma(x, splat(0x1.715476p+0f), splat(kShift));
  const Floats n = shifted - splat(kShift);
  Floats r = fnma(n, splat(0x1.62ep-1f), x);              // the high part of ln 2 has 13 bits: n times it is exact
  r = fnma(n, splat(0x1.0bfbe8p-15f), r);
  Floats p = splat(0x1.a01a02p-13f);                      // 1/7!: the next term is below 2^-27 for |r| <= ln 2 / 2
  p = fma(p, r, splat(0x1.6c16c2p-10f));
  p = fma(p, r, splat(0x1.111112p-7f));
  p = fma(p, r, splat(0x1.555556p-5f));
  p = fma(p, r, splat(0x1.555556p-3f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return p * as_floats(shift_left<23>(as_ints(shifted)));
}

// 2^x with an error of about one unit in the last place, for x <= 126; NaN for NaN. x below -64 gives 2^-64. That is a
// softmax's weight of nothing: it vanishes beside a weight of 1, and yet its products are no denormals, which are slow.
FLARE_INLINE Floats exp2(Floats x) {
  x = max(splat(-64.0f), x);
  const Floats shifted = x + splat(kShift);
  const Floats r = x - (shifted - splat(kShift));           // exact
  Floats p = splat(0x1.48cep-13f);                          // minimax for |r| <= 1/2, with p(0) = 1: below 2^-25
  p = fma(p, r, splat(0x1.5eebbp-10f));
  p = fma(p, r, splat(0x1.3b2624p-7f));
  p = fma(p, r, splat(0x1.c6afc6p-5f));
  p = fma(p, r, splat(0x1.ebfbdep-3f));
  p = fma(p, r, splat(0x1.62e43p-1f));
  p = fma(p, r, splat(1.0f));
  return p * as_floats(shift_left<23>(as_ints(shifted)));
}

// x / (1 + e^-x)
FLARE_INLINE Floats silu(Floats x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }

}  // namespace flare::simd
