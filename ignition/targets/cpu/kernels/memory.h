// Memory that cores own. No exceptions, and nothing of the C++ runtime library: a kernel library needs libc only.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace flare {

// A fixed number of value-initialised elements, 64-byte aligned. Their destructors are not run: they must be trivial.
template <class T>
class Array {
 public:
  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { free(data_); }

  // False when there is no memory. Called once.
  bool allocate(size_t count) {
    if (count > (SIZE_MAX - 64) / sizeof(T)) return false;
    const size_t bytes = (count * sizeof(T) + 64) & ~size_t{63};
    data_ = static_cast<T*>(aligned_alloc(64, bytes));
    if (!data_) return false;
    for (size_t i = 0; i < count; ++i) new (data_ + i) T();
    return true;
  }

  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* data() { return data_; }

 private:
  T* data_ = nullptr;
};

// Anonymous memory: zero, page-aligned, occupied only where it was written.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (base_) munmap(base_, mapped_);
  }

  // False when the system refuses. Called once; 0 bytes give a null pointer.
  bool allocate(uint64_t bytes, bool huge) {
    constexpr uint64_t kHuge = uint64_t{2} << 20;
    if (bytes == 0) return true;
    if (bytes > (uint64_t{1} << 62)) return false;
    mapped_ = bytes + (huge ? kHuge : 0);
    void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return false;
    base_ = data_ = static_cast<uint8_t*>(base);
    if (huge) {
      data_ += (kHuge - reinterpret_cast<uintptr_t>(base) % kHuge) % kHuge;
      madvise(data_, bytes, MADV_HUGEPAGE);  // a wish: without it everything works, slower
    }
    return true;
  }

  uint8_t* data() const { return data_; }

 private:
  uint8_t* base_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace flare
