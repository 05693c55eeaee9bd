// A row of logits in blocks of 64, and the highest of each block: with them, finding a row's few best is one quick look
// at a block for most of it.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "exponential.h"

namespace flare {

constexpr int32_t kBlock = 64;

// Not tokens: why a row gives none. kMasked: all its logits are -inf.
constexpr int32_t kNan = -1, kMasked = -2;

inline int32_t blocks_of(int32_t vocabulary) { return (vocabulary + kBlock - 1) / kBlock; }
inline size_t padded_to_block(int32_t vocabulary) { return size_t(blocks_of(vocabulary)) * kBlock; }

// Calls body(block, values) with 64 values each; the last block is filled up with -inf.
template <class Body>
void for_each_block(const float* logits, int32_t vocabulary, Body body) {
  const int32_t whole = vocabulary / kBlock, all = blocks_of(vocabulary);
  for (int32_t b = 0; b < whole; ++b) body(b, logits + size_t(b) * kBlock);
  if (whole == all) return;
  float rest[kBlock];
  for (int32_t i = 0; i < kBlock; ++i)
    rest[i] = whole * kBlock + i < vocabulary ? logits[whole * kBlock + i] : -INFINITY;
  body(whole, rest);
}

// The sum of a block's 64 values, f64 and always in the same order.
inline double block_sum(const float* values) {
  double part[8] = {};
  for (int32_t i = 0; i < kBlock; i += 8)
    for (int32_t k = 0; k < 8; ++k) part[k] += double(values[i + k]);
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

class Maxima {
 public:
  static size_t bytes(int32_t vocabulary) { return (blocks_of(vocabulary) * sizeof(float) * 2 + 63) / 64 * 64; }

  Maxima(uint8_t* memory, int32_t vocabulary)
      : size_(vocabulary), blocks_(blocks_of(vocabulary)), of_block_(reinterpret_cast<float*>(memory)),
        order_(of_block_ + blocks_) {}

  int32_t blocks() const { return blocks_; }
  float of_block(int32_t b) const { return of_block_[b]; }

  // Of the whole row; valid, like the blocks' own, after find() gave true.
  float highest() const { return highest_; }

  // False when there is a NaN.
  bool find(const float* logits) {
    using exponential::Floats;
    using exponential::Ints;
    using exponential::kWidth;
    Ints nan{};
    for_each_block(logits, size_, [&](int32_t b, const float* x) {
      Floats most = *reinterpret_cast<const Floats*>(x);
      nan |= most != most;
      for (int32_t i = kWidth; i < kBlock; i += kWidth) {
        const Floats v = *reinterpret_cast<const Floats*>(x + i);
        nan |= v != v;
        most = v > most ? v : most;
      }
      for (int32_t width = kWidth / 2; width; width /= 2)
        for (int32_t i = 0; i < width; ++i) most[i] = most[i + width] > most[i] ? most[i + width] : most[i];
      of_block_[b] = most[0];
    });
    int32_t any = 0;
    for (int32_t i = 0; i < kWidth; ++i) any |= nan[i];
    highest_ = -INFINITY;
    for (int32_t b = 0; b < blocks_; ++b) highest_ = of_block_[b] > highest_ ? of_block_[b] : highest_;
    return any == 0;
  }

  // A logit that at least k tokens reach, and few more: the k-th highest of the blocks' highest.
  float reached_by(int32_t k) {
    if (k >= blocks_) return -INFINITY;
    memcpy(order_, of_block_, sizeof(float) * blocks_);
    int32_t begin = 0, end = blocks_;
    while (end - begin > 1) {
      const float pivot = order_[begin + (end - begin) / 2];
      int32_t i = begin, j = end - 1;
      while (i <= j) {
        while (order_[i] > pivot) ++i;
        while (order_[j] < pivot) --j;
        if (i > j) break;
        const float swap = order_[i];
        order_[i++] = order_[j];
        order_[j--] = swap;
      }
      if (k - 1 <= j) {
        end = j + 1;
      } else if (k - 1 >= i) {
        begin = i;
      } else {
        return pivot;
      }
    }
    return order_[begin];
  }

 private:
  int32_t size_, blocks_;
  float* of_block_;
  float* order_;
  float highest_ = -INFINITY;
};

}  // namespace flare
