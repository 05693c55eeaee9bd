// Rotary position embedding: the angles of a step's tokens, and the rotation.
#pragma once
#include "kernel.h"
#include "simd.h"

namespace flare {

// Cosine and sine of x >= 0 in double, good to about 1e-13: rounded to float they are within half a unit in the last
// place and a little. Only additions and multiplications are used, so every instruction set gives the same bits.
struct Rotation {
  double cosine, sine;
};
FLARE_INLINE Rotation rotation(double x) {
  // x = quadrant * pi/2 + r. The first parts of pi/2 have 30 bits: quadrant times them is exact below 2^23.
  const double shifted = x * 0x1.45f306dc9c883p-1 + 0x1.8p+52;
  const double quadrant = shifted - 0x1.8p+52;
  double r = x - quadrant * 0x1.921fb54p+0;
  r -= quadrant * 0x1.10b46118p-30;
  r -= quadrant * 0x1.313198a2e0370p-61;
  const double z = r * r;
  double s = 1.0 / 6227020800;                              // Taylor series: |r| <= pi/4
  s = s * z - 1.0 / 39916800;
  s = s * z + 1.0 / 362880;
  s = s * z - 1.0 / 5040;
  s = s * z + 1.0 / 120;
  s = s * z - 1.0 / 6;
  s = r + r * z * s;
  double c = -1.0 / 87178291200;
  c = c * z + 1.0 / 479001600;
  c = c * z - 1.0 / 3628800;
  c = c * z + 1.0 / 40320;
  c = c * z - 1.0 / 720;
  c = c * z + 1.0 / 24;
  c = c * z - 0.5;
  c = 1.0 + z * c;
  const int64_t turn = (int64_t)quadrant;
  const double a = turn & 1 ? s : c, b = turn & 1 ? c : s;
  return {(turn + 1) & 2 ? -a : a, turn & 2 ? -b : b};
}

// RopeAngles<D2, scale>: inv_freq f32[D2], cos F[T][D2], sin F[T][D2]; the angle is float(position) * inv_freq, rounded
// to float as the models' references do. A unit is one token.
template <int D2, float scale>
struct RopeAngles {
  static constexpr int32_t args = 3;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(floats(D2)), writes(most.tokens * floats(D2)), writes(most.tokens * floats(D2))};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    const auto* inverse_frequency = (const float*)arg[0].pointer;
    for (int64_t t = begin; t < end; ++t) {
      float* cosine = (float*)arg[1].pointer + t * D2;
      float* sine = (float*)arg[2].pointer + t * D2;
      const float position = (float)step.position[t];
      for (int i = 0; i < D2; ++i) {
        const float angle = position * inverse_frequency[i];
        const Rotation at = rotation((double)angle);
        cosine[i] = (float)at.cosine * scale;
        sine[i] = (float)at.sine * scale;
      }
    }
  }
};

// Rotates x[DH] to out[DH] (may be the same): halves (a, b) become (a cos - b sin, b cos + a sin).
template <int DH>
FLARE_INLINE void rotate(const float* x, const float* cosine, const float* sine, float* out) {
  using namespace simd;
  static_assert(DH % 2 == 0);
  constexpr int half = DH / 2, whole = half / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    const Floats a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
    store(out + i, fnma(b, s, a * c));
    store(out + half + i, fma(a, s, b * c));
  }
  if constexpr (whole < half) {
    constexpr int rest = half - whole;
    const Floats a = load_first(x + whole, rest), b = load_first(x + half + whole, rest);
    const Floats c = load_first(cosine + whole, rest), s = load_first(sine + whole, rest);
    store_first(out + whole, fnma(b, s, a * c), rest);
    store_first(out + half + whole, fma(a, s, b * c), rest);
  }
}

// Rope<H, DH>: x F[T][H*DH], cos F[T][DH/2], sin F[T][DH/2], out F[T][H*DH] (may be x). A unit is one token.
template <int H, int DH>
struct Rope {
  static constexpr int32_t args = 4;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(most.tokens * floats(H * DH)), reads(most.tokens * floats(DH / 2)),
                            reads(most.tokens * floats(DH / 2)), writes(most.tokens * floats(H * DH))};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step&, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cosine = (const float*)arg[1].pointer + t * (DH / 2);
      const float* sine = (const float*)arg[2].pointer + t * (DH / 2);
      for (int h = 0; h < H; ++h) {
        const size_t at = ((size_t)t * H + h) * DH;
        rotate<DH>((const float*)arg[0].pointer + at, cosine, sine, (float*)arg[3].pointer + at);
      }
    }
  }
};

}  // namespace flare
