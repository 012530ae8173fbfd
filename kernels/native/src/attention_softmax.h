// Online softmax of one query's scores, a key block at a time.
//
// Exponents are to base 2. Weights are 2^(score - base). `base` moves to the largest score so far
// only if that exceeds it by SLACK. Then sums and weighted values are scaled down, which happens
// seldom.
#pragma once

#include <cfloat>

#include "attention_plan.h"
#include "exp2.h"

namespace rootlace {

constexpr float SLACK = 8;
constexpr float NOTHING = -FLT_MAX;  // the base before any key has been seen

inline float exp2_of(float x) { return exp2<5>(Isa::splat(x))[0]; }

inline Native larger(Native a, Native b) { return a > b ? a : b; }

inline float largest(Native v) {
  float most = v[0];
  for (int i = 1; i < NATIVE; i++) most = v[i] > most ? v[i] : most;
  return most;
}

// 0, 1, 2 and so on.
struct Numbers {
  alignas(64) int32_t at[NATIVE] = {};
  constexpr Numbers() {
    for (int i = 0; i < NATIVE; i++) at[i] = i;
  }
};
constexpr Numbers NUMBERS;

constexpr int PARTS = LANES / NATIVE;      // registers of 16 lanes
constexpr int SCORES = KEY_BLOCK / NATIVE;  // registers of a query's scores

// Weights of one key block, rounded as they are stored, and added up as rounded.
inline void store_weights(Native (&x)[SCORES], float* sums, float* weights) {
  std::memcpy(weights, x, sizeof x);
  Isa::add_weights(x, sums);
}
inline void store_weights(Native (&x)[SCORES], float* sums, bf16* weights) {
  Isa::add_weights(x, sums, weights);
}

inline Native largest(const Native (&x)[SCORES]) {
  Native top = x[0];
#pragma GCC unroll 16
  for (int j = 1; j < SCORES; j++) top = larger(top, x[j]);
  return top;
}

// Turns scores [KEY_BLOCK], before their factor `scale` > 0, into weights [KEY_BLOCK]. Only keys
// low : high count, all in the first `vecs` vectors. `sums` [LANES]: sums of the rounded weights.
// Returns the factor for the weighted values so far.
template <class T>
[[gnu::always_inline]] inline float soften(const float* scores, int vecs, int low, int high,
                                           float scale, float& base, float* sums,
                                           T* weights) {
  constexpr int DEGREE = sizeof(T) == 4 ? 5 : 3;
  const Native nothing = Isa::splat(-INFINITY), factor = Isa::splat(scale);
  Native scored[SCORES], x[SCORES];
#pragma GCC unroll 16
  for (int j = 0; j < SCORES; j++)
    scored[j] = j < vecs * PARTS ? load_as<Native>(scores + j * NATIVE) : nothing;
  if (low > 0 || high < vecs * LANES) {
    const NativeInts numbers = load_as<NativeInts>(NUMBERS.at);
    for (int j = 0; j < SCORES; j++) {
      NativeInts key = numbers + j * NATIVE;
      scored[j] = key < low ? nothing : scored[j];
      scored[j] = key < high ? scored[j] : nothing;
    }
  }
  auto subtract_base = [&] {
    const Native shift = Isa::splat(-base);
#pragma GCC unroll 16
    for (int j = 0; j < SCORES; j++) x[j] = Isa::multiply_add(scored[j], factor, shift);
  };
  subtract_base();
  float keep = 1;
  if (Isa::any_above(largest(x), SLACK)) {
    const float most = largest(largest(scored)) * scale;
    keep = exp2_of(base - most);
    base = most;
    subtract_base();
    store(sums, load(sums) * keep);
  }
#pragma GCC unroll 16
  for (int j = 0; j < SCORES; j++) x[j] = exp2<DEGREE>(x[j]);
  store_weights(x, sums, weights);
  return keep;
}

}  // namespace rootlace
