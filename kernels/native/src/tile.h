// The innermost product: a few rows of A times a panel of B, sums in registers.
//
// Every sum runs over the depth in order, whatever ROWS and VECS are: a row's result has the same
// bits in any company.
#pragma once

#include "vec.h"

namespace rootlace {

// c[ROWS, VECS * 16] (+)= a[ROWS, depth] b, with a row-major (`lda` elements apart), c float32.
// b is packed, float32: [depth][VECS * 16]; bfloat16: [depth / 2][VECS * 16][2], depth even.
template <int ROWS, int VECS>
inline void tile(const bf16* a, size_t lda, const bf16* b, int depth, float* c, size_t ldc,
                 bool add) {
  Vec acc[ROWS][VECS];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < VECS; j++) acc[i][j] = add ? load(c + i * ldc + j * LANES) : Vec{};
  for (int k = 0; k < depth; k += 2) {
    Ints panel[VECS];
    for (int j = 0; j < VECS; j++) panel[j] = load_pairs(b + (size_t)k * VECS * LANES + j * 32);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      Ints pair = splat_pair(a + i * lda + k);
      for (int j = 0; j < VECS; j++) acc[i][j] = dot_pairs(acc[i][j], pair, panel[j]);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < VECS; j++) store(c + i * ldc + j * LANES, acc[i][j]);
}

template <int ROWS, int VECS>
inline void tile(const float* a, size_t lda, const float* b, int depth, float* c, size_t ldc,
                 bool add) {
  Vec acc[ROWS][VECS];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < VECS; j++) acc[i][j] = add ? load(c + i * ldc + j * LANES) : Vec{};
  for (int k = 0; k < depth; k++) {
    Vec panel[VECS];
    for (int j = 0; j < VECS; j++) panel[j] = load(b + ((size_t)k * VECS + j) * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < VECS; j++) acc[i][j] += a[i * lda + k] * panel[j];
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < VECS; j++) store(c + i * ldc + j * LANES, acc[i][j]);
}

}  // namespace rootlace
