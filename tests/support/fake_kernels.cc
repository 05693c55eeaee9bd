// Kernels that show what the runtime does with them: phases, threads, bounds, arguments. Not for models.
#include <sched.h>
#include <time.h>

#include "kernel.h"
#include "runtime.h"

namespace {

using namespace flare;

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

template <class T>
T* at(const Arg& arg) {
  return static_cast<T*>(arg.pointer);
}

// i32 out[T]: the step's tokens.
struct Tokens {
  static constexpr int32_t args = 1;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {writes(most.tokens * 4)};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) at<int32_t>(arg[0])[i] = step.token[i];
  }
};

// i32 x[64], i32 out[64]: out[i] = sum of all x + i, so any x of a phase that has not ended shows.
struct SumPlus {
  static constexpr int32_t args = 2;
  static constexpr size_t scratch = 256;
  static Need need(int32_t arg, const Capacity&) {
    const Need all[args] = {reads(256), writes(256)};
    return all[arg];
  }
  static int64_t units(const Step&) { return 64; }
  static void run(const Step&, const Arg* arg, Scratch scratch, int64_t begin, int64_t end) {
    auto* copy = reinterpret_cast<int32_t*>(scratch.memory);
    memcpy(copy, at<int32_t>(arg[0]), 256);
    for (int64_t i = begin; i < end; ++i) {
      int32_t sum = 0;
      for (int32_t k = 0; k < 64; ++k) sum += copy[k];
      at<int32_t>(arg[1])[i] = sum + static_cast<int32_t>(i);
    }
  }
};

// i32 counts[T], i32 met[16]: unit i adds 1 to met[0], then waits until met[0] reaches token i, for at most 20 s (then
// met[1] is 1). So a test can demand that units run at the same time, or on another thread than another unit.
struct Meet {
  static constexpr int32_t args = 2;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {writes(most.tokens * 4), writes(64)};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    auto* met = at<std::atomic<int32_t>>(arg[1]);
    for (int64_t i = begin; i < end; ++i) {
      ++at<int32_t>(arg[0])[i];
      ++met[0];
      for (const int64_t begun = now(); met[0] < step.token[i]; sched_yield())
        if (now() - begun > 20'000'000'000) met[1] = 1, met[0] = 1 << 30;
    }
  }
};

// i32 counts[T]: how often each unit ran. The unit of token t spins for t microseconds.
struct Spin {
  static constexpr int32_t args = 1;
  static constexpr size_t scratch = 64;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {writes(most.tokens * 4)};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (const int64_t begun = now(); now() - begun < step.token[i] * int64_t{1000};) {
      }
      ++at<int32_t>(arg[0])[i];
    }
  }
};

// f32 table[V], f32 logits[R][V]: every row is the table plus the row's token, at the row's token only.
template <int32_t V>
struct Logits {
  static constexpr int32_t args = 2;
  static constexpr size_t scratch = 0;
  static constexpr int32_t vocabulary = V;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {reads(floats(V)), writes(most.rows * floats(V))};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.rows; }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* row = at<float>(arg[1]) + i * V;
      memcpy(row, at<float>(arg[0]), sizeof(float) * V);
      const int32_t token = step.token[step.row[i]];
      row[token] += static_cast<float>(token);
    }
  }
};

// K page offset (i32 [page_tokens]): writes each token's number to its place, through the page table.
template <int32_t PT>
struct Remember {
  static constexpr int32_t args = 1;
  static constexpr size_t scratch = 0;
  static constexpr int32_t page_tokens = PT;
  static Need need(int32_t arg, const Capacity&) {
    const Need all[args] = {in_pages(PT * 4)};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int32_t* pages = step.page_table + static_cast<int64_t>(step.slot[i]) * step.page_stride;
      uint8_t* page = step.kv + step.kv_page_bytes * pages[step.position[i] / PT];
      reinterpret_cast<int32_t*>(page + arg[0].page_offset)[step.position[i] % PT] = step.token[i];
    }
  }
};

// K page offset, i32 out[T]: the sum of everything that Remember wrote for the token's slot, up to the token.
template <int32_t PT>
struct Recall {
  static constexpr int32_t args = 2;
  static constexpr size_t scratch = 0;
  static constexpr int32_t page_tokens = PT;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {in_pages(PT * 4), writes(most.tokens * 4)};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step& step, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int32_t* pages = step.page_table + static_cast<int64_t>(step.slot[i]) * step.page_stride;
      int32_t sum = 0;
      for (int32_t p = 0; p <= step.position[i]; ++p) {
        const uint8_t* page = step.kv + step.kv_page_bytes * pages[p / PT];
        sum += reinterpret_cast<const int32_t*>(page + arg[0].page_offset)[p % PT];
      }
      at<int32_t>(arg[1])[i] = sum;
    }
  }
};

// An optional argument, i32 out[1]: 1 if the argument is there.
struct Present {
  static constexpr int32_t args = 2;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity&) {
    const Need all[args] = {unused(), writes(4)};
    return all[arg];
  }
  static int64_t units(const Step&) { return 1; }
  static void run(const Step&, const Arg* arg, Scratch, int64_t, int64_t) {
    at<int32_t>(arg[1])[0] = arg[0].pointer != nullptr;
  }
};

// No units at all.
struct Nothing {
  static constexpr int32_t args = 0;
  static constexpr size_t scratch = 0;
  static Need need(int32_t, const Capacity&) { return unused(); }
  static int64_t units(const Step&) { return 0; }
  static void run(const Step&, const Arg*, Scratch, int64_t, int64_t) {}
};

// u32 words[6]: key 0, 1 and counter 0..3 become the four words of Philox. f32 values[4096]: x becomes exp(x).
struct Parts {
  static constexpr int32_t args = 2;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity&) {
    const Need all[args] = {writes(24), writes(floats(4096))};
    return all[arg];
  }
  static int64_t units(const Step&) { return 1; }
  static void run(const Step&, const Arg* arg, Scratch, int64_t, int64_t) {
    auto* words = at<uint32_t>(arg[0]);
    const Philox philox(words[2], words[3], words[4], words[5], words[0], words[1]);
    memcpy(words, philox.word, sizeof philox.word);
    for (int32_t i = 0; i < 4096; i += exponential::kWidth) {
      auto& lanes = *reinterpret_cast<exponential::Floats*>(at<float>(arg[1]) + i);
      lanes = exponential::exp_nonpositive(lanes);
    }
  }
};

// f32 out[T]: the smallest normal number, halved: 0 where denormals are flushed.
struct Halve {
  static constexpr int32_t args = 1;
  static constexpr size_t scratch = 0;
  static Need need(int32_t arg, const Capacity& most) {
    const Need all[args] = {writes(most.tokens * 4)};
    return all[arg];
  }
  static int64_t units(const Step& step) { return step.tokens; }
  static void run(const Step&, const Arg* arg, Scratch, int64_t begin, int64_t end) {
    volatile float smallest = FLT_MIN;
    for (int64_t i = begin; i < end; ++i) at<float>(arg[0])[i] = smallest * 0.5f;
  }
};

}  // namespace

#define FAKE(...) flare::kernel<__VA_ARGS__>(#__VA_ARGS__)

static constexpr flare::Kernel kernels[] = {
    FAKE(Tokens),       FAKE(SumPlus),    FAKE(Meet),    FAKE(Spin),    FAKE(Logits<64>), FAKE(Logits<1000>),
    FAKE(Logits<49152>), FAKE(Remember<16>), FAKE(Recall<16>), FAKE(Present), FAKE(Nothing), FAKE(Parts), FAKE(Halve),
};

FLARE_LIBRARY(FAKE_ISA, kernels)
