// Tensor maps: what the header demands of them, and what a real driver leaves to the device is an error too. Part of driver.c.
//
// A map is opaque: what is written here, only executor.py reads, and cuGraphAddNode knows it by its first word.

#define MAP_MAGIC 0x70616d20656b6166  // "fake map"
typedef struct {
  uint64_t magic, base, strides[4];  // bytes, the innermost dimension first, which has none
  uint32_t last[5];                  // of each dimension, its size less one
  uint16_t box[5];
  uint8_t rank, type, swizzle, promotion, rest[46];
} FakeMap;
_Static_assert(sizeof(FakeMap) == sizeof(CUtensorMap), "a map has 128 bytes");

static const int element_bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};  // of CUtensorMapDataType, but its packed ones

#define BAD(...) return refuse(CUDA_ERROR_INVALID_VALUE, __VA_ARGS__)
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* size,
                                const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t* step,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  IN_CONTEXT;
  static const unsigned spans[] = {~0u, 32, 64, 128};
  if (capability < 90) return refuse(CUDA_ERROR_NOT_SUPPORTED, "a device of %d has no tensor maps", (int)capability);
  if ((uintptr_t)map % _Alignof(CUtensorMap)) BAD("a map at %p, wanted a multiple of %zu", (void*)map, _Alignof(CUtensorMap));
  if ((unsigned)type >= sizeof element_bytes / sizeof *element_bytes) BAD("elements of type %d", type);
  if (!rank || rank > 5) BAD("a rank of %u", rank);
  if ((uintptr_t)base % 16) BAD("a tensor at %p, wanted a multiple of 16", base);
  if (interleave || fill) BAD("the fake has no interleaved maps and fills with zeros");
  if ((unsigned)swizzle > CU_TENSOR_MAP_SWIZZLE_128B) BAD("a swizzle of %d", swizzle);
  if ((unsigned)promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B) BAD("a promotion of %d", promotion);
  const uint64_t element = element_bytes[type];
  if (box[0] * element % 16 || box[0] * element > spans[swizzle]) BAD("a box with rows of %u elements", box[0]);
  FakeMap made = {.magic = MAP_MAGIC, .base = (uint64_t)base, .rank = rank, .type = type, .swizzle = swizzle, .promotion = promotion};
  uint64_t extent = 0, below = element;
  for (unsigned i = 0; i < rank; ++i) {
    if (!size[i] || size[i] > 1ull << 32) BAD("a size of %llu", (unsigned long long)size[i]);
    if (!box[i] || box[i] > 256) BAD("a box of %u", box[i]);
    if (step[i] != 1) BAD("an element stride of %u", step[i]);
    if (i && (stride[i - 1] % 16 || stride[i - 1] >= 1ull << 40 || stride[i - 1] < below))
      BAD("a stride of %llu bytes", (unsigned long long)stride[i - 1]);
    const uint64_t apart = i ? stride[i - 1] : element;
    extent += (size[i] - 1) * apart;
    below = size[i] * apart;
    made.last[i] = size[i] - 1, made.box[i] = box[i];
    if (i) made.strides[i - 1] = apart;
  }
  const Block* block = block_of(base, extent + element);
  if (!block || block->host) BAD("a tensor outside of memory");
  memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}
static int is_map(const uint8_t* bytes) {
  uint64_t magic;
  memcpy(&magic, bytes, sizeof magic);
  return magic == MAP_MAGIC;
}
