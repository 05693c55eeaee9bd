// Runs random work on pools of several sizes and checks, inside every chunk, that the phase before is complete and the
// phase after has not begun. Meant for the thread sanitizer. Argument: rounds for each pool.
#include "pool.h"

#include <cerrno>
#include <cstring>
#include <random>
#include <vector>

struct Rounds {
  std::vector<std::vector<int>> runs;  // [phase][unit], how often it ran
  std::vector<int64_t> units;
  std::atomic<int> errors{0};
};

static void run(void* context, int32_t, int32_t phase, int64_t begin, int64_t end) {
  Rounds& rounds = *static_cast<Rounds*>(context);
  if (phase > 0)
    for (int count : rounds.runs[phase - 1]) rounds.errors += count != 1;
  if (phase + 1 < static_cast<int32_t>(rounds.runs.size()))
    for (int count : rounds.runs[phase + 1]) rounds.errors += count != 0;
  for (int64_t i = begin; i < end; ++i) ++rounds.runs[phase][i];
}

int main(int, char** argv) {
  std::mt19937 random(7);
  for (int threads : {2, 3, 5, 16}) {
    flare::Pool pool;
    if (int error = pool.start(threads)) return printf("%d threads: %s\n", threads, strerror(error));
    for (int round = 0; round < atoi(argv[1]); ++round) {
      Rounds rounds;
      const int phases = 1 + random() % 40;
      for (int phase = 0; phase < phases; ++phase) {
        const int units = 1 + random() % (random() % 3 ? 8 : 200);
        rounds.units.push_back(units);
        rounds.runs.emplace_back(units, 0);
      }
      const int32_t chunks = 1 + random() % flare::Pool::kMaxChunks;
      pool.begin(flare::Work{run, &rounds, rounds.units.data(), phases, chunks});
      if (round % 3 == 0) usleep(random() % 200);  // the caller comes late
      pool.finish();
      for (const auto& phase : rounds.runs)
        for (int count : phase) rounds.errors += count != 1;
      if (rounds.errors) return printf("%d threads, round %d: %d errors\n", threads, round, rounds.errors.load());
      if (round % 20 == 0) usleep(500);  // now and then the workers go to sleep
    }
  }
}
