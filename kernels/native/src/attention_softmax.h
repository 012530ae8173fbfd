// Online softmax of one query's scores, a key block at a time.
//
// Exponents are to base 2. Weights are 2^(score - base), where `base` follows the largest score so
// far only when that has outgrown it by SLACK: sums and weighted values are then scaled down, and
// seldom need to be.
#pragma once

#include "attention_plan.h"
#include "exp2.h"
#include "tile.h"
#include "vec.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace rootlace {

constexpr float SLACK = 8;
constexpr float NOTHING = -INFINITY;  // a base: no key has been seen

inline float exp2_of(float x) { return exp2<true>(native_of(x))[0]; }

// Whether a lane of v is above `limit`.
inline bool any_above(Native v, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)(v > limit)) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)(v > limit)) != 0;
#else
  bool any = false;
  for (int i = 0; i < NATIVE; i++) any |= v[i] > limit;
  return any;
#endif
}

inline Native larger(Native a, Native b) { return a > b ? a : b; }

inline float largest(Native v) {
  float most = v[0];
  for (int i = 1; i < NATIVE; i++) most = v[i] > most ? v[i] : most;
  return most;
}

struct Numbers {
  NativeInts at;
  Numbers() {
    for (int i = 0; i < NATIVE; i++) at[i] = i;
  }
};

constexpr int PARTS = LANES / NATIVE;      // registers of 16 lanes
constexpr int SCORES = KEY_BLOCK / NATIVE;  // registers of a query's scores

inline void store_native(float* to, Native v) { std::memcpy(to, &v, sizeof v); }

// sums [LANES] * keep + the sums of x in lanes.
inline void add_up(const Native* x, float keep, float* sums) {
  for (int i = 0; i < PARTS; i++) {
    Native sum = detail::load_as<Native>(sums + i * NATIVE) * keep;
    sum += (x[i] + x[PARTS + i]) + (x[2 * PARTS + i] + x[3 * PARTS + i]);
    store_native(sums + i * NATIVE, sum);
  }
}

// Weights of one key block, rounded as they are stored, and added up as rounded.
inline void store_weights(Native* x, float keep, float* sums, float* weights) {
  for (int j = 0; j < SCORES; j++) store_native(weights + j * NATIVE, x[j]);
  add_up(x, keep, sums);
}

inline void store_weights(Native* x, float keep, float* sums, bf16* weights) {
#if defined(__AVX512BF16__)
  const Ints ones = Ints{} + 0x3f803f80;
  Vec sum = load(sums) * keep;
  for (int j = 0; j < SCORES; j += 2) {
    Ints rounded = (Ints)_mm512_cvtne2ps_pbh((__m512)x[j + 1], (__m512)x[j]);
    std::memcpy(weights + j * LANES, &rounded, sizeof rounded);
    sum = dot_pairs(sum, rounded, ones);
  }
  store(sums, sum);
#else
  typedef uint16_t NativeHalves __attribute__((vector_size(NATIVE * 2)));
  typedef uint32_t NativeWords __attribute__((vector_size(NATIVE * 4)));
  for (int j = 0; j < SCORES; j++) {
    NativeWords bits = (NativeWords)x[j];
    NativeWords rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = x[j] == x[j] ? rounded : (bits >> 16) | 0x40;
    x[j] = (Native)(rounded << 16);
    NativeHalves halves = __builtin_convertvector(rounded, NativeHalves);
    std::memcpy(weights + j * NATIVE, &halves, sizeof halves);
  }
  add_up(x, keep, sums);
#endif
}

// scores [KEY_BLOCK], still to be multiplied by `scale` > 0, of which keys low : high count, all in
// the first `vecs` vectors -> weights [KEY_BLOCK]. `sums` [LANES]: of the weights as rounded, to be
// added up. Returns what the weighted values so far are to be multiplied by.
template <class T>
inline float soften(const float* scores, int vecs, int low, int high, float scale, float& base,
                    float* sums, T* weights) {
  constexpr bool FINE = sizeof(T) == 4;
  const Native nothing = native_of(NOTHING);
  Native x[SCORES];
#pragma GCC unroll 16
  for (int j = 0; j < SCORES; j++)
    x[j] = j < vecs * PARTS ? detail::load_as<Native>(scores + j * NATIVE) : nothing;
  if (low > 0 || high < vecs * LANES) {
    static const Numbers numbers;
    for (int j = 0; j < SCORES; j++) {
      NativeInts key = numbers.at + j * NATIVE;
      x[j] = key < low ? nothing : x[j];
      x[j] = key < high ? x[j] : nothing;
    }
  }
  Native top = x[0];
#pragma GCC unroll 16
  for (int j = 1; j < SCORES; j++) top = larger(top, x[j]);
  float keep = 1;
  if (any_above(top * scale, base + SLACK)) {
    float most = largest(top) * scale;
    keep = exp2_of(base - most);
    base = most;
  }
  const Native factor = native_of(scale), shift = native_of(base == NOTHING ? 0.0f : -base);
#pragma GCC unroll 16
  for (int j = 0; j < SCORES; j++) x[j] = exp2<FINE>(multiply_add(x[j], factor, shift));
  store_weights(x, keep, sums, weights);
  return keep;
}

}  // namespace rootlace
