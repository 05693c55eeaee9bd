// The contract between a graph's nodes and the kernels that run them.
//
// A graph is a list of nodes; a node names a kernel and binds its arguments to memory. A core (core.h) holds each
// argument against what the kernel says it needs, then runs nodes in phases: nodes of one phase are independent, and
// a barrier stands between phases. A kernel splits its work into numbered units; threads claim ranges of units, in any
// order and on any thread. What a unit writes depends on the unit alone, never on the range it was claimed in: that is
// what makes results equal for every thread count and every batch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace flare {

// One ragged step. Everything here was bounds-checked by the core (core.h); kernels may trust it.
// Tokens of one slot are contiguous, in order, at consecutive positions.
struct Step {
  int32_t tokens;                 // T, live tokens of this step
  int32_t rows;                   // R, how many logit rows are wanted
  const int32_t* token;           // [T] in [0, vocabulary)
  const int32_t* position;        // [T] in [0, max_context)
  const int32_t* slot;            // [T] in [0, slots)
  const int32_t* page_table;      // [slots][page_stride] page numbers in [0, pages)
  int32_t page_stride;            // entries in one slot's row of page_table
  const int32_t* row;             // [R] in [0, T): the tokens whose logits are wanted
  uint8_t* kv;                    // the kv segment: pages of kv_page_bytes each
  size_t kv_page_bytes;           // bytes of one page, all layers together
};

// A node's bound argument: a pointer into a segment, or a byte offset inside each kv page.
union Arg {
  void* pointer;
  size_t page_offset;
};

// Memory of one thread, 64-byte aligned, at least Kernel::scratch bytes; contents are undefined between calls.
struct Scratch {
  uint8_t* memory;
};

// The most that a step of a core holds.
struct Capacity {
  uint64_t tokens;                // max_step_tokens
  uint64_t rows;                  // max_rows
};

// What a kernel does with an argument, and how many of its bytes, from the first, it may touch.
struct Need {
  enum Kind {
    kUnused,                      // it never looks: the argument may be absent
    kRead,                        // memory: weights, arena or io
    kWrite,                       // memory that is not weights; may be read too
    kPages,                       // a range of every kv page
  } kind;
  uint64_t bytes;
};
constexpr Need unused() { return {Need::kUnused, 0}; }
constexpr Need reads(uint64_t bytes) { return {Need::kRead, bytes}; }
constexpr Need writes(uint64_t bytes) { return {Need::kWrite, bytes}; }
constexpr Need in_pages(uint64_t bytes) { return {Need::kPages, bytes}; }

// Bytes of a row of `count` floats.
constexpr uint64_t floats(uint64_t count) { return count * sizeof(float); }

struct Kernel {
  const char* name;                                  // instantiation's name, as the graph spells it
  int32_t args;                                      // how many arguments a node binds
  int32_t page_tokens;                               // positions of the pages that it was made for; 0: any
  int32_t vocabulary;                                // tokens that it was made for; 0: any
  size_t scratch;                                    // bytes of scratch one thread needs
  int64_t (*units)(const Step&);                     // how many units this step has
  void (*run)(const Step&, const Arg*, Scratch, int64_t begin, int64_t end);
  Need (*need)(int32_t arg, const Capacity&);        // of an argument, enough for every step within the capacity
};

// Describes a kernel class K as a table entry.
template <class K>
constexpr Kernel kernel(const char* name) {
  Kernel entry{name, K::args, 0, 0, K::scratch, &K::units, &K::run, &K::need};
  if constexpr (requires { K::page_tokens; }) entry.page_tokens = K::page_tokens;
  if constexpr (requires { K::vocabulary; }) entry.vocabulary = K::vocabulary;
  return entry;
}

}  // namespace flare
