// The gated half of an MLP: gate and up projections and silu(gate) * up in one pass.
#pragma once
#include "product.h"

namespace flare {

// GateUp<FmtG, FmtU, K, N, Out>
//   x (Q for quantised weights, else F)[T][K], w_gate [N, K] packed, w_up [N, K] packed, out (F or Q)[T][N].
// Both weights are quantised or neither is. A unit is 16 output columns of one tile of tokens, 32 where out is
// quantised: a whole group.
template <class FmtG, class FmtU, int K, int N, class Out>
struct GateUp {
  static_assert(FmtG::quantized == FmtU::quantized, "gate and up read the same activations");
  static constexpr int32_t args = 4;
  static constexpr size_t scratch = 0;
  static constexpr bool quant = std::is_same_v<Out, ToQuant>;
  static constexpr int span = quant ? 2 : 1;                // blocks of a unit
  static constexpr int64_t parts = blocks_of(N) / span;
  static_assert(!quant || N % kGroup == 0);

  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(most.tokens * input_bytes<FmtG, K>()), reads(packed_bytes<FmtG>(N, K)),
                            reads(packed_bytes<FmtU>(N, K)), writes(most.tokens * output_bytes<Out, N>())};
    return all[arg];
  }

  static int64_t units(const Step& step) { return grid_units(step.tokens, unit_tokens<FmtG>, parts); }

  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    const auto* x = (const uint8_t*)arg[0].pointer;
    for_grid(step.tokens, unit_tokens<FmtG>, parts, begin, end, [&](int from, int to, int64_t first, int64_t stop) {
      for (int64_t part = first; part < stop; ++part)
        for_tiles<FmtG>(from, to, [&](auto tokens, int token) {
          constexpr int M = tokens;
          Tile<M> hidden[span];
          activate<M>(arg, x + (size_t)token * input_bytes<FmtG, K>(), part * span, hidden);
          finish<M>(arg, hidden, token, part);
        });
    });
  }

 private:
  // silu(gate) * up of the unit's columns, from row block `first` on.
  template <int M>
  static FLARE_INLINE void activate(const Arg* arg, const uint8_t* x, int64_t first, Tile<M> (&hidden)[span]) {
    constexpr size_t gate_bytes = FmtG::block_bytes(K), up_bytes = FmtU::block_bytes(K);
    const uint8_t* gate = (const uint8_t*)arg[1].pointer + (size_t)first * gate_bytes;
    const uint8_t* up = (const uint8_t*)arg[2].pointer + (size_t)first * up_bytes;
    if constexpr (std::is_same_v<FmtG, FmtU> && tile_blocks<FmtG, M> >= 2) {
      constexpr int pairs = tile_blocks<FmtG, M> >= 2 * span ? span : 1;
      for (int b = 0; b < span; b += pairs) {
        const uint8_t* blocks[2 * pairs];
        for (int i = 0; i < pairs; ++i) {
          blocks[i] = gate + (b + i) * gate_bytes;
          blocks[pairs + i] = up + (b + i) * up_bytes;
        }
        Tile<M> both[2 * pairs];
        product<FmtG, K, M, 2 * pairs>(blocks, pairs * gate_bytes, x, both);
        for (int i = 0; i < pairs; ++i) multiply(both[i], both[pairs + i], hidden[b + i]);
      }
    } else {
      for (int b = 0; b < span; ++b) {
        const uint8_t* one[1] = {gate + b * gate_bytes};
        const uint8_t* other[1] = {up + b * up_bytes};
        Tile<M> both[2];
        product<FmtG, K, M, 1>(one, gate_bytes, x, (Tile<M>(&)[1])both[0]);
        product<FmtU, K, M, 1>(other, up_bytes, x, (Tile<M>(&)[1])both[1]);
        multiply(both[0], both[1], hidden[b]);
      }
    }
  }

  template <int M>
  static FLARE_INLINE void multiply(const Tile<M>& gate, const Tile<M>& up, Tile<M>& hidden) {
    for (int m = 0; m < M; ++m)
      simd::store(hidden.at[m], simd::silu(simd::load(gate.at[m])) * simd::load(up.at[m]));
  }

  template <int M>
  static FLARE_INLINE void finish(const Arg* arg, const Tile<M> (&hidden)[span], int token, int64_t part) {
    using namespace simd;
    for (int m = 0; m < M; ++m) {
      if constexpr (quant) {
        uint8_t* row = (uint8_t*)arg[3].pointer + (size_t)(token + m) * QuantRow<N>::bytes;
        QuantRow<N>::put(row, (int)part, load(hidden[0].at[m]), load(hidden[1].at[m]));
      } else {
        const int column = (int)part * kBlockRows;
        float* out = (float*)arg[3].pointer + (size_t)(token + m) * N + column;
        if constexpr (N % kBlockRows == 0) store(out, load(hidden[0].at[m]));
        else store_first(out, load(hidden[0].at[m]), N - column < kBlockRows ? N - column : kBlockRows);
      }
    }
  }
};

}  // namespace flare
