// The tile unit in plain C++, with the order of sums and the rounding of TDPBF16PS (Intel's manual, volume 2).
// TDPBSSD's sums are exact, modulo 2^32. On a processor with the unit, tests compare both.
#pragma once

#include <cmath>
#include <cstring>

#include "amx.h"

namespace rootlace {

class TwinTiles {
 public:
  static int32_t request() { return 0; }
  void configure(const TileShapes& shapes) {
    shapes_ = shapes;
    std::memset(registers_, 0, sizeof registers_);
  }
  void release() { configure({}); }

  template <int C>
  void zero() {
    std::memset(registers_[C], 0, sizeof registers_[C]);
  }
  template <int R>
  void load(const void* from, size_t stride) {
    zero<R>();
    for (int row = 0; row < shapes_.rows[R]; row++)
      std::memcpy(registers_[R][row], static_cast<const char*>(from) + row * stride,
                  shapes_.bytes[R]);
  }
  template <int R>
  void load_once(const void* from, size_t stride) {
    load<R>(from, stride);
  }
  template <int R>
  void store(void* to, size_t stride) const {
    for (int row = 0; row < shapes_.rows[R]; row++)
      std::memcpy(static_cast<char*>(to) + row * stride, registers_[R][row], shapes_.bytes[R]);
  }
  // Sums products of even and of odd numbers apart, rounding once per product, then adds both sums to C. Subnormal
  // numbers count as zero, as inputs and as results.
  template <int C, int A, int B>
  void multiply() {
    for (int row = 0; row < shapes_.rows[A]; row++) {
      float even[COLUMNS] = {}, odd[COLUMNS] = {};  // all columns, so that compilers make vectors
      for (int k = 0; k < shapes_.bytes[A] / 4; k++) {
        const uint32_t a = registers_[A][row][k];
        for (int column = 0; column < COLUMNS; column++) {
          const uint32_t b = registers_[B][k][column];
          even[column] = normal(std::fma(low(a), low(b), even[column]));
          odd[column] = normal(std::fma(high(a), high(b), odd[column]));
        }
      }
      for (int column = 0; column < shapes_.bytes[B] / 4; column++) {
        float sum = normal(number(registers_[C][row][column]) + normal(even[column] + odd[column]));
        std::memcpy(&registers_[C][row][column], &sum, sizeof sum);
      }
    }
  }

  template <int C, int A, int B>
  void multiply_bytes() {
    for (int row = 0; row < shapes_.rows[A]; row++)
      for (int k = 0; k < shapes_.bytes[A] / 4; k++) {
        const uint32_t a = registers_[A][row][k];
        for (int column = 0; column < shapes_.bytes[B] / 4; column++) {
          const uint32_t b = registers_[B][k][column];
          for (int at = 0; at < 32; at += 8)
            registers_[C][row][column] += static_cast<int8_t>(a >> at) * static_cast<int8_t>(b >> at);
        }
      }
  }

 private:
  static constexpr int COLUMNS = 16;

  static float normal(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits &= bits & 0x7f800000u ? ~0u : 0x80000000u;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  static float number(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return normal(x);
  }
  static float low(uint32_t pair) { return number(pair << 16); }
  static float high(uint32_t pair) { return number(pair & 0xffff0000u); }

  TileShapes shapes_;
  uint32_t registers_[8][16][COLUMNS] = {};
};

}  // namespace rootlace
