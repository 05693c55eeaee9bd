// Causal attention over paged keys and values.
//
// Positions are taken in chunks of 64, counted from position 0 whatever the query, with a running maximum and sum (online
// softmax). A query's result thus depends on its own position and the pages only: not on the context's capacity, the
// queries computed with it, or whether its prefix was written in this step. Keys beyond a query's position, and values
// outside its span, never enter its arithmetic: they may be leftovers of other requests, even NaN.
#pragma once
#include "pages.h"
#include "quantized_activation.h"

namespace flare {

// Attention<H, KH, DH, Kv, PT, scale, Window, Out>
//   q F[T][H*DH], page offset of K, page offset of V, out (F or Q)[T][H*DH].
// Window > 0 limits a query at position p to keys at positions > p - Window. A unit is one head of one tile of tokens;
// neighbouring units of one key-value head are computed together, so that they share the reading of keys and values.
template <int H, int KH, int DH, class Kv, int PT, float scale, int Window, class Out>
struct Attention {
  static_assert(H % KH == 0 && scale > 0.0f);
  static_assert(std::is_same_v<Out, ToFloat> || DH % kGroup == 0, "a quantised group must lie inside one head");

 private:
  static constexpr int chunk = 64, runs = chunk / kRun;
  static constexpr int tokens_together = 32;
  static constexpr int queries = 96;                        // most that are computed together
  static constexpr int shared = H / KH;                     // heads of a key-value head
  static constexpr int vectors = (DH + simd::kLanes - 1) / simd::kLanes;
  static constexpr int width = vectors * simd::kLanes;
  static constexpr int joined = 4;                          // queries of a register tile
  using Pool = Pages<KH, DH, Kv, PT>;
  using Element = typename Kv::Element;

  // From this many queries on, converting a chunk to f32 once is cheaper than converting it for each register tile.
  static constexpr int worth_converting = 8;

  struct alignas(64) Work {
    float keys[runs][DH][kRun];                             // the chunk in f32
    float values[chunk][DH];
    float weights[queries][chunk];                          // dot products, then their exponentials
    float out[queries][width];                              // running sums of weight * value
    float total[queries][simd::kLanes];                     // running sums of weights, by lane
    float peak[queries];                                    // running maxima of dot products
    const float* query[queries];
    int position[queries];
    int begin[queries], end[queries];                       // positions of the chunk that a query sees
  };

  // Where the runs of a chunk lie: keys [DH][16] and values [16][DH] of each.
  template <class Source>
  struct Runs {
    const typename Source::Element* keys[runs];
    const typename Source::Element* values[runs];
  };
  using Chunk = Runs<Kv>;

  // Tokens of one slot at consecutive positions, and heads of one key-value head. Query i is token i % tokens of head
  // i / tokens.
  struct Batch {
    int slot, position, token, tokens, head, heads;
  };

 public:
  static constexpr int32_t args = 4;
  static constexpr size_t scratch = sizeof(Work);
  static constexpr int32_t page_tokens = PT;

  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(most.tokens * floats(H * DH)), in_pages(Pool::bytes), in_pages(Pool::bytes),
                            writes(most.tokens * output_bytes<Out, H * DH>())};
    return all[arg];
  }

  static int64_t units(const Step& step) { return (int64_t)((step.tokens + tile(step) - 1) / tile(step)) * H; }

  static void run(const Step& step, const Arg* arg, Scratch scratch, int64_t begin, int64_t end) {
    auto& work = *(Work*)scratch.memory;
    while (begin < end) {
      const int head = (int)(begin % H), left = shared - head % shared;
      const int heads = end - begin < left ? (int)(end - begin) : left;
      const int first = (int)(begin / H) * tile(step);
      const int stop = step.tokens - first < tile(step) ? step.tokens : first + tile(step);
      for (int token = first; token < stop;) {
        int tokens = 1;
        while (token + tokens < stop && step.slot[token + tokens] == step.slot[token]) ++tokens;
        const int together = queries / tokens < heads ? queries / tokens : heads;
        for (int h = 0; h < heads; h += together) {
          const int some = heads - h < together ? heads - h : together;
          attend(step, arg, work, {step.slot[token], step.position[token], token, tokens, head + h, some});
        }
        token += tokens;
      }
      begin += heads;
    }
  }

 private:
  // Tokens of a unit: few where a step is small, so that every thread has work; many where it is large, to share the
  // reading of keys and values. Results do not depend on it.
  static int tile(const Step& step) {
    const int tokens = step.tokens / 16;
    return tokens < 1 ? 1 : tokens > tokens_together ? tokens_together : tokens;
  }

  static void attend(const Step& step, const Arg* arg, Work& work, const Batch& batch) {
    using namespace simd;
    const int count = batch.tokens * batch.heads, last = batch.position + batch.tokens - 1;
    const auto* q = (const float*)arg[0].pointer;
    for (int i = 0; i < count; ++i) {
      const int token = i % batch.tokens, head = i / batch.tokens;
      work.query[i] = q + ((size_t)(batch.token + token) * H + batch.head + head) * DH;
      work.position[i] = batch.position + token;
      work.peak[i] = -__builtin_inff();
      store(work.total[i], splat(0.0f));
      for (int v = 0; v < width; v += kLanes) store(work.out[i] + v, splat(0.0f));
    }
    const int oldest = Window > 0 && batch.position >= Window ? batch.position - Window + 1 : 0;
    Chunk next = locate(step, arg, batch, oldest / chunk * chunk, last);
    for (int start = oldest / chunk * chunk; start <= last; start += chunk) {
      const int length = last + 1 - start < chunk ? last + 1 - start : chunk;
      for (int i = 0; i < count; ++i) {
        const int newest = work.position[i] + 1 - start, from = Window > 0 ? newest - Window : 0;
        work.begin[i] = from < 0 ? 0 : from;
        work.end[i] = newest < chunk ? newest : chunk;
      }
      const Chunk here = next;
      if (start + chunk <= last) next = locate(step, arg, batch, start + chunk, last);
      if constexpr (!std::is_same_v<Kv, F32>) {
        if (count >= worth_converting) {
          convert(work, here, length);
          Runs<F32> plain;
          for (int r = 0; r < runs; ++r) {
            plain.keys[r] = &work.keys[r][0][0];
            plain.values[r] = &work.values[r * kRun][0];
          }
          one_chunk<F32, false>(work, count, plain, nullptr, length);
          continue;
        }
      }
      one_chunk<Kv, true>(work, count, here, next.keys, length);
    }
    for (int i = 0; i < count; ++i) finish(arg, work, batch, i);
  }

  // The chunk at position `start`; runs beyond position `last` repeat the last one.
  static FLARE_INLINE Chunk locate(const Step& step, const Arg* arg, const Batch& batch, int start, int last) {
    Chunk found;
    for (int r = 0; r < runs; ++r) {
      const int position = start + r * kRun < last ? start + r * kRun : last, head = batch.head / shared;
      uint8_t* page = Pool::page(step, batch.slot, position);
      found.keys[r] = Pool::keys(page, arg[1].page_offset, head, position);
      found.values[r] = Pool::values(page, arg[2].page_offset, head, position / kRun * kRun);
    }
    return found;
  }

  static void convert(Work& work, const Chunk& from, int length) {
    for (int r = 0; r * kRun < length; ++r) {
      for (int d = 0; d < DH; ++d) simd::store(work.keys[r][d], Kv::load(from.keys[r] + d * kRun));
      // Value rows beyond the last written position stay as they are: no query reads them.
      const int rows = length - r * kRun < kRun ? length - r * kRun : kRun;
      for (int row = 0; row < rows; ++row) {
        float* to = work.values[r * kRun + row];
        for (int d = 0; d < DH; d += simd::kLanes) {
          const int n = DH - d < simd::kLanes ? DH - d : simd::kLanes;
          if (DH % simd::kLanes == 0 || n == simd::kLanes) simd::store(to + d, Kv::load(from.values[r] + row * DH + d));
          else simd::store_first(to + d, Kv::load_first(from.values[r] + row * DH + d, n), n);
        }
      }
    }
  }

  // Adds the chunk's positions to every query's running softmax. With Fetch, memory is read here for the first time: the
  // values are asked for while keys are multiplied, and the next chunk's keys while values are.
  template <class Source, bool Fetch>
  static void one_chunk(Work& work, int count, const Runs<Source>& here, const Element* const* ahead, int length) {
    const int used = (length + kRun - 1) / kRun;
    groups(count, [&](auto number, int i) {
      constexpr int M = number;
      constexpr int together = M == 1 ? runs : simd::kScoreRuns;
      int r = 0;
      for (; r + together <= used; r += together) scores<Source, Fetch, M, together>(work, i, here, r);
      if constexpr (together == 4) {
        for (; r + 2 <= used; r += 2) scores<Source, Fetch, M, 2>(work, i, here, r);
      }
      for (; r < used; ++r) scores<Source, Fetch, M, 1>(work, i, here, r);
    });
    for (int i = 0; i < count; ++i) soften(work, i);
    groups(count, [&](auto number, int i) {
      constexpr int M = number;
      // What all queries of the group see is summed together, the rest of each on its own, in ascending order.
      int from = work.begin[i], to = work.end[i];
      for (int m = 1; m < M; ++m) {
        from = work.begin[i + m] > from ? work.begin[i + m] : from;
        to = work.end[i + m] < to ? work.end[i + m] : to;
      }
      const auto alone = [&](int m, int begin, int end) {
        add_values<Source, Fetch, 1>(work, i + m, here.values, ahead, begin, end);
      };
      if (M == 1 || from >= to) {
        for (int m = 0; m < M; ++m) alone(m, work.begin[i + m], work.end[i + m]);
        return;
      }
      for (int m = 0; m < M; ++m) alone(m, work.begin[i + m], from);
      add_values<Source, Fetch, M>(work, i, here.values, ahead, from, to);
      for (int m = 0; m < M; ++m) alone(m, to, work.end[i + m]);
    });
  }

  // Calls visit(std::integral_constant<int, M>, first query) for groups of queries.
  template <class Visit>
  static FLARE_INLINE void groups(int count, Visit visit) {
    int i = 0;
    for (; i + joined <= count; i += joined) visit(std::integral_constant<int, joined>{}, i);
    if (count - i == 3) visit(std::integral_constant<int, 3>{}, i);
    if (count - i == 2) visit(std::integral_constant<int, 2>{}, i);
    if (count - i == 1) visit(std::integral_constant<int, 1>{}, i);
  }

  // Dot products of M queries and R runs of 16 keys. Lanes beyond a query's position are computed from leftovers and masked
  // afterwards: lanes do not mix.
  template <class Source, bool Fetch, int M, int R>
  static __attribute__((noinline)) void scores(Work& work, int i, const Runs<Source>& here, int run) {
    using namespace simd;
    const float* q[M];
    const typename Source::Element* keys[R];
    const typename Source::Element* values[R];
    for (int m = 0; m < M; ++m) q[m] = work.query[i + m];
    for (int r = 0; r < R; ++r) keys[r] = here.keys[run + r], values[r] = here.values[run + r];
    Floats dots[R][M];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) dots[r][m] = splat(0.0f);
    }
    for (int d = 0; d < DH; ++d) {
      Floats k[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        k[r] = Source::load(keys[r] + d * kRun);
        if constexpr (Fetch) prefetch(values[r] + d * kRun);
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const Floats one = splat(q[m][d]);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) dots[r][m] = fma(k[r], one, dots[r][m]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) store(work.weights[i + m] + (run + r) * kRun, dots[r][m]);
    }
  }

  // Turns a query's dot products into exponentials over its running maximum, and rescales what was summed so far.
  static FLARE_INLINE void soften(Work& work, int i) {
    const int from = work.begin[i], to = work.end[i];
    if (from == 0 && to == chunk) soften_span<true>(work, i, 0, chunk);
    else if (from < to) soften_span<false>(work, i, from, to);
  }

  template <bool Whole>
  static FLARE_INLINE void soften_span(Work& work, int i, int from, int to) {
    using namespace simd;
    // e^(scale (dot - peak)) as a power of two: one multiplication instead of a reduction by ln 2.
    const Floats unit = splat(scale * 0x1.715476p+0f);
    float* weights = work.weights[i];
    const float before = work.peak[i];
    Floats most = splat(before);
    const int first = Whole ? 0 : from / kRun, stop = Whole ? runs : (to + kRun - 1) / kRun;
    for (int r = first; r < stop; ++r) {
      Floats dots = load(weights + r * kRun);
      if constexpr (!Whole) dots = seen(dots, r, from, to, splat(-__builtin_inff()));
      most = max(most, dots);
    }
    const float peak = largest(most);
    const Floats least = splat(0.0f) - splat(peak) * unit;
    Floats total = load(work.total[i]);
    if (peak != before) {
      const Floats shrink = exp2(fma(splat(before), unit, least));
      total = total * shrink;
      for (int v = 0; v < width; v += kLanes) store(work.out[i] + v, load(work.out[i] + v) * shrink);
      work.peak[i] = peak;
    }
    for (int r = first; r < stop; ++r) {
      Floats weight = exp2(fma(load(weights + r * kRun), unit, least));
      if constexpr (!Whole) weight = seen(weight, r, from, to, splat(0.0f));
      total = total + weight;
      store(weights + r * kRun, weight);
    }
    store(work.total[i], total);
  }

  // Keeps the lanes of run r whose positions lie in [from, to).
  static FLARE_INLINE simd::Floats seen(simd::Floats a, int r, int from, int to, simd::Floats other) {
    const int first = from - r * kRun, end = to - r * kRun;
    if (first <= 0 && end >= kRun) return a;
    return simd::select_lanes(a, first < 0 ? 0 : first, end < kRun ? end : kRun, other);
  }

  // out[i..i+M-1] += sum over positions [from, to) of weight * value.
  template <class Source, bool Fetch, int M>
  static FLARE_INLINE void add_values(Work& work, int i, const typename Source::Element* const* values,
                                      const Element* const* ahead, int from, int to) {
    if (from >= to) return;
    constexpr int together = M == 1 ? 4 : simd::kValueVectors;
    constexpr int whole = vectors / together * together;
    for (int v = 0; v < whole; v += together) some_values<Source, Fetch, M, together>(work, i, values, ahead, from, to, v);
    if constexpr (whole < vectors)
      some_values<Source, Fetch, M, vectors - whole>(work, i, values, ahead, from, to, whole);
  }

  template <class Source, bool Fetch, int M, int J>
  static __attribute__((noinline)) void some_values(Work& work, int i, const typename Source::Element* const* values,
                                                    const Element* const* ahead, int from, int to, int vector) {
    using namespace simd;
    Floats sums[M][J];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) sums[m][j] = load(work.out[i + m] + (vector + j) * kLanes);
    }
    for (int r = from / kRun; r * kRun < to; ++r) {
      const int stop = to < (r + 1) * kRun ? to : (r + 1) * kRun;
      int position = from > r * kRun ? from : r * kRun;
      const int skip = (position - r * kRun) * DH + vector * kLanes;
      const auto* row = values[r] + skip;
      for (const Element* fetch = Fetch ? ahead[r] + skip : nullptr; position < stop; ++position, row += DH) {
        if constexpr (Fetch) {
          for (int j = 0; j < J; ++j) prefetch(fetch + j * kLanes);
          fetch += DH;
        }
        Floats value[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) {
          constexpr int rest = DH % kLanes;
          if (rest == 0 || (vector + j + 1) * kLanes <= DH) value[j] = Source::load(row + j * kLanes);
          else value[j] = Source::load_first(row + j * kLanes, rest);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const Floats weight = splat(work.weights[i + m][position]);
#pragma GCC unroll 4
          for (int j = 0; j < J; ++j) sums[m][j] = fma(value[j], weight, sums[m][j]);
        }
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) store(work.out[i + m] + (vector + j) * kLanes, sums[m][j]);
    }
  }

  // Divides by the sum of weights and writes query i's head.
  static FLARE_INLINE void finish(const Arg* arg, Work& work, const Batch& batch, int i) {
    using namespace simd;
    const int token = batch.token + i % batch.tokens, head = batch.head + i / batch.tokens;
    const Floats inverse = splat(1.0f / sum(load(work.total[i])));
    const float* out = work.out[i];
    if constexpr (std::is_same_v<Out, ToQuant>) {
      uint8_t* row = (uint8_t*)arg[3].pointer + (size_t)token * QuantRow<H * DH>::bytes;
      for (int d = 0; d < DH; d += kGroup)
        QuantRow<H * DH>::put(row, (head * DH + d) / kGroup, load(out + d) * inverse, load(out + d + kLanes) * inverse);
    } else {
      float* row = (float*)arg[3].pointer + ((size_t)token * H + head) * DH;
      constexpr int whole = DH / kLanes * kLanes;
      for (int d = 0; d < whole; d += kLanes) store(row + d, load(out + d) * inverse);
      if constexpr (whole < DH) store_first(row + whole, load(out + whole) * inverse, DH - whole);
    }
  }
};

}  // namespace flare
