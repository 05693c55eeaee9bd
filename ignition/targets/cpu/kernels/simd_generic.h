// The vector vocabulary in plain C++ with the compiler's portable vectors, for any architecture.
//
// Sixteen lanes are four vectors of 16 bytes, a size that every vector unit has. Products are rounded before they are
// added: a fused multiply-add without hardware would be a library call a lane.
#pragma once

namespace flare::simd {

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));
typedef int16_t Short8 __attribute__((vector_size(16)));

struct Floats {
  Float4 part[4];
};
struct Ints {
  Int4 part[4];
};

// Widths of register tiles.
constexpr int kDotTokens = 4;       // tokens of a tile of integer dots
constexpr int kFloatTokens = 2;     // tokens of a tile of float products
constexpr int kFloatBlocks = 1;     // row blocks of a tile of float products
constexpr int kScoreRuns = 1;       // runs of 16 keys scored together for several queries
constexpr int kValueVectors = 1;    // vectors of a value row summed together for several queries

template <class Vector, class Function>
FLARE_INLINE Vector by_part(Function function) {
  return {function(0), function(1), function(2), function(3)};
}

FLARE_INLINE Floats load(const float* p) {
  Floats a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
FLARE_INLINE Floats load_first(const float* p, int n) {
  float lanes[16] = {};
  std::memcpy(lanes, p, (size_t)n * 4);
  return load(lanes);
}
FLARE_INLINE void store(float* p, Floats a) { std::memcpy(p, &a, sizeof a); }
FLARE_INLINE void store_first(float* p, Floats a, int n) { std::memcpy(p, &a, (size_t)n * 4); }
FLARE_INLINE Floats splat(float a) {
  const Float4 four = {a, a, a, a};
  return {four, four, four, four};
}

FLARE_INLINE Floats operator+(Floats a, Floats b) {
  return by_part<Floats>([&](int i) { return a.part[i] + b.part[i]; });
}
FLARE_INLINE Floats operator-(Floats a, Floats b) {
  return by_part<Floats>([&](int i) { return a.part[i] - b.part[i]; });
}
FLARE_INLINE Floats operator*(Floats a, Floats b) {
  return by_part<Floats>([&](int i) { return a.part[i] * b.part[i]; });
}
FLARE_INLINE Floats operator/(Floats a, Floats b) {
  return by_part<Floats>([&](int i) { return a.part[i] / b.part[i]; });
}
FLARE_INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
FLARE_INLINE Floats fnma(Floats a, Floats b, Floats c) { return c - a * b; }
FLARE_INLINE Floats max(Floats a, Floats b) {
  return by_part<Floats>([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
FLARE_INLINE Floats min(Floats a, Floats b) {
  return by_part<Floats>([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}
FLARE_INLINE Floats abs(Floats a) {
  return by_part<Floats>([&](int i) { return (Float4)((Int4)a.part[i] & 0x7fffffff); });
}

// Lanes from <= lane < to keep a; the others become `other`.
FLARE_INLINE Floats select_lanes(Floats a, int from, int to, Floats other) {
  return by_part<Floats>([&](int i) {
    const Int4 lane = Int4{0, 1, 2, 3} + 4 * i;
    return (lane >= from) & (lane < to) ? a.part[i] : other.part[i];
  });
}

FLARE_INLINE float sum(Floats a) {
  const Float4 four = (a.part[0] + a.part[2]) + (a.part[1] + a.part[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
FLARE_INLINE float largest(Floats a) {
  float most = a.part[0][0];
  for (int i = 1; i < 16; ++i) most = most > a.part[i / 4][i % 4] ? most : a.part[i / 4][i % 4];
  return most;
}

// The largest |lane| of both; NaN if any is NaN, for as integers NaN lies above infinity.
FLARE_INLINE float largest_magnitude(Floats p, Floats q) {
  Int4 most = {};
  for (int i = 0; i < 4; ++i) {
    const Int4 a = (Int4)p.part[i] & 0x7fffffff, b = (Int4)q.part[i] & 0x7fffffff;
    const Int4 larger = a > b ? a : b;
    most = most > larger ? most : larger;
  }
  for (int i = 1; i < 4; ++i) most[0] = most[0] > most[i] ? most[0] : most[i];
  return ((Float4)most)[0];
}

FLARE_INLINE Ints load_ints(const uint8_t* p) {
  Ints a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
FLARE_INLINE Ints splat(int32_t a) {
  const Int4 four = {a, a, a, a};
  return {four, four, four, four};
}
FLARE_INLINE Ints operator+(Ints a, Ints b) {
  return by_part<Ints>([&](int i) { return a.part[i] + b.part[i]; });
}
template <int N>
FLARE_INLINE Ints shift_left(Ints a) {
  return by_part<Ints>([&](int i) { return (Int4)((Word4)a.part[i] << N); });
}
FLARE_INLINE Ints as_ints(Floats a) {
  return by_part<Ints>([&](int i) { return (Int4)a.part[i]; });
}
FLARE_INLINE Floats as_floats(Ints a) {
  return by_part<Floats>([&](int i) { return (Float4)a.part[i]; });
}
FLARE_INLINE Floats to_floats(Ints a) {
  return by_part<Floats>([&](int i) { return __builtin_convertvector(a.part[i], Float4); });
}
// To nearest, ties to even, for |a| < 2^22: adding 1.5 * 2^23 rounds, and leaves the integer in the low bits.
FLARE_INLINE Ints to_ints(Floats a) {
  return by_part<Ints>([&](int i) { return (Int4)(a.part[i] + 0x1.8p+23f) - 0x4b400000; });
}
FLARE_INLINE int32_t sum(Ints a) {
  const Int4 four = (a.part[0] + a.part[1]) + (a.part[2] + a.part[3]);
  return (four[0] + four[1]) + (four[2] + four[3]);
}
FLARE_INLINE void store_int8(int8_t* p, Ints a) {
  for (int i = 0; i < 16; ++i) {
    const int32_t lane = a.part[i / 4][i % 4];
    p[i] = (int8_t)(lane > 127 ? 127 : lane < -128 ? -128 : lane);
  }
}

FLARE_INLINE Ints low_nibbles(Ints a) {
  return by_part<Ints>([&](int i) { return a.part[i] & 0x0f0f0f0f; });
}
FLARE_INLINE Ints high_nibbles(Ints a) {
  return by_part<Ints>([&](int i) { return (Int4)((Word4)a.part[i] >> 4) & 0x0f0f0f0f; });
}

// Lane r gains sum over j of w[4r + j] * x[j]; w holds bytes 0..255, x four int8. Products of a byte and an int8 fit 16
// bits, so bytes 0 and 2, then 1 and 3, are multiplied as pairs of 16-bit numbers and added in 32 bits.
FLARE_INLINE Ints dot_bytes(Ints sum, Ints w, int32_t x) {
  const int32_t even = (int32_t)((uint32_t)(uint16_t)(int8_t)x | (uint32_t)(uint16_t)(int8_t)(x >> 16) << 16);
  const int32_t odd = (int32_t)((uint32_t)(uint16_t)(int8_t)(x >> 8) | (uint32_t)(uint16_t)(int8_t)(x >> 24) << 16);
  const Int4 even4 = {even, even, even, even}, odd4 = {odd, odd, odd, odd};
  return by_part<Ints>([&](int i) {
    const Int4 w02 = w.part[i] & 0x00ff00ff, w13 = (Int4)((Word4)w.part[i] >> 8) & 0x00ff00ff;
    const Int4 p = (Int4)((Short8)w02 * (Short8)even4), q = (Int4)((Short8)w13 * (Short8)odd4);
    const Int4 low = ((Int4)((Word4)p << 16) >> 16) + ((Int4)((Word4)q << 16) >> 16);
    return sum.part[i] + low + (p >> 16) + (q >> 16);
  });
}
// Bytes of w are in 0..15. A chain has at most 8 of these and its sums are read by end_nibbles.
FLARE_INLINE Ints dot_nibbles(Ints sum, Ints w, int32_t x) { return dot_bytes(sum, w, x); }
FLARE_INLINE Ints end_nibbles(Ints sum) { return sum; }
// Lane r gains sum over j of (w[4r + j] - 128) * x[j]. A chain of these starts from start_offset, which is told
// -128 times the sum of all x of the chain; x is in -127..127.
FLARE_INLINE Ints start_offset(int32_t correction) { return splat(correction); }
FLARE_INLINE Ints dot_offset(Ints sum, Ints w, int32_t x) { return dot_bytes(sum, w, x); }

// Moving the 15 lower bits into place and multiplying by 2^112 corrects the exponent's bias, for subnormals too.
FLARE_INLINE Floats load_f16(const uint16_t* p) {
  return by_part<Floats>([&](int i) {
    const Int4 half = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
    const Int4 magnitude = (half & 0x7fff) << 13;
    Int4 bits = (Int4)((Float4)magnitude * 0x1p+112f);
    bits |= ((half & 0x7c00) == 0x7c00) & 0x7f800000;
    return (Float4)(bits | (half & 0x8000) << 16);
  });
}
FLARE_INLINE Floats load_first_f16(const uint16_t* p, int n) {
  uint16_t lanes[16] = {};
  std::memcpy(lanes, p, (size_t)n * 2);
  return load_f16(lanes);
}
// To nearest, ties to even.
FLARE_INLINE uint16_t to_f16(float a) {
  uint32_t bits;
  std::memcpy(&bits, &a, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x47800000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) {                                  // subnormal: adding 0.5 rounds to units of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return (uint16_t)(sign | (bits - 0x38000000) >> 13);
}
FLARE_INLINE void store_f16(uint16_t* p, Floats a) {
  for (int i = 0; i < 16; ++i) p[i] = to_f16(a.part[i / 4][i % 4]);
}
FLARE_INLINE Floats load_bf16(const uint16_t* p) {
  return by_part<Floats>([&](int i) {
    const Int4 half = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
    return (Float4)(half << 16);
  });
}

}  // namespace flare::simd
