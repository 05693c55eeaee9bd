// Log probabilities of one row of logits, as they leave the model: before penalties, mask, temperature and filters.
//
// 1. Sum: of exp(x - highest) over the complete vocabulary; each term f32 (exponential.h), sums f64. If the highest logit
//    is +inf, the tokens at +inf weigh 1 and all others 0, as in a draw.
// 2. A token's value is (x - highest) - log(sum) in f64, rounded to f32 once. At -inf it is -inf.
// 3. Rank of a token: 1 + the number of tokens whose value is strictly greater.
// 4. Alternatives: the tokens first by descending value, then by ascending id. Logits that differ may round to one value:
//    they are equals here.
//
// NaN anywhere, and a row in which all are -inf, have no probabilities: rank 0, nothing else. No libm and a fixed order of
// every operation: equal logits give equal bits on every machine, at every instruction set level, for any number of threads.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "exponential.h"
#include "interface.h"
#include "logarithm.h"
#include "maxima.h"

namespace flare {

// The log probabilities of rows whose maxima are known.
class Scorer {
 public:
  Scorer(int32_t vocabulary, Maxima& maxima) : size_(vocabulary), maxima_(maxima) {}

  // Makes `out`, but for `explicit_`, that of a row without probabilities.
  static void clear(RowLogprobs& out) {
    out.chosen = -INFINITY;
    out.rank = out.count = out.reserved = 0;
  }

  // Fills `out` but for `explicit_`, for a token in [0, vocabulary) and `alternatives` in [0, kMaxAlternatives]. The maxima
  // are those of `logits`, which hold no NaN and are not all -inf.
  void score(const float* logits, int32_t token, int32_t alternatives, RowLogprobs& out) {
    normalise(logits);
    out.chosen = value(logits[token]);
    out.rank = 1 + count_above(logits, last_equal(logits[token]));
    out.count = alternatives ? rank_best(logits, alternatives < size_ ? alternatives : size_, out) : 0;
    out.reserved = 0;
  }

  // The value of a logit of the row that was scored last.
  float value(float logit) const {
    if (maxima_.highest() == INFINITY) return logit == INFINITY ? float(0.0 - log_sum_) : -INFINITY;
    return float((double(logit) - double(maxima_.highest())) - log_sum_);
  }

 private:
  using Floats = exponential::Floats;
  using Ints = exponential::Ints;
  static constexpr int32_t kWidth = exponential::kWidth;

  void normalise(const float* logits) {
    constexpr int32_t kBatch = 16;  // blocks that are weighed, then summed: values just stored are slow to read in halves
    alignas(64) float weight[kBatch * kBlock];
    const float highest = maxima_.highest();
    double sum = 0;
    int32_t held = 0;
    for_each_block(logits, size_, [&](int32_t b, const float* x) {
      for (int32_t i = 0; i < kBlock; i += kWidth)
        *reinterpret_cast<Floats*>(weight + held * kBlock + i) =
            exponential::relative_weight(*reinterpret_cast<const Floats*>(x + i), highest, 1.0f);
      if (++held < kBatch && b + 1 < maxima_.blocks()) return;
      for (int32_t i = 0; i < held; ++i) sum += block_sum(weight + i * kBlock);
      held = 0;
    });
    log_sum_ = logarithm(sum);
  }

  // The highest logit, at most the row's highest, with the value that `logit` has; values never fall as logits rise.
  float last_equal(float logit) const {
    const float same = value(logit);
    int64_t low = ordinal(logit), high = ordinal(maxima_.highest());
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (value(from_ordinal(middle)) > same) {
        high = middle - 1;
      } else {
        low = middle;
      }
    }
    return from_ordinal(low);
  }

  // Numbers the floats from -inf to +inf in order; -0 and +0 are one.
  static int64_t ordinal(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >= 0 ? int64_t{bits} : INT64_C(-0x80000000) - bits;
  }

  static float from_ordinal(int64_t n) {
    const int32_t bits = int32_t(n >= 0 ? n : INT64_C(-0x80000000) - n);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }

  int32_t count_above(const float* logits, float limit) const {
    Ints above{};
    for_each_block(logits, size_, [&](int32_t b, const float* x) {
      if (maxima_.of_block(b) <= limit) return;
      for (int32_t i = 0; i < kBlock; i += kWidth) above -= *reinterpret_cast<const Floats*>(x + i) > limit;
    });
    int32_t count = 0;
    for (int32_t i = 0; i < kWidth; ++i) count += above[i];
    return count;
  }

  // Fills ids and values with the best `count` tokens, in [1, vocabulary]; returns `count`. Ids are looked at in their
  // order, so a later one must be better to come before those that are held.
  int32_t rank_best(const float* logits, int32_t count, RowLogprobs& out) {
    const float least = value(maxima_.reached_by(count));  // at least `count` tokens have it
    int32_t held = 0;
    for (int32_t b = 0; b < maxima_.blocks(); ++b) {
      if (!enters(value(maxima_.of_block(b)), least, held, count, out)) continue;
      const int32_t stop = (b + 1) * kBlock < size_ ? (b + 1) * kBlock : size_;
      for (int32_t id = b * kBlock; id < stop; ++id) {
        const float candidate = value(logits[id]);
        if (!enters(candidate, least, held, count, out)) continue;
        int32_t place = held < count ? held++ : count - 1;
        for (; place && out.values[place - 1] < candidate; --place) {
          out.values[place] = out.values[place - 1];
          out.ids[place] = out.ids[place - 1];
        }
        out.values[place] = candidate;
        out.ids[place] = id;
      }
    }
    return held;
  }

  static bool enters(float candidate, float least, int32_t held, int32_t count, const RowLogprobs& out) {
    return held < count ? candidate >= least : candidate > out.values[count - 1];
  }

  int32_t size_;
  Maxima& maxima_;
  double log_sum_ = 0;
};

}  // namespace flare
