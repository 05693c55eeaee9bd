// A libcuda.so.1 for tests: memory is the host's, time is deferred, and what a real driver leaves undefined is an error.
//
// - Work on a stream waits in a queue until somebody waits for the stream, so results read too early are not there yet, and
//   host memory changed too early is seen changed.
// - A graph's nodes run one by one, of those that are ready always the last added: an order that only edges hold.
// - Behind a programmatic edge, a kernel without the instruction that waits is run before the kernel that it should wait for.
// - Kernels are run by a hook (executor.py) on the very bytes packed into their nodes.
// - Every end of every copy must lie in one allocation; new memory is full of 0xFF (NaN, -1); freed memory must be whole.
// - Blocks, shared memory and parameters are checked against what the cubin itself says, tensor maps against the header.
//
// Settings, from the environment at load or by fake_set: FAKE_CUDA_CAPABILITY (90), FAKE_CUDA_MEMORY (bytes, 2^30),
// FAKE_CUDA_DEVICES (1), FAKE_CUDA_DRIVER (13000). FAKE_CUDA_FAIL or fake_fail ("cuGraphLaunch=719@2"): the second next call gives result 719;
// with a + behind ("cuGraphLaunch=304@2+") all later ones do too. A call of result -1 does not return.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define GUARD 256
#define MOST_PARAMS 256

typedef int (*Hook)(const void* image, size_t image_bytes, const char* kernel, const unsigned* grid, int params, void** values,
                    const uint32_t* sizes);

typedef struct Block {
  uint8_t* data;
  size_t size;
  int host;
  struct Block* next;
} Block;

typedef struct Library Library;
typedef struct Function {
  char name[512];
  int params, attribute, waits;
  uint32_t offset[MOST_PARAMS], size[MOST_PARAMS], block[3], param_bytes, static_shared;
  Library* library;
  struct Function* next;
} Function;
struct Library {
  uint8_t* image;
  size_t size;
  Function* functions;
};

typedef struct Node {
  CUgraphNodeType type;
  CUDA_KERNEL_NODE_PARAMS kernel;
  uint8_t* values;
  CUDA_MEMCPY3D copy;
  CUDA_MEMSET_NODE_PARAMS fill;
  size_t before_count;
  struct Node** before;
  uint8_t* programmatic;  // of each edge from `before`
  int done;
} Node;
typedef struct Graph {
  Node** nodes;
  size_t count;
  int executables, destroyed;
} Graph;
typedef struct {
  Graph* graph;
  int uploaded;
} Executable;

typedef struct {
  enum { LAUNCH, COPY, RECORD } kind;
  Executable* executable;
  void *target, *source;
  size_t size;
  int* event;
} Work;

static Block* blocks;
static Work queue[4096];
static int queued, misfrees, contexts, sticky, context_object, stream_object, initialised;
static char reason[1024] = "", failing[64] = "";
static int fail_result, fail_after, fail_on;
static int64_t capability, memory, devices, driver;
static Hook hook;
static __thread CUcontext current;  // of a thread

static CUresult refuse(CUresult result, const char* form, ...) __attribute__((format(printf, 2, 3)));
static CUresult refuse(CUresult result, const char* form, ...) {
  va_list list;
  va_start(list, form);
  vsnprintf(reason, sizeof reason, form, list);
  va_end(list);
  return result;
}

// A result that the header calls fatal stays: every later call gives it too.
static int fatal(int result) {
  return result == 214 || (result >= 700 && result <= 721 && result != 701 && result != 704 && result != 705 &&
         result != 708 && result != 712 && result != 713 && result != 720) || result == 999;
}

// `function` may have a suffix that tells its version.
static int is_failing(const char* function) {
  const size_t length = strlen(failing);
  return length && !strncmp(function, failing, length) && (!function[length] || !strncmp(function + length, "_v", 2));
}

static CUresult enter(const char* function) {
  if (sticky) return sticky;
  if (is_failing(function) && --fail_after <= 0) {
    if (fail_result < 0) for (;;) pause();  // as behind a kernel that never ends
    if (!fail_on) failing[0] = 0;
    if (fatal(fail_result)) sticky = fail_result, queued = 0;
    return refuse(fail_result, "injected into %s", function);
  }
  return CUDA_SUCCESS;
}
#define ENTER                                        \
  do {                                               \
    CUresult injected = enter(__func__);             \
    if (injected != CUDA_SUCCESS) return injected;   \
  } while (0)
#define IN_CONTEXT                                                                                            \
  do {                                                                                                        \
    ENTER;                                                                                                    \
    if (!current) return refuse(CUDA_ERROR_INVALID_CONTEXT, "%s: the thread has no context", __func__);       \
  } while (0)

EXPORT void fake_set_hook(Hook function) { hook = function; }

static const struct {
  const char* name;
  const char* variable;
  int64_t* value;
  int64_t usual;
} settings[] = {
    {"capability", "FAKE_CUDA_CAPABILITY", &capability, 90},
    {"memory", "FAKE_CUDA_MEMORY", &memory, 1 << 30},
    {"devices", "FAKE_CUDA_DEVICES", &devices, 1},
    {"driver", "FAKE_CUDA_DRIVER", &driver, 13000},
};
#define SETTINGS (sizeof settings / sizeof *settings)

EXPORT int fake_set(const char* name, int64_t value) {
  for (size_t i = 0; i < SETTINGS; ++i)
    if (!strcmp(name, settings[i].name)) return *settings[i].value = value, 0;
  return 1;
}

// Whether the driver has a function of this name; the version behind it may be left out.
static int is_function(const char* name) {
  Dl_info info;
  void* self = dladdr((void*)fake_set, &info) ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
  char text[80];
  for (int version = 1; self && !strncmp(name, "cu", 2) && version < 5; ++version) {
    snprintf(text, sizeof text, version > 1 ? "%s_v%d" : "%s", name, version);
    if (dlsym(self, text)) return 1;
  }
  return 0;
}

// "function=result@call", with a + behind for all later calls too; "" takes an injection back. 1: not of that form, or no such function.
EXPORT int fake_fail(const char* text) {
  char more = 0;
  failing[0] = 0;
  fail_after = 1;
  const int read = *text ? sscanf(text, "%63[^=]=%d@%d%c", failing, &fail_result, &fail_after, &more) : 0;
  fail_on = more == '+';
  if (!*text || (read >= 2 && (!more || fail_on) && is_function(failing))) return 0;
  failing[0] = 0;
  return 1;
}

EXPORT int fake_blocks(uint64_t* begin, uint64_t* size, int most) {
  int count = 0;
  for (Block* b = blocks; b && count < most; b = b->next) begin[count] = (uint64_t)b->data, size[count++] = b->size;
  return count;
}

EXPORT int fake_contexts(void) { return contexts; }
EXPORT int fake_misfrees(void) { return misfrees; }

__attribute__((constructor)) static void read_environment(void) {
  for (size_t i = 0; i < SETTINGS; ++i) {
    const char* text = getenv(settings[i].variable);
    *settings[i].value = text ? atoll(text) : settings[i].usual;
  }
  const char* text = getenv("FAKE_CUDA_FAIL");
  if (text && fake_fail(text)) {
    fprintf(stderr, "FAKE_CUDA_FAIL: %s is not function=result, function=result@n or function=result@n+ of a function of the fake driver\n", text);
    _exit(2);
  }
}

// Devices, contexts, errors.

CUresult cuInit(unsigned flags) {
  ENTER;
  if (devices < 1) return refuse(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected");
  initialised = 1;
  return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) { ENTER; *version = (int)driver; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { ENTER; *count = (int)devices; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER;
  if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (ordinal < 0 || ordinal >= devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  ENTER;
  snprintf(name, length, "fake device %d", device);
  return CUDA_SUCCESS;
}
// Most shared memory of a block, as the CUDA C++ Programming Guide has it for each compute capability.
static int most_shared(void) {
  if (capability == 80 || capability == 87) return 163 << 10;
  return capability < 90 || capability >= 120 ? 99 << 10 : 227 << 10;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  ENTER;
  (void)device;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = (int)capability / 10; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = (int)capability % 10; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = most_shared(); return CUDA_SUCCESS;
    default: return refuse(CUDA_ERROR_INVALID_VALUE, "the fake knows nothing of attribute %d", attribute);
  }
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER;
  (void)device;
  ++contexts;
  *context = (CUcontext)&context_object;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  ENTER;
  (void)device;
  return --contexts < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { ENTER; current = context; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult result, const char** text) {
  *text = result && reason[0] ? reason : "no reason given";
  return CUDA_SUCCESS;
}

// Memory.

static Block* block_of(const void* begin, size_t size) {
  for (Block* b = blocks; b; b = b->next)
    if ((uint8_t*)begin >= b->data && (uint8_t*)begin + size <= b->data + b->size) return b;
  return 0;
}
static int64_t taken(void) {
  int64_t sum = 0;
  for (Block* b = blocks; b; b = b->next) sum += b->host ? 0 : (int64_t)b->size;
  return sum;
}
static void* take(size_t size, int host) {
  uint8_t* memory_of_block;
  if (posix_memalign((void**)&memory_of_block, 256, size + 2 * GUARD)) return 0;
  Block* b = malloc(sizeof *b);
  *b = (Block){memory_of_block + GUARD, size, host, blocks};
  memset(memory_of_block, 0xA5, GUARD);
  memset(b->data, 0xFF, size);
  memset(b->data + size, 0xA5, GUARD);
  blocks = b;
  return b->data;
}
// Refuses to free what work under way may use: a real driver would not notice.
static CUresult misfree(void) {
  ++misfrees;
  return refuse(CUDA_ERROR_INVALID_VALUE, "something is freed while work is under way");
}
static CUresult give(void* data, int host) {
  for (Block** at = &blocks; *at; at = &(*at)->next) {
    Block* b = *at;
    if (b->data != data || b->host != host) continue;
    if (queued) return misfree();
    for (int i = 0; i < GUARD; ++i)
      if (b->data[-1 - i] != 0xA5 || b->data[b->size + i] != 0xA5) {
        fprintf(stderr, "fake cuda: something wrote beside an allocation of %zu bytes\n", b->size);
        abort();
      }
    *at = b->next;
    free(b->data - GUARD);
    free(b);
    return CUDA_SUCCESS;
  }
  return refuse(CUDA_ERROR_INVALID_VALUE, "%p is no allocation of that kind", data);
}
CUresult cuMemGetInfo(size_t* available, size_t* total) {
  IN_CONTEXT;
  *total = memory;
  *available = memory - taken();
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr* pointer, size_t size) {
  IN_CONTEXT;
  if (!size) return refuse(CUDA_ERROR_INVALID_VALUE, "an allocation of no bytes");
  if ((int64_t)size > memory - taken()) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "out of memory");
  return (*pointer = (CUdeviceptr)take(size, 0)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFree(CUdeviceptr pointer) { IN_CONTEXT; return give((void*)pointer, 0); }
CUresult cuMemAllocHost(void** pointer, size_t size) {
  IN_CONTEXT;
  return (*pointer = take(size, 1)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFreeHost(void* pointer) { IN_CONTEXT; return give(pointer, 1); }

// As in a new process: nothing is allocated, nothing failed, and settings are the defaults.
EXPORT void fake_reset(void) {
  sticky = queued = misfrees = contexts = initialised = 0;
  for (size_t i = 0; i < SETTINGS; ++i) *settings[i].value = settings[i].usual;
  reason[0] = failing[0] = 0;
  while (blocks) give(blocks->data, blocks->host);
}

// Streams and events.

static CUresult run_graph(Graph* graph);
static CUresult drain(void) {
  int count = queued;
  for (int i = 0; i < count; ++i) {
    Work* work = &queue[i];
    CUresult result = CUDA_SUCCESS;
    if (work->kind == COPY) memcpy(work->target, work->source, work->size);
    if (work->kind == LAUNCH) result = run_graph(work->executable->graph);
    if (work->kind == RECORD) *work->event = 2;
    if (result) {
      queued = 0;
      return sticky = result;
    }
  }
  queued = 0;
  return CUDA_SUCCESS;
}
static CUresult push(Work work) {
  if (queued == sizeof queue / sizeof *queue) return refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "the fake's queue is full");
  queue[queued++] = work;
  return CUDA_SUCCESS;
}
static CUresult copy(CUstream stream, void* target, int target_host, const void* source, int source_host, size_t size) {
  const Block *to = block_of(target, size), *from = block_of(source, size);
  if (stream != (CUstream)&stream_object) return refuse(CUDA_ERROR_INVALID_HANDLE, "a copy on no stream of the fake's");
  if (!to || to->host != target_host) return refuse(CUDA_ERROR_INVALID_VALUE, "a copy of %zu bytes to outside of memory", size);
  if (!from || from->host != source_host) return refuse(CUDA_ERROR_INVALID_VALUE, "a copy of %zu bytes from outside of memory", size);
  return push((Work){.kind = COPY, .target = target, .source = (void*)source, .size = size});
}
CUresult cuStreamCreate(CUstream* stream, unsigned flags) { IN_CONTEXT; (void)flags; *stream = (CUstream)&stream_object; return CUDA_SUCCESS; }
CUresult cuStreamDestroy(CUstream stream) { IN_CONTEXT; (void)stream; return queued ? misfree() : CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream stream) { IN_CONTEXT; (void)stream; return drain(); }
CUresult cuEventCreate(CUevent* event, unsigned flags) { IN_CONTEXT; (void)flags; *event = calloc(1, sizeof(int)); return CUDA_SUCCESS; }
CUresult cuEventDestroy(CUevent event) {
  IN_CONTEXT;
  if (queued) return misfree();
  free(event);
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  IN_CONTEXT;
  (void)stream;
  *(int*)event = 1;
  return push((Work){.kind = RECORD, .event = (int*)event});
}
CUresult cuEventSynchronize(CUevent event) {
  IN_CONTEXT;
  if (!*(int*)event) return refuse(CUDA_ERROR_INVALID_VALUE, "an event is waited for that was never recorded");
  return *(int*)event == 1 ? drain() : CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void* source, size_t size, CUstream stream) {
  IN_CONTEXT;
  return copy(stream, (void*)target, 0, source, 1, size);
}
CUresult cuMemcpyDtoHAsync(void* target, CUdeviceptr source, size_t size, CUstream stream) {
  IN_CONTEXT;
  return copy(stream, target, 1, (void*)source, 0, size);
}
CUresult cuMemcpyDtoH(void* target, CUdeviceptr source, size_t size) {
  IN_CONTEXT;
  const Block* from = block_of((void*)source, size);
  if (!from || from->host) return refuse(CUDA_ERROR_INVALID_VALUE, "a copy of %zu bytes from outside of memory", size);
  if (queued) return refuse(CUDA_ERROR_INVALID_VALUE, "memory is read while work is under way");
  memcpy(target, (void*)source, size);
  return CUDA_SUCCESS;
}

#include "libraries.h"

#include "tensor_maps.h"

#include "graphs.h"

// The only symbol that callers look up by its own name. What they ask for by name and version, the header above defines with
// a suffix where there are several versions.
EXPORT CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult* status) {
  static void* self;
  Dl_info info;
  (void)version, (void)flags;
  if (!self && dladdr((void*)fake_reset, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  const char* name = strcmp(symbol, "cuGraphInstantiate") ? symbol : "cuGraphInstantiateWithFlags";
  *function = 0;
  for (int suffix = 3; suffix >= 1 && !*function; --suffix) {
    char text[256];
    snprintf(text, sizeof text, suffix > 1 ? "%s_v%d" : "%s", name, suffix);
    *function = dlsym(self, text);
  }
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
