// Kernels for what was not fused: one op each, f32 in, f32 out. A unit is one token.
#pragma once
#include "norm.h"
#include "pages.h"

namespace flare {

// SiluMul<N>: gate F[T][N], up F[T][N], out F[T][N] = silu(gate) * up. out may be gate or up.
template <int N>
struct SiluMul {
  static constexpr int32_t args = 3;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(most.tokens * floats(N)), reads(most.tokens * floats(N)),
                            writes(most.tokens * floats(N))};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step&, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    using namespace simd;
    const auto* gate = (const float*)arg[0].pointer;
    const auto* up = (const float*)arg[1].pointer;
    auto* out = (float*)arg[2].pointer;
    constexpr int whole = N / kLanes * kLanes;
    for (int64_t t = begin; t < end; ++t) {
      const size_t at = (size_t)t * N;
      for (int i = 0; i < whole; i += kLanes) store(out + at + i, silu(load(gate + at + i)) * load(up + at + i));
      if constexpr (whole < N) {
        constexpr int rest = N - whole;
        const size_t tail = at + whole;
        store_first(out + tail, silu(load_first(gate + tail, rest)) * load_first(up + tail, rest), rest);
      }
    }
  }
};

// Add<N>: a F[T][N], b F[T][N], out F[T][N] = a + b. out may be a or b.
template <int N>
struct Add {
  static constexpr int32_t args = 3;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(most.tokens * floats(N)), reads(most.tokens * floats(N)),
                            writes(most.tokens * floats(N))};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step&, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    const auto* a = (const float*)arg[0].pointer;
    const auto* b = (const float*)arg[1].pointer;
    auto* out = (float*)arg[2].pointer;
    for (int64_t i = begin * N; i < end * N; ++i) out[i] = a[i] + b[i];
  }
};

// HeadNorm<H, DH, eps>: x F[T][H*DH], weight f32[DH], out F[T][H*DH] (may be x): RMS norm of each head.
template <int H, int DH, float eps>
struct HeadNorm {
  static constexpr int32_t args = 3;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(most.tokens * floats(H * DH)), reads(floats(DH)),
                            writes(most.tokens * floats(H * DH))};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step&, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    for (int64_t head = begin * H; head < end * H; ++head) {
      const float* x = (const float*)arg[0].pointer + head * DH;
      scale_row<DH>(x, inverse_rms<DH>(x, eps), (const float*)arg[1].pointer, (float*)arg[2].pointer + head * DH);
    }
  }
};

// KvWrite<KH, DH, Kv, PT>: k F[T][KH*DH], v F[T][KH*DH], page offsets of the layer's K and V.
template <int KH, int DH, class Kv, int PT>
struct KvWrite {
  static constexpr int32_t args = 4;
  static constexpr size_t scratch = 0;
  static constexpr int32_t page_tokens = PT;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(most.tokens * floats(KH * DH)), reads(most.tokens * floats(KH * DH)),
                            in_pages(Pages<KH, DH, Kv, PT>::bytes), in_pages(Pages<KH, DH, Kv, PT>::bytes)};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    using Pool = Pages<KH, DH, Kv, PT>;
    for (int64_t t = begin; t < end; ++t)
      for (int head = 0; head < KH; ++head) {
        const size_t at = ((size_t)t * KH + head) * DH;
        const int slot = step.slot[t], position = step.position[t];
        Pool::put_key(step, arg[2].page_offset, head, slot, position, (const float*)arg[0].pointer + at);
        Pool::put_value(step, arg[3].page_offset, head, slot, position, (const float*)arg[1].pointer + at);
      }
  }
};

// TakeRows<D>: x F[T][D], out F[R][D]; out[i] = x[row[i]]. A unit is one wanted row.
template <int D>
struct TakeRows {
  static constexpr int32_t args = 2;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(most.tokens * floats(D)), writes(most.rows * floats(D))};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.rows; }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy((float*)arg[1].pointer + i * D, (const float*)arg[0].pointer + (size_t)step.row[i] * D, D * 4);
  }
};

}  // namespace flare
