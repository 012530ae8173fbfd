// Powers of two of a register of numbers.
#pragma once

#include "tile.h"
#include "vec.h"

namespace rootlace {

inline Native native_of(float x) { return x - Native{}; }

inline Native multiply_add(Native a, Native b, Native c) {
#if defined(__AVX512F__)
  return (Native)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// 1 / x of normal numbers, to about 1e-7.
inline Native reciprocal(Native x) {
#if defined(__AVX512F__)
  Native guess = (Native)_mm512_rcp14_ps((__m512)x);
  return multiply_add(guess, multiply_add(-x, guess, native_of(1.0f)), guess);
#else
  return 1.0f / x;
#endif
}

// 2^x; exactly 1 at 0 and 0 at -infinity; NaN of NaN. FINE: to about one unit in the last place of
// float32, else to 3e-6, far below what bfloat16 shows. The polynomials are minimax for 2^r,
// 0 <= r <= 1, relatively, with p(0) = 1.
template <bool FINE>
inline Native exp2(Native x) {
#if defined(__AVX512DQ__)
  Native r = (Native)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
#else
  Native clamped = x < -126.0f ? native_of(-126.0f) : x;
  clamped = clamped > 128.0f ? native_of(128.0f) : clamped;
  // 1.5 * 2^23: the last bits are the rounded number.
  Native shifted = clamped - 0.5f + 12582912.0f;
  Native r = clamped - (shifted - 12582912.0f);
#endif
  Native p;
  if (FINE) {
    p = multiply_add(r, native_of(1.867130070e-3f), native_of(9.017030322e-3f));
    p = multiply_add(p, r, native_of(5.579991310e-2f));
    p = multiply_add(p, r, native_of(2.401644502e-1f));
    p = multiply_add(p, r, native_of(6.931513118e-1f));
  } else {
    p = multiply_add(r, native_of(1.342668427e-2f), native_of(5.224247422e-2f));
    p = multiply_add(p, r, native_of(2.412802048e-1f));
    p = multiply_add(p, r, native_of(6.930448449e-1f));
  }
  p = multiply_add(p, r, native_of(1.0f));
#if defined(__AVX512DQ__)
  return (Native)_mm512_scalef_ps((__m512)p, (__m512)x);  // p 2^floor(x)
#else
  NativeInts bits = (NativeInts)p + ((NativeInts)shifted << 23);
  return x < -126.0f ? Native{} : (Native)bits;
#endif
}

}  // namespace rootlace
