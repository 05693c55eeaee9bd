// log, equal to the bit on every machine: no libm, no fused operations.
#pragma once
#include <cstdint>
#include <cstring>

namespace flare {

// log(x) for a normal x > 0, within 1e-15 plus 2 units in the last place.
inline double logarithm(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint64_t kRootHalf = 0x3FE6A09E667F3BCD;  // sqrt(1/2): x = m * 2^n with m in [sqrt(1/2), sqrt(2))
  const int64_t n = int64_t(bits - kRootHalf) >> 52;
  bits -= uint64_t(n) << 52;
  double m;
  memcpy(&m, &bits, sizeof m);
  const double f = (m - 1.0) / (m + 1.0), s = f * f;  // log m = 2 artanh f, |f| < 0.1716: f^21 leaves 4e-18
  double series = 1.0 / 21;
  for (int32_t k = 19; k > 1; k -= 2) series = series * s + 1.0 / k;
  return double(n) * 0x1.62e42fefa39efp-1 + (2.0 * f + 2.0 * f * s * series);
}

}  // namespace flare
