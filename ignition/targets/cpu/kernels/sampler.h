// Chooses a token from one row of logits. Exact semantics, in this order, all on f32 logits unless said otherwise:
//
// 1. Penalties, from `history` = prompt then generated tokens. Repetition, once for each token that occurs in it: a
//    positive logit is divided by `repetition`, another multiplied. Then, over the generated tokens alone,
//    logit = (logit - frequency * count) - presence for each token with count > 0.
// 2. Mask: the logit of a token whose bit is not set becomes -inf; a NaN stays one.
// 3. temperature <= 0: the highest logit, the lowest id among equals. Nothing below applies.
// 4. Weights: w = exp((logit - highest) / temperature), where 1 / temperature is rounded first; w = 0 once the exponent
//    is below -86. If the highest logit is +inf, the tokens at +inf weigh 1 and all others 0.
// 5. top_k keeps the first k tokens by descending logit, equal logits by ascending id. Off at -1 and 0.
// 6. top_p keeps, in that order, the shortest prefix whose weights reach top_p times the sum of those that step 5 kept;
//    at least one. Off at 1.
// 7. min_p keeps w >= min_p (the highest weight is 1). Off at 0.
// 8. Draw: u = the upper 53 bits of the first two words (word 0 above word 1) of Philox4x32-10 with key (seed low, seed
//    high) and counter (position, choice, 0, 0), times 2^-53. Chosen is the first token whose running sum of weights
//    exceeds u times the sum of all kept weights; tokens in the order of step 5 if any filter is on, else by id.
//    If rounding leaves none, the last one with w > 0.
//
// Sums are f64. NaN among the penalised logits, and a row in which all are -inf after the mask, are outcomes of their
// own (never a token). Nothing here calls libm and the order of every operation is fixed, so equal logits give equal
// tokens on every machine, at every instruction set level and for any number of threads.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "exponential.h"
#include "interface.h"
#include "maxima.h"
#include "philox.h"

namespace flare {

// One thread's sampler: scratch memory and the steps above.
class Sampler {
 public:
  // Bytes of memory that a sampler needs, a multiple of 64.
  static size_t bytes(int32_t vocabulary) {
    const size_t padded = padded_to_block(vocabulary);
    const size_t of_tokens = padded * (sizeof(float) * 2 + sizeof(int32_t) + sizeof(Candidate));
    const size_t of_blocks = (blocks_of(vocabulary) * sizeof(double) + 63) / 64 * 64;
    return of_tokens + of_blocks;
  }

  // `memory` is zeroed and 64-byte aligned; it keeps its contents between calls.
  Sampler(uint8_t* memory, int32_t vocabulary, Maxima& maxima) : size_(vocabulary), maxima_(maxima) {
    const size_t padded = padded_to_block(vocabulary);
    auto take = [&memory](auto*& pointer, size_t count) {
      pointer = reinterpret_cast<decltype(pointer + 0)>(memory);
      memory += count * sizeof(*pointer);
    };
    take(penalised_, padded);
    take(weight_, padded);
    take(count_, padded);
    take(candidate_, padded);
    take(sum_, maxima_.blocks());
  }

  // A token in [0, vocabulary), or kNan or kMasked. Parameters and history were checked. Leaves the maxima of the logits
  // that penalties and mask made.
  int32_t choose(const float* logits, const SampleParams& p) {
    if (p.penalised()) logits = penalise(logits, p);
    if (p.mask) logits = forbid(logits, p.mask);
    if (!maxima_.find(logits)) return kNan;
    const float highest = maxima_.highest();
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

  // The logits, -inf where the mask has no bit. Writes to penalised_, which `logits` may be.
  const float* forbid(const float* logits, const uint32_t* mask) {
    Ints bit;
    for (int32_t i = 0; i < kWidth; ++i) bit[i] = int32_t(uint32_t{1} << i);
    const int32_t whole = size_ / 32;
    for (int32_t w = 0; w < whole; ++w)
      for (int32_t i = 0; i < 32; i += kWidth) {
        const Floats x = *reinterpret_cast<const Floats*>(logits + w * 32 + i);
        const Ints forbidden = (bit & int32_t(mask[w] >> i)) == 0;
        *reinterpret_cast<Floats*>(penalised_ + w * 32 + i) = forbidden & (x == x) ? Floats{} - INFINITY : x;
      }
    for (int32_t id = whole * 32; id < size_; ++id) {
      const bool allowed = mask[whole] >> (id % 32) & 1;
      penalised_[id] = allowed || logits[id] != logits[id] ? logits[id] : -INFINITY;
    }
    return penalised_;
  }

  int32_t first_of(const float* logits, float value) const {
    int32_t b = 0;
    while (maxima_.of_block(b) != value) ++b;
    int32_t id = b * kBlock;
    while (logits[id] != value) ++id;
    return id;
  }

  // Fills weight_ (zero beyond the vocabulary) and sum_; returns the sum of all.
  double weigh(const float* logits, float highest, float inverse) {
    for_each_block(logits, size_, [&](int32_t b, const float* x) {
      float* weight = weight_ + size_t(b) * kBlock;
      for (int32_t i = 0; i < kBlock; i += kWidth)
        *reinterpret_cast<Floats*>(weight + i) =
            exponential::relative_weight(*reinterpret_cast<const Floats*>(x + i), highest, inverse);
    });
    double total = 0;
    for (int32_t b = 0; b < maxima_.blocks(); ++b) total += sum_[b] = block_sum(weight_ + size_t(b) * kBlock);
    return total;
  }

  int32_t draw_by_id(double total, double u) const {
    const double target = u * total;
    double running = 0;
    int32_t b = 0;
    while (b + 1 < maxima_.blocks() && running + sum_[b] <= target) running += sum_[b++];
    for (int32_t id = b * kBlock; id < (b + 1) * kBlock; ++id) {
      running += weight_[id];
      if (running > target) return id;
    }
    int32_t last = (b + 1) * kBlock - 1;  // rounding left none; the weights' sum is at least 1, so one is positive
    while (weight_[last] == 0.0f) --last;
    return last;
  }

  // Writes all tokens with a logit of at least `least` to candidate_, but none at -inf, which weigh nothing; returns
  // their end.
  Candidate* collect(const float* logits, float least) {
    if (least < -FLT_MAX) least = -FLT_MAX;
    Candidate* end = candidate_;
    for (int32_t b = 0; b < maxima_.blocks(); ++b) {
      if (maxima_.of_block(b) < least) continue;
      const int32_t stop = (b + 1) * kBlock < size_ ? (b + 1) * kBlock : size_;
      for (int32_t id = b * kBlock; id < stop; ++id) {
        *end = Candidate{logits[id], weight_[id], id};
        end += logits[id] >= least;
      }
    }
    return end;
  }

  // The same for all tokens with a weight of at least `least`, which is positive.
  Candidate* collect_weights(const float* logits, float least) {
    Candidate* end = candidate_;
    for (int32_t b = 0; b < maxima_.blocks(); ++b) {
      if (sum_[b] < least) continue;
      const int32_t stop = (b + 1) * kBlock < size_ ? (b + 1) * kBlock : size_;
      for (int32_t id = b * kBlock; id < stop; ++id) {
        *end = Candidate{logits[id], weight_[id], id};
        end += weight_[id] >= least;
      }
    }
    return end;
  }

  Candidate* keep_top_k(const float* logits, int32_t k) {
    Candidate* end = collect(logits, maxima_.reached_by(k));
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
      w = exponential::relative_weight(w, highest, inverse);
      for (int32_t i = 0; i < count; ++i) {
        group[i].weight = w[i];
        if (w[i] > 0.0f) *kept++ = group[i];
      }
    }
    return kept;
  }

  // The highest tokens, whole value classes of them, with at least `mass` of weight, or all that weigh anything.
  Candidate* collect_mass(const float* logits, double mass) {
    for (int32_t k = 32; k < maxima_.blocks(); k *= 8) {
      Candidate* end = collect(logits, maxima_.reached_by(k));
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

  int32_t size_;
  Maxima& maxima_;
  float* penalised_;
  float* weight_;
  int32_t* count_;  // all zero between calls
  Candidate* candidate_;
  double* sum_;     // of each block's weights
};

}  // namespace flare
