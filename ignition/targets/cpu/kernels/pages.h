// Where keys and values of a position lie in the paged pool.
//
// A layer's part of a page of PT positions is K [KH][PT/16][DH][16], transposed inside runs of 16 positions so that 16
// scores are 16 lanes, and V [KH][PT][DH], so that a value row's elements are lanes. Pages hold leftovers beyond the
// positions written so far: kernels must not let them reach a result.
#pragma once
#include "formats.h"
#include "kernel.h"

namespace flare {

constexpr int kRun = 16;                                    // positions of a run

template <int KH, int DH, class Kv, int PT>
struct Pages {
  static_assert(PT % kRun == 0 && DH % 2 == 0);
  using Element = typename Kv::Element;
  static constexpr uint64_t bytes = (uint64_t)KH * PT * DH * sizeof(Element);  // of K, and of V, in a page

  // The page that holds a slot's position.
  static FLARE_INLINE uint8_t* page(const Step& step, int slot, int position) {
    const int32_t number = step.page_table[(size_t)slot * step.page_stride + position / PT];
    return step.kv + (size_t)number * step.kv_page_bytes;
  }
  // Keys of the run that holds a position: [DH][16].
  static FLARE_INLINE Element* keys(uint8_t* page, size_t offset, int head, int position) {
    return (Element*)(page + offset) + ((size_t)head * (PT / kRun) + position % PT / kRun) * DH * kRun;
  }
  // The value row of a position: [DH].
  static FLARE_INLINE Element* values(uint8_t* page, size_t offset, int head, int position) {
    return (Element*)(page + offset) + ((size_t)head * PT + position % PT) * DH;
  }

  // Stores a head's key x[DH] at a position.
  static FLARE_INLINE void put_key(const Step& step, size_t offset, int head, int slot, int position, const float* x) {
    Element* column = keys(page(step, slot, position), offset, head, position) + position % kRun;
    for (int d = 0; d < DH; d += simd::kLanes) {
      const int n = DH - d < simd::kLanes ? DH - d : simd::kLanes;
      Element lanes[simd::kLanes];
      Kv::store(lanes, vector(x, d));
      for (int i = 0; i < n; ++i) column[(d + i) * kRun] = lanes[i];
    }
  }
  // Stores a head's value x[DH] at a position.
  static FLARE_INLINE void put_value(const Step& step, size_t offset, int head, int slot, int position, const float* x) {
    Element* row = values(page(step, slot, position), offset, head, position);
    constexpr int whole = DH / simd::kLanes * simd::kLanes;
    for (int d = 0; d < whole; d += simd::kLanes) Kv::store(row + d, simd::load(x + d));
    if constexpr (whole < DH) {
      Element lanes[simd::kLanes];
      Kv::store(lanes, vector(x, whole));
      std::memcpy(row + whole, lanes, (DH - whole) * sizeof(Element));
    }
  }

 private:
  static FLARE_INLINE simd::Floats vector(const float* x, int d) {
    if constexpr (DH % simd::kLanes == 0) return simd::load(x + d);
    else return simd::load_first(x + d, DH - d < simd::kLanes ? DH - d : simd::kLanes);
  }
};

}  // namespace flare
