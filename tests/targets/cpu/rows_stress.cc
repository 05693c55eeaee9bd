// Draws from and scores random rows through logit_rows.h, in memory that ends exactly where it must. Meant for the address
// and undefined behaviour sanitizers. Argument: rounds for each vocabulary.
#include "logit_rows.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using namespace flare;

static int round_of(int32_t vocabulary, int32_t rows, LogitRows& work, Pool& pool, std::mt19937& random) {
  auto pick = [&random](auto... values) {
    const double all[] = {double(values)...};
    return all[random() % (sizeof all / sizeof *all)];
  };
  auto token = [&] { return int32_t(random() % vocabulary); };
  std::vector<float> logits(size_t(rows) * vocabulary);
  std::vector<std::vector<int32_t>> histories(rows), explicits(rows);
  std::vector<std::vector<uint32_t>> masks(rows);
  std::vector<SampleParams> params(rows);
  std::vector<int32_t> sampled(rows), targets(rows), wanted(rows);
  std::vector<RowLogprobs> logprobs(rows);
  for (int32_t row = 0; row < rows; ++row) {
    const double kind = pick(0, 1, 2, 3);
    for (int32_t id = 0; id < vocabulary; ++id)
      logits[size_t(row) * vocabulary + id] = kind == 0   ? std::normal_distribution<float>(0, 4)(random)
                                              : kind == 1 ? float(pick(-INFINITY, 1, 2))
                                              : kind == 2 ? float(pick(-3e38, 3e38, 0, INFINITY, -INFINITY))
                                                          : 1.0f;
    if (random() % 16 == 0) logits[size_t(row) * vocabulary + token()] = NAN;
    for (auto* list : {&histories[row], &explicits[row]}) {
      list->resize(random() % 40);
      for (int32_t& entry : *list) entry = token();
    }
    masks[row].resize((vocabulary + 31) / 32);
    for (uint32_t& word : masks[row]) word = random() & random();
    SampleParams& p = params[row];
    p.temperature = pick(0, 0.01, 0.7, 3e38);
    p.top_p = pick(1, 1, 0, 0.5, 0.99);
    p.min_p = pick(0, 0, 0.1, 1);
    p.repetition = pick(1, 1.5, 1e-30);
    p.presence = pick(0, 2, -3e38);
    p.frequency = pick(0, 0.5, 3e38);
    p.top_k = pick(-1, 1, 20, 1000, INT32_MAX);
    p.seed = random();
    p.history = histories[row].data();
    p.history_len = histories[row].size();
    p.prompt_len = p.history_len / 2;
    p.mask = random() % 2 ? masks[row].data() : nullptr;
    p.explicit_ids = explicits[row].data();
    p.explicit_ = explicits[row].size();
    p.alternatives = pick(-1, 0, 3, 20);
    targets[row] = token();
    wanted[row] = pick(0, 1, 20);
  }
  char text[200] = "";
  const ErrorText error(text, sizeof text);
  const flare_sample_args sample{sizeof sample, sizeof(SampleParams), rows,           sizeof(RowLogprobs),
                                 params.data(), sampled.data(),       logprobs.data()};
  const flare_score_args score{sizeof score,   sizeof(RowLogprobs), 0, rows, targets.data(), wanted.data(),
                               logprobs.data()};
  const int drawn = work.sample(sample, logits.data(), rows, pool, error);
  const int scored = work.score(score, logits.data(), rows, pool, error);
  if (drawn == kRefused || scored == kRefused) return printf("vocabulary %d: %s\n", vocabulary, text);
  for (int32_t row = 0; row < rows; ++row)
    if (sampled[row] < -1 || sampled[row] >= vocabulary)
      return printf("vocabulary %d: row %d has token %d\n", vocabulary, row, sampled[row]);
  return 0;
}

int main(int, char** argv) {
  for (int32_t vocabulary : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 75, 127, 1000, 1281, 3000}) {
    std::mt19937 random(vocabulary);
    flare_open_args limits{};
    limits.vocabulary = vocabulary;
    limits.max_rows = 3;
    limits.threads = 2;
    Pool pool;
    LogitRows work;
    if (pool.start(2) || !work.allocate(limits)) return 1;
    for (int round = 0; round < atoi(argv[1]); ++round)
      if (int failed = round_of(vocabulary, 1 + random() % 3, work, pool, random)) return failed;
  }
  return 0;
}
