// Activations quantised to int8 in groups of 32: the storage that integer dots read.
//
// A row of K activations is: int8 q[K]; f32 scale[K/32]; f32 sum[K/32] = scale * (sum of q), which a minimum is
// multiplied by; int32 correction[K/32] = -128 * (sum of q), which removes the offset of q8 weights. Rows are padded to
// 64 bytes. q = x * (127 / absmax) to nearest even and scale = absmax / 127; in a group that holds NaN or infinity q is
// 0, scale and sum are NaN.
#pragma once
#include <type_traits>

#include "kernel.h"
#include "simd.h"

namespace flare {

// Output storages.
struct ToFloat {};                                          // f32 [count][N]
struct ToQuant {};                                          // quantised rows

// Which live count bounds a kernel's first dimension.
struct Tokens {
  static FLARE_INLINE int count(const Step& step) { return step.tokens; }
  static uint64_t most(const Capacity& capacity) { return capacity.tokens; }
};
struct Rows {
  static FLARE_INLINE int count(const Step& step) { return step.rows; }
  static uint64_t most(const Capacity& capacity) { return capacity.rows; }
};

template <int K>
struct QuantRow {
  static_assert(K % 32 == 0, "quantised activations come in groups of 32");
  static constexpr int groups = K / 32;
  static constexpr size_t scales_at = K;
  static constexpr size_t sums_at = scales_at + groups * 4;
  static constexpr size_t corrections_at = sums_at + groups * 4;
  static constexpr size_t bytes = (corrections_at + groups * 4 + 63) / 64 * 64;

  // Four consecutive q, from k = 32g + 4i.
  static FLARE_INLINE int32_t quad(const uint8_t* row, int g, int i) { return word(row + g * 32 + i * 4); }
  static FLARE_INLINE float scale(const uint8_t* row, int g) { return real(row + scales_at + g * 4); }
  static FLARE_INLINE float sum(const uint8_t* row, int g) { return real(row + sums_at + g * 4); }
  static FLARE_INLINE int32_t correction(const uint8_t* row, int g) { return word(row + corrections_at + g * 4); }

  // Quantises x[32g..32g+31], given as two vectors.
  static FLARE_INLINE void put(uint8_t* row, int g, simd::Floats a, simd::Floats b) {
    using namespace simd;
    const float absmax = largest_magnitude(a, b);
    if (!(absmax < __builtin_inff())) return put_nan(row, g);
    // Groups too small for a finite reciprocal are zero.
    const bool nonzero = absmax > 0x1p-100f;
    const Floats reciprocal = splat(nonzero ? 127.0f / absmax : 0.0f);
    const float scale = nonzero ? absmax / 127.0f : 0.0f;
    const Ints p = to_ints(a * reciprocal), q = to_ints(b * reciprocal);
    store_int8((int8_t*)row + g * 32, p);
    store_int8((int8_t*)row + g * 32 + 16, q);
    const int32_t total = simd::sum(p + q);
    const float weighted = scale * (float)total;
    const int32_t correction = -128 * total;
    std::memcpy(row + scales_at + g * 4, &scale, 4);
    std::memcpy(row + sums_at + g * 4, &weighted, 4);
    std::memcpy(row + corrections_at + g * 4, &correction, 4);
  }

 private:
  // A group that holds NaN or infinity is NaN as a whole: every product with it is.
  static __attribute__((noinline, cold)) void put_nan(uint8_t* row, int g) {
    const float nan = __builtin_nanf("");
    std::memset(row + g * 32, 0, 32);
    std::memcpy(row + scales_at + g * 4, &nan, 4);
    std::memcpy(row + sums_at + g * 4, &nan, 4);
    std::memset(row + corrections_at + g * 4, 0, 4);
  }
  static FLARE_INLINE int32_t word(const uint8_t* p) {
    int32_t a;
    std::memcpy(&a, p, 4);
    return a;
  }
  static FLARE_INLINE float real(const uint8_t* p) {
    float a;
    std::memcpy(&a, p, 4);
    return a;
  }
};

// Bytes of a row of N outputs in storage Out.
template <class Out, int N>
constexpr uint64_t output_bytes() {
  if constexpr (std::is_same_v<Out, ToQuant>) return QuantRow<N>::bytes;
  else return floats(N);
}

// Quantize<Count, K>: x F[count][K], out Q[count][K].
template <class Count, int K>
struct Quantize {
  static constexpr int32_t args = 2;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(Count::most(most) * floats(K)), writes(Count::most(most) * QuantRow<K>::bytes)};
    return all[arg];
  }
  static int64_t units(const Step& step) { return Count::count(step); }
  static void run(const Step&, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = (const float*)arg[0].pointer + t * K;
      uint8_t* row = (uint8_t*)arg[1].pointer + t * QuantRow<K>::bytes;
      for (int g = 0; g < K / 32; ++g) QuantRow<K>::put(row, g, simd::load(x + g * 32), simd::load(x + g * 32 + 16));
    }
  }
};

}  // namespace flare
