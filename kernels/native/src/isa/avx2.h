// AVX2: 16 registers of eight numbers.
#pragma once

#include <immintrin.h>

#include "plain.h"

namespace rootlace {

struct Avx2 : Plain<8> {
  static constexpr const char* NAME = "avx2";

  static Native multiply_add(Native a, Native b, Native c) {
    return (Native)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  }
  static bool any_above(Native v, float limit) {
    return _mm256_movemask_ps((__m256)(v > limit)) != 0;
  }

  static uint32_t bits_of(Ints lanes) {
    __m256 halves[2];
    std::memcpy(halves, &lanes, sizeof lanes);
    return static_cast<uint32_t>(_mm256_movemask_ps(halves[0])) |
           static_cast<uint32_t>(_mm256_movemask_ps(halves[1])) << 8;
  }
};
using Isa = Avx2;

}  // namespace rootlace
