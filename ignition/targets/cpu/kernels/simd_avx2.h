// The vector vocabulary on AVX2, FMA and F16C (x86-64-v3): sixteen lanes are two registers.
#pragma once
#include <immintrin.h>

namespace flare::simd {

struct Floats {
  __m256 lo, hi;
};
struct Ints {
  __m256i lo, hi;
};

// Widths of register tiles: 16 registers of 8 lanes.
constexpr int kDotTokens = 4;       // tokens of a tile of integer dots
constexpr int kFloatTokens = 4;     // tokens of a tile of float products
constexpr int kFloatBlocks = 1;     // row blocks of a tile of float products
constexpr int kScoreRuns = 1;       // runs of 16 keys scored together for several queries
constexpr int kValueVectors = 1;    // vectors of a value row summed together for several queries

// All ones in the first n of 16 lanes.
FLARE_INLINE Ints first_lanes(int n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane), _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane)};
}

FLARE_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FLARE_INLINE Floats load_first(const float* p, int n) {
  const Ints keep = first_lanes(n);
  return {_mm256_maskload_ps(p, keep.lo), _mm256_maskload_ps(p + 8, keep.hi)};
}
FLARE_INLINE void store(float* p, Floats a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
FLARE_INLINE void store_first(float* p, Floats a, int n) {
  const Ints keep = first_lanes(n);
  _mm256_maskstore_ps(p, keep.lo, a.lo);
  _mm256_maskstore_ps(p + 8, keep.hi, a.hi);
}
FLARE_INLINE Floats splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }

FLARE_INLINE Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
FLARE_INLINE Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
FLARE_INLINE Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
FLARE_INLINE Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
FLARE_INLINE Floats fma(Floats a, Floats b, Floats c) {     // a * b + c
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
FLARE_INLINE Floats fnma(Floats a, Floats b, Floats c) {    // c - a * b
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
FLARE_INLINE Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
FLARE_INLINE Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
FLARE_INLINE Floats abs(Floats a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}

// Lanes from <= lane < to keep a; the others become `other`.
FLARE_INLINE Floats select_lanes(Floats a, int from, int to, Floats other) {
  const Ints below = first_lanes(from), keep = first_lanes(to);
  return {_mm256_blendv_ps(other.lo, a.lo, _mm256_castsi256_ps(_mm256_andnot_si256(below.lo, keep.lo))),
          _mm256_blendv_ps(other.hi, a.hi, _mm256_castsi256_ps(_mm256_andnot_si256(below.hi, keep.hi)))};
}

FLARE_INLINE float sum(Floats a) {
  const __m256 b = _mm256_add_ps(a.lo, a.hi);
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
FLARE_INLINE float largest(Floats a) {
  const __m256 b = _mm256_max_ps(a.lo, a.hi);
  const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

// The largest |lane| of both; NaN if any is NaN, for as integers NaN lies above infinity.
FLARE_INLINE float largest_magnitude(Floats p, Floats q) {
  p = abs(p), q = abs(q);
  const __m256i a = _mm256_max_epi32(_mm256_castps_si256(p.lo), _mm256_castps_si256(q.lo));
  const __m256i b = _mm256_max_epi32(a, _mm256_max_epi32(_mm256_castps_si256(p.hi), _mm256_castps_si256(q.hi)));
  const __m128i c = _mm_max_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  const __m128i d = _mm_max_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(d, _mm_shuffle_epi32(d, 0xb1))));
}

FLARE_INLINE Ints load_ints(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
FLARE_INLINE Ints splat(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
FLARE_INLINE Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
template <int N>
FLARE_INLINE Ints shift_left(Ints a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
FLARE_INLINE Ints as_ints(Floats a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
FLARE_INLINE Floats as_floats(Ints a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
FLARE_INLINE Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
FLARE_INLINE Ints to_ints(Floats a) {                       // to nearest, ties to even
  return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}
FLARE_INLINE int32_t sum(Ints a) {
  const __m256i b = _mm256_add_epi32(a.lo, a.hi);
  const __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  const __m128i d = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(d, _mm_shuffle_epi32(d, 0xb1)));
}
FLARE_INLINE void store_int8(int8_t* p, Ints a) {
  const __m128i lo = _mm_packs_epi32(_mm256_castsi256_si128(a.lo), _mm256_extracti128_si256(a.lo, 1));
  const __m128i hi = _mm_packs_epi32(_mm256_castsi256_si128(a.hi), _mm256_extracti128_si256(a.hi, 1));
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(lo, hi));
}

FLARE_INLINE Ints low_nibbles(Ints a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
FLARE_INLINE Ints high_nibbles(Ints a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(a.lo, 4), mask), _mm256_and_si256(_mm256_srli_epi16(a.hi, 4), mask)};
}

// Lane r gains sum over j of w[4r + j] * x[j]; bytes of w are in 0..15, x holds four int8. A chain has at most 8 of these
// and its sums are read by end_nibbles: 16-bit halves of a lane, which stay within 8 * 2 * 15 * 128 = 30720 until then.
FLARE_INLINE Ints dot_nibbles(Ints sum, Ints w, int32_t x) {
  const __m256i four = _mm256_set1_epi32(x);
  return {_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.lo, four)),
          _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.hi, four))};
}
FLARE_INLINE Ints end_nibbles(Ints sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sum.lo, ones), _mm256_madd_epi16(sum.hi, ones)};
}
// Lane r gains sum over j of (w[4r + j] - 128) * x[j]. A chain of these starts from start_offset, which is told
// -128 times the sum of all x of the chain; x is in -127..127.
// vpmaddubsw multiplies unsigned by signed and saturates pairs: |w - 128| against x with the sign of w - 128 keeps them
// within 2 * 128 * 127 = 32512. The offset is gone then, so the chain starts from zero.
FLARE_INLINE Ints start_offset(int32_t) { return splat(int32_t{0}); }
FLARE_INLINE Ints dot_offset(Ints sum, Ints w, int32_t x) {
  const __m256i four = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1), offset = _mm256_set1_epi8(-128);
  const __m256i lo = _mm256_xor_si256(w.lo, offset), hi = _mm256_xor_si256(w.hi, offset);
  const __m256i p = _mm256_maddubs_epi16(_mm256_abs_epi8(lo), _mm256_sign_epi8(four, lo));
  const __m256i q = _mm256_maddubs_epi16(_mm256_abs_epi8(hi), _mm256_sign_epi8(four, hi));
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(p, ones)), _mm256_add_epi32(sum.hi, _mm256_madd_epi16(q, ones))};
}

FLARE_INLINE Floats load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
FLARE_INLINE Floats load_first_f16(const uint16_t* p, int n) {
  uint16_t lanes[16] = {};
  std::memcpy(lanes, p, (size_t)n * 2);
  return load_f16(lanes);
}
FLARE_INLINE void store_f16(uint16_t* p, Floats a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
FLARE_INLINE Floats load_bf16(const uint16_t* p) {
  const __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}

}  // namespace flare::simd
