// A core: memory, nodes, threads; and the checks in front of them. Nothing gets past the checks that could make a
// kernel touch memory that is not its own: sizes and offsets, against the segments and against what each kernel needs,
// once, when a core opens; tokens and pages at every step.
#pragma once
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "interface.h"
#include "kernel.h"
#include "logit_rows.h"
#include "memory.h"
#include "pool.h"

namespace flare {

// Stands for the kernel of a node that the caller computes, as one unit. What it does with its arguments is checked there.
inline constexpr Kernel kInterpreted{"interpret",
                                     0,
                                     0,
                                     0,
                                     0,
                                     [](const Step&) -> int64_t { return 1; },
                                     nullptr,
                                     [](int32_t, const Capacity&) { return unused(); }};

class Core {
 public:
  static void* operator new(size_t bytes) noexcept { return aligned_alloc(alignof(Core), bytes); }
  static void operator delete(void* core) { free(core); }

  // Fills a new core. After a failure it can only be deleted.
  int open(const flare_open_args& a, const Kernel* kernels, size_t kernel_count, ErrorText fail) {
    limits_ = a;
    limits_.nodes = nullptr;  // the caller's, for this call only
    if (!a.nodes) return fail("nodes is null");
    if (int bad = check_limits(fail)) return bad;
    if (!kv_.allocate(a.kv_page_bytes * a.kv_pages, a.huge_pages))
      return fail.unavailable("bytes of memory for kv pages (choose fewer)", a.kv_page_bytes * a.kv_pages, ENOMEM);
    if (!arena_.allocate(a.arena_bytes, a.huge_pages))
      return fail.unavailable("bytes of memory for the arena", a.arena_bytes, ENOMEM);
    if (!io_.allocate(a.io_bytes, a.huge_pages)) return fail.unavailable("bytes of memory for io", a.io_bytes, ENOMEM);
    if (a.huge_pages && !weights_.allocate(a.weights_bytes, true))
      return fail.unavailable("bytes of memory for the weights' copy in huge pages", a.weights_bytes, ENOMEM);
    if (int bad = bind(a.nodes, kernels, kernel_count, fail)) return bad;
    const uint64_t scratch_bytes = scratch_stride_ * a.threads + LogitRows::bytes(a);
    if (!scratch_.allocate(scratch_stride_ * a.threads, false) || !rows_.allocate(a) || !last_step_.allocate(a.slots))
      return fail.unavailable("bytes of memory for the threads' scratch", scratch_bytes, ENOMEM);
    if (int error = pool_.start(a.threads)) return fail.unavailable("threads", a.threads, error);
    if (a.huge_pages) copy_weights();
    return kGood;
  }

  // Begins a step; `finish` must follow, on the same thread, and nothing else before it.
  int begin(const flare_step_args& a, ErrorText fail) {
    if (int bad = check_step(a, fail)) return bad;
    step_ = Step{a.tokens, a.rows, a.token, a.position, a.slot, a.page_table, a.page_stride,
                 a.row,    kv_.data(), limits_.kv_page_bytes};
    int32_t live = 0;
    for (int32_t phase = 0; phase < phases_; ++phase) {
      int64_t total = 0;
      for (int32_t n = first_node_[phase]; n < first_node_[phase + 1]; ++n) {
        units_[n] = nodes_[n].kernel->units(step_);
        if (units_[n] < 0 || units_[n] > Pool::kMaxUnits - total)
          return fail("node %d (%s) has %lld units of work", n, nodes_[n].kernel->name,
                      static_cast<long long>(units_[n]));
        total += units_[n];
      }
      if (total == 0) continue;
      live_phase_[live] = phase;
      live_units_[live++] = total;
    }
    // One token's units take microseconds, and large chunks stream better; many tokens' units take long.
    const int32_t chunks = a.tokens <= 8 ? 4 : 16;
    pool_.begin(Work{&Core::run_nodes, this, live_units_.data(), live, chunks});
    live_rows_ = a.rows;
    begun_ = true;
    return kGood;
  }

  bool begun() const { return begun_; }

  // Returns when the step that was begun is done.
  void finish() {
    pool_.finish();
    begun_ = false;
  }

  int sample(const flare_sample_args& a, ErrorText fail) { return rows_.sample(a, logits(), live_rows_, pool_, fail); }
  int score(const flare_score_args& a, ErrorText fail) { return rows_.score(a, logits(), live_rows_, pool_, fail); }

  float* logits() const { return reinterpret_cast<float*>(io_.data() + limits_.logits_offset); }

  // Marks the core as in use, until a step that was begun is finished; false when it is in use already.
  bool enter() { return !busy_.exchange(true, std::memory_order_acquire); }
  void leave() { busy_.store(false, std::memory_order_release); }

 private:
  struct Node {
    const Kernel* kernel = nullptr;
    int32_t first_arg = 0;
  };

  static unsigned long long ull(uint64_t value) { return value; }

  int check_limits(ErrorText fail) const {
    const flare_open_args& a = limits_;
    const struct {
      const char* name;
      int64_t value, least, most;
    } ranges[] = {
        {"vocabulary", a.vocabulary, 1, 1 << 28},
        {"max_context", a.max_context, 1, 1 << 30},
        {"slots", a.slots, 1, 1 << 20},
        {"max_step_tokens", a.max_step_tokens, 1, 1 << 24},
        {"max_rows", a.max_rows, 1, a.max_step_tokens},
        {"page_tokens", a.page_tokens, 16, 1 << 20},
        {"kv_pages", a.kv_pages, 1, INT32_MAX},
        {"threads", a.threads, 1, Pool::kMaxThreads},
        {"huge_pages", a.huge_pages, 0, 1},
        {"node_count", a.node_count, 1, 1 << 24},
        {"reserved", a.reserved, 0, 0},
    };
    for (const auto& r : ranges)
      if (r.value < r.least || r.value > r.most)
        return fail("%s %lld: must be in [%lld, %lld]", r.name, static_cast<long long>(r.value),
                    static_cast<long long>(r.least), static_cast<long long>(r.most));
    if (a.page_tokens % 16) return fail("page_tokens %d: must be a multiple of 16", a.page_tokens);
    uint64_t kv_bytes;
    if (a.kv_page_bytes == 0 || a.kv_page_bytes % 64 || __builtin_mul_overflow(a.kv_page_bytes, a.kv_pages, &kv_bytes))
      return fail("kv_page_bytes %llu: must be a positive multiple of 64, and less than 2^64 in all %d pages",
                  ull(a.kv_page_bytes), a.kv_pages);
    const uint64_t logits_bytes = sizeof(float) * uint64_t(a.max_rows) * a.vocabulary;
    if (a.logits_offset % 64 || !holds(a.io_bytes, a.logits_offset, logits_bytes))
      return fail("logits_offset %llu: %llu bytes of logits from a multiple of 64 do not fit in io_bytes %llu",
                  ull(a.logits_offset), ull(logits_bytes), ull(a.io_bytes));
    if (reinterpret_cast<uintptr_t>(a.weights) % 64) return fail("weights: their address is no multiple of 64");
    if (a.weights_bytes && !a.weights) return fail("weights is null, weights_bytes is %llu", ull(a.weights_bytes));
    return kGood;
  }

  static bool holds(uint64_t size, uint64_t offset, uint64_t bytes) { return offset <= size && bytes <= size - offset; }

  // Resolves every node's kernel and turns its arguments into pointers.
  int bind(const flare_node* nodes, const Kernel* kernels, size_t kernel_count, ErrorText fail) {
    const int32_t count = limits_.node_count;
    int64_t args = 0;
    for (int32_t n = 0; n < count; ++n) args += nodes[n].nargs > 0 ? nodes[n].nargs : 0;
    if (!nodes_.allocate(count) || !units_.allocate(count) || !live_units_.allocate(count) ||
        !live_phase_.allocate(count) || !first_node_.allocate(count + 1) || !args_.allocate(args))
      return fail.unavailable("nodes' worth of memory", count, ENOMEM);
    int32_t bound = 0;
    size_t scratch = 0;
    for (int32_t n = 0; n < count; ++n) {
      const flare_node& node = nodes[n];
      if (!node.kernel) return fail("node %d: its kernel's name is null", n);
      const Kernel* kernel = kernels;
      while (kernel != kernels + kernel_count && strcmp(kernel->name, node.kernel) != 0) ++kernel;
      int32_t takes;  // arguments
      if (kernel != kernels + kernel_count) {
        takes = kernel->args;
      } else if (limits_.interpret && strcmp(node.kernel, kInterpreted.name) == 0) {
        kernel = &kInterpreted;
        takes = node.nargs < 0 ? 0 : node.nargs;
      } else {
        return fail("node %d: the library has no kernel %.200s", n, node.kernel);
      }
      if (node.nargs != takes || (node.nargs && !node.args))
        return fail("node %d (%s): %d arguments, the kernel takes %d", n, kernel->name, node.args ? node.nargs : 0,
                    takes);
      if (node.phase < 0 || (n && node.phase < nodes[n - 1].phase))
        return fail("node %d (%s): phase %d: phases may not decrease", n, kernel->name, node.phase);
      if (n == 0 || node.phase != nodes[n - 1].phase) first_node_[phases_++] = n;
      nodes_[n] = Node{kernel, bound};
      if (kernel->page_tokens && kernel->page_tokens != limits_.page_tokens)
        return fail("node %d (%s): made for page_tokens %d, the core has %d", n, kernel->name, kernel->page_tokens,
                    limits_.page_tokens);
      if (kernel->vocabulary && kernel->vocabulary != limits_.vocabulary)
        return fail("node %d (%s): made for a vocabulary of %d, the core has %d", n, kernel->name, kernel->vocabulary,
                    limits_.vocabulary);
      for (int32_t i = 0; i < node.nargs; ++i) {
        const flare_arg& arg = node.args[i];
        const Need need = kernel->need(i, {uint64_t(limits_.max_step_tokens), uint64_t(limits_.max_rows)});
        const char* wrong = bind_arg(arg, args_[bound++]);
        if (!wrong) wrong = misuse(need.kind, arg.segment);
        if (wrong)
          return fail("node %d (%s): argument %d (segment %d, offset %llu, bytes %llu): %s", n, kernel->name, i,
                      arg.segment, ull(arg.offset), ull(arg.bytes), wrong);
        if (arg.bytes < need.bytes)
          return fail("node %d (%s): argument %d has %llu bytes, %llu are needed for %d tokens and %d rows a step", n,
                      kernel->name, i, ull(arg.bytes), ull(need.bytes), limits_.max_step_tokens, limits_.max_rows);
      }
      if (kernel->scratch > scratch) scratch = kernel->scratch;
    }
    first_node_[phases_] = count;
    if (scratch > (size_t{1} << 40)) return fail("a kernel wants %llu bytes of scratch", ull(scratch));
    scratch_stride_ = (scratch + 63) / 64 * 64 + 128;  // neighbours share no line, nor a prefetched pair of lines
    return kGood;
  }

  // Null when good, else what is wrong.
  const char* bind_arg(const flare_arg& arg, Arg& out) const {
    uint8_t* base = nullptr;
    uint64_t size = 0;
    if (arg.reserved != 0) return "reserved must be 0";
    switch (arg.segment) {
      case FLARE_NONE:
        out.pointer = nullptr;
        return arg.offset || arg.bytes ? "an absent argument has neither offset nor bytes" : nullptr;
      case FLARE_WEIGHTS:
        base = limits_.huge_pages ? weights_.data() : static_cast<uint8_t*>(const_cast<void*>(limits_.weights));
        size = limits_.weights_bytes;
        break;
      case FLARE_ARENA:
        base = arena_.data();
        size = limits_.arena_bytes;
        break;
      case FLARE_IO:
        base = io_.data();
        size = limits_.io_bytes;
        break;
      case FLARE_KV:
        size = limits_.kv_page_bytes;
        break;
      default:
        return "no such segment";
    }
    if (arg.offset % 64) return "offset is no multiple of 64";
    if (arg.bytes == 0) return "it has no bytes";
    if (!holds(size, arg.offset, arg.bytes)) return "it reaches beyond its segment";
    if (arg.segment == FLARE_KV) {
      out.page_offset = arg.offset;
    } else {
      out.pointer = base + arg.offset;
    }
    return nullptr;
  }

  // Null when an argument in this segment can be what the kernel takes it for, else what is wrong.
  static const char* misuse(Need::Kind kind, int32_t segment) {
    if (kind == Need::kUnused) return nullptr;
    if (segment == FLARE_NONE) return "the kernel cannot do without it";
    if ((kind == Need::kPages) != (segment == FLARE_KV))
      return kind == Need::kPages ? "the kernel wants it in kv pages" : "the kernel cannot have it in kv pages";
    if (kind == Need::kWrite && segment == FLARE_WEIGHTS) return "the kernel writes to it, weights are read only";
    return nullptr;
  }

  // Linear in the tokens and in the pages that their slots occupy.
  int check_step(const flare_step_args& a, ErrorText fail) {
    const flare_open_args& l = limits_;
    if (a.tokens < 1 || a.tokens > l.max_step_tokens)
      return fail("tokens %d: must be in [1, %d]", a.tokens, l.max_step_tokens);
    const int32_t most_rows = a.tokens < l.max_rows ? a.tokens : l.max_rows;
    if (a.rows < 0 || a.rows > most_rows) return fail("rows %d: must be in [0, %d]", a.rows, most_rows);
    if (a.page_stride < 1) return fail("page_stride %d: must be positive", a.page_stride);
    if (!a.token || !a.position || !a.slot || !a.page_table || (a.rows && !a.row)) return fail("an array is null");
    ++step_number_;
    for (int32_t begin = 0, end; begin < a.tokens; begin = end) {
      const int32_t slot = a.slot[begin];
      if (slot < 0 || slot >= l.slots) return fail("slot[%d] %d: must be in [0, %d)", begin, slot, l.slots);
      if (last_step_[slot] == step_number_)
        return fail("slot[%d] %d: the slot's tokens are not contiguous", begin, slot);
      last_step_[slot] = step_number_;
      for (end = begin; end < a.tokens && a.slot[end] == slot; ++end) {
        if (a.token[end] < 0 || a.token[end] >= l.vocabulary)
          return fail("token[%d] %d: must be in [0, %d)", end, a.token[end], l.vocabulary);
        if (a.position[end] < 0 || a.position[end] >= l.max_context)
          return fail("position[%d] %d: must be in [0, %d)", end, a.position[end], l.max_context);
        if (end > begin && a.position[end] != a.position[end - 1] + 1)
          return fail("position[%d] %d: must follow %d, slot %d's one before", end, a.position[end],
                      a.position[end - 1], slot);
      }
      const int32_t pages = a.position[end - 1] / l.page_tokens + 1;
      if (pages > a.page_stride)
        return fail("page_stride %d: slot %d at position %d needs %d pages", a.page_stride, slot, a.position[end - 1],
                    pages);
      const uint32_t highest = highest_of(a.page_table + size_t(slot) * a.page_stride, pages);
      if (highest >= uint32_t(l.kv_pages))
        return fail("page_table: slot %d has page %d: must be in [0, %d)", slot, int32_t(highest), l.kv_pages);
    }
    for (int32_t i = 0; i < a.rows; ++i)
      if (a.row[i] < 0 || a.row[i] >= a.tokens) return fail("row[%d] %d: must be in [0, %d)", i, a.row[i], a.tokens);
    return kGood;
  }

  // A negative number is a very high one.
  static uint32_t highest_of(const int32_t* values, int32_t count) {
    uint32_t highest = 0;
    for (int32_t i = 0; i < count; ++i) highest = uint32_t(values[i]) > highest ? uint32_t(values[i]) : highest;
    return highest;
  }

  static void run_nodes(void* context, int32_t thread, int32_t live, int64_t begin, int64_t end) {
    Core& core = *static_cast<Core*>(context);
    const Scratch scratch{core.scratch_.data() + core.scratch_stride_ * thread};
    int64_t first = 0;  // the phase's number of this node's first unit
    for (int32_t n = core.first_node_[core.live_phase_[live]]; first < end; first += core.units_[n++]) {
      const int64_t from = begin > first ? begin - first : 0;
      const int64_t to = end - first < core.units_[n] ? end - first : core.units_[n];
      const Node& node = core.nodes_[n];
      const Arg* args = core.args_.data() + node.first_arg;
      if (from >= to) continue;
      if (node.kernel->run) node.kernel->run(core.step_, args, scratch, from, to);
      else core.limits_.interpret(n, args, core.step_.kv);
    }
  }

  void copy_weights() {
    const int64_t units = int64_t((limits_.weights_bytes + kCopyBytes - 1) / kCopyBytes);
    if (units) pool_.run(Work{&Core::copy_range, this, &units, 1, Pool::kMaxChunks});
  }

  static void copy_range(void* context, int32_t, int32_t, int64_t begin, int64_t end) {
    Core& core = *static_cast<Core*>(context);
    const uint64_t from = begin * kCopyBytes;
    const uint64_t to = end * kCopyBytes < core.limits_.weights_bytes ? end * kCopyBytes : core.limits_.weights_bytes;
    memcpy(core.weights_.data() + from, static_cast<const uint8_t*>(core.limits_.weights) + from, to - from);
  }

  static constexpr uint64_t kCopyBytes = uint64_t{2} << 20;  // one huge page

  flare_open_args limits_{};
  Mapping weights_, arena_, io_, kv_, scratch_;
  size_t scratch_stride_ = 0;
  int32_t phases_ = 0;
  Array<Node> nodes_;
  Array<Arg> args_;
  Array<int32_t> first_node_;   // [phases_ + 1]
  Array<int64_t> units_;        // [nodes], of the step that runs
  Array<int64_t> live_units_;   // [live phases], those with any unit in the step that runs
  Array<int32_t> live_phase_;   // [live phases], their numbers
  Array<uint64_t> last_step_;   // [slots], the number of the last step that each was seen in
  uint64_t step_number_ = 0;
  int32_t live_rows_ = 0;
  Step step_{};
  LogitRows rows_;
  bool begun_ = false;  // a step is
  std::atomic<bool> busy_{false};
  Pool pool_;  // last: its threads end before anything that they could touch
};

}  // namespace flare
