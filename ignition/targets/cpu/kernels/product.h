// Products of blocks of 16 weight rows and a few tokens: the inner loops of every linear kernel.
//
// An output is one lane of one accumulator that walks along K in order, whatever the tile it is computed in; that is why
// a token's bits depend on neither its neighbours nor the tile widths, which each instruction set chooses.
#pragma once
#include "formats.h"
#include "quantized_activation.h"

namespace flare {

// Bytes from one token's activations to the next: quantised rows for quantised weights, else f32.
template <class Fmt, int K>
constexpr size_t input_bytes() {
  if constexpr (Fmt::quantized) return QuantRow<K>::bytes;
  else return (size_t)K * 4;
}

template <class Fmt>
constexpr int tile_tokens = Fmt::quantized ? simd::kDotTokens : simd::kFloatTokens;

// Tokens of a unit: enough to use a weight block many times while it is in the nearest cache, in whole tiles.
template <class Fmt>
constexpr int unit_tokens = (32 + tile_tokens<Fmt> - 1) / tile_tokens<Fmt> * tile_tokens<Fmt>;

// Row blocks that are walked through together. With few tokens the memory's rate is the limit, and a core gets more of it
// from several places at once than from one; with many tokens the registers are better spent on tokens.
template <class Fmt, int M>
constexpr int tile_blocks = Fmt::quantized ? (M <= 2 ? 4 : 1) : (M <= 2 ? 2 : simd::kFloatBlocks);

// How far ahead weights are fetched: about the memory's delay times a core's share of its rate.
constexpr size_t kPrefetchBytes = 3072;

template <int M>
struct alignas(64) Tile {
  float at[M][kBlockRows];
};

// out[b].at[m][r] = sum over k of weight(block b, row r, k) * x[m][k], for B blocks and M tokens. `next` is the distance
// in bytes from a block to the one that will be read in its place next; it only steers what is fetched ahead.
template <class Fmt, int K, int M, int B>
__attribute__((noinline)) void product(const uint8_t* const (&block)[B], size_t next, const uint8_t* x,
                                       Tile<M> (&out)[B]) {
  using namespace simd;
  if constexpr (Fmt::quantized) {
    using Row = QuantRow<K>;
    constexpr int groups = K / kGroup;
    constexpr size_t group_bytes = std::is_same_v<Fmt, Q8> ? 512 : 256;
    constexpr size_t share = Fmt::block_bytes(K) / groups;  // of a group, with its scales
    Floats total[B][M];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) total[b][m] = splat(0.0f);
    }
    for (int g = 0; g < groups; ++g) {
      size_t ahead = g * share + kPrefetchBytes;
      ahead += ahead / Fmt::block_bytes(K) * (next - Fmt::block_bytes(K));
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        for (size_t line = 0; line < share; line += 64) prefetch(block[b] + ahead + line);
        const auto* scales = (const uint16_t*)block[b];
        const uint8_t* w = block[b] + Fmt::weights_at(K) + g * group_bytes;
        Ints dots[M];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
          dots[m] = std::is_same_v<Fmt, Q8> ? start_offset(Row::correction(x + m * Row::bytes, g)) : splat(int32_t{0});
        if constexpr (std::is_same_v<Fmt, Q8>) {
#pragma GCC unroll 8
          for (int i = 0; i < 8; ++i) {
            const Ints four = load_ints(w + i * 64);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) dots[m] = dot_offset(dots[m], four, Row::quad(x + m * Row::bytes, g, i));
          }
        } else {
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            const Ints eight = load_ints(w + i * 64), low = low_nibbles(eight), high = high_nibbles(eight);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) dots[m] = dot_nibbles(dots[m], low, Row::quad(x + m * Row::bytes, g, 2 * i));
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m)
              dots[m] = dot_nibbles(dots[m], high, Row::quad(x + m * Row::bytes, g, 2 * i + 1));
          }
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) dots[m] = end_nibbles(dots[m]);
        }
        const Floats scale = load_f16(scales + g * kBlockRows);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
          total[b][m] = fma(to_floats(dots[m]), scale * splat(Row::scale(x + m * Row::bytes, g)), total[b][m]);
        if constexpr (std::is_same_v<Fmt, Q4>) {
          const Floats least = load_f16(scales + (groups + g) * kBlockRows);
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m)
            total[b][m] = fma(least, splat(Row::sum(x + m * Row::bytes, g)), total[b][m]);
        }
      }
    }
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) store(out[b].at[m], total[b][m]);
    }
  } else {
    using Element = typename Fmt::Element;
    const auto* rows = (const float*)x;
    Floats total[B][M];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) total[b][m] = splat(0.0f);
    }
    for (int k = 0; k < K; ++k) {
      Floats w[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const Element* p = (const Element*)block[b] + (size_t)k * kBlockRows;
        if constexpr (M <= 2) prefetch(p + kPrefetchBytes / sizeof(Element));
        w[b] = Fmt::load(p);
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const Floats one = splat(rows[(size_t)m * K + k]);
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) total[b][m] = fma(w[b], one, total[b][m]);
      }
    }
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) store(out[b].at[m], total[b][m]);
    }
  }
}

// Cuts tokens [from, to) into tiles and calls visit(std::integral_constant<int, M>, first token) for each.
template <class Fmt, class Visit>
FLARE_INLINE void for_tiles(int from, int to, Visit visit) {
  constexpr int most = tile_tokens<Fmt>;
  for (; to - from >= most; from += most) visit(std::integral_constant<int, most>{}, from);
  if constexpr (most > 8) {
    if (to - from >= 8) { visit(std::integral_constant<int, 8>{}, from); from += 8; }
  }
  if constexpr (most > 4) {
    if (to - from >= 4) { visit(std::integral_constant<int, 4>{}, from); from += 4; }
  }
  if constexpr (most > 2) {
    if (to - from >= 2) { visit(std::integral_constant<int, 2>{}, from); from += 2; }
  }
  if (to - from >= 1) visit(std::integral_constant<int, 1>{}, from);
}

// Units of a kernel that splits its output columns into `parts` and its tokens into tiles of `tokens`: parts of one
// token tile are neighbours, so that threads walk through the weights while the activations stay near.
FLARE_INLINE int64_t grid_units(int count, int tokens, int64_t parts) {
  return (int64_t)((count + tokens - 1) / tokens) * parts;
}

// Calls visit(first token, last token + 1, first part, last part + 1) for units [begin, end), one call a token tile.
template <class Visit>
FLARE_INLINE void for_grid(int count, int tokens, int64_t parts, int64_t begin, int64_t end, Visit visit) {
  while (begin < end) {
    const int64_t tile = begin / parts, part = begin % parts;
    const int64_t stop = end - begin < parts - part ? part + (end - begin) : parts;
    const int from = (int)tile * tokens;
    visit(from, count - from < tokens ? count : from + tokens, part, stop);
    begin += stop - part;
  }
}

}  // namespace flare
