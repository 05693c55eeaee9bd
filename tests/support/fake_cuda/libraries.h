// Libraries: what a cubin says of its kernels, and kernels by name. Part of driver.c.
//
// A cubin is an ELF file; what it says of a kernel lies in its section .nv.info.<kernel>, in entries of a format
// byte, an attribute byte, and two bytes: of a value, or (format 4) of a value's size. Its code lies in .text.<kernel>, in
// instructions of 16 bytes; nvdisasm calls the one that waits for the kernels before programmatic edges ACQBULK.

#define AT(type, place) (*(const type*)(b + (place)))
static void read_info(Function* f, const uint8_t* b, uint64_t at, uint64_t end) {
  while (at + 4 <= end) {
    int sized = b[at] == 4, attribute = b[at + 1], half = AT(uint16_t, at + 2);
    uint64_t value = at + 4;
    at = value + (sized ? half : 0);
    if (sized && (attribute == 0x17 || attribute == 0x45)) {  // one parameter: index, ordinal, offset, size
      int ordinal = AT(uint16_t, value + 4);
      uint32_t word = AT(uint32_t, value + 8);
      if (ordinal >= MOST_PARAMS) abort();
      f->offset[ordinal] = AT(uint16_t, value + 6);
      f->size[ordinal] = attribute == 0x17 ? word >> 18 : word;
      if (ordinal >= f->params) f->params = ordinal + 1;
    }
    if (sized && attribute == 0x10) memcpy(f->block, b + value, 12);  // the block size that the kernel requires
    if (attribute == 0x19) f->param_bytes = half;
  }
}
static int has_wait(const uint8_t* b, uint64_t at, uint64_t end) {
  for (; at + 16 <= end; at += 16)
    if (AT(uint16_t, at) == 0x782E) return 1;
  return 0;
}
CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jit, void** jit_values, unsigned jit_count,
                           CUlibraryOption* options, void** values, unsigned count) {
  IN_CONTEXT;
  (void)jit, (void)jit_values, (void)options, (void)values;
  const uint8_t* b = code;
  if (jit_count || count || memcmp(b, "\177ELF", 4)) return refuse(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid");
  uint64_t sections = AT(uint64_t, 0x28), size = 0;
  int entry = AT(uint16_t, 0x3A), number = AT(uint16_t, 0x3C), names = AT(uint16_t, 0x3E);
  uint64_t programs_end = AT(uint64_t, 0x20) + (uint64_t)AT(uint16_t, 0x36) * AT(uint16_t, 0x38);
  int arch = AT(uint32_t, 0x30) >> (b[8] == 7 ? 0 : 8) & 0xFF;  // b[8]: the ELF ABI, 7 of CUDA 12, 8 of CUDA 13
  if (arch != capability && !(arch / 10 == capability / 10 && arch < capability))
    return refuse(CUDA_ERROR_NO_BINARY_FOR_GPU, "a cubin for sm_%d on a device of %d", arch, (int)capability);
  Library* l = calloc(1, sizeof *l);
  uint64_t name_table = AT(uint64_t, sections + names * entry + 0x18);
  size = sections + (uint64_t)number * entry > programs_end ? sections + (uint64_t)number * entry : programs_end;
  for (int i = 0; i < number; ++i) {
    uint64_t s = sections + i * entry, at = AT(uint64_t, s + 0x18), bytes = AT(uint64_t, s + 0x20);
    const char* name = (const char*)b + name_table + AT(uint32_t, s);
    if (AT(uint32_t, s + 4) != 8 && at + bytes > size) size = at + bytes;  // 8: of no bytes in the file
    if (strncmp(name, ".nv.info.", 9)) continue;
    Function* f = calloc(1, sizeof *f);
    snprintf(f->name, sizeof f->name, "%s", name + 9);
    f->library = l, f->next = l->functions;
    l->functions = f;
    read_info(f, b, at, at + bytes);
  }
  for (int i = 0; i < number; ++i) {
    uint64_t s = sections + i * entry;
    const char* name = (const char*)b + name_table + AT(uint32_t, s);
    uint64_t at = AT(uint64_t, s + 0x18), bytes = AT(uint64_t, s + 0x20);
    for (Function* f = l->functions; f; f = f->next) {
      if (!strncmp(name, ".nv.shared.", 11) && !strcmp(name + 11, f->name)) f->static_shared = bytes;
      f->attribute = 49152 - f->static_shared;
      if (!strncmp(name, ".text.", 6) && !strcmp(name + 6, f->name)) f->waits = has_wait(b, at, at + bytes);
    }
  }
  memcpy(l->image = malloc(size), b, l->size = size);
  *library = (CUlibrary)l;
  return CUDA_SUCCESS;
}
CUresult cuLibraryUnload(CUlibrary library) {
  IN_CONTEXT;
  Library* l = (Library*)library;
  for (Function* f = l->functions; f;) { Function* next = f->next; free(f); f = next; }
  free(l->image);
  free(l);
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  IN_CONTEXT;
  for (Function* f = ((Library*)library)->functions; f; f = f->next)
    if (!strcmp(f->name, name)) return *kernel = (CUkernel)f, CUDA_SUCCESS;
  return refuse(CUDA_ERROR_NOT_FOUND, "named symbol not found");
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) { IN_CONTEXT; *function = (CUfunction)kernel; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  IN_CONTEXT;
  Function* f = (Function*)function;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value + (int)f->static_shared > most_shared())
    return refuse(CUDA_ERROR_INVALID_VALUE, "invalid argument");
  f->attribute = value;
  return CUDA_SUCCESS;
}
