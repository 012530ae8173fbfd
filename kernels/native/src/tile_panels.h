// Weights in panels for products with a tile unit, and these products, in bfloat16.
#pragma once

#include <algorithm>
#include <cstring>

#include "codes.h"
#include "isa/amx.h"
#include "isa/fetch.h"
#include "vec.h"
#include "vector_panels.h"

namespace rootlace {

// How weights lie in memory. Panels one behind the other, each [steps of the inputs][VECS] tiles of
// the unit: tile rows are pairs of inputs, of LANES columns; behind the last input they are zero.
// Gated as in VectorPanels.
//
// Sums run over the inputs in steps of DEPTH, in order: a row's bits do not depend on the others.
template <class Tiles>
class TilePanels {
 public:
  static constexpr int VECS = 2;
  static constexpr int COLUMNS = VECS * LANES;
  static constexpr int ROWS = 32;
  static constexpr int MOST_ROWS = 256;
  static constexpr int DEPTH = 32;  // inputs of a tile
  static constexpr int64_t GROUP_BYTES = 512 << 10, LARGE_GROUP_BYTES = GROUP_BYTES;

  const int inputs, columns, parts, panels;  // as in VectorPanels

  TilePanels(int outputs, int inputs, bool gated)
      : inputs(inputs),
        columns(gated ? outputs / 2 : outputs),
        parts(gated ? 2 : 1),
        panels(ceil_div(columns, COLUMNS)),
        steps_(ceil_div(inputs, DEPTH)) {}

  size_t bytes() const { return size() * panels * parts * sizeof(bf16); }
  int chunks() const { return steps_ * (DEPTH / CHUNK); }  // of codes

  void pack(const bf16* weights, int index, bf16* packed) const {
    int first = index / parts * COLUMNS;
    const bf16* rows = weights + (static_cast<size_t>(index % parts) * columns + first) * inputs;
    int count = std::min(COLUMNS, columns - first);
    bf16* panel = packed + index * size();
    std::memset(static_cast<void*>(panel), 0, size() * sizeof(bf16));
    for (int step = 0; step < steps_; step++)
      for (int column = 0; column < count; column++) {
        const bf16* row = rows + static_cast<size_t>(column) * inputs + step * DEPTH;
        bf16* to = panel + (step * VECS + column / LANES) * TILE + column % LANES * 2;
        int depth = std::min(DEPTH, inputs - step * DEPTH);
        for (int k = 0; k < depth; k++) to[k / 2 * LANES * 2 + k % 2] = row[k];
      }
  }

  // Computes the products of one thread; lives only while the thread does nothing else.
  class Multiplier {
   public:
    // As those of VectorPanels::Multiplier. Rows of x are read where they are: quickly if they lie an
    // odd number of cache lines apart; a power of two apart they would share few lines of the cache.
    static size_t bytes(const Codes& codes) {
      return codes ? STRETCH * VECS * TILE * sizeof(bf16) : 0;
    }

    Multiplier(const TilePanels& panels, void* memory)
        : panels_(panels), unpacked_(static_cast<bf16*>(memory)) {}
    ~Multiplier() {
      if (first_) tiles_.release();
    }
    Multiplier(const Multiplier&) = delete;
    Multiplier& operator=(const Multiplier&) = delete;

    template <class Finish>
    void multiply(const Rows<bf16>& x, const PackedWeights& weights, int panel, int vec, int vecs,
                  float* sums, Finish&& finish) {
      const bool codes = static_cast<bool>(weights.codes);
      const int all = panels_.steps_;
      const int most = x.count > ROWS ? STRETCH : codes ? SHORT_STRETCH : all;
      for (int part = 0; part < panels_.parts; part++, sums += MOST_ROWS * COLUMNS) {
        const bf16* from = static_cast<const bf16*>(weights.packed) +
                           (panel * panels_.parts + part) * panels_.size() + vec * TILE;
        for (int step = 0; step < all; step += most) {
          const int steps = std::min(most, all - step);
          const bf16* b = from + static_cast<size_t>(step) * VECS * TILE;
          if (codes) {
            const Place place{unpacked_, vec, step};
            unpack<bf16>(weights.codes.parts[part], weights.codes_of(panel, part), vec, vecs,
                         step * (DEPTH / CHUNK), (step + steps) * (DEPTH / CHUNK), place);
            b = unpacked_;
          }
          const bool last = part + 1 == panels_.parts && step + steps == all;
          for (int row = 0; row < x.count; row += ROWS) {
            Factors at = factors(x, row, b, step, steps, sums, !codes);
            if (last)
              // While the unit computes these rows, those before them are finished, and the places
              // of these are fetched.
              block(at, vecs, [&](int begin, int end) {
                begin = begin * ROWS / steps, end = end * ROWS / steps;
                if (row) finish(row - ROWS + begin, row - ROWS + end);
                finish.fetch(std::min(row + begin, x.count), std::min(row + end, x.count));
              });
            else
              block(at, vecs, [](int, int) {});
          }
        }
      }
      finish(x.count <= ROWS ? 0 : (x.count - 1) / ROWS * ROWS, x.count);
    }

   private:
    // Up to ROWS rows, times some steps of a panel.
    struct Factors {
      const char *a, *b;
      size_t stride;  // of a, between rows
      int rows, steps;
      const char* rest;  // rows of the last step, if it is not whole
      float* sums;
      bool add;
      const float* next;  // sums of the block after this one, if it will be soon
      // Weights that are fetched in each step: how far ahead, how many lines, whether to the first
      // level of cache.
      int distance, lines;
      bool near;
    };

    // Where chunks are unpacked to, the first one's first vector at `to`.
    struct Place {
      static constexpr size_t row = LANES * 2;
      bf16* to;
      int vec, step;
      bf16* operator()(int at, int column) const {
        constexpr int IN_TILE = DEPTH / CHUNK;
        bf16* tile = to + ((at / IN_TILE - step) * VECS + column - vec) * TILE;
        return tile + at % IN_TILE * (TILE / IN_TILE);
      }
    };

    Factors factors(const Rows<bf16>& x, int row, const bf16* b, int step, int steps, float* sums,
                    bool fetched_ahead) {
      Factors at;
      at.rows = std::min(ROWS, x.count - row);
      at.steps = steps;
      at.b = reinterpret_cast<const char*>(b);
      at.sums = sums + row * COLUMNS;
      at.next = sums + (row + ROWS < x.count ? row + ROWS : 0) * COLUMNS;
      at.add = step > 0;
      at.rest = nullptr;
      // Few rows wait for memory alone; of many, each block fetches a part of the next stretch.
      const int blocks = ceil_div(x.count, ROWS);
      at.near = blocks == 1 && fetched_ahead;
      at.lines = fetched_ahead ? ceil_div(LINES, blocks) : 0;
      at.distance =
          blocks == 1 ? AHEAD : (STRETCH * LINES + row / ROWS * at.lines * STRETCH) * 64;
      const bf16* from = x.at + row * x.stride;
      at.a = reinterpret_cast<const char*>(from + step * DEPTH);
      at.stride = x.stride * sizeof(bf16);
      if ((step + steps) * DEPTH <= panels_.inputs) return at;
      // What follows the last inputs in memory is not these rows', and may not be a number.
      at.steps--;
      for (int i = 0; i < at.rows; i++)
        copy_step(from + i * x.stride, step + at.steps, rest_ + i * DEPTH);
      at.rest = reinterpret_cast<const char*>(rest_);
      return at;
    }

    void copy_step(const bf16* row, int step, bf16* to) const {
      const int depth = std::min(DEPTH, panels_.inputs - step * DEPTH);
      std::memcpy(static_cast<void*>(to), row + step * DEPTH, depth * sizeof(bf16));
      std::memset(static_cast<void*>(to + depth), 0, (DEPTH - depth) * sizeof(bf16));
    }

    template <class Between>
    void block(const Factors& at, int vecs, Between&& between) {
      configure(std::min(at.rows, LANES), std::max(at.rows - LANES, 0));
      if (at.rows > LANES)
        vecs == VECS ? run<2, 2>(at, between) : run<2, 1>(at, between);
      else
        vecs == VECS ? run<1, 2>(at, between) : run<1, 1>(at, between);
    }

    // HEIGHT x WIDTH tiles of sums; register 2 i + j has those of row tile i and column tile j.
    template <int HEIGHT, int WIDTH, class Between>
    void run(const Factors& at, Between&& between) {
      const Factors f = at;  // in registers: what asm statements write is not known
      begin<0, HEIGHT, WIDTH>(f.sums, f.add);
      const char *a = f.a, *b = f.b, *next = reinterpret_cast<const char*>(f.next);
      const char* soon = b + f.distance;
      for (int step = 0; step < f.steps; step++) {
        one_step<HEIGHT, WIDTH>(a, f.stride, b);
        a += DEPTH * sizeof(bf16), b += VECS * TILE * sizeof(bf16);
        fetch<WIDTH>(soon, f.lines, f.near);
        soon += f.lines * 64;
        if (HEIGHT == 2 && !f.near)
          for (int i = 0; i < SUM_LINES; i++, next += 64) fetch_to_write(next);
        between(step, step + 1);
      }
      if (f.rest) {
        one_step<HEIGHT, WIDTH>(f.rest, DEPTH * sizeof(bf16), b);
        between(f.steps, f.steps + 1);
      }
      end<0, HEIGHT, WIDTH>(f.sums);
    }

    template <int HEIGHT, int WIDTH>
    [[gnu::always_inline]] void one_step(const char* a, size_t stride, const char* b) {
      tiles_.template load<6>(b, 64);
      tiles_.template load_once<4>(a, stride);
      tiles_.template multiply<0, 4, 6>();
      if (WIDTH == 2) {
        tiles_.template load<7>(b + TILE * sizeof(bf16), 64);
        tiles_.template multiply<1, 4, 7>();
      }
      if (HEIGHT == 2) {
        tiles_.template load_once<5>(a + LANES * stride, stride);
        tiles_.template multiply<2, 5, 6>();
        if (WIDTH == 2) tiles_.template multiply<3, 5, 7>();
      }
    }

    template <int R, int HEIGHT, int WIDTH>
    void begin(const float* sums, bool add) {
      if constexpr (R < 2 * HEIGHT) {
        if constexpr (R % 2 < WIDTH) {
          if (add)
            tiles_.template load<R>(sums + R / 2 * LANES * COLUMNS + R % 2 * LANES, COLUMNS * 4);
          else
            tiles_.template zero<R>();
        }
        begin<R + 1, HEIGHT, WIDTH>(sums, add);
      }
    }
    template <int R, int HEIGHT, int WIDTH>
    void end(float* sums) {
      if constexpr (R < 2 * HEIGHT) {
        if constexpr (R % 2 < WIDTH)
          tiles_.template store<R>(sums + R / 2 * LANES * COLUMNS + R % 2 * LANES, COLUMNS * 4);
        end<R + 1, HEIGHT, WIDTH>(sums);
      }
    }

    template <int WIDTH>
    static void fetch(const char* from, int lines, bool near) {
      if (near)
        for (int i = 0; i < LINES * WIDTH / VECS; i++) __builtin_prefetch(from + i * 64, 0, 3);
      else
        for (int i = 0; i < lines; i++) __builtin_prefetch(from + i * 64, 0, 2);
    }

    void configure(int first, int second) {
      if (first == first_ && second == second_) return;
      first_ = first, second_ = second;
      tiles_.configure(TileShapes(first, second));
    }

    const TilePanels& panels_;
    bf16* unpacked_;
    alignas(64) bf16 rest_[ROWS * DEPTH];
    [[no_unique_address]] Tiles tiles_;
    int first_ = 0, second_ = 0;  // rows that registers are configured for
  };

 private:
  static constexpr int TILE = LANES * DEPTH;  // elements
  static constexpr int STRETCH = 16;          // steps whose weights stay in the first level
  static constexpr int SHORT_STRETCH = 4;     // unpacked together for few rows
  // Lines of a step's weights, and how many bytes ahead they are fetched for few rows.
  static constexpr int LINES = VECS * TILE * sizeof(bf16) / 64;
  static constexpr int AHEAD = 2048;
  // Lines of the next block's sums that are fetched in each step of a stretch.
  static constexpr int SUM_LINES = ROWS * COLUMNS * sizeof(float) / 64 / STRETCH;

  size_t size() const { return static_cast<size_t>(steps_) * VECS * TILE; }

  int steps_;
};

}  // namespace rootlace
