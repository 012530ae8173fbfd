// Weights in panels for products with vectors, and these products.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "api.h"
#include "codes.h"
#include "division.h"
#include "group_products.h"
#include "tile.h"

namespace rootlace {

// Rows of a factor, `stride` elements apart. `row`: number of the first in the product; negative for gathered rows.
template <class T>
struct Rows {
  const T* at;
  size_t stride;
  int row, count;
};

// Weights in panels, one behind the other, each [words of the inputs][COLUMNS] of 32-bit words. Gated: panel 2i
// has the gate's columns from i * COLUMNS on, panel 2i + 1 those of up.
template <class T>
class VectorPanels {
 public:
  static constexpr bool TILES = false, BYTES = Isa::BYTES && sizeof(T) == sizeof(bf16);
  static constexpr bool GROUPS = BYTES && CODE_GROUPS;
  static constexpr int BYTE_SHIFT = Isa::BYTE_SHIFT;
  static constexpr int VECS = 3;  // vectors of a panel: as many as the largest tile of AVX-512 has
  static constexpr int COLUMNS = VECS * LANES;
  static constexpr int ROWS = Isa::TILE_ROWS;  // rows of a unit are a multiple of this
  static constexpr int MOST_ROWS = 96;    // most rows of a unit, whose sums are kept

  static constexpr size_t ROW = static_cast<size_t>(COLUMNS) * STEP<T>;  // elements
  static constexpr int64_t GROUP_BYTES = 256 << 10, LARGE_GROUP_BYTES = 4 << 20;

  const int inputs, columns;  // `columns` of the result: half of the outputs, if gated
  const int parts;            // 1, or 2 if gated
  const int panels;           // of each part, one for COLUMNS columns

  VectorPanels(int outputs, int inputs, bool gated)
      : inputs(inputs),
        columns(gated ? outputs / 2 : outputs),
        parts(gated ? 2 : 1),
        panels(ceil_div(columns, COLUMNS)),
        words_(ceil_div(inputs, STEP<T>)) {}

  size_t bytes() const { return size() * panels * parts * sizeof(T); }
  int chunks() const { return ceil_div(inputs, CHUNK); }  // of codes

  void pack(const T* weights, int index, T* packed) const {
    int first = index / parts * COLUMNS;
    const T* rows = weights + (static_cast<size_t>(index % parts) * columns + first) * inputs;
    int count = std::min(COLUMNS, columns - first);
    T* panel = packed + index * size();
    std::memset(static_cast<void*>(panel), 0, size() * sizeof(T));
    // Packs a few inputs of all rows at a time, to read and write whole cache lines.
    constexpr int CHUNK = 64 / sizeof(T);
    for (int begin = 0; begin < inputs; begin += CHUNK) {
      int end = std::min(begin + CHUNK, inputs);
      for (int column = 0; column < count; column++) {
        const T* row = rows + static_cast<size_t>(column) * inputs;
        for (int k = begin; k < end; k++)
          panel[k / STEP<T> * ROW + column * STEP<T> + k % STEP<T>] = row[k];
      }
    }
  }

  // Computes the products of one thread; lives only while the thread does nothing else.
  class Multiplier {
   public:
    // Returns the bytes of scratch that a thread needs for unpacked codes.
    static size_t bytes(const Codes& codes) {
      const bool unpacked = codes && !codes.as_bytes() && !codes.grouped();
      return unpacked ? STRETCH_BYTES + LEAST_ROWS * ROW * sizeof(T) : 0;
    }

    Multiplier(const VectorPanels& panels, void* memory)
        : panels_(panels), unpacked_(static_cast<T*>(memory)) {}

    // Computes sums[part][MOST_ROWS, COLUMNS], the rows times the vectors vec : vec + vecs of a panel, for each part.
    // Then calls finish(begin, end) for ranges that make up all rows.
    template <class Finish>
    void multiply(const Rows<T>& x, const PackedWeights& weights, int panel, int vec, int vecs,
                  float* sums, Finish&& finish) {
      const bool codes = static_cast<bool>(weights.codes);
      for (int part = 0; part < panels_.parts; part++, sums += MOST_ROWS * COLUMNS) {
        const T* from = static_cast<const T*>(weights.packed) +
                        (panel * panels_.parts + part) * panels_.size() + vec * LANES * STEP<T>;
        bool few = x.count <= 4 * Isa::TILE_ROWS;
        int stretches =
            ceil_div(panels_.size() * sizeof(T), few ? SHORT_STRETCH_BYTES : STRETCH_BYTES);
        if (!codes && x.count <= Isa::TILE_ROWS && vecs <= Isa::tile_vecs(x.count)) stretches = 1;
        Groups groups[VECS];
        if (codes) weights.vectors_of(panel, part, vec, vecs, groups);
        int words = panels_.words_, least = codes ? LEAST_ROWS : AHEAD_STEPS;
        int steps = ceil_div(ceil_div(words, stretches), least) * least;
        for (int step = 0; step < words; step += steps) {
          int k = step * STEP<T>, depth = std::min(steps * STEP<T>, panels_.inputs - k);
          const T* b = from + step * ROW;
          if (codes) {
            auto* unpack = weights.codes.parts[part].scheme.codes == RL_FOUR_BITS
                               ? unpack_codes<T, RL_FOUR_BITS, Place>
                               : unpack_bytes<T, Place>;
            unpack(groups, vecs, ceil_div(depth, CHUNK), Place{unpacked_});
            b = unpacked_;
          }
          stretch(x.at + k, x.stride, x.count, b, depth, vecs, sums, step > 0, !codes);
        }
      }
      finish(0, x.count);
    }

    void forget() {}

    // The same for `as_bytes` codes: rows are int8, and `sums` holds int32.
    template <class Finish>
    void multiply_bytes(const Rows<int8_t>& x, const PackedWeights& weights, int panel, int vec,
                        int vecs, float* sums, Finish&& finish) {
      for (int part = 0; part < panels_.parts; part++, sums += MOST_ROWS * COLUMNS) {
        const CodeLayout& layout = weights.codes.parts[part];
        const char* from = weights.part(panel, part) + layout.byte(0, vec, 0);
        const int depth = layout.chunks * CHUNK;
        const bool few = x.count <= Isa::TILE_ROWS && vecs <= Isa::tile_vecs(x.count);
        const int most = few ? depth : BYTE_STRETCH;
        for (int k = 0; k < depth; k += most)
          stretch(x.at + k, x.stride, x.count,
                  reinterpret_cast<const int8_t*>(from) + static_cast<size_t>(k) * COLUMNS,
                  std::min(most, depth - k), vecs, sums, k > 0, true);
      }
      finish(0, x.count);
    }

    // The same for `grouped` codes: rows are 16-bit integers.
    template <class Finish>
    void multiply_groups(const Rows<int16_t>& x, const PackedWeights& weights, int panel, int vec,
                         int vecs, float* sums, Finish&& finish) {
      for (int part = 0; part < panels_.parts; part++)
        rootlace::multiply_groups<COLUMNS>(
            x.at, x.stride, x.count, weights.codes.parts[part], panels_.inputs,
            weights.part(panel, part), vec, vecs, sums + part * MOST_ROWS * COLUMNS);
      finish(0, x.count);
    }

   private:
    // Addresses for unpacked chunks.
    struct Place {
      static constexpr size_t row = ROW;
      T* to;
      T* operator()(int chunk, int vec) const {
        return to + chunk * (CHUNK / STEP<T>)*ROW + vec * LANES * STEP<T>;
      }
    };

    template <class Number>
    void stretch(const Number* a, size_t lda, int rows, const Number* b, int depth, int all,
                 float* sums, bool add, bool fetched_ahead) {
      constexpr int WORD = STEP<Number>;
      int tiles = ceil_div(rows, Isa::TILE_ROWS);
      int vecs = std::min(all, Isa::tile_vecs(ceil_div(rows, tiles)));
      int passes = tiles * ceil_div(all, vecs);
      // Each pass fetches as many lines of the next stretch, if all vectors of the panel are wanted: then the next
      // stretch follows in memory.
      Ahead ahead;
      int lines = all == VECS && fetched_ahead ? AHEAD_STEPS * VECS : 0;
      if (passes > 1) {
        ahead.from = reinterpret_cast<const char*>(b + depth / WORD * (COLUMNS * WORD));
        ahead.lines = ceil_div(lines, passes);
      } else if (rows > 1) {
        ahead = {reinterpret_cast<const char*>(b) + LONE_AHEAD, lines, true};
      }
      int fetched = depth / WORD / AHEAD_STEPS * ahead.lines, left = lines;
      for (int vec = 0; vec < all; vec += vecs) {
        int width = std::min(vecs, all - vec);
        for (int i = 0, row = 0; i < tiles; i++) {
          int count = rows / tiles + (i < rows % tiles);
          tile_of<Number>(count, width)(a + row * lda, lda, b + vec * LANES * WORD, depth,
                                        sums + row * COLUMNS + vec * LANES, add, ahead);
          row += count;
          ahead.from += fetched * 64;
          left -= ahead.lines;
          if (left <= 0) ahead.lines = 0;
        }
      }
    }

    const VectorPanels& panels_;
    T* unpacked_;
  };

 private:
  // A panel is read in stretches of its depth that stay in the second level of cache. For a few tiles of rows they
  // stay in the first, since so few do not hide the latency of the second.
  static constexpr int64_t STRETCH_BYTES = 192 << 10, SHORT_STRETCH_BYTES = 26 << 10;
  // Bytes by which weights are fetched ahead for a lone tile.
  static constexpr int LONE_AHEAD = 4096;
  static constexpr int LEAST_ROWS = CHUNK / STEP<T>;  // rows of numbers that are unpacked together
  // Inputs of a stretch of int8, in whole tiles.
  static constexpr int BYTE_STRETCH = 512;

  size_t size() const { return words_ * ROW; }  // of a panel, in elements

  template <class Number>
  using Tile = void (*)(const Number* a, size_t lda, const Number* b, int depth, float* c, bool add,
                        Ahead ahead);

  template <class Number, int COUNT, int WIDTH>
  static void one_tile(const Number* a, size_t lda, const Number* b, int depth, float* c, bool add,
                       Ahead ahead) {
    constexpr size_t ROW = static_cast<size_t>(COLUMNS) * STEP<Number>;
    tile<COUNT, WIDTH>(a, lda, b, ROW, depth, c, COLUMNS, add, ahead);
  }

  // Returns the most rows of a tile of `vecs` vectors.
  static constexpr int tile_rows(int vecs) {
    int rows = Isa::TILE_ROWS;
    while (Isa::tile_vecs(rows) < vecs) rows--;
    return rows;
  }

  template <class Number, int WIDTH, int... COUNT>
  static Tile<Number> tile_of(int rows, std::integer_sequence<int, COUNT...>) {
    static constexpr Tile<Number> all[] = {one_tile<Number, COUNT + 1, WIDTH>...};
    return all[rows - 1];
  }
  template <class Number, int WIDTH>
  static Tile<Number> tile_with(int rows) {
    return tile_of<Number, WIDTH>(rows, std::make_integer_sequence<int, tile_rows(WIDTH)>());
  }
  template <class Number>
  static Tile<Number> tile_of(int rows, int vecs) {
    return vecs == 3   ? tile_with<Number, 3>(rows)
           : vecs == 2 ? tile_with<Number, 2>(rows)
                       : tile_with<Number, 1>(rows);
  }

  int words_;  // 32-bit words of an input vector
};

}  // namespace rootlace
