// Attention's products by a tile unit, of up to 32 queries and a key block, in bfloat16.
//
// Scores are sums over steps of 32 dimensions, weighted values over steps of 32 keys, each in order, whatever the
// number of queries. So a query's bits do not depend on other queries.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention_pack.h"
#include "isa/amx.h"
#include "key_block.h"
#include "kv_codes.h"
#include "vector_panels.h"

namespace rootlace {

template <class Tiles>
class TileProducts {
 public:
  static constexpr int MOST_ROWS = 32;

  // Methods without a comment are as in VectorProducts.
  TileProducts(int dim, int value_dim)
      : dim_(dim),
        value_dim_(value_dim),
        padded_(ceil_div(dim, DEPTH) * DEPTH),
        columns_(ceil_div(value_dim, LANES) * LANES) {}
  ~TileProducts() {
    if (first_) tiles_.release();
  }
  TileProducts(const TileProducts&) = delete;
  TileProducts& operator=(const TileProducts&) = delete;

  int query_stride() const { return padded_; }

  void place(Arena& arena, bool packed) {
    packed_ = packed;
    if (packed || padded_ != dim_) keys_ = arena.take<bf16>((size_t)padded_ * KEY_BLOCK);
    values_ = arena.take<bf16>((size_t)columns_ * KEY_BLOCK);
  }

  void begin(int) {
    if (keys_) std::memset(static_cast<void*>(keys_), 0, (size_t)padded_ * KEY_BLOCK * sizeof(bf16));
  }

  KeyPanels<bf16> pack(const bf16* k_cache, const bf16* v_cache, const int64_t* offsets, int count) {
    pack_keys(k_cache, offsets, ceil_div(count, LANES) * LANES, dim_, padded_, keys_);
    pack_values(v_cache, offsets, ceil_div(count, 2) * 2, value_dim_, columns_, values_);
    return packed();
  }

  // Makes panels of codes. The length of a head is a whole number of steps.
  KeyPanels<bf16> unpack(int bits, const CodePanels& now, const CodePanels* next, int count) {
    if (bits == 8)
      rootlace::unpack<8>(now, next, count, dim_, keys_, values_);
    else
      rootlace::unpack<4>(now, next, count, dim_, keys_, values_);
    return packed();
  }

  // Pads keys with zeros to whole steps, and copies values to whole steps of 32 keys with zeros behind the last key:
  // other memory that the unit would read may hold NaN.
  void take(const KeyPanels<bf16>& panels, int count) {
    for (int i = 0; i < PANELS; i++) {
      at_[i] = panels.keys[i];
      if (padded_ == dim_ || packed_) continue;
      std::memcpy(static_cast<void*>(keys_ + i * LANES * padded_), panels.keys[i],
                  sizeof(bf16) * LANES * dim_);
      at_[i] = keys_ + i * LANES * padded_;
    }
    if (!packed_)
      for (int i = 0; i * LANES < count; i++)
        std::memcpy(static_cast<void*>(values_ + i * LANES * columns_), panels.values[i],
                    sizeof(bf16) * LANES * columns_);
    if (count == KEY_BLOCK) return;
    bf16* end = values_ + count / 2 * 2 * columns_;
    if (count % 2)
      for (int i = 0; i < columns_; i++) end[2 * i + 1] = bf16{0};
    end += count % 2 * 2 * columns_;
    std::fill(end, values_ + KEY_BLOCK * columns_, bf16{0});
  }

  void score(const bf16* queries, int rows, int vecs, float* scores, const KeyPanels<bf16>* next) {
    configure(rows);
    for (int vec = 0; vec < vecs; vec += 2) {
      Sums sums{scores + vec * LANES, KEY_BLOCK};
      if (rows > LANES)
        score<2>(queries, vec, sums, next);
      else
        score<1>(queries, vec, sums, next);
    }
  }

  void weigh(const bf16* weights, int rows, int count, float* values, const float* keep,
             const KeyPanels<bf16>* next) {
    for (int row = 0; row < rows; row++)
      if (keep[row] != 1) scale(values + (size_t)row * columns_, keep[row]);
    configure(rows);
    const int steps = ceil_div(count, DEPTH);
    for (int column = 0; column < columns_; column += 2 * LANES) {
      Sums sums{values + column, (size_t)columns_};
      const bool two = column + LANES < columns_;
      if (rows > LANES)
        two ? weigh<2, 2>(weights, column, steps, sums) : weigh<2, 1>(weights, column, steps, sums);
      else
        two ? weigh<1, 2>(weights, column, steps, sums) : weigh<1, 1>(weights, column, steps, sums);
      if (next) fetch(next->values, column, 2 * LANES);
    }
  }

 private:
  KeyPanels<bf16> packed() const {
    KeyPanels<bf16> panels;
    for (int i = 0; i < PANELS; i++) {
      panels.keys[i] = keys_ + i * LANES * padded_;
      panels.values[i] = values_ + i * LANES * columns_;
    }
    return panels;
  }

  static constexpr int DEPTH = 32;  // dimensions, or keys, of a tile

  struct Sums {
    float* at;
    size_t stride;
  };

  // Computes scores of the keys of panels `vec` and vec + 1.
  template <int HEIGHT>
  void score(const bf16* queries, int vec, const Sums& sums, const KeyPanels<bf16>* next) {
    const size_t stride = padded_ * sizeof(bf16);
    zero<0, HEIGHT, 2>();
    for (int d = 0; d < padded_; d += DEPTH) {
      step<HEIGHT, 2>(queries + d, stride, at_[vec] + d * LANES, at_[vec + 1] + d * LANES, 64);
      if (next && vec == 0 && d < dim_) fetch(next->keys, d, std::min(DEPTH, dim_ - d));
    }
    put<0, HEIGHT, 2>(sums);
  }

  template <int HEIGHT, int WIDTH>
  void weigh(const bf16* weights, int column, int steps, const Sums& sums) {
    const size_t row = columns_ * 2 * sizeof(bf16);
    get<0, HEIGHT, WIDTH>(sums);
    for (int i = 0; i < steps; i++) {
      const bf16* b = values_ + (size_t)i * DEPTH * columns_ + column * 2;
      step<HEIGHT, WIDTH>(weights + i * DEPTH, KEY_BLOCK * sizeof(bf16), b, b + LANES * 2, row);
    }
    put<0, HEIGHT, WIDTH>(sums);
  }

  template <int HEIGHT, int WIDTH>
  [[gnu::always_inline]] void step(const bf16* a, size_t lda, const bf16* first, const bf16* second,
                                   size_t ldb) {
    tiles_.template load<6>(first, ldb);
    if (WIDTH == 2) tiles_.template load<7>(second, ldb);
    tiles_.template load<4>(a, lda);
    tiles_.template multiply<0, 4, 6>();
    if (WIDTH == 2) tiles_.template multiply<1, 4, 7>();
    if (HEIGHT == 2) {
      tiles_.template load<5>(reinterpret_cast<const char*>(a) + LANES * lda, lda);
      tiles_.template multiply<2, 5, 6>();
      if (WIDTH == 2) tiles_.template multiply<3, 5, 7>();
    }
  }

  // Register 2 i + j has the sums of row tile i and column tile j.
  template <int R, int HEIGHT, int WIDTH>
  void zero() {
    if constexpr (R < 2 * HEIGHT) {
      if constexpr (R % 2 < WIDTH) tiles_.template zero<R>();
      zero<R + 1, HEIGHT, WIDTH>();
    }
  }
  template <int R, int HEIGHT, int WIDTH>
  void get(const Sums& sums) {
    if constexpr (R < 2 * HEIGHT) {
      if constexpr (R % 2 < WIDTH)
        tiles_.template load<R>(sums.at + R / 2 * LANES * sums.stride + R % 2 * LANES,
                                sums.stride * sizeof(float));
      get<R + 1, HEIGHT, WIDTH>(sums);
    }
  }
  template <int R, int HEIGHT, int WIDTH>
  void put(const Sums& sums) {
    if constexpr (R < 2 * HEIGHT) {
      if constexpr (R % 2 < WIDTH)
        tiles_.template store<R>(sums.at + R / 2 * LANES * sums.stride + R % 2 * LANES,
                                 sums.stride * sizeof(float));
      put<R + 1, HEIGHT, WIDTH>(sums);
    }
  }

  void scale(float* values, float keep) const {
    for (int i = 0; i < columns_; i += LANES) store(values + i, load(values + i) * keep);
  }

  // Fetches `count` dimensions, or columns, of each panel from `from` on.
  static void fetch(const bf16* const* panels, int from, int count) {
    for (int i = 0; i < PANELS; i++)
      for (int d = 0; d < count; d += 2)
        __builtin_prefetch(panels[i] + (from + d) * LANES, 0, 2);
  }

  void configure(int rows) {
    const int first = std::min(rows, LANES), second = std::max(rows - LANES, 0);
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    tiles_.configure(TileShapes(first, second));
  }

  const int dim_, value_dim_, padded_, columns_;
  bool packed_ = false;
  bf16 *keys_ = nullptr, *values_ = nullptr;
  const bf16* at_[PANELS];  // keys
  [[no_unique_address]] Tiles tiles_;
  int first_ = 0, second_ = 0;  // rows that registers are configured for
};

}  // namespace rootlace
