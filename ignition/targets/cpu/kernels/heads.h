// The query, key and value projections: linear, bias, head norm, rotation and the store, one head at a time.
#pragma once
#include "norm.h"
#include "pages.h"
#include "product.h"
#include "rope.h"

namespace flare {

// Where heads go.
struct Query {};                                            // F[T][H*DH]
struct Key {};                                              // this layer's K in the pages
struct Value {};                                            // this layer's V in the pages

// Heads<Fmt, K, H, DH, HasBias, NormEps, HasRope, Dest, Kv, PT>
//   x (Q for quantised weights, else F)[T][K], w [H*DH, K] packed, bias f32[H*DH], norm weight f32[DH],
//   cos F[T][DH/2], sin F[T][DH/2], dest (F[T][H*DH], or the page offset of K or V).
// NormEps < 0: no head norm. A unit is one head of one tile of tokens.
template <class Fmt, int K, int H, int DH, bool HasBias, float NormEps, bool HasRope, class Dest, class Kv, int PT>
struct Heads {
  static constexpr int32_t args = 7;
  // A head whose rows do not start at a block's border takes the blocks that it touches whole.
  static constexpr int width = DH % kBlockRows == 0 ? DH : (DH + 2 * (kBlockRows - 1)) / kBlockRows * kBlockRows;
  static constexpr size_t scratch = (size_t)tile_tokens<Fmt> * width * sizeof(float);
  static constexpr int32_t page_tokens = PT;

  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(most.tokens * input_bytes<Fmt, K>()), reads(packed_bytes<Fmt>(H * DH, K)),
                            HasBias ? reads(floats(H * DH)) : unused(), NormEps >= 0.0f ? reads(floats(DH)) : unused(),
                            HasRope ? reads(most.tokens * floats(DH / 2)) : unused(),
                            HasRope ? reads(most.tokens * floats(DH / 2)) : unused(),
                            std::is_same_v<Dest, Query> ? writes(most.tokens * floats(H * DH))
                                                        : in_pages(Pages<H, DH, Kv, PT>::bytes)};
    return all[arg];
  }

  static int64_t units(const Step& step) { return grid_units(step.tokens, unit_tokens<Fmt>, H); }

  static void run(const Step& step, const Arg* arg, Scratch scratch, int64_t begin, int64_t end) {
    auto* rows = (float*)scratch.memory;
    for_grid(step.tokens, unit_tokens<Fmt>, H, begin, end, [&](int from, int to, int64_t first, int64_t stop) {
      for (int head = (int)first; head < (int)stop; ++head)
        for_tiles<Fmt>(from, to, [&](auto tokens, int token) {
          project<tokens>(arg, head, token, rows);
          for (int m = 0; m < tokens; ++m)
            finish(step, arg, head, token + m, rows + m * width + head * DH % kBlockRows);
        });
    });
  }

 private:
  // The blocks that hold the head's rows, for M tokens, to rows[M][width].
  template <int M>
  static FLARE_INLINE void project(const Arg* arg, int head, int token, float* rows) {
    const uint8_t* x = (const uint8_t*)arg[0].pointer + (size_t)token * input_bytes<Fmt, K>();
    const int first = head * DH / kBlockRows, blocks = (int)blocks_of((head + 1) * DH) - first;
    const uint8_t* w = (const uint8_t*)arg[1].pointer + (size_t)first * Fmt::block_bytes(K);
    constexpr int together = tile_blocks<Fmt, M>;
    int b = 0;
    for (; b + together <= blocks; b += together) some_blocks<M, together>(x, w, b, rows);
    if constexpr (together > 1) {
      for (; b < blocks; ++b) some_blocks<M, 1>(x, w, b, rows);
    }
  }

  template <int M, int B>
  static FLARE_INLINE void some_blocks(const uint8_t* x, const uint8_t* w, int first, float* rows) {
    const uint8_t* at[B];
    for (int b = 0; b < B; ++b) at[b] = w + (size_t)(first + b) * Fmt::block_bytes(K);
    Tile<M> tile[B];
    product<Fmt, K, M, B>(at, B * Fmt::block_bytes(K), x, tile);
    for (int b = 0; b < B; ++b)
      for (int m = 0; m < M; ++m)
        simd::store(rows + m * width + (first + b) * kBlockRows, simd::load(tile[b].at[m]));
  }

  // Bias, norm, rotation and store of one token's head x[DH], in place.
  static FLARE_INLINE void finish(const Step& step, const Arg* arg, int head, int token, float* x) {
    using namespace simd;
    if constexpr (HasBias) {
      const float* bias = (const float*)arg[2].pointer + head * DH;
      for (int d = 0; d < DH; ++d) x[d] += bias[d];
    }
    if constexpr (NormEps >= 0.0f) scale_row<DH>(x, inverse_rms<DH>(x, NormEps), (const float*)arg[3].pointer, x);
    if constexpr (HasRope) {
      const size_t at = (size_t)token * (DH / 2);
      rotate<DH>(x, (const float*)arg[4].pointer + at, (const float*)arg[5].pointer + at, x);
    }
    using Pool = Pages<H, DH, Kv, PT>;
    if constexpr (std::is_same_v<Dest, Query>) {
      std::memcpy((float*)arg[6].pointer + ((size_t)token * H + head) * DH, x, DH * sizeof(float));
    } else if constexpr (std::is_same_v<Dest, Key>) {
      Pool::put_key(step, arg[6].page_offset, head, step.slot[token], step.position[token], x);
    } else {
      Pool::put_value(step, arg[6].page_offset, head, step.slot[token], step.position[token], x);
    }
  }
};

}  // namespace flare
