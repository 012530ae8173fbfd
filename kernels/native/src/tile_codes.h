// Unpacking of four-bit codes for a tile unit, column by column.
//
// Two chunks, the codes of 32 inputs x 16 columns, are four vectors of 16-bit words, a word per input. Digit n (from
// the lowest) in vector q belongs to column 4 q + n. In a group each column has a table of its 16 numbers, rounded;
// one instruction looks up 32. The result is a tile whose rows are columns of the panel: a left factor.
#pragma once

#include <algorithm>
#include <cstring>

#include "codes.h"

namespace rootlace {

class TileCodes {
 public:
  static constexpr int DEPTH = 2 * CHUNK;      // inputs of a tile
  static constexpr int TILE = DEPTH * LANES;   // numbers

  // Begins with the first tile of a vector.
  void begin(const Groups& groups) {
    groups_ = groups, left_ = 0;
    const RlScheme& scheme = groups.layout().scheme;
    std::memcpy(static_cast<void*>(numbers_), scheme.table, sizeof numbers_);
    offsets_given_ = scheme.offsets != RL_NO_NUMBERS;
    borders_ = groups.layout().group_chunks % 2;
  }

  // Unpacks the next `tiles` tiles, `stride` numbers apart.
  void unpack(int tiles, bf16* to, size_t stride) {
    const size_t bytes = groups_.layout().vecs * groups_.layout().chunk_bytes * 2;
    while (tiles > 0) {
      const char* codes = groups_.codes();
      if (!left_) next_tables();
      const int count = std::min(left_, tiles);
      left_ -= count, tiles -= count;
      groups_.skip(borders_ ? 1 : 2 * count);
      for (int i = 0; i < count; i++, codes += bytes, to += stride)
        for (int j = 0; j < 4; j++) {
          fetch_codes(codes + j * 64);
          Isa::look_up_columns(tables_ + 4 * j * DEPTH, codes + j * 64, borders_,
                               to + 4 * j * DEPTH);
        }
    }
  }

 private:
  static constexpr int HALF = LANES / NATIVE;  // registers of a table's half

  // Makes each column's table: 16 numbers for the first half of a tile's inputs, 16 for the second.
  void next_tables() {
    take(0);
    left_ = groups_.left() / 2;
    if (borders_) {
      groups_.skip(1);
      take(1);
      left_ = 1;
    }
    offsets_given_ ? fill<true>() : fill<false>();
  }

  void take(int half) {
    store(scales_[half], groups_.scales());
    if (offsets_given_) store(offsets_[half], groups_.offsets());
  }

  template <bool OFFSETS>
  void fill() {
    // A copy in registers: for all that compilers know, stores change `numbers_`.
    Native numbers[HALF];
#pragma GCC unroll 8
    for (int i = 0; i < HALF; i++) numbers[i] = numbers_[i];
    const auto table = [&](int half, int column, Native* to) {
#pragma GCC unroll 8
      for (int i = 0; i < HALF; i++) {
        to[i] = numbers[i] * scales_[half][column];
        if (OFFSETS) to[i] = Isa::rounded(to[i]) + offsets_[half][column];
      }
    };
    Native x[2 * HALF];
    if (borders_)
      for (int column = 0; column < LANES; column++) {
        table(0, column, x);
        table(1, column, x + HALF);
        Isa::narrow_row(tables_ + column * DEPTH, x);
      }
    else
#pragma GCC unroll 4
      for (int column = 0; column < LANES; column++) {
        table(0, column, x);
#pragma GCC unroll 8
        for (int i = 0; i < HALF; i++) x[HALF + i] = x[i];
        Isa::narrow_row(tables_ + column * DEPTH, x);
      }
  }

  Groups groups_;
  bool offsets_given_ = false, borders_ = false;  // `borders_`: groups end within tiles
  int left_ = 0;                                  // tiles left that use the present tables
  Native numbers_[HALF];
  alignas(64) float scales_[2][LANES];
  alignas(64) float offsets_[2][LANES];
  alignas(64) bf16 tables_[LANES * DEPTH];
};

}  // namespace rootlace
