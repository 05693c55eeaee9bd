// Chooses a token from one row of logits. Exact semantics, in this order, all on f32 logits unless said otherwise:
//
// 1. Penalties, from `history` = prompt then generated tokens. Repetition, once for each token that occurs in it: a
//    positive logit is divided by `repetition`, another multiplied. Then, over the generated tokens alone,
//    logit = (logit - frequency * count) - presence for each token with count > 0.
// 2. temperature <= 0: the highest logit, the lowest id among equals. Nothing below applies.
// 3. Weights: w = exp((logit - highest) / temperature), where 1 / temperature is rounded first; w = 0 once the exponent
//    is below -86. If the highest logit is +inf, the tokens at +inf weigh 1 and all others 0.
// 4. top_k keeps the first k tokens by descending logit, equal logits by ascending id. Off at -1 and 0.
// 5. top_p keeps, in that order, the shortest prefix whose weights reach top_p times the sum of those that step 4 kept;
//    at least one. Off at 1.
// 6. min_p keeps w >= min_p (the highest weight is 1). Off at 0.
// 7. Draw: u = the upper 53 bits of the first two words (word 0 above word 1) of Philox4x32-10 with key (seed low, seed
//    high) and counter (position, choice, 0, 0), times 2^-53. Chosen is the first token whose running sum of weights
//    exceeds u times the sum of all kept weights; tokens in the order of step 4 if any filter is on, else by id.
//    If rounding leaves none, the last one with w > 0.
//
// Sums are f64. NaN among the penalised logits, and a row in which all are -inf, are outcomes of their own (never a
// token). Nothing here calls libm and the order of every operation is fixed, so equal logits give equal tokens on every
// machine, at every instruction set level and for any number of threads.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "exponential.h"
#include "interface.h"
#include "philox.h"

namespace flare {

// One thread's sampler: scratch memory and the steps above.
class Sampler {
 public:
  static constexpr int32_t kNan = -1;     // not tokens: why there is none
  static constexpr int32_t kMasked = -2;

  // Bytes of memory that a sampler needs, a multiple of 64.
  static size_t bytes(int32_t vocabulary) {
    const size_t padded = padded_to_block(vocabulary);
    const size_t of_tokens = padded * (sizeof(float) * 2 + sizeof(int32_t) + sizeof(Candidate));
    const size_t of_blocks = blocks_of(padded) * (sizeof(double) + sizeof(float) * 2);
    return of_tokens + (of_blocks + 63) / 64 * 64;
  }

  // `memory` is zeroed and 64-byte aligned; it keeps its contents between calls.
  Sampler(uint8_t* memory, int32_t vocabulary) : size_(vocabulary), blocks_(blocks_of(vocabulary)) {
    const size_t padded = padded_to_block(vocabulary);
    auto take = [&memory](auto*& pointer, size_t count) {
      pointer = reinterpret_cast<decltype(pointer + 0)>(memory);
      memory += count * sizeof(*pointer);
    };
    take(penalised_, padded);
    take(weight_, padded);
    take(count_, padded);
    take(candidate_, padded);
    take(sum_, blocks_);
    take(highest_, blocks_);
    take(order_, blocks_);
  }

  // A token in [0, vocabulary), or kNan or kMasked. Parameters and history were checked.
  int32_t choose(const float* logits, const SampleParams& p) {
    if (p.penalised()) logits = penalise(logits, p);
    float highest;
    if (!scan(logits, highest)) return kNan;
    if (highest == -INFINITY) return kMasked;
    if (p.temperature <= 0.0f) return first_of(logits, highest);
    const float inverse = 1.0f / p.temperature < FLT_MAX ? 1.0f / p.temperature : FLT_MAX;  // keeps 0 * inverse 0
    const double u = Philox(p.position, p.choice, 0, 0, uint32_t(p.seed), uint32_t(p.seed >> 32)).uniform();
    const bool top_k = p.top_k > 0;
    if (!top_k && p.top_p >= 1.0f && p.min_p <= 0.0f) return draw_by_id(weigh(logits, highest, inverse), u);
    Candidate* end = candidate_;
    double total = 0;
    if (top_k) {
      end = keep_top_k(logits, p.top_k);
      end = weigh_candidates(end, highest, inverse);
      for (const Candidate* c = candidate_; c != end; ++c) total += c->weight;
    } else {
      total = weigh(logits, highest, inverse);
      end = p.top_p < 1.0f ? collect_mass(logits, p.top_p * total) : collect_weights(logits, p.min_p);
    }
    if (p.top_p < 1.0f) {
      const double target = p.top_p * total;
      end = shortest_prefix(end, [](const Candidate& c) { return double(c.weight); },
                            [target](double sum) { return sum >= target; });
    }
    return draw_by_rank(end, p.min_p, u);
  }

 private:
  static constexpr int32_t kBlock = 64;
  static constexpr int32_t kWidth = exponential::kWidth;
  using Floats = exponential::Floats;
  using Ints = exponential::Ints;

  struct Candidate {
    float logit;
    float weight;
    int32_t id;

    bool before(const Candidate& other) const {
      return (logit > other.logit) | ((logit == other.logit) & (id < other.id));  // without branches
    }
  };

  static size_t padded_to_block(size_t n) { return (n + kBlock - 1) / kBlock * kBlock; }
  static int32_t blocks_of(size_t n) { return int32_t((n + kBlock - 1) / kBlock); }

  const float* penalise(const float* logits, const SampleParams& p) {
    memcpy(penalised_, logits, sizeof(float) * size_);
    if (p.repetition != 1.0f) {
      for (int32_t i = 0; i < p.history_len; ++i) {
        const int32_t token = p.history[i];
        if (count_[token]++) continue;
        float& logit = penalised_[token];
        logit = logit > 0.0f ? logit / p.repetition : logit * p.repetition;
      }
      for (int32_t i = 0; i < p.history_len; ++i) count_[p.history[i]] = 0;
    }
    if (p.presence != 0.0f || p.frequency != 0.0f) {
      for (int32_t i = p.prompt_len; i < p.history_len; ++i) ++count_[p.history[i]];
      for (int32_t i = p.prompt_len; i < p.history_len; ++i) {
        const int32_t token = p.history[i];
        if (!count_[token]) continue;
        penalised_[token] = (penalised_[token] - p.frequency * float(count_[token])) - p.presence;
        count_[token] = 0;
      }
    }
    return penalised_;
  }

  // Calls body(block, values) with 64 values each; the last block is filled up with -inf.
  template <class Body>
  void for_each_block(const float* logits, Body body) {
    const int32_t whole = size_ / kBlock;
    for (int32_t b = 0; b < whole; ++b) body(b, logits + size_t(b) * kBlock);
    if (whole == blocks_) return;
    float rest[kBlock];
    for (int32_t i = 0; i < kBlock; ++i) rest[i] = whole * kBlock + i < size_ ? logits[whole * kBlock + i] : -INFINITY;
    body(whole, rest);
  }

  // Fills highest_ and finds the highest of all. False when there is a NaN.
  bool scan(const float* logits, float& highest) {
    Ints nan{};
    for_each_block(logits, [&](int32_t b, const float* x) {
      Floats most = *reinterpret_cast<const Floats*>(x);
      nan |= most != most;
      for (int32_t i = kWidth; i < kBlock; i += kWidth) {
        const Floats v = *reinterpret_cast<const Floats*>(x + i);
        nan |= v != v;
        most = v > most ? v : most;
      }
      for (int32_t width = kWidth / 2; width; width /= 2)
        for (int32_t i = 0; i < width; ++i) most[i] = most[i + width] > most[i] ? most[i + width] : most[i];
      highest_[b] = most[0];
    });
    int32_t any = 0;
    for (int32_t i = 0; i < kWidth; ++i) any |= nan[i];
    highest = -INFINITY;
    for (int32_t b = 0; b < blocks_; ++b) highest = highest_[b] > highest ? highest_[b] : highest;
    return any == 0;
  }

  int32_t first_of(const float* logits, float value) const {
    int32_t b = 0;
    while (highest_[b] != value) ++b;
    int32_t id = b * kBlock;
    while (logits[id] != value) ++id;
    return id;
  }

  static Floats weigh_lanes(Floats x, float highest, float inverse) {
    if (highest == INFINITY) return x == INFINITY ? Floats{} + 1.0f : Floats{};
    return exponential::exp_nonpositive((x - highest) * inverse);
  }

  // Fills weight_ (zero beyond the vocabulary) and sum_; returns the sum of all.
  double weigh(const float* logits, float highest, float inverse) {
    for_each_block(logits, [&](int32_t b, const float* x) {
      float* weight = weight_ + size_t(b) * kBlock;
      for (int32_t i = 0; i < kBlock; i += kWidth)
        *reinterpret_cast<Floats*>(weight + i) =
            weigh_lanes(*reinterpret_cast<const Floats*>(x + i), highest, inverse);
      double part[8] = {};
      for (int32_t i = 0; i < kBlock; i += 8)
        for (int32_t k = 0; k < 8; ++k) part[k] += double(weight[i + k]);
      sum_[b] = ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
    });
    double total = 0;
    for (int32_t b = 0; b < blocks_; ++b) total += sum_[b];
    return total;
  }

  int32_t draw_by_id(double total, double u) const {
    const double target = u * total;
    double running = 0;
    int32_t b = 0;
    while (b + 1 < blocks_ && running + sum_[b] <= target) running += sum_[b++];
    for (int32_t id = b * kBlock; id < (b + 1) * kBlock; ++id) {
      running += weight_[id];
      if (running > target) return id;
    }
    int32_t last = (b + 1) * kBlock - 1;  // rounding left none; the weights' sum is at least 1, so one is positive
    while (weight_[last] == 0.0f) --last;
    return last;
  }

  // Writes all tokens with a logit of at least `least` to candidate_; returns their end.
  Candidate* collect(const float* logits, float least) {
    Candidate* end = candidate_;
    for (int32_t b = 0; b < blocks_; ++b) {
      if (highest_[b] < least) continue;
      const int32_t stop = (b + 1) * kBlock < size_ ? (b + 1) * kBlock : size_;
      for (int32_t id = b * kBlock; id < stop; ++id) {
        *end = Candidate{logits[id], weight_[id], id};
        end += logits[id] >= least;
      }
    }
    return end;
  }

  // The same for all tokens with a weight of at least `least`.
  Candidate* collect_weights(const float* logits, float least) {
    Candidate* end = candidate_;
    for (int32_t id = 0; id < size_; ++id) {
      *end = Candidate{logits[id], weight_[id], id};
      end += weight_[id] >= least;
    }
    return end;
  }

  // A logit that at least k tokens reach, and few more: the k-th highest of the blocks' highest.
  float lower_bound_of_top(int32_t k) {
    if (k >= blocks_) return -INFINITY;
    memcpy(order_, highest_, sizeof(float) * blocks_);
    int32_t begin = 0, end = blocks_;
    while (end - begin > 1) {
      const float pivot = order_[begin + (end - begin) / 2];
      int32_t i = begin, j = end - 1;
      while (i <= j) {
        while (order_[i] > pivot) ++i;
        while (order_[j] < pivot) --j;
        if (i > j) break;
        const float swap = order_[i];
        order_[i++] = order_[j];
        order_[j--] = swap;
      }
      if (k - 1 <= j) {
        end = j + 1;
      } else if (k - 1 >= i) {
        begin = i;
      } else {
        return pivot;
      }
    }
    return order_[begin];
  }

  Candidate* keep_top_k(const float* logits, int32_t k) {
    Candidate* end = collect(logits, lower_bound_of_top(k));
    return shortest_prefix(end, [](const Candidate&) { return 1.0; }, [k](double sum) { return sum >= k; });
  }

  // Sets the candidates' weights and drops those without any; they cannot be drawn.
  Candidate* weigh_candidates(const Candidate* end, float highest, float inverse) {
    Candidate* kept = candidate_;
    for (const Candidate* c = candidate_; c < end; c += kWidth) {
      const int32_t count = end - c < kWidth ? int32_t(end - c) : kWidth;
      Floats w = Floats{} - INFINITY;
      Candidate group[kWidth];
      for (int32_t i = 0; i < count; ++i) w[i] = (group[i] = c[i]).logit;
      w = weigh_lanes(w, highest, inverse);
      for (int32_t i = 0; i < count; ++i) {
        group[i].weight = w[i];
        if (w[i] > 0.0f) *kept++ = group[i];
      }
    }
    return kept;
  }

  // The highest tokens, whole value classes of them, with at least `mass` of weight, or all that weigh anything.
  Candidate* collect_mass(const float* logits, double mass) {
    for (int32_t k = 32; k < blocks_; k *= 8) {
      Candidate* end = collect(logits, lower_bound_of_top(k));
      double sum = 0;
      for (const Candidate* c = candidate_; c != end; ++c) sum += c->weight;
      if (sum >= mass) return end;
    }
    return collect(logits, -INFINITY);
  }

  int32_t draw_by_rank(const Candidate* end, float min_p, double u) {
    Candidate* kept = candidate_;
    double total = 0;
    for (const Candidate* c = candidate_; c != end; ++c) {
      if (c->weight < min_p || c->weight == 0.0f) continue;
      total += c->weight;
      *kept++ = *c;
    }
    const double target = u * total;
    return shortest_prefix(kept, [](const Candidate& c) { return double(c.weight); },
                           [target](double sum) { return sum > target; })[-1].id;
  }

  // Reorders [candidate_, end) so that its shortest prefix, by before(), whose measures' sum is enough comes first, and
  // returns that prefix's end; its last element is the last by before(). Quickselect: linear time for any prefix.
  template <class Measure, class Enough>
  Candidate* shortest_prefix(Candidate* end, Measure measure, Enough enough) {
    Candidate* begin = candidate_;
    double settled = 0;  // of [candidate_, begin), which is surely in the prefix
    uint32_t random = 1;
    while (end - begin > 32) {
      const uint32_t count = uint32_t(end - begin);
      Candidate* pick[3];
      for (auto*& c : pick) c = begin + (uint64_t(random = random * 1664525u + 1013904223u) * count >> 32);
      if (pick[1]->before(*pick[0])) exchange(pick[0], pick[1]);
      if (pick[2]->before(*pick[1])) exchange(pick[1], pick[2]);
      if (pick[1]->before(*pick[0])) exchange(pick[0], pick[1]);
      const Candidate pivot = *pick[1];
      Candidate* middle = begin;  // [begin, middle) is not after the pivot
      double sum = settled;
      for (Candidate* c = begin; c != end; ++c) {
        const Candidate value = *c;
        const bool kept = !pivot.before(value);
        sum += kept ? measure(value) : 0.0;
        *c = *middle;  // an exchange that does no harm if `value` stays behind: no branch to mispredict
        *middle = value;
        middle += kept;
      }
      if (enough(sum)) {
        end = middle;
      } else {
        begin = middle;
        settled = sum;
      }
    }
    for (Candidate* c = begin; c < end; ++c) {
      const Candidate value = *c;
      Candidate* hole = c;
      for (; hole != begin && value.before(hole[-1]); --hole) *hole = hole[-1];
      *hole = value;
    }
    for (Candidate* c = begin; c != end; ++c)
      if (enough(settled += measure(*c))) return c + 1;
    return end;
  }

  template <class T>
  static void exchange(T& a, T& b) {
    const T old = a;
    a = b;
    b = old;
  }

  int32_t size_, blocks_;
  float* penalised_;
  float* weight_;
  int32_t* count_;  // all zero between calls
  Candidate* candidate_;
  double* sum_;     // of each block's weights
  float* highest_;  // of each block's logits
  float* order_;
};

}  // namespace flare
