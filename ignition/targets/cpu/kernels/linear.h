// Linear layers, with bias and residual in the same pass.
#pragma once
#include "product.h"

namespace flare {

// Linear<Count, Fmt, K, N, HasBias, HasResidual>
//   x (Q for quantised weights, else F)[count][K], w [N, K] packed, bias f32[N] (null unless HasBias),
//   residual F[count][N] (unused unless HasResidual; may be out itself), out F[count][N] = x w^T + bias + residual.
// A unit is one block of 16 output columns of one tile of tokens.
template <class Count, class Fmt, int K, int N, bool HasBias, bool HasResidual>
struct Linear {
  static constexpr int32_t args = 5;
  static constexpr size_t scratch = 0;
  static constexpr int64_t blocks = blocks_of(N);

  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(Count::most(most) * input_bytes<Fmt, K>()), reads(packed_bytes<Fmt>(N, K)),
                            HasBias ? reads(floats(N)) : unused(),
                            HasResidual ? reads(Count::most(most) * floats(N)) : unused(),
                            writes(Count::most(most) * floats(N))};
    return all[arg];
  }

  static int64_t units(const Step& step) { return grid_units(Count::count(step), unit_tokens<Fmt>, blocks); }

  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    const auto* x = (const uint8_t*)arg[0].pointer;
    const auto* w = (const uint8_t*)arg[1].pointer;
    constexpr int wide = tile_blocks<Fmt, 1>;
    for_grid(Count::count(step), unit_tokens<Fmt>, blocks, begin, end,
             [&](int from, int to, int64_t first, int64_t stop) {
      int64_t block = first;
      if (!Fmt::quantized || to - from <= 2) {
        for (; block + wide <= stop; block += wide) columns<wide>(arg, x, w, from, to, block);
      }
      for (; block < stop; ++block) columns<1>(arg, x, w, from, to, block);
    });
  }

 private:
  // All tokens of the tile for B blocks, starting from `block`.
  template <int B>
  static void columns(const Arg* arg, const uint8_t* x, const uint8_t* w, int from, int to, int64_t block) {
    for_tiles<Fmt>(from, to, [&](auto tokens, int first) {
      constexpr int M = tokens;
      constexpr int together = B < tile_blocks<Fmt, M> ? B : tile_blocks<Fmt, M>;
      for (int b = 0; b < B; b += together) {
        const uint8_t* at[together];
        for (int i = 0; i < together; ++i) at[i] = w + (size_t)(block + b + i) * Fmt::block_bytes(K);
        Tile<M> tile[together];
        product<Fmt, K, M, together>(at, B * Fmt::block_bytes(K), x + (size_t)first * input_bytes<Fmt, K>(), tile);
        for (int i = 0; i < together; ++i) finish<M>(arg, tile[i], first, (int)(block + b + i) * kBlockRows);
      }
    });
  }

  template <int M>
  static FLARE_INLINE void finish(const Arg* arg, const Tile<M>& tile, int first, int column) {
    using namespace simd;
    const int n = N - column < kBlockRows ? N - column : kBlockRows;
    const auto* bias = (const float*)arg[2].pointer;
    const auto* residual = (const float*)arg[3].pointer;
    auto* out = (float*)arg[4].pointer;
    for (int m = 0; m < M; ++m) {
      const size_t at = (size_t)(first + m) * N + column;
      Floats y = load(tile.at[m]);
      if constexpr (N % kBlockRows == 0) {
        if constexpr (HasBias) y = y + load(bias + column);
        if constexpr (HasResidual) y = y + load(residual + at);
        store(out + at, y);
      } else {
        if constexpr (HasBias) y = y + load_first(bias + column, n);
        if constexpr (HasResidual) y = y + load_first(residual + at, n);
        store_first(out + at, y, n);
      }
    }
  }
};

}  // namespace flare
