// RMS normalisation.
#pragma once
#include "quantized_activation.h"

namespace flare {

// 1 / sqrt(mean(x^2) + eps). Four chains, added in one order, keep a long row from waiting for each addition.
template <int D>
FLARE_INLINE float inverse_rms(const float* x, float eps) {
  using namespace simd;
  Floats squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  constexpr int whole = D / kLanes * kLanes;
  int i = 0;
  for (; i + 4 * kLanes <= whole; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int chain = 0; chain < 4; ++chain) {
      const Floats v = load(x + i + chain * kLanes);
      squares[chain] = fma(v, v, squares[chain]);
    }
  }
  for (; i < whole; i += kLanes) {
    const Floats v = load(x + i);
    squares[0] = fma(v, v, squares[0]);
  }
  if constexpr (whole < D) {
    const Floats v = load_first(x + whole, D - whole);
    squares[1] = fma(v, v, squares[1]);
  }
  const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  return 1.0f / __builtin_sqrtf(total / (float)D + eps);
}

// out[i] = x[i] * inverse * weight[i]; out may be x.
template <int D>
FLARE_INLINE void scale_row(const float* x, float inverse, const float* weight, float* out) {
  using namespace simd;
  constexpr int whole = D / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) store(out + i, load(x + i) * splat(inverse) * load(weight + i));
  if constexpr (whole < D) {
    constexpr int rest = D - whole;
    const Floats y = load_first(x + whole, rest) * splat(inverse) * load_first(weight + whole, rest);
    store_first(out + whole, y, rest);
  }
}

// Norm<Count, D, eps, Out>: x F[T][D], weight f32[D], out (F or Q)[count][D]. With Count = Rows, output row i is
// computed from x[row[i]]. A unit is one output row.
template <class Count, int D, float eps, class Out>
struct Norm {
  static constexpr int32_t args = 3;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(most.tokens * floats(D)), reads(floats(D)),
                            writes(Count::most(most) * output_bytes<Out, D>())};
    return all[arg];
  }
  static int64_t units(const Step& step) { return Count::count(step); }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    using namespace simd;
    const auto* weight = (const float*)arg[1].pointer;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t source = std::is_same_v<Count, Rows> ? step.row[t] : t;
      const float* x = (const float*)arg[0].pointer + source * D;
      const float inverse = inverse_rms<D>(x, eps);
      if constexpr (std::is_same_v<Out, ToQuant>) {
        uint8_t* row = (uint8_t*)arg[2].pointer + t * QuantRow<D>::bytes;
        const auto scaled = [&](int i) { return load(x + i) * splat(inverse) * load(weight + i); };
        for (int g = 0; g < D / 32; ++g) QuantRow<D>::put(row, g, scaled(g * 32), scaled(g * 32 + 16));
      } else {
        scale_row<D>(x, inverse, weight, (float*)arg[2].pointer + t * D);
      }
    }
  }
};

}  // namespace flare
