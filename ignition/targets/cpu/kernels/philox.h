// The random numbers of draws: a function of counter and key, with no state.
#pragma once
#include <cstdint>

namespace flare {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
struct Philox {
  uint32_t word[4];

  Philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) : word{c0, c1, c2, c3} {
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{0xD2511F53} * word[0], b = uint64_t{0xCD9E8D57} * word[2];
      word[0] = uint32_t(b >> 32) ^ word[1] ^ k0;
      word[1] = uint32_t(b);
      word[2] = uint32_t(a >> 32) ^ word[3] ^ k1;
      word[3] = uint32_t(a);
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
  }

  // In [0, 1), a multiple of 2^-53.
  double uniform() const { return double((uint64_t(word[0]) << 32 | word[1]) >> 11) * 0x1p-53; }
};

}  // namespace flare
