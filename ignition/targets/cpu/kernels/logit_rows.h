// What becomes of the rows of logits that a step leaves: tokens are drawn from them (sampler.h), or given tokens are
// scored (logprobs.h). A row is one unit of work. Every argument is checked before anything is done.
#pragma once
#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "interface.h"
#include "logprobs.h"
#include "memory.h"
#include "pool.h"
#include "sampler.h"

namespace flare {

class LogitRows {
 public:
  // Bytes that allocate() asks for.
  static uint64_t bytes(const flare_open_args& limits) { return stride(limits.vocabulary) * limits.threads; }

  // False when there is no memory. Called once.
  bool allocate(const flare_open_args& limits) {
    vocabulary_ = limits.vocabulary;
    return memory_.allocate(bytes(limits), false) && outcome_.allocate(limits.max_rows);
  }

  // Chooses `sampled` from the first of the `live` rows of `logits`. kRowsFailed: some rows have no token; those are -1 in
  // `sampled` and have rank 0 in `logprobs`, the others are good, the text names the first.
  int sample(const flare_sample_args& a, const float* logits, int32_t live, Pool& pool, ErrorText fail) {
    if (a.params_size != sizeof(SampleParams))
      return fail("params of %u bytes, the library takes %zu", a.params_size, sizeof(SampleParams));
    if (int bad = check_size(a.logprobs_size, fail)) return bad;
    if (a.rows < 0 || a.rows > live) return fail("rows %d: the last step left %d rows of logits", a.rows, live);
    if (a.rows && (!a.params || !a.sampled)) return fail("params or sampled is null");
    for (int32_t row = 0; row < a.rows; ++row) {
      if (int bad = check_params(row, a.params[row], fail)) return bad;
      if (a.params[row].alternatives >= 0 && !a.logprobs)
        return fail("params[%d]: alternatives %d: logprobs is null", row, a.params[row].alternatives);
    }
    sample_ = a;
    run(&LogitRows::sample_rows, a.rows, logits, pool);
    for (int32_t row = 0; row < a.rows; ++row) a.sampled[row] = outcome_[row] < 0 ? -1 : outcome_[row];
    return report(0, a.rows, fail);
  }

  // Scores a target in each of a range of the `live` rows of `logits`. kRowsFailed: some rows have no probabilities; those
  // have rank 0, the others are good, the text names the first.
  int score(const flare_score_args& a, const float* logits, int32_t live, Pool& pool, ErrorText fail) {
    if (int bad = check_size(a.logprobs_size, fail)) return bad;
    if (a.first < 0 || a.count < 0 || a.first > live - a.count)
      return fail("rows %d from %d on: the last step left %d rows of logits", a.count, a.first, live);
    if (a.count && (!a.target || !a.wanted || !a.logprobs)) return fail("target, wanted or logprobs is null");
    for (int32_t row = a.first; row < a.first + a.count; ++row) {
      if (a.target[row] < 0 || a.target[row] >= vocabulary_)
        return fail("target[%d] %d: must be in [0, %d)", row, a.target[row], vocabulary_);
      if (a.wanted[row] < 0 || a.wanted[row] > kMaxAlternatives)
        return fail("wanted[%d] %d: must be in [0, %d]", row, a.wanted[row], kMaxAlternatives);
    }
    score_ = a;
    run(&LogitRows::score_rows, a.count, logits, pool);
    return report(a.first, a.count, fail);
  }

 private:
  static size_t stride(int32_t vocabulary) {  // 4096: threads share no line
    return Maxima::bytes(vocabulary) + Sampler::bytes(vocabulary) + 4096;
  }

  static int check_size(uint32_t logprobs_size, ErrorText fail) {
    if (logprobs_size == sizeof(RowLogprobs)) return kGood;
    return fail("logprobs of %u bytes, the library takes %zu", logprobs_size, sizeof(RowLogprobs));
  }

  int check_params(int32_t row, const SampleParams& p, ErrorText fail) const {
    const struct {
      const char* name;
      float value, least, most;
    } ranges[] = {
        {"temperature", p.temperature, -FLT_MAX, FLT_MAX},
        {"top_p", p.top_p, 0, 1},
        {"min_p", p.min_p, 0, 1},
        {"repetition", p.repetition, FLT_MIN, FLT_MAX},
        {"presence", p.presence, -FLT_MAX, FLT_MAX},
        {"frequency", p.frequency, -FLT_MAX, FLT_MAX},
    };
    for (const auto& r : ranges)
      if (!(r.value >= r.least && r.value <= r.most))
        return fail("params[%d]: %s %g: must be in [%g, %g]", row, r.name, r.value, r.least, r.most);
    if (p.top_k < -1) return fail("params[%d]: top_k %d: must be at least -1", row, p.top_k);
    if (p.history_len < 0 || p.prompt_len < 0 || p.prompt_len > p.history_len)
      return fail("params[%d]: prompt_len %d of history_len %d", row, p.prompt_len, p.history_len);
    if (p.alternatives < -1 || p.alternatives > kMaxAlternatives)
      return fail("params[%d]: alternatives %d: must be in [-1, %d]", row, p.alternatives, kMaxAlternatives);
    if (p.explicit_ < 0 || p.explicit_ > kMaxExplicit)
      return fail("params[%d]: explicit %d: must be in [0, %d]", row, p.explicit_, kMaxExplicit);
    if (p.penalised())
      if (int bad = check_tokens(row, "history", p.history, p.history_len, fail)) return bad;
    return p.alternatives < 0 ? kGood : check_tokens(row, "explicit_ids", p.explicit_ids, p.explicit_, fail);
  }

  int check_tokens(int32_t row, const char* name, const int32_t* tokens, int32_t count, ErrorText fail) const {
    if (count && !tokens) return fail("params[%d]: %s is null", row, name);
    uint32_t highest = 0;  // a negative number is a very high one
    for (int32_t i = 0; i < count; ++i) highest = uint32_t(tokens[i]) > highest ? uint32_t(tokens[i]) : highest;
    if (highest >= uint32_t(vocabulary_))
      return fail("params[%d]: %s has token %d: must be in [0, %d)", row, name, int32_t(highest), vocabulary_);
    return kGood;
  }

  void run(void (*work)(void*, int32_t, int32_t, int64_t, int64_t), int64_t rows, const float* logits, Pool& pool) {
    logits_ = logits;
    if (rows) pool.run(Work{work, this, &rows, 1, Pool::kMaxChunks});
  }

  static void sample_rows(void* context, int32_t thread, int32_t, int64_t begin, int64_t end) {
    LogitRows& rows = *static_cast<LogitRows*>(context);
    Maxima maxima = rows.maxima(thread);
    Sampler sampler(rows.memory(thread) + Maxima::bytes(rows.vocabulary_), rows.vocabulary_, maxima);
    Scorer scorer(rows.vocabulary_, maxima);
    for (int64_t row = begin; row < end; ++row) {
      const SampleParams& params = rows.sample_.params[row];
      const float* logits = rows.logits(row);
      const int32_t token = rows.outcome_[row] = sampler.choose(logits, params);
      if (params.alternatives < 0) continue;
      RowLogprobs& out = rows.sample_.logprobs[row];
      if (token < 0) {
        Scorer::clear(out);
        continue;
      }
      if (params.penalised() || params.mask) maxima.find(logits);  // no NaN: it would have been one in choose() too
      scorer.score(logits, token, params.alternatives, out);
      for (int32_t i = 0; i < params.explicit_; ++i) out.explicit_[i] = scorer.value(logits[params.explicit_ids[i]]);
    }
  }

  static void score_rows(void* context, int32_t thread, int32_t, int64_t begin, int64_t end) {
    LogitRows& rows = *static_cast<LogitRows*>(context);
    const flare_score_args& a = rows.score_;
    Maxima maxima = rows.maxima(thread);
    Scorer scorer(rows.vocabulary_, maxima);
    for (int64_t row = a.first + begin; row < a.first + end; ++row) {
      const float* logits = rows.logits(row);
      const bool good = maxima.find(logits);
      if (good && maxima.highest() > -INFINITY) {
        scorer.score(logits, a.target[row], a.wanted[row], a.logprobs[row]);
        rows.outcome_[row] = a.target[row];
      } else {
        Scorer::clear(a.logprobs[row]);
        rows.outcome_[row] = good ? kMasked : kNan;
      }
    }
  }

  // kRowsFailed, and a line about the first row without a token, if there is one.
  int report(int32_t first, int32_t count, ErrorText fail) const {
    for (int32_t row = first; row < first + count; ++row) {
      if (outcome_[row] >= 0) continue;
      fail(outcome_[row] == kNan ? "row %d: its logits hold NaN" : "row %d: all its logits are -inf", row);
      return kRowsFailed;
    }
    return kGood;
  }

  const float* logits(int64_t row) const { return logits_ + size_t(vocabulary_) * row; }
  uint8_t* memory(int32_t thread) const { return memory_.data() + stride(vocabulary_) * thread; }
  Maxima maxima(int32_t thread) const { return Maxima(memory(thread), vocabulary_); }

  int32_t vocabulary_ = 0;
  Mapping memory_;          // of each thread's maxima and sampler
  Array<int32_t> outcome_;  // [max_rows], of the call that runs: at least 0, or why a row failed
  const float* logits_ = nullptr;
  flare_sample_args sample_{};
  flare_score_args score_{};
};

}  // namespace flare
