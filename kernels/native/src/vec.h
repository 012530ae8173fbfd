// Vectors of 16 float32 lanes and bfloat16, for any CPU that GCC or Clang compiles for.
//
// Written with the compilers' vector extension, which becomes AVX-512, pairs of AVX2 or quads of
// NEON instructions; intrinsics only where the extension has no words for them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

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

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const bf16* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
  Words w = __builtin_convertvector(h, Words) << 16;
  return reinterpret_cast<Vec>(w);
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Rounded to nearest, ties to even. NaN stays NaN.
inline void store(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
  std::memcpy(p, &h, sizeof h);
#else
  Words w = reinterpret_cast<Words>(v);
  Words rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
  Words quiet = (w >> 16) | 0x40;
  Words is_nan = reinterpret_cast<Words>(v != v);
  Halves h = __builtin_convertvector((rounded & ~is_nan) | (quiet & is_nan), Halves);
  std::memcpy(p, &h, sizeof h);
#endif
}

inline void store(float* p, float x) { *p = x; }
inline void store(bf16* p, float x) {
  alignas(64) bf16 all[LANES];
  store(all, splat(x));
  *p = all[0];
}

// The two bfloat16 at `p` in every lane.
inline Ints splat_pair(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return pair - Ints{};
}

inline Ints load_pairs(const bf16* p) {
  Ints v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// acc + a.low * b.low + a.high * b.high, lane by lane, of pairs of bfloat16.
inline Vec dot_pairs(Vec acc, Ints a, Ints b) {
#if defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  Ints al = a << 16, bl = b << 16;
  const int32_t high = static_cast<int32_t>(0xffff0000u);
  Ints ah = a & high, bh = b & high;
  acc += reinterpret_cast<Vec>(ah) * reinterpret_cast<Vec>(bh);
  return acc + reinterpret_cast<Vec>(al) * reinterpret_cast<Vec>(bl);
#endif
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

// Bit i says whether lane i of a comparison's result holds.
inline uint32_t bits_of(Ints lanes) {
#if defined(__AVX512F__)
  __m512i all = reinterpret_cast<__m512i>(lanes);
  return _mm512_test_epi32_mask(all, all);
#elif defined(__AVX__)
  __m256 halves[2];
  std::memcpy(halves, &lanes, sizeof lanes);
  return static_cast<uint32_t>(_mm256_movemask_ps(halves[0])) |
         static_cast<uint32_t>(_mm256_movemask_ps(halves[1])) << 8;
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= static_cast<uint32_t>(lanes[i] != 0) << i;
  return bits;
#endif
}

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
