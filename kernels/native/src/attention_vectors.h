// Attention's products by vectors, of a few queries and a key block.
#pragma once

#include <algorithm>
#include <utility>

#include "attention_pack.h"
#include "key_block.h"
#include "kv_codes.h"
#include "tile.h"
#include "vector_panels.h"

namespace rootlace {
namespace detail {

constexpr int MOST_ROWS = 6;

constexpr int MOST_VECS = 4;

// Keys and values are fetched ahead to the second level of cache: few lines at a time can be on their way to the
// first, too few to hide the latency of memory.
constexpr int NEAR = 2;

template <int ROWS, int COLUMNS>
[[gnu::always_inline]] inline void put(const detail::Sums<ROWS, COLUMNS>& sums, float* c,
                                       size_t ldc) {
  asm("" : "+r"(c), "+r"(ldc));  // else compilers keep the addresses of all rows in registers
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++)
      std::memcpy(c + i * ldc + j * NATIVE, &sums.at[i][j], sizeof(Native));
}

// Addresses of the registers of a step of VECS panels of keys.
template <class T, int VECS>
struct KeyStep {
  const T* const* panels;
  int64_t from;
  [[gnu::always_inline]] const T* operator()(int column) const {
    constexpr int EACH = LANES / NATIVE;
    return panels[column / EACH] + from + column % EACH * NATIVE * STEP<T>;
  }
};

// Computes scores[ROWS, VECS * 16] of queries [ROWS, dim] and VECS panels of keys. Meanwhile fetches the panels at
// `next` (null: none).
template <int ROWS, int VECS, class T>
void score(const T* queries, int dim, const T* const* panels, float* scores, size_t ldc,
           const T* const* next) {
  constexpr int COLUMNS = VECS * LANES / NATIVE;
  detail::Sums<ROWS, COLUMNS> sums;
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) sums.at[i][j] = Native{};
  const T* keys[VECS];
#pragma GCC unroll 4
  for (int j = 0; j < VECS; j++) keys[j] = panels[j];
  const int64_t end = (int64_t)dim * LANES;
  const T* a = queries;
  constexpr int64_t STRIDE = LANES * STEP<T>;
  int64_t k = 0;
  auto fetch = [&] {
    if (next)
      for (int i = 0; i < PANELS; i++) __builtin_prefetch(next[i] + k, 0, NEAR);
  };
  if constexpr (QUADS<T, ROWS>) {
    Isa::reorder(sums.at);
    for (; k + 2 * STRIDE <= end; k += STRIDE, a += 2 * STEP<T>) {
      fetch();
      two_steps_at(a, dim, KeyStep<T, VECS>{keys, k}, KeyStep<T, VECS>{keys, k + STRIDE}, sums);
      k += STRIDE;
      fetch();
    }
    Isa::reorder(sums.at);
  }
  for (; k < end; k += STRIDE, a += STEP<T>) {
    fetch();
    step_at(a, dim, KeyStep<T, VECS>{keys, k}, sums);
  }
  put(sums, scores, ldc);
}

// Computes values[ROWS, VECS * 16] = values * keep[row] + weights [ROWS, KEY_BLOCK] of `count` keys x the columns
// column : column + VECS * 16 of their values. `tail`: an odd last key's values as pairs with zeros; else null.
template <int ROWS, int VECS, class T>
void weigh(const T* weights, int count, const T* const* panels, int column, int columns,
           const T* tail, float* values, const float* keep, const T* const* next) {
  constexpr int COLUMNS = VECS * LANES / NATIVE;
  detail::Sums<ROWS, COLUMNS> sums;
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++)
      sums.at[i][j] =
          load_as<Native>(values + (size_t)i * columns + j * NATIVE) * keep[i];
  const int64_t row = (int64_t)columns * STEP<T>;
  const int lines = columns / LANES;
  int left = count / STEP<T>;
  for (int panel = 0; left > 0; panel++) {
    const T* b = panels[panel] + column * STEP<T>;
    const T* fetched = next ? next[panel] : nullptr;
    const int steps = std::min(left, LANES / STEP<T>);
    left -= steps;
    auto fetch = [&] {
      if (!fetched) return;
      for (int i = 0; i < lines; i++) __builtin_prefetch(fetched + i * LANES * STEP<T>, 0, NEAR);
      fetched += row;
    };
    int k = 0;
    if constexpr (QUADS<T, ROWS>) {
      Isa::reorder(sums.at);
      for (; k + 2 <= steps; k += 2, b += 2 * row, weights += 2 * STEP<T>) {
        fetch();
        fetch();
        two_steps_at(weights, KEY_BLOCK, detail::Row<T>{b}, detail::Row<T>{b + row}, sums);
      }
      Isa::reorder(sums.at);
    }
    for (; k < steps; k++, b += row, weights += STEP<T>) {
      fetch();
      step_at(weights, KEY_BLOCK, detail::Row<T>{b}, sums);
    }
  }
  if (tail) step_at(weights, KEY_BLOCK, detail::Row<T>{tail + column * STEP<T>}, sums);
  put(sums, values, columns);
}

template <class T>
using Score = void (*)(const T*, int, const T* const*, float*, size_t, const T* const*);
template <class T>
using Weigh = void (*)(const T*, int, const T* const*, int, int, const T*, float*, const float*,
                       const T* const*);

template <class T, int ROWS, int VECS>
constexpr Score<T> score_of() {
  if constexpr (VECS <= Isa::attention_vecs(ROWS)) return score<ROWS, VECS, T>;
  return nullptr;
}
template <class T, int ROWS, int VECS>
constexpr Weigh<T> weigh_of() {
  if constexpr (VECS <= Isa::attention_vecs(ROWS)) return weigh<ROWS, VECS, T>;
  return nullptr;
}

// Products of rows + 1 queries and vectors + 1 vectors, as [rows][vectors].
template <class T>
struct Products {
  Score<T> score[MOST_ROWS][MOST_VECS];
  Weigh<T> weigh[MOST_ROWS][MOST_VECS];
};
template <class T, int... ROWS>
constexpr Products<T> products(std::integer_sequence<int, ROWS...>) {
  return {{{score_of<T, ROWS + 1, 1>(), score_of<T, ROWS + 1, 2>(), score_of<T, ROWS + 1, 3>(),
            score_of<T, ROWS + 1, 4>()}...},
          {{weigh_of<T, ROWS + 1, 1>(), weigh_of<T, ROWS + 1, 2>(), weigh_of<T, ROWS + 1, 3>(),
            weigh_of<T, ROWS + 1, 4>()}...}};
}
template <class T>
constexpr Products<T> PRODUCTS = products<T>(std::make_integer_sequence<int, MOST_ROWS>());

// Calls visit(from, to) for the vectors 0 : vecs in groups that a product of `rows` rows takes.
template <class Visit>
inline void each_group(int rows, int vecs, Visit&& visit) {
  const int groups = ceil_div(vecs, Isa::attention_vecs(rows));
  for (int g = 0; g < groups; g++) visit(cut(vecs, g, groups), cut(vecs, g + 1, groups));
}

}  // namespace detail

template <class T>
class VectorProducts {
 public:
  static constexpr int MOST_ROWS = detail::MOST_ROWS;  // most queries of a product

  // Lengths of keys and of values, equal where the cache has panels.
  VectorProducts(int dim, int value_dim)
      : dim_(dim), value_dim_(value_dim), columns_(ceil_div(value_dim, LANES) * LANES) {}

  int query_stride() const { return dim_; }

  // Takes memory from `arena`. `packed`: the cache has no panels of keys and values.
  void place(Arena& arena, bool packed) {
    if (packed) {
      keys_ = arena.take<T>((size_t)dim_ * KEY_BLOCK);
      values_ = arena.take<T>((size_t)columns_ * KEY_BLOCK);
    }
    tail_ = arena.take<T>((size_t)columns_ * STEP<T>);
  }

  void begin(int) { std::fill_n(tail_, columns_ * STEP<T>, T{}); }

  // Makes panels of plain rows. The last of `count` keys is repeated behind itself.
  KeyPanels<T> pack(const T* k_cache, const T* v_cache, const int64_t* offsets, int count) {
    pack_keys(k_cache, offsets, ceil_div(count, LANES) * LANES, dim_, dim_, keys_);
    pack_values(v_cache, offsets, ceil_div(count, 2) * 2, value_dim_, columns_, values_);
    return packed();
  }

  // Makes panels of codes. The length of a head is a whole number of steps.
  KeyPanels<T> unpack(int bits, const CodePanels& now, const CodePanels* next, int count) {
    if (bits == 8)
      rootlace::unpack<8>(now, next, count, dim_, keys_, values_);
    else
      rootlace::unpack<4>(now, next, count, dim_, keys_, values_);
    return packed();
  }

  // Sets the key block of the next products. Memory behind `count` keys may hold anything.
  void take(const KeyPanels<T>& panels, int) { panels_ = panels; }

  // Computes scores[rows, KEY_BLOCK] of queries [rows, query_stride] and the block's first `vecs` panels. Meanwhile
  // fetches the keys of `next` (null: none).
  void score(const T* queries, int rows, int vecs, float* scores, const KeyPanels<T>* next) {
    detail::each_group(rows, vecs, [&](int from, int to) {
      detail::PRODUCTS<T>.score[rows - 1][to - from - 1](
          queries, dim_, panels_.keys + from, scores + from * LANES, KEY_BLOCK,
          next && from == 0 ? next->keys : nullptr);
    });
  }

  // Computes values[rows, columns] = values * keep[row] + weights [rows, KEY_BLOCK] x the values of the first `count`
  // keys. Meanwhile fetches the values of `next` (null: none).
  void weigh(const T* weights, int rows, int count, float* values, const float* keep,
             const KeyPanels<T>* next) {
    const T* tail = nullptr;
    if (count % STEP<T>) {
      // Memory behind the last key may hold anything, also NaN.
      const T* word = panels_.values[count / LANES] + count % LANES / STEP<T> * STEP<T> * columns_;
      for (int i = 0; i < columns_; i++) tail_[i * STEP<T>] = word[i * STEP<T>];
      tail = tail_;
    }
    detail::each_group(rows, columns_ / LANES, [&](int from, int to) {
      detail::PRODUCTS<T>.weigh[rows - 1][to - from - 1](
          weights, count, panels_.values, from * LANES, columns_, tail, values + from * LANES, keep,
          next && from == 0 ? next->values : nullptr);
    });
  }

 private:
  KeyPanels<T> packed() const {
    KeyPanels<T> panels;
    for (int i = 0; i < PANELS; i++) {
      panels.keys[i] = keys_ + i * LANES * dim_;
      panels.values[i] = values_ + i * LANES * columns_;
    }
    return panels;
  }

  const int dim_, value_dim_, columns_;
  T *keys_ = nullptr, *values_ = nullptr;  // panels, if the cache has none
  T* tail_ = nullptr;                      // [columns, STEP], the second halves zero
  KeyPanels<T> panels_;
};

}  // namespace rootlace
