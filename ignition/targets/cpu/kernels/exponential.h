// exp on vectors, equal to the bit on every machine: no libm, no fused operations.
#pragma once
#include <cmath>
#include <cstdint>

namespace flare::exponential {

// As many lanes as the machine's registers have. Nothing depends on their number: sums have a fixed order of their own.
#if defined(__AVX512F__)
constexpr int32_t kWidth = 16;
#elif defined(__AVX2__)
constexpr int32_t kWidth = 8;
#else
constexpr int32_t kWidth = 4;
#endif
typedef float Floats __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));

// exp(x) for x <= 0, within 2 units in the last place; 0 below -86 (also for -inf).
inline Floats exp_nonpositive(Floats x) {
  const Floats floor = Floats{} - 86.0f, magic = Floats{} + 0x1.8p23f;  // adding magic rounds to an integer
  const Ints vanished = x < floor;
  const Floats y = vanished ? floor : x;
  const Floats n = (y * 0x1.715476p0f + magic) - magic;
  const Floats r = (y - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts; the first product is exact
  Floats p = r * 0x1.a01a02p-13f + 0x1.6c16c2p-10f;  // Taylor: |r| <= ln(2) / 2, so degree 7 leaves 1e-8
  p = p * r + 0x1.111112p-7f;
  p = p * r + 0x1.555556p-5f;
  p = p * r + 0x1.555556p-3f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Ints scaled = (Ints)p + (__builtin_convertvector(n, Ints) << 23);  // p * 2^n; a cast keeps the bits
  return vanished ? Floats{} : (Floats)scaled;
}

// exp((x - highest) * inverse) for x <= highest. At a highest of +inf: 1 for those that are there too, 0 for all others.
inline Floats relative_weight(Floats x, float highest, float inverse) {
  if (highest == INFINITY) return x == INFINITY ? Floats{} + 1.0f : Floats{};
  return exp_nonpositive((x - highest) * inverse);
}

}  // namespace flare::exponential
