// The innermost product: a few rows of A times a panel of B, sums in registers.
//
// Every sum runs over the depth in order, whatever ROWS and VECS are, so a row's bits do not depend on other rows.
// A later call may continue a sum (`add`) with the same bits.
#pragma once

#include "isa/isa.h"

namespace rootlace {

// Inputs in a 32-bit word of a panel: bfloat16 come in pairs, integers of eight bits in fours.
template <class T>
constexpr int STEP = 4 / static_cast<int>(sizeof(T));

// Cache lines to fetch while a tile is computed: `lines` for every AHEAD_STEPS steps.
constexpr int AHEAD_STEPS = 4;
struct Ahead {
  const char* from = nullptr;
  int lines = 0;
  bool near = false;  // to the first level of cache, for this tile; else to the second, for the next tiles
};

namespace detail {

template <int ROWS, int COLUMNS>
struct Sums {
  Native at[ROWS][COLUMNS];
};

// Addresses of the registers of a panel's row, one behind the other.
template <class T>
struct Row {
  const T* at;
  [[gnu::always_inline]] const T* operator()(int column) const {
    return at + column * NATIVE * STEP<T>;
  }
};

// Adds one step: a word of each row x a row of the panel, whose registers are at(column).
template <int ROWS, int COLUMNS, class Panel>
[[gnu::always_inline]] inline void step_at(const float* a, size_t lda, Panel at,
                                           Sums<ROWS, COLUMNS>& sums) {
  Isa::add_numbers(sums.at, at, [&](int i) { return a[i * lda]; });
}

template <int ROWS, int COLUMNS, class Panel>
[[gnu::always_inline]] inline void step_at(const bf16* a, size_t lda, Panel at,
                                           Sums<ROWS, COLUMNS>& sums) {
  Isa::add_pairs(sums.at, at, [&](int i) { return load_as<int32_t>(a + i * lda); });
}

template <int ROWS, int COLUMNS, class Panel>
[[gnu::always_inline]] inline void step_at(const int8_t* a, size_t lda, Panel at,
                                           Sums<ROWS, COLUMNS>& sums) {
  Isa::add_bytes(sums.at, at, [&](int i) { return load_as<int32_t>(a + i * lda); });
}

template <int ROWS, int COLUMNS, class T>
[[gnu::always_inline]] inline void step(const T* a, size_t lda, const T* b,
                                        Sums<ROWS, COLUMNS>& sums) {
  step_at(a, lda, Row<T>{b}, sums);
}

// Whether ROWS rows take two steps at once, between two calls of Isa::reorder.
template <class T, int ROWS>
constexpr bool QUADS = STEP<T> == 2 && Isa::has_quads(ROWS);

template <int ROWS, int COLUMNS, class T, class Panel>
[[gnu::always_inline]] inline void two_steps_at(const T* a, size_t lda, Panel first, Panel second,
                                                Sums<ROWS, COLUMNS>& sums) {
  Isa::add_quads(sums.at, first, second, [&](int i) { return a + i * lda; });
}

// Adds the last of an odd number of inputs; the number behind it in memory does not belong to A.
template <int ROWS, int COLUMNS>
[[gnu::always_inline]] inline void last(const bf16* a, size_t lda, const bf16* b,
                                        Sums<ROWS, COLUMNS>& sums) {
  Isa::add_pairs(sums.at, Row<bf16>{b}, [&](int i) { return static_cast<int32_t>(a[i * lda].bits); });
}

template <int ROWS, int COLUMNS, class T>
inline void last(const T*, size_t, const T*, Sums<ROWS, COLUMNS>&) {}

}  // namespace detail

// Computes c[ROWS, VECS * 16] (+)= a[ROWS, depth] b. Rows of a are `lda` elements apart; c is float32. Rows of b are
// `ldb` elements apart:
//     float32:  [depth][>= VECS * 16]
//     bfloat16: [(depth + 1) / 2][>= VECS * 16][2]; with an odd depth the last pairs' second halves are finite
//     int8:     [depth / 4][>= VECS * 16][4]; depth is a multiple of 4, and c has the bits of int32
template <int ROWS, int VECS, class T>
inline void tile(const T* a, size_t lda, const T* b, size_t ldb, int depth, float* c, size_t ldc,
                 bool add, Ahead ahead = {}) {
  constexpr int COLUMNS = VECS * LANES / NATIVE;
  detail::Sums<ROWS, COLUMNS> sums;
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++)
      sums.at[i][j] = add ? load_as<Native>(c + i * ldc + j * NATIVE) : Native{};
  constexpr bool QUADS = detail::QUADS<T, ROWS>;
  if constexpr (QUADS) Isa::reorder(sums.at);
  int steps = depth / STEP<T>, k = 0;
  for (; k + AHEAD_STEPS <= steps; k += AHEAD_STEPS) {
    if (ahead.near)
      for (int i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.from + i * 64, 0, 3);
    else
      for (int i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.from + i * 64, 0, 2);
    ahead.from += ahead.lines * 64;
#pragma GCC unroll 4
    for (int i = 0; i < AHEAD_STEPS; i += 1 + QUADS, a += (1 + QUADS) * STEP<T>, b += (1 + QUADS) * ldb)
      if constexpr (QUADS)
        detail::two_steps_at(a, lda, detail::Row<T>{b}, detail::Row<T>{b + ldb}, sums);
      else
        detail::step(a, lda, b, sums);
  }
  if constexpr (QUADS) Isa::reorder(sums.at);
  for (; k < steps; k++, a += STEP<T>, b += ldb) detail::step(a, lda, b, sums);
  if (depth % STEP<T>) detail::last(a, lda, b, sums);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++)
      std::memcpy(c + i * ldc + j * NATIVE, &sums.at[i][j], sizeof(Native));
}

// The same with contiguous rows of b.
template <int ROWS, int VECS, class T>
inline void tile(const T* a, size_t lda, const T* b, int depth, float* c, size_t ldc, bool add) {
  tile<ROWS, VECS>(a, lda, b, static_cast<size_t>(VECS) * LANES * STEP<T>, depth, c, ldc, add);
}

}  // namespace rootlace
