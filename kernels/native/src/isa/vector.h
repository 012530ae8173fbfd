// Vectors of 16 float32 lanes and bfloat16, for any CPU that GCC or Clang compiles for.
//
// Written with the compilers' vector extension, which becomes AVX-512, pairs of AVX2 or quads of
// NEON instructions.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rootlace {

constexpr int LANES = 16;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline Vec splat(float x) { return x - Vec{}; }

template <class V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const float* p) { return load_as<Vec>(p); }

inline Vec load(const bf16* p) {
  Words w = __builtin_convertvector(load_as<Halves>(p), Words) << 16;
  return reinterpret_cast<Vec>(w);
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

}  // namespace rootlace
