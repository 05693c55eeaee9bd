// The threads of one core and how they share a step's work.
//
// Work is a list of phases; a phase is a number of units, cut into chunks. Each thread owns a contiguous run of chunks
// (so that it streams through memory), takes them one by one, and then takes what is left of the others' runs.
//
// A phase ends when its last chunk is finished, not when every thread has arrived: a thread that holds no chunk never
// holds up the others. So the operating system may take a thread off its core for as long as it likes between chunks, a
// sleeping thread may join late, and more threads than cores still work. Threads also offer their core to whoever waits
// for it about every millisecond, between chunks: the scheduler then has little reason to stop them inside one, which
// is what would stall all the others. What a unit computes does not depend on who runs it.
//
// The calling thread is thread 0 and works too. Workers that find nothing spin for some microseconds, yield for a while
// and then sleep on a futex, so an idle core uses no processor time. A pool does not survive fork(): only the calling
// thread exists in the child; open a core in the process that uses it.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "memory.h"

namespace flare {

// What a pool runs. run() gets a half-open range of one phase's units and the number of the thread that it runs on.
struct Work {
  void (*run)(void* context, int32_t thread, int32_t phase, int64_t begin, int64_t end);
  void* context;
  const int64_t* units;       // [phases], each in [1, Pool::kMaxUnits]
  int32_t phases;
  int32_t chunks_per_thread;  // in [1, Pool::kMaxChunks]: more balance better, fewer stream better
};

// Kernels count on the default floating-point environment (round to nearest, denormals kept) on every thread.
class DefaultFloats {
 public:
#if defined(__SSE__)
  DefaultFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloats() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

class Pool {
 public:
  static constexpr int32_t kMaxThreads = 1024;
  static constexpr int32_t kMaxChunks = 32;  // of one thread in one phase
  static constexpr int64_t kMaxUnits = int64_t{1} << 40;

  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  ~Pool() {
    stopping_.store(true, std::memory_order_release);
    announce(true);
    for (int32_t i = 1; i < started_; ++i) pthread_join(workers_[i].handle, nullptr);
  }

  // Starts threads - 1 workers. Returns 0 or an errno; the destructor cleans up either way. Called once.
  int start(int32_t threads) {
    threads_ = threads;
    if (!shares_[0].allocate(threads) || !shares_[1].allocate(threads) || !workers_.allocate(threads)) return ENOMEM;
    sigset_t all, old;  // workers take no signals: those are for the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = 0;
    for (started_ = 1; started_ < threads; ++started_) {
      Worker& worker = workers_[started_];
      worker.pool = this;
      worker.index = started_;
      failed = pthread_create(&worker.handle, nullptr, &Pool::work, &worker);
      if (failed) break;
      char name[16];  // the kernel's limit
      snprintf(name, sizeof name, "flare-%d", started_);
      pthread_setname_np(worker.handle, name);
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    return failed;
  }

  // Runs all phases in order and returns when the last is finished. One caller at a time.
  void run(const Work& work) {
    begin(work);
    finish();
  }

  // Lets the workers begin. Until the caller comes to `finish` it is like a thread that the system keeps off its core.
  void begin(const Work& work) {
    work_ = work;  // nobody reads it now: a thread does so only while it holds a chunk
    if (threads_ == 1 || work.phases == 0) return;
    first_event_ = event_.load(std::memory_order_relaxed) + 1;
    workers_[0].processor.store(sched_getcpu(), std::memory_order_relaxed);
    open_phase(first_event_, 0);
  }

  // Works until all that was begun is finished. The caller is the thread that began it.
  void finish() {
    DefaultFloats floats;
    if (threads_ == 1) {
      for (int32_t phase = 0; phase < work_.phases; ++phase) work_.run(work_.context, 0, phase, 0, work_.units[phase]);
      return;
    }
    if (work_.phases == 0) return;
    const uint32_t end = first_event_ + work_.phases;
    participate(0, end);
    returned_.store(end, std::memory_order_relaxed);
  }

 private:
  static constexpr int32_t kPauses = 400;                  // spinning: 5 to 20 us
  static constexpr int64_t kBetweenNanoseconds = 150'000;  // spinning after the last phase
  static constexpr int64_t kWithinNanoseconds = 350'000;   // spinning within a phase, on a processor of one's own
  static constexpr int64_t kIdleNanoseconds = 400'000;     // yielding before sleep, after the last phase
  static constexpr int64_t kStuckNanoseconds = 50'000;     // yielding before sleep, within a phase
  static constexpr int64_t kPoliteNanoseconds = 1'000'000;  // below the scheduler's usual slices
  static constexpr int64_t kLongChunkNanoseconds = 20'000;
  static constexpr uint64_t kPrepared = uint64_t{1} << 32;

  // The chunks of a phase that are one thread's own: event << 32 | end << 16 | next. They can be taken while `event` is
  // the pool's; a thread that was away finds another event there, or nothing left.
  struct alignas(64) Share {
    std::atomic<uint64_t> value{0};
  };

  struct Worker {
    Pool* pool;
    int32_t index;
    pthread_t handle;
    std::atomic<int32_t> processor{-1};  // where the thread last found itself
  };

  static int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000 + t.tv_nsec;
  }

  static void pause() {
#if defined(__SSE__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  static void* work(void* argument) {
    Worker& worker = *static_cast<Worker*>(argument);
    DefaultFloats floats;
    worker.pool->participate(worker.index, 0);
    return nullptr;
  }

  // Works until the pool's event is `end` (thread 0) or the pool stops (workers).
  void participate(int32_t self, uint32_t end) {
    int64_t turn = now();     // when this thread last offered its core
    int64_t reported = turn;  // when it last reported
    bool long_chunks = false;
    for (;;) {
      const uint32_t event = event_.load(std::memory_order_acquire);
      if (self == 0 && event == end) return;
      const uint64_t report = run_chunks(self, event, long_chunks, turn);
      if (report) {
        const uint64_t left = unfinished_.fetch_add(report, std::memory_order_acq_rel) + report;
        if (uint32_t(left) == 0) open_phase(event + 1, left / kPrepared);
        const int64_t time = now();
        long_chunks = time - reported > kLongChunkNanoseconds * uint32_t(-report);  // how many it took
        reported = time;
        if (time - turn > kPoliteNanoseconds) {
          sched_yield();
          turn = now();
          spread(self);
        }
      } else {
        if (self != 0 && stopping_.load(std::memory_order_acquire)) return;
        if (wait(self, event)) {
          turn = now();
          spread(self);
        }
      }
    }
  }

  // Moves this thread off a processor that a thread before it runs on. The system keeps two busy threads of three on one of
  // two processors for seconds, although either could work beside the third: then this pool would have half of its due.
  void spread(int32_t self) {
    const int32_t here = sched_getcpu();
    workers_[self].processor.store(here, std::memory_order_relaxed);
    bool crowded = false;
    for (int32_t i = 0; i < self; ++i) crowded |= workers_[i].processor.load(std::memory_order_relaxed) == here;
    cpu_set_t allowed;
    if (!crowded || sched_getaffinity(0, sizeof allowed, &allowed)) return;
    cpu_set_t free = allowed;
    for (int32_t i = 0; i < self; ++i) {
      const int32_t taken = workers_[i].processor.load(std::memory_order_relaxed);
      if (taken >= 0 && taken < CPU_SETSIZE) CPU_CLR(taken, &free);
    }
    if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free)) return;
    sched_setaffinity(0, sizeof allowed, &allowed);  // moved; where to go from here is the system's choice again
    workers_[self].processor.store(sched_getcpu(), std::memory_order_relaxed);
  }

  // Runs chunks of the event's phase while there are any, this thread's own first. Returns what to add to unfinished_.
  uint64_t run_chunks(int32_t self, uint32_t event, bool long_chunks, int64_t turn) {
    uint64_t report = 0;
    for (int32_t i = 0, owner = self; i < threads_; ++i, owner = owner + 1 == threads_ ? 0 : owner + 1) {
      std::atomic<uint64_t>& share = shares_[event % 2][owner].value;
      uint64_t value = share.load(std::memory_order_relaxed);
      while (value >> 32 == event && (value & 0xffff) < (value >> 16 & 0xffff)) {
        if (!share.compare_exchange_weak(value, value + 1, std::memory_order_relaxed)) continue;
        // The phase cannot end before this chunk is reported: from here on work_ and the next phase's share are safe.
        const int32_t phase = int32_t(event - first_event_);
        if (report == 0) report = prepare(self, event + 1);
        const int64_t units = work_.units[phase], chunks = chunks_of(units), chunk = value & 0xffff;
        work_.run(work_.context, self, phase, units * chunk / chunks, units * (chunk + 1) / chunks);
        --report;
        if (long_chunks && now() - turn > kPoliteNanoseconds) return report;  // to offer the core
        value = share.load(std::memory_order_relaxed);
      }
    }
    return report;
  }

  int64_t chunks_of(int64_t units) const {
    const int64_t most = int64_t{threads_} * work_.chunks_per_thread;
    return units < most ? units : most;
  }

  // Thread `owner`'s share of an event's phase; 0 if it has none.
  uint64_t share_of(int32_t owner, uint32_t event) const {
    const uint64_t chunks = chunks_of(work_.units[event - first_event_]);
    const uint64_t begin = (chunks * owner + threads_ - 1) / threads_;
    const uint64_t end = (chunks * (owner + 1) + threads_ - 1) / threads_;
    return begin == end ? 0 : uint64_t{event} << 32 | end << 16 | begin;
  }

  // Writes this thread's share of the next phase ahead of time, so that whoever opens it need not touch this thread's
  // memory. Called while holding a chunk of the phase before: nobody else writes it then. Returns kPrepared if that
  // made one more share ready.
  uint64_t prepare(int32_t self, uint32_t event) {
    if (event - first_event_ == uint32_t(work_.phases)) return 0;
    std::atomic<uint64_t>& share = shares_[event % 2][self].value;
    const uint64_t value = share_of(self, event);
    if (value == 0 || share.load(std::memory_order_relaxed) == value) return 0;
    share.store(value, std::memory_order_relaxed);
    return kPrepared;
  }

  // Opens the phase of an event, or tells that all are finished; called by the one thread that reported the last chunk
  // of the phase before, in which `prepared` threads prepared their shares.
  void open_phase(uint32_t event, uint64_t prepared) {
    const uint32_t phase = event - first_event_;
    if (phase == uint32_t(work_.phases)) return announce(true);
    const int64_t chunks = chunks_of(work_.units[phase]);
    if (prepared < uint64_t(chunks < threads_ ? chunks : threads_)) {
      for (int32_t owner = 0; owner < threads_; ++owner) {
        std::atomic<uint64_t>& share = shares_[event % 2][owner].value;
        const uint64_t value = share_of(owner, event);
        if (value && share.load(std::memory_order_relaxed) != value) share.store(value, std::memory_order_relaxed);
      }
    }
    unfinished_.store(chunks, std::memory_order_relaxed);
    announce(chunks > 1 || phase == 0);  // the caller may have other things to do first
  }

  void announce(bool wake) {
    event_.fetch_add(1, std::memory_order_seq_cst);
    if (wake && sleepers_.load(std::memory_order_seq_cst))
      syscall(SYS_futex, &event_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // True if another thread of the pool last found itself where this one did.
  bool shares_processor(int32_t self) const {
    const int32_t here = workers_[self].processor.load(std::memory_order_relaxed);
    for (int32_t i = 0; i < threads_; ++i)
      if (i != self && workers_[i].processor.load(std::memory_order_relaxed) == here) return true;
    return false;
  }

  // Returns after an announcement later than `seen`, or for no reason. True if it offered the core to others.
  bool wait(int32_t self, uint32_t seen) {
    // It pays to stay awake without offering the core: beside a busy program that would cost a whole time slice, while the
    // next phase comes in microseconds and the next call after the caller has looked at the results. But a thread of the
    // pool that is kept off this processor may be the one that is waited for.
    const int64_t begun = now();
    const int64_t within = shares_processor(self) ? 0 : kWithinNanoseconds;
    bool between;
    do {
      for (int32_t i = 0; i < kPauses; ++i) {
        if (event_.load(std::memory_order_acquire) != seen) return false;
        pause();
      }
      between = returned_.load(std::memory_order_relaxed) == seen;
    } while (now() - begun < (between ? kBetweenNanoseconds : within));
    for (;;) {
      sched_yield();
      if (event_.load(std::memory_order_acquire) != seen) return true;
      // Within a call, the thread that is waited for may have lost its core; the system can move it to this one once this
      // one is idle.
      between = returned_.load(std::memory_order_relaxed) == seen;
      if (now() - begun > (between ? kIdleNanoseconds : kStuckNanoseconds)) break;
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (event_.load(std::memory_order_seq_cst) == seen)
      syscall(SYS_futex, &event_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return true;
  }

  int32_t threads_ = 1, started_ = 1;
  Array<Share> shares_[2];  // of the phases with even and odd events
  Array<Worker> workers_;
  Work work_{};
  uint32_t first_event_ = 0;  // of work_'s first phase
  std::atomic<uint32_t> returned_{0};  // the event at which finish() last returned
  std::atomic<bool> stopping_{false};
  // On one line: whoever reports the end of a phase then owns all that the waiting threads look at.
  alignas(64) std::atomic<uint64_t> unfinished_{0};  // chunks not reported; above them, threads that prepared a share
  std::atomic<uint32_t> event_{0};                   // the open phase, or none; grows by 1; the futex word
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace flare
