// The contract between a graph's nodes and the kernels that run them.
//
// A graph is a list of nodes; a node names a kernel and binds its arguments to memory. The runtime (runtime.h) runs nodes
// in phases: all nodes of one phase are independent, and a barrier stands between phases. A kernel splits its work into
// numbered units; threads claim ranges of units, in any order and on any thread. What a unit writes depends on the unit
// alone, never on the range it was claimed in: that is what makes results equal for every thread count and every batch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace flare {

// One ragged step. Everything here was bounds-checked at the C border; kernels may trust it.
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

struct Kernel {
  const char* name;                                  // instantiation's name, as the graph spells it
  int32_t args;                                      // how many arguments a node binds
  size_t scratch;                                    // bytes of scratch one thread needs
  int64_t (*units)(const Step&);                     // how many units this step has
  void (*run)(const Step&, const Arg*, Scratch, int64_t begin, int64_t end);
};

// Describes a kernel class K as a table entry.
template <class K>
constexpr Kernel kernel(const char* name) {
  return Kernel{name, K::args, K::scratch, &K::units, &K::run};
}

}  // namespace flare
