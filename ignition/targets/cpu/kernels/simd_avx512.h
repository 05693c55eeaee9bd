// The vector vocabulary on AVX-512 F/BW/DQ/VL and VNNI (x86-64-v4 with -mavx512vnni).
#pragma once

// GCC 12's own header trips its warnings wherever an intrinsic has a don't-care operand.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace flare::simd {

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};

// Widths of register tiles: 32 registers of 16 lanes.
constexpr int kDotTokens = 12;      // tokens of a tile of integer dots
constexpr int kFloatTokens = 8;     // tokens of a tile of float products
constexpr int kFloatBlocks = 2;     // row blocks of a tile of float products
constexpr int kScoreRuns = 4;       // runs of 16 keys scored together for several queries
constexpr int kValueVectors = 4;    // vectors of a value row summed together for several queries

FLARE_INLINE Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
FLARE_INLINE Floats load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
FLARE_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
FLARE_INLINE void store_first(float* p, Floats a, int n) {
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a.v);
}
FLARE_INLINE Floats splat(float a) { return {_mm512_set1_ps(a)}; }

FLARE_INLINE Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
FLARE_INLINE Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
FLARE_INLINE Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
FLARE_INLINE Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
FLARE_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }     // a * b + c
FLARE_INLINE Floats fnma(Floats a, Floats b, Floats c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }   // c - a * b
FLARE_INLINE Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
FLARE_INLINE Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
FLARE_INLINE Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }

// Lanes from <= lane < to keep a; the others become `other`.
FLARE_INLINE Floats select_lanes(Floats a, int from, int to, Floats other) {
  const __mmask16 keep = (__mmask16)(((1u << to) - 1) & ~((1u << from) - 1));
  return {_mm512_mask_blend_ps(keep, other.v, a.v)};
}

FLARE_INLINE float sum(Floats a) {
  const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
FLARE_INLINE float largest(Floats a) {
  const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

// The largest |lane| of both; NaN if any is NaN, for as integers NaN lies above infinity.
FLARE_INLINE float largest_magnitude(Floats p, Floats q) {
  const __m512i a = _mm512_max_epi32(_mm512_castps_si512(abs(p).v), _mm512_castps_si512(abs(q).v));
  const __m256i b = _mm256_max_epi32(_mm512_castsi512_si256(a), _mm512_extracti32x8_epi32(a, 1));
  const __m128i c = _mm_max_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  const __m128i d = _mm_max_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(d, _mm_shuffle_epi32(d, 0xb1))));
}

FLARE_INLINE Ints load_ints(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
FLARE_INLINE Ints splat(int32_t a) { return {_mm512_set1_epi32(a)}; }
FLARE_INLINE Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
template <int N>
FLARE_INLINE Ints shift_left(Ints a) {
  return {_mm512_slli_epi32(a.v, N)};
}
FLARE_INLINE Ints as_ints(Floats a) { return {_mm512_castps_si512(a.v)}; }
FLARE_INLINE Floats as_floats(Ints a) { return {_mm512_castsi512_ps(a.v)}; }
FLARE_INLINE Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
FLARE_INLINE Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }        // to nearest, ties to even
FLARE_INLINE int32_t sum(Ints a) {
  const __m256i b = _mm256_add_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti32x8_epi32(a.v, 1));
  const __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  const __m128i d = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(d, _mm_shuffle_epi32(d, 0xb1)));
}
FLARE_INLINE void store_int8(int8_t* p, Ints a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v)); }

FLARE_INLINE Ints low_nibbles(Ints a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
FLARE_INLINE Ints high_nibbles(Ints a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}

// Lane r gains sum over j of w[4r + j] * x[j]; bytes of w are in 0..15, x holds four int8. A chain has at most 8 of these
// and its sums are read by end_nibbles.
FLARE_INLINE Ints dot_nibbles(Ints sum, Ints w, int32_t x) {
  return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(x))};
}
FLARE_INLINE Ints end_nibbles(Ints sum) { return sum; }
// Lane r gains sum over j of (w[4r + j] - 128) * x[j]. A chain of these starts from start_offset, which is told
// -128 times the sum of all x of the chain; x is in -127..127.
FLARE_INLINE Ints start_offset(int32_t correction) { return splat(correction); }
FLARE_INLINE Ints dot_offset(Ints sum, Ints w, int32_t x) {
  return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(x))};
}

FLARE_INLINE Floats load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
FLARE_INLINE Floats load_first_f16(const uint16_t* p, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p))};
}
FLARE_INLINE void store_f16(uint16_t* p, Floats a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
FLARE_INLINE Floats load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}

}  // namespace flare::simd
