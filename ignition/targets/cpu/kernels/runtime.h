// The functions of a kernel library (interface.h has their structures) over cores (core.h).
//
// A generated translation unit includes the kernels and this file, builds a constexpr table and ends with
//     FLARE_LIBRARY("x86-64-v4", kernels)
// which defines the functions of a library. All state is in the handle: any number of cores, of any number of
// libraries, live in one process. One call at a time runs on a core (a second is refused); flare_close must be the last.
// A function that fails returns nonzero, writes one line to `error`, and leaves the core as it was.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core.h"
#include "interface.h"
#include "kernel.h"

namespace flare {

// Runs one call on a handle, refusing a null handle, arguments of another size and a second call at the same time.
template <class Args>
int call(void* handle, const Args* args, int (Core::*method)(const Args&, ErrorText), ErrorText fail) {
  if (!handle) return fail("the core is not open");
  if (!args || args->struct_size != sizeof(Args))
    return fail("arguments of %u bytes, the library takes %zu: it was made for another version of flare",
                args ? args->struct_size : 0, sizeof(Args));
  Core& core = *static_cast<Core*>(handle);
  if (!core.enter()) return fail("another call runs on this core");
  const int result = (core.*method)(*args, fail);
  if (!core.begun()) core.leave();
  return result;
}

// Ends a step that flare_begin began. The core is in use from the one to the other.
inline int finish(void* handle, ErrorText fail) {
  if (!handle) return fail("the core is not open");
  Core& core = *static_cast<Core*>(handle);
  if (!core.begun()) return fail("no step was begun");
  core.finish();
  core.leave();
  return kGood;
}

inline int open(const flare_open_args* args, void** handle, const Kernel* kernels, size_t kernel_count,
                ErrorText fail) {
  if (!handle) return fail("no place for the handle");
  *handle = nullptr;
  if (!args || args->struct_size != sizeof(flare_open_args))
    return fail("arguments of %u bytes, the library takes %zu: it was made for another version of flare",
                args ? args->struct_size : 0, sizeof(flare_open_args));
  Core* core = new Core;
  if (!core) return fail.unavailable("bytes of memory for a core", sizeof(Core), ENOMEM);
  if (int bad = core->open(*args, kernels, kernel_count, fail)) {
    delete core;
    return bad;
  }
  *handle = core;
  return kGood;
}

// A library's description, one line of JSON, built when it is compiled.
template <size_t N>
struct Info {
  char text[N];
};

template <class Put>
constexpr void write_info(const char* isa, const Kernel* kernels, size_t count, Put put) {
  auto write = [&put](const char* s) {
    for (; *s; ++s) put(*s);
  };
  auto quote = [&put](const char* s) {
    put('"');
    for (; *s; ++s) put(*s == '"' || *s == '\\' || *s < ' ' ? '?' : *s);  // names are plain identifiers
    put('"');
  };
  write("{\"abi\":4,\"isa\":");
  static_assert(kAbiVersion == 4);
  quote(isa);
  write(",\"kernels\":[");
  for (size_t i = 0; i < count; ++i) {
    if (i) put(',');
    quote(kernels[i].name);
  }
  write("]}");
}

constexpr size_t info_size(const char* isa, const Kernel* kernels, size_t count) {
  size_t size = 1;
  write_info(isa, kernels, count, [&size](char) { ++size; });
  return size;
}

template <size_t N>
constexpr Info<N> make_info(const char* isa, const Kernel* kernels, size_t count) {
  Info<N> info{};
  size_t i = 0;
  write_info(isa, kernels, count, [&](char c) { info.text[i++] = c; });
  return info;
}

}  // namespace flare

#define FLARE_EXPORT extern "C" __attribute__((visibility("default")))

// `kernels` names a static constexpr array of flare::Kernel.
#define FLARE_LIBRARY(isa, kernels)                                                                                  \
  FLARE_EXPORT uint32_t flare_abi_version() { return flare::kAbiVersion; }                                           \
  FLARE_EXPORT const char* flare_library_info() {                                                                    \
    constexpr size_t count = sizeof(kernels) / sizeof(kernels[0]);                                                   \
    static constexpr auto info = flare::make_info<flare::info_size(isa, kernels, count)>(isa, kernels, count);       \
    return info.text;                                                                                                \
  }                                                                                                                  \
  FLARE_EXPORT int flare_open(const flare_open_args* args, void** core, char* error, size_t error_bytes) {           \
    return flare::open(args, core, kernels, sizeof(kernels) / sizeof(kernels[0]), {error, error_bytes});             \
  }                                                                                                                  \
  FLARE_EXPORT int flare_begin(void* core, const flare_step_args* args, char* error, size_t error_bytes) {           \
    return flare::call(core, args, &flare::Core::begin, {error, error_bytes});                                       \
  }                                                                                                                  \
  FLARE_EXPORT int flare_finish(void* core, char* error, size_t error_bytes) {                                       \
    return flare::finish(core, {error, error_bytes});                                                                \
  }                                                                                                                  \
  FLARE_EXPORT int flare_sample(void* core, const flare_sample_args* args, char* error, size_t error_bytes) {        \
    return flare::call(core, args, &flare::Core::sample, {error, error_bytes});                                      \
  }                                                                                                                  \
  FLARE_EXPORT int flare_score(void* core, const flare_score_args* args, char* error, size_t error_bytes) {          \
    return flare::call(core, args, &flare::Core::score, {error, error_bytes});                                       \
  }                                                                                                                  \
  FLARE_EXPORT float* flare_logits(void* core) {                                                                     \
    return core ? static_cast<flare::Core*>(core)->logits() : nullptr;                                               \
  }                                                                                                                  \
  FLARE_EXPORT void flare_close(void* core) { delete static_cast<flare::Core*>(core); }
