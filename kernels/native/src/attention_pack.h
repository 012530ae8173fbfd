// Keys and values of one key block, laid out for products with lanes across keys and dimensions.
#pragma once

#include "attention_plan.h"
#include "vec.h"

namespace rootlace {

// A 16 x 16 matrix of 32-bit words transposed: in row i, columns from `column` on, at rows[i];
// only the first `width` columns are read and written. out row j at out + j * stride.
#if defined(__AVX512F__)
inline void transpose16(const int32_t* const* rows, int column, int width, int32_t* out,
                        size_t stride) {
  __m512i r[16], t[16];
  const __mmask16 some = (__mmask16)((1u << width) - 1);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    r[i] = _mm512_maskz_loadu_epi32(some, rows[i] + column);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 a + c] holds, of rows 4a..4a+3, columns c, c + 4, c + 8 and c + 12 in its four quarters.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44);
    t[4 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44);
    t[8 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[4 + c], 0x88);
    r[4 + c] = _mm512_shuffle_i32x4(t[c], t[4 + c], 0xdd);
    r[8 + c] = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x88);
    r[12 + c] = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xdd);
  }
  if (width == 16) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) _mm512_storeu_si512(out + j * stride, r[j]);
  } else {
    for (int j = 0; j < width; j++) _mm512_storeu_si512(out + j * stride, r[j]);
  }
}
#else
typedef int32_t Four __attribute__((vector_size(16)));

#if defined(__clang__)
#define ROOTLACE_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define ROOTLACE_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, Four{i, j, k, l})
#endif

inline void transpose16(const int32_t* const* rows, int column, int width, int32_t* out,
                        size_t stride) {
  for (int i = 0; i < 16; i += 4) {
    const int32_t* p[4];
    for (int k = 0; k < 4; k++) p[k] = rows[i + k] + column;
    int j = 0;
    for (; j + 4 <= width; j += 4) {
      Four r[4];
      for (int k = 0; k < 4; k++) std::memcpy(&r[k], p[k] + j, sizeof(Four));
      Four a = ROOTLACE_SHUFFLE(r[0], r[1], 0, 4, 1, 5);
      Four b = ROOTLACE_SHUFFLE(r[2], r[3], 0, 4, 1, 5);
      Four c = ROOTLACE_SHUFFLE(r[0], r[1], 2, 6, 3, 7);
      Four d = ROOTLACE_SHUFFLE(r[2], r[3], 2, 6, 3, 7);
      r[0] = ROOTLACE_SHUFFLE(a, b, 0, 1, 4, 5);
      r[1] = ROOTLACE_SHUFFLE(a, b, 2, 3, 6, 7);
      r[2] = ROOTLACE_SHUFFLE(c, d, 0, 1, 4, 5);
      r[3] = ROOTLACE_SHUFFLE(c, d, 2, 3, 6, 7);
      for (int k = 0; k < 4; k++) std::memcpy(out + (j + k) * stride + i, &r[k], sizeof(Four));
    }
    for (; j < width; j++)
      for (int k = 0; k < 4; k++) out[j * stride + i + k] = p[k][j];
  }
}
#undef ROOTLACE_SHUFFLE
#endif

// Keys of plain rows at base + offsets[], `count` of them (a multiple of LANES), into panels: see
// KvLayout; panels are as large as keys of `padded` numbers make them.
template <class T>
inline void pack_keys(const T* base, const int64_t* offsets, int count, int dim, int padded,
                      T* out) {
  const int words = dim * (int)sizeof(T) / 4;
  int32_t* to = reinterpret_cast<int32_t*>(out);
  for (int k = 0; k < count; k += LANES, to += padded * (int)sizeof(T) / 4 * LANES) {
    const int32_t* rows[LANES];
    for (int i = 0; i < LANES; i++)
      rows[i] = reinterpret_cast<const int32_t*>(base + offsets[k + i]);
    for (int w = 0; w < words; w += 16)
      transpose16(rows, w, words - w < 16 ? words - w : 16, to + w * LANES, LANES);
  }
}

// `count` (even) values: float32 [count][columns]; bfloat16, in pairs of keys:
// [count / 2][columns][2]. `columns`: dim rounded up to whole vectors; those behind dim are zero.
inline void pack_values(const float* base, const int64_t* offsets, int count, int dim, int columns,
                        float* out) {
  for (int k = 0; k < count; k++) {
    const float* from = base + offsets[k];
    float* to = out + (size_t)k * columns;
    int d = 0;
    for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d));
    for (; d < columns; d++) to[d] = d < dim ? from[d] : 0.0f;
  }
}

inline void pack_values(const bf16* base, const int64_t* offsets, int count, int dim, int columns,
                        bf16* out) {
#if defined(__AVX512BW__)
  alignas(64) static const uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,
                                               37, 6, 38, 7, 39, 8,  40, 9,  41, 10, 42,
                                               11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(LOW);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
#endif
  for (int k = 0; k < count; k += 2) {
    const bf16 *even = base + offsets[k], *odd = base + offsets[k + 1];
    bf16* to = out + (size_t)k * columns;
    int d = 0;
#if defined(__AVX512BW__)
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
      __m512i a = _mm512_loadu_si512(even + d), b = _mm512_loadu_si512(odd + d);
      _mm512_storeu_si512(to + 2 * d, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(to + 2 * d + 2 * LANES, _mm512_permutex2var_epi16(a, high, b));
    }
#endif
    for (; d + LANES <= dim; d += LANES) {
      Halves a, b;
      std::memcpy(&a, even + d, sizeof a);
      std::memcpy(&b, odd + d, sizeof b);
      Words both = __builtin_convertvector(a, Words) | (__builtin_convertvector(b, Words) << 16);
      std::memcpy(to + 2 * d, &both, sizeof both);
    }
    for (; d < columns; d++) {
      to[2 * d] = d < dim ? even[d] : bf16{0};
      to[2 * d + 1] = d < dim ? odd[d] : bf16{0};
    }
  }
}

}  // namespace rootlace
