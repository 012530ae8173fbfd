// Functions of 16 float32 lanes and of bfloat16.
#pragma once

#include <cmath>

#include "isa/isa.h"

namespace rootlace {

inline void store(bf16* p, Vec v) {
  Halves h = Isa::narrow(v);
  std::memcpy(static_cast<void*>(p), &h, sizeof h);
}

inline void store(float* p, float x) { *p = x; }
inline void store(bf16* p, float x) {
  alignas(64) bf16 all[LANES];
  store(all, splat(x));
  *p = all[0];
}

// Returns values i to i + 15 of x[size], minus infinity behind the end.
inline Vec load_part(const float* x, int i, int size) {
  if (i + LANES <= size) return load(x + i);
  Vec v = splat(-INFINITY);
  for (int j = 0; i + j < size; j++) v[j] = x[i + j];
  return v;
}

// Keeps compilers from fusing a product with a later addition: the product is rounded alone.
inline Vec rounded(Vec v) {
  for (int i = 0; i < LANES; i += NATIVE) {
    float* at = reinterpret_cast<float*>(&v) + i;
    const Native some = Isa::rounded(load_as<Native>(at));
    std::memcpy(at, &some, sizeof some);
  }
  return v;
}

inline float sum(Vec v) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
}

inline float max_of(Vec v) {
  float most = v[0];
  for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
  return most;
}

inline uint32_t bits_of(Ints lanes) { return Isa::bits_of(lanes); }

inline Vec max_of(Vec a, Vec b) { return a > b ? a : b; }

// e^x to about one unit in the last place; 0 below -87.3, infinity above 88.7.
inline Vec exp(Vec x) {
  Vec clamped = x < -87.3f ? splat(-87.3f) : x;
  clamped = clamped > 88.8f ? splat(88.8f) : clamped;
  // x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts so that r is exact.
  Vec shifted = clamped * 1.44269504088896341f + 12582912.0f;
  Vec n = shifted - 12582912.0f;
  Vec r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  Vec y = p * r * r + r + 1.0f;
  Ints e = (__builtin_convertvector(n, Ints) + 127) << 23;
  Vec result = y * reinterpret_cast<Vec>(e);
  return x < -87.3f ? Vec{} : result;
}

}  // namespace rootlace
