// C entry points to a `table` of kernels, which the generated source defines before it includes this.
#pragma once
#include "kernel.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int64_t harness_units(int kernel, const flare::Step* step) { return table[kernel].units(*step); }
EXPORTED int64_t harness_scratch(int kernel) { return (int64_t)table[kernel].scratch; }
EXPORTED uint64_t harness_need(int kernel, int arg, uint64_t tokens, uint64_t rows, int* kind) {
  const flare::Need need = table[kernel].need(arg, {tokens, rows});
  *kind = need.kind;
  return need.bytes;
}
EXPORTED int harness_args(int kernel) { return table[kernel].args; }
EXPORTED void harness_run(int kernel, const flare::Step* step, const flare::Arg* args, uint8_t* scratch, int64_t begin,
                          int64_t end) {
  table[kernel].run(*step, args, {scratch}, begin, end);
}
