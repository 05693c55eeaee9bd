// What crosses the C border of a kernel library; `flare/replay/cpu_interface.py` mirrors the structures.
#pragma once
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace flare {

constexpr int32_t kMaxAlternatives = 20;
constexpr int32_t kMaxExplicit = 128;

// One row's parameters; the C struct flare_sample_params.
struct SampleParams {
  float temperature;    // finite
  float top_p;          // [0, 1]
  float min_p;          // [0, 1]
  float repetition;     // > 0, finite; 1 is off
  float presence;       // finite; 0 is off
  float frequency;      // finite; 0 is off
  int32_t top_k;        // >= -1
  uint32_t choice;      // which of a request's n choices this is
  uint64_t seed;
  uint32_t position;    // of the token to choose
  int32_t history_len;  // tokens in history, those of the prompt first
  int32_t prompt_len;   // in [0, history_len]
  int32_t reserved;     // 0
  const int32_t* history;  // may be null when history_len is 0 or no penalty is on
  const uint32_t* mask;    // bit t % 32 of word t / 32 set: token t may be drawn; null: every token
  const int32_t* explicit_ids;  // tokens whose log probabilities are wanted; may be null when there are none
  int32_t explicit_;            // how many, in [0, kMaxExplicit]
  int32_t alternatives;         // natural alternatives wanted, in [0, kMaxAlternatives]; -1: no log probabilities

  bool penalised() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }
};
static_assert(sizeof(SampleParams) == 88);

// A row's log probabilities (logprobs.h): of one token, of the best ones, and of those asked for by id.
struct RowLogprobs {
  float chosen;      // of the token drawn, or of the row's target
  int32_t rank;      // of that token, from 1; 0: the row has no probabilities, and nothing below is meant
  int32_t count;     // of ids and values
  int32_t reserved;  // 0
  int32_t ids[kMaxAlternatives];
  float values[kMaxAlternatives];
  float explicit_[kMaxExplicit];  // in the order of SampleParams::explicit_ids
};
static_assert(sizeof(RowLogprobs) == 688);

}  // namespace flare

extern "C" {

// Segments of arguments. An argument that a node leaves out is in segment none, with offset and bytes 0.
enum { FLARE_NONE = 0, FLARE_WEIGHTS = 1, FLARE_ARENA = 2, FLARE_IO = 3, FLARE_KV = 4 };

struct flare_arg {
  int32_t segment;
  int32_t reserved;  // 0
  uint64_t offset;   // a multiple of 64; inside the segment, for kv inside a page
  uint64_t bytes;    // > 0
};

struct flare_node {
  const char* kernel;  // a name of the library's table, or "interpret"
  const flare_arg* args;
  int32_t nargs;
  int32_t phase;  // nondecreasing from node to node; nodes of one phase are independent
};

struct flare_open_args {
  uint32_t struct_size;  // sizeof(flare_open_args)
  int32_t vocabulary;
  int32_t max_context;
  int32_t slots;
  int32_t max_step_tokens;
  int32_t max_rows;
  int32_t page_tokens;  // a multiple of 16
  int32_t kv_pages;
  int32_t threads;
  int32_t huge_pages;  // 1: weights are copied to, and all segments ask for, transparent huge pages
  int32_t node_count;
  int32_t reserved;         // 0
  uint64_t kv_page_bytes;   // a multiple of 64
  uint64_t arena_bytes;
  uint64_t io_bytes;
  uint64_t logits_offset;   // in io: f32 [max_rows][vocabulary], where the graph leaves its logits
  uint64_t weights_bytes;
  const void* weights;      // 64-byte aligned; the caller's until flare_close, unless huge_pages is 1
  const flare_node* nodes;  // read during flare_open only, like the names and arguments that they point to
  // Computes the node of that number, whose kernel is "interpret", for the whole step. `args` are its bound arguments
  // (kernel.h), `kv` is the kv segment. Called on any thread of the core. Null where there is no such node.
  void (*interpret)(int32_t node, const void* args, void* kv);
};

struct flare_step_args {
  uint32_t struct_size;
  int32_t tokens;             // T in [1, max_step_tokens]
  int32_t rows;               // R in [0, min(T, max_rows)]
  int32_t page_stride;        // entries in one slot's row of page_table
  const int32_t* token;       // [T]
  const int32_t* position;    // [T]
  const int32_t* slot;        // [T]
  const int32_t* page_table;  // [slots][page_stride]
  const int32_t* row;         // [R]
};

struct flare_sample_args {
  uint32_t struct_size;
  uint32_t params_size;  // sizeof(flare::SampleParams)
  int32_t rows;           // in [0, R of the last step]
  uint32_t logprobs_size; // sizeof(flare::RowLogprobs)
  const flare::SampleParams* params;  // [rows]
  int32_t* sampled;                   // [rows] out
  flare::RowLogprobs* logprobs;       // [rows] out, of the rows that want any; may be null when none does
};

struct flare_score_args {
  uint32_t struct_size;
  uint32_t logprobs_size;        // sizeof(flare::RowLogprobs)
  int32_t first;                 // row; first + count in [0, R of the last step]
  int32_t count;
  const int32_t* target;         // [first + count] in [0, vocabulary): the token whose log probability is `chosen`
  const int32_t* wanted;         // [first + count] in [0, kMaxAlternatives]
  flare::RowLogprobs* logprobs;  // [first + count] out: those from `first` on, all but `explicit_`
};

}  // extern "C"

namespace flare {

constexpr uint32_t kAbiVersion = 4;

// Result codes of the C functions. Unavailable: the system gave too little memory or too few threads.
enum { kGood = 0, kRefused = 1, kRowsFailed = 2, kUnavailable = 3 };

// Where a failing call writes its line.
class ErrorText {
 public:
  ErrorText(char* text, size_t bytes) : text_(text), bytes_(text ? bytes : 0) {}

  // Writes the line and returns kRefused.
  __attribute__((format(printf, 2, 3))) int operator()(const char* format, ...) const {
    va_list values;
    va_start(values, format);
    if (bytes_) vsnprintf(text_, bytes_, format, values);
    va_end(values);
    return kRefused;
  }

  int unavailable(const char* what, uint64_t amount, int error) const {
    (*this)("the system does not give %llu %s: %s", static_cast<unsigned long long>(amount), what, strerror(error));
    return kUnavailable;
  }

 private:
  char* text_;
  size_t bytes_;
};

}  // namespace flare
