// Activations as 16-bit integers, for products with codes that have scales per group of inputs.
//
// The integers n are those of byte_rows.h in one piece; the errors stated there hold here, too.
#pragma once

#include <cstring>

#include "byte_rows.h"
#include "codes.h"
#include "rows.h"
#include "vec.h"

namespace rootlace {

// Row i begins at at + i stride: the integers, with zeros up to whole chunks; the sums of the integers
// before each chunk and of all integers; the row's scale.
class ShortRows {
 public:
  int16_t* at = nullptr;
  size_t stride = 0;

  ShortRows() = default;
  ShortRows(void* memory, int inputs)
      : at(static_cast<int16_t*>(memory)), stride(stride_of(inputs)), inputs_(inputs) {}

  static size_t bytes(size_t rows, int inputs) { return rows * stride_of(inputs) * sizeof(int16_t); }
  static size_t stride_of(int inputs) {
    return spread<int16_t>(scale_at(inputs) + sizeof(float) / sizeof(int16_t));
  }
  static int sums_at(int inputs) { return ceil_div(inputs, CHUNK) * CHUNK; }
  static int scale_at(int inputs) {
    return sums_at(inputs) + (ceil_div(inputs, CHUNK) + 1) * sizeof(int32_t) / sizeof(int16_t);
  }

  // Returns the rows from `row` on.
  ShortRows from(int row) const {
    ShortRows rest = *this;
    rest.at += row * stride;
    return rest;
  }

  void put(int row, const bf16* x) const {
    int16_t* to = at + row * stride;
    const RowScale scale = RowScale::of(x, inputs_);
    int32_t sum = 0;
    char* sums = reinterpret_cast<char*>(to + sums_at(inputs_));
    std::memcpy(sums, &sum, sizeof sum);
    for (int i = 0; i < inputs_; i += CHUNK) {
      bf16 rest[CHUNK] = {};
      const bf16* from = x + i;
      if (i + CHUNK > inputs_) {
        std::memcpy(static_cast<void*>(rest), from, (inputs_ - i) * sizeof *x);
        from = rest;
      }
      sum += Isa::put_shorts(from, scale.steps, to + i);
      std::memcpy(sums += sizeof sum, &sum, sizeof sum);
    }
    std::memcpy(to + scale_at(inputs_), &scale.scale, sizeof scale.scale);
  }

 private:
  int inputs_ = 0;
};

}  // namespace rootlace
