// Keys and values of one key block, laid out for products with lanes across keys and dimensions.
#pragma once

#include "attention_plan.h"
#include "vec.h"

namespace rootlace {

// Packs `count` keys (a multiple of LANES), plain rows at base + offsets[], into panels as KvLayout
// has them; a panel has space for keys of `padded` numbers.
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
      Isa::transpose16(rows, w, words - w < 16 ? words - w : 16, to + w * LANES, LANES);
  }
}

// Packs `count` (even) values: float32 [count][columns]; bfloat16, in pairs of keys:
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
  for (int k = 0; k < count; k += 2) {
    const bf16 *even = base + offsets[k], *odd = base + offsets[k + 1];
    bf16* to = out + (size_t)k * columns;
    int d = Isa::interleave(even, odd, to, dim);
    for (; d < columns; d++) {
      to[2 * d] = d < dim ? even[d] : bf16{0};
      to[2 * d + 1] = d < dim ? odd[d] : bf16{0};
    }
  }
}

}  // namespace rootlace
