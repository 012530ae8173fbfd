// Online softmax of one query's scores, a key block at a time.
//
// Exponents are to base 2. Weights are 2^(score - base), where `base` follows the largest score so
// far only when that has outgrown it by SLACK: sums and weighted values are then scaled down, and
// seldom need to be.
#pragma once

#include "attention_plan.h"
#include "vec.h"

namespace rootlace {

constexpr float SLACK = 8;
constexpr float NOTHING = -INFINITY;  // a base: no key has been seen

inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// 2^x; exactly 1 at 0 and 0 at -infinity; NaN of NaN. FINE: to about one unit in the last place of
// float32, else to 3e-6, far below what bfloat16 shows. The polynomials are minimax for 2^r,
// 0 <= r <= 1, relatively, with p(0) = 1.
template <bool FINE>
inline Vec exp2(Vec x) {
#if defined(__AVX512DQ__)
  Vec r = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
#else
  Vec clamped = x < -126.0f ? splat(-126.0f) : x;
  clamped = clamped > 128.0f ? splat(128.0f) : clamped;
  Vec shifted = clamped - 0.5f + 12582912.0f;  // 1.5 * 2^23: the last bits are the rounded number
  Vec r = clamped - (shifted - 12582912.0f);
#endif
  Vec p;
  if (FINE) {
    p = multiply_add(r, splat(1.867130070e-3f), splat(9.017030322e-3f));
    p = multiply_add(p, r, splat(5.579991310e-2f));
    p = multiply_add(p, r, splat(2.401644502e-1f));
    p = multiply_add(p, r, splat(6.931513118e-1f));
  } else {
    p = multiply_add(r, splat(1.342668427e-2f), splat(5.224247422e-2f));
    p = multiply_add(p, r, splat(2.412802048e-1f));
    p = multiply_add(p, r, splat(6.930448449e-1f));
  }
  p = multiply_add(p, r, splat(1.0f));
#if defined(__AVX512DQ__)
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)x);  // p 2^floor(x)
#else
  Ints bits = (Ints)p + ((Ints)shifted << 23);
  return x < -126.0f ? Vec{} : (Vec)bits;
#endif
}

inline float exp2_of(float x) { return exp2<true>(splat(x))[0]; }

// Whether a lane of v is above `limit`.
inline bool any_above(Vec v, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  return max_of(v) > limit;
#endif
}

inline float largest(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  return max_of(v);
#endif
}

struct Lanes {
  Ints number;
  Lanes() {
    for (int i = 0; i < LANES; i++) number[i] = i;
  }
};

// Weights of one key block, rounded as they are stored; returns `sum` and their sums in lanes.
inline Vec store_weights(float* weights, const Vec* x, Vec sum) {
  for (int j = 0; j < KEY_BLOCK / LANES; j++) store(weights + j * LANES, x[j]);
  return sum + ((x[0] + x[1]) + (x[2] + x[3]));
}

inline Vec store_weights(bf16* weights, const Vec* x, Vec sum) {
  const Ints ones = Ints{} + 0x3f803f80;
  for (int j = 0; j < KEY_BLOCK / LANES; j += 2) {
#if defined(__AVX512BF16__)
    Ints rounded = (Ints)_mm512_cvtne2ps_pbh((__m512)x[j + 1], (__m512)x[j]);
    std::memcpy(weights + j * LANES, &rounded, sizeof rounded);
#else
    store(weights + j * LANES, x[j]);
    store(weights + (j + 1) * LANES, x[j + 1]);
    Ints rounded = load_pairs(weights + j * LANES);
#endif
    sum = dot_pairs(sum, rounded, ones);
  }
  return sum;
}

// scores [KEY_BLOCK], still to be multiplied by `scale` > 0, of which keys low : high count, all in
// the first `vecs` vectors -> weights [KEY_BLOCK]. `sums` [LANES]: of the weights as rounded, to be
// added up. Returns what the weighted values so far are to be multiplied by.
template <class T>
inline float soften(const float* scores, int vecs, int low, int high, float scale, float& base,
                    float* sums, T* weights) {
  constexpr int ALL = KEY_BLOCK / LANES;
  constexpr bool FINE = sizeof(T) == 4;
  const Vec nothing = splat(NOTHING);
  Vec x[ALL];
  for (int j = 0; j < ALL; j++) x[j] = j < vecs ? load(scores + j * LANES) : nothing;
  if (low > 0 || high < vecs * LANES) {
    static const Lanes lanes;
    for (int j = 0; j < ALL; j++) {
      Ints key = lanes.number + j * LANES;
      x[j] = key < low ? nothing : x[j];
      x[j] = key < high ? x[j] : nothing;
    }
  }
  Vec top = max_of(max_of(x[0], x[1]), max_of(x[2], x[3]));
  float keep = 1;
  if (any_above(top * scale, base + SLACK)) {
    float most = largest(top) * scale;
    keep = exp2_of(base - most);
    base = most;
  }
  const Vec factor = splat(scale), shift = splat(base == NOTHING ? 0.0f : -base);
  for (int j = 0; j < ALL; j++) x[j] = exp2<FINE>(multiply_add(x[j], factor, shift));
  store(sums, store_weights(weights, x, load(sums) * keep));
  return keep;
}

}  // namespace rootlace
