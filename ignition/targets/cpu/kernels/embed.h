// Embedding rows of the step's tokens.
#pragma once
#include "formats.h"
#include "kernel.h"

namespace flare {

// Embed<Fmt, V, D>: table [V, D] packed, out F[T][D]. A unit is one token.
template <class Fmt, int V, int D>
struct Embed {
  static constexpr int32_t args = 2;
  static constexpr size_t scratch = 0;
  static constexpr int32_t vocabulary = V;                  // every token has a row
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(packed_bytes<Fmt>(V, D)), writes(most.tokens * floats(D))};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      decode_row<Fmt, D>((const uint8_t*)arg[0].pointer, step.token[t], (float*)arg[1].pointer + t * D);
  }
};

}  // namespace flare
