// Weight formats: how a matrix [N, K] lies in memory, and how one of its rows is read back.
//
// Rows come in blocks of 16, back to back, N padded with zero rows. Inside a block the 16 rows are the 16 lanes:
//   f32, f16, bf16   w[K][16]
//   q8               f16 scale[K/32][16], u8 w[K/32][8][16][4]: byte [g][i][r][j] is row r, k = 32g + 4i + j, plus 128
//   q4               f16 scale[K/32][16], f16 min[K/32][16], u8 w[K/32][4][16][4]: byte [g][i][r][j] holds row r,
//                    k = 32g + 8i + j in the low nibble and k + 4 in the high one; weight = scale * nibble + min
#pragma once
#include <type_traits>

#include "simd.h"

namespace flare {

constexpr int kBlockRows = 16;                              // rows of a weight block
constexpr int kGroup = 32;                                  // elements that share a quantisation scale

constexpr int64_t blocks_of(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

struct F32 {
  using Element = float;
  static constexpr bool quantized = false;
  static constexpr size_t block_bytes(int K) { return (size_t)K * kBlockRows * sizeof(Element); }
  static FLARE_INLINE simd::Floats load(const Element* p) { return simd::load(p); }
  static FLARE_INLINE simd::Floats load_first(const Element* p, int n) { return simd::load_first(p, n); }
  static FLARE_INLINE void store(Element* p, simd::Floats a) { simd::store(p, a); }
};

struct F16 {
  using Element = uint16_t;
  static constexpr bool quantized = false;
  static constexpr size_t block_bytes(int K) { return (size_t)K * kBlockRows * sizeof(Element); }
  static FLARE_INLINE simd::Floats load(const Element* p) { return simd::load_f16(p); }
  static FLARE_INLINE simd::Floats load_first(const Element* p, int n) { return simd::load_first_f16(p, n); }
  static FLARE_INLINE void store(Element* p, simd::Floats a) { simd::store_f16(p, a); }
};

struct BF16 {
  using Element = uint16_t;
  static constexpr bool quantized = false;
  static constexpr size_t block_bytes(int K) { return (size_t)K * kBlockRows * sizeof(Element); }
  static FLARE_INLINE simd::Floats load(const Element* p) { return simd::load_bf16(p); }
};

struct Q8 {
  static constexpr bool quantized = true;
  static constexpr size_t block_bytes(int K) { return weights_at(K) + (size_t)K * kBlockRows; }
  static constexpr size_t weights_at(int K) { return (size_t)(K / kGroup) * kBlockRows * 2; }
};

struct Q4 {
  static constexpr bool quantized = true;
  static constexpr size_t block_bytes(int K) { return weights_at(K) + (size_t)K * kBlockRows / 2; }
  static constexpr size_t mins_at(int K) { return (size_t)(K / kGroup) * kBlockRows * 2; }
  static constexpr size_t weights_at(int K) { return 2 * mins_at(K); }
};

// Bytes of a packed matrix [N, K].
template <class Fmt>
constexpr uint64_t packed_bytes(int64_t N, int K) {
  return (uint64_t)blocks_of(N) * Fmt::block_bytes(K);
}

// Writes row `row` of the packed matrix [.., K] to out[K].
template <class Fmt, int K>
inline void decode_row(const uint8_t* packed, int row, float* out) {
  using namespace simd;
  const uint8_t* block = packed + (size_t)(row / kBlockRows) * Fmt::block_bytes(K);
  const int lane = row % kBlockRows;
  if constexpr (Fmt::quantized) {
    const auto* scales = (const uint16_t*)block;
    for (int g = 0; g < K / kGroup; ++g) {
      uint16_t pair[16] = {scales[g * kBlockRows + lane]};
      float numbers[kGroup];
      if constexpr (std::is_same_v<Fmt, Q8>) {
        const uint8_t* w = block + Q8::weights_at(K) + (size_t)g * kGroup * kBlockRows + lane * 4;
        for (int k = 0; k < kGroup; ++k) numbers[k] = (float)((int)w[k / 4 * 64 + k % 4] - 128);
      } else {
        pair[1] = scales[(K / kGroup + g) * kBlockRows + lane];
        const uint8_t* w = block + Q4::weights_at(K) + (size_t)g * kGroup / 2 * kBlockRows + lane * 4;
        for (int k = 0; k < kGroup; ++k) numbers[k] = (float)(w[k / 8 * 64 + k % 4] >> (k & 4) & 15);
      }
      float factors[16];                                    // the group's scale, then its minimum or 0
      store(factors, load_f16(pair));
      for (int k = 0; k < kGroup; k += kLanes)
        store(out + g * kGroup + k, fma(load(numbers + k), splat(factors[0]), splat(factors[1])));
    }
  } else {
    const auto* w = (const typename Fmt::Element*)block + lane;
    for (int k = 0; k < K; k += kLanes) {
      const int n = K - k < kLanes ? K - k : kLanes;
      typename Fmt::Element column[kLanes] = {};
      for (int i = 0; i < n; ++i) column[i] = w[(size_t)(k + i) * kBlockRows];
      store_first(out + k, Fmt::load(column), n);
    }
  }
}

}  // namespace flare
