// Activations as integers, for products with weights that are integers of eight bits.
//
// A number x of a row becomes n = 256 high + low, both integers of eight bits, |n| <= LARGEST. Its
// value is n * scale, with scale = (the row's largest magnitude) / LARGEST. So the error of each
// number is at most this magnitude / 65,278 (and float32's rounding). As a vector of `inputs`
// numbers, a row's error has at most sqrt(inputs) * 2^-15.99 of the row's length. Up to 16,384
// inputs that is no more than the bound for rounding to bfloat16, 2^-9; with the most inputs
// (MOST_BYTE_INPUTS) it is 1.4 times as much. For usual rows, without a number far above all
// others, it is a thirtieth.
//
// Sums of products of integers are exact, in any order. The sums over high and low numbers give y =
// (256 sum_high + sum_low) * row's scale * output's scale, in float32, step by step. So all
// instruction sets give the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codes.h"
#include "rows.h"
#include "vec.h"

namespace rootlace {

// Factor from a row's numbers to integers, and the scale of the integers.
struct RowScale {
  static constexpr int LARGEST = 127 * 256 + 127;  // largest magnitude of the integers

  float steps, scale;

  static RowScale of(const bf16* x, int inputs) {
    constexpr uint32_t LEAST = 0x0d80, INFINITE = 0x7f80;  // 2^-100
    const uint32_t most = largest_of(x, inputs);
    const float largest = to_float(bf16{static_cast<uint16_t>(most)});
    // Rows of tiny numbers become zero; all sums of a row that is not finite are NaN.
    const bool usual = most >= LEAST && most < INFINITE;
    return {usual ? LARGEST / largest : 0.0f,
            usual ? largest / LARGEST : most < LEAST ? 0.0f : NAN};
  }

 private:
  // Largest magnitude, as bits, which are in the order of the numbers.
  static uint32_t largest_of(const bf16* x, int inputs) {
    typedef uint16_t Many __attribute__((vector_size(64)));
    constexpr int COUNT = 2 * LANES;
    Many all = {};
    int i = 0;
    for (; i + COUNT <= inputs; i += COUNT) {
      const Many some = load_as<Many>(x + i) & 0x7fff;
      all = some > all ? some : all;
    }
    uint16_t most = 0;
    for (int lane = 0; lane < COUNT; lane++) most = std::max(most, all[lane]);
    for (; i < inputs; i++) most = std::max<uint16_t>(most, x[i].bits & 0x7fff);
    return most;
  }
};

// Row i's high numbers begin at at + 2 i stride, its low numbers `stride` bytes behind. After the
// last input both are zero, up to whole tiles.
class ByteRows {
 public:
  int8_t* at = nullptr;
  size_t stride = 0;

  ByteRows() = default;
  ByteRows(void* memory, int rows, int inputs)
      : at(static_cast<int8_t*>(memory)),
        stride(spread<int8_t>(inputs)),
        heads_(reinterpret_cast<Head*>(at + 2 * stride * rows)) {}

  static size_t bytes(size_t rows, int inputs) {
    return rows * (2 * spread<int8_t>(inputs) + sizeof(Head));
  }

  // Returns the rows from `row` on.
  ByteRows from(int row) const {
    ByteRows rest = *this;
    rest.at += 2 * stride * row, rest.heads_ += row;
    return rest;
  }

  // Joins the sums of a row's high and low numbers, without the outputs' scales.
  Vec joined(int row, const float* high, const float* low) const {
    const Head& head = heads_[row];
    const Vec upper = __builtin_convertvector(load_as<Ints>(high) - head.high, Vec);
    const Vec lower = __builtin_convertvector(load_as<Ints>(low) - head.low, Vec);
    return (upper * 256.0f + lower) * head.scale;
  }

  // `shift`: value added to each weight in products (Isa::BYTE_SHIFT).
  void put(int row, const bf16* x, int inputs, int shift) const {
    const RowScale scale = RowScale::of(x, inputs);
    const float steps = scale.steps;
    int8_t* high = at + 2 * stride * row;
    int8_t* low = high + stride;
    heads_[row] = {scale.scale, 0, 0};
    int i = 0;
    for (; i + BYTE_DEPTH <= inputs; i += BYTE_DEPTH)
      Isa::split_bytes(x + i, steps, high + i, low + i);
    if (i < inputs) {
      alignas(64) bf16 rest[BYTE_DEPTH] = {};
      std::memcpy(static_cast<void*>(rest), x + i, (inputs - i) * sizeof *x);
      Isa::split_bytes(rest, steps, high + i, low + i);
    }
    if (!shift) return;
    int32_t sum_high = 0, sum_low = 0;
    for (int k = 0; k < inputs; k++) sum_high += high[k], sum_low += low[k];
    heads_[row].high = shift * sum_high, heads_[row].low = shift * sum_low;
  }

 private:
  // Scale of a row, and the excess of its sums.
  struct Head {
    float scale;
    int32_t high, low;
  };

  Head* heads_ = nullptr;
};

}  // namespace rootlace
