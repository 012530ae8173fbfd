// Weights in panels for products with a tile unit, and these products, in bfloat16.
#pragma once

#include <algorithm>
#include <cstring>

#include "isa/amx.h"
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
  static constexpr int MOST_ROWS = 96;
  static constexpr int DEPTH = 32;  // inputs of a tile

  const int inputs, columns, parts, panels;  // as in VectorPanels

  TilePanels(int outputs, int inputs, bool gated)
      : inputs(inputs),
        columns(gated ? outputs / 2 : outputs),
        parts(gated ? 2 : 1),
        panels(ceil_div(columns, COLUMNS)),
        steps_(ceil_div(inputs, DEPTH)) {}

  size_t bytes() const { return size() * panels * parts * sizeof(bf16); }

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

  // Products of one thread; for as long as it has nothing else to do.
  class Multiplier {
   public:
    explicit Multiplier(const TilePanels& panels) : panels_(panels) {}
    ~Multiplier() {
      if (first_) tiles_.release();
    }
    Multiplier(const Multiplier&) = delete;
    Multiplier& operator=(const Multiplier&) = delete;

    // As VectorPanels::Multiplier's.
    void multiply(const bf16* x, size_t ldx, int rows, const bf16* packed, int panel, int vec,
                  int vecs, float* sums) {
      const bf16* from = packed + panel * panels_.size() + vec * TILE;
      int most = rows <= ROWS ? panels_.steps_ : STRETCH;
      for (int step = 0; step < panels_.steps_; step += most) {
        int steps = std::min(most, panels_.steps_ - step);
        for (int row = 0; row < rows; row += ROWS)
          block(x + row * ldx, ldx, std::min(ROWS, rows - row), from, step, steps, vecs,
                sums + row * COLUMNS);
      }
    }

   private:
    // Up to ROWS rows, and some of the steps.
    void block(const bf16* x, size_t ldx, int rows, const bf16* b, int step, int steps, int vecs,
               float* sums) {
      configure(std::min(rows, LANES), std::max(rows - LANES, 0));
      Factors at;
      at.stride = ldx * sizeof(bf16);
      at.a = reinterpret_cast<const char*>(x + step * DEPTH);
      at.b = reinterpret_cast<const char*>(b + static_cast<size_t>(step) * VECS * TILE);
      // The last inputs of an incomplete step, with zeros behind them: what follows in memory is
      // not x's, and may not be a number.
      alignas(64) bf16 rest[ROWS * DEPTH];
      int depth = panels_.inputs - (step + steps - 1) * DEPTH;
      bool whole = depth >= DEPTH;
      at.steps = steps - !whole;
      if (!whole) {
        std::memset(static_cast<void*>(rest), 0, sizeof rest);
        for (int row = 0; row < rows; row++)
          std::memcpy(rest + row * DEPTH, x + row * ldx + (step + at.steps) * DEPTH,
                      depth * sizeof(bf16));
        at.rest = reinterpret_cast<const char*>(rest);
      }
      bool add = step > 0;
      if (rows > LANES)
        vecs == VECS ? run<2, 2>(at, sums, add) : run<2, 1>(at, sums, add);
      else
        vecs == VECS ? run<1, 2>(at, sums, add) : run<1, 1>(at, sums, add);
    }

    struct Factors {
      const char *a, *b, *rest = nullptr;
      size_t stride;  // of a, in bytes
      int steps;      // without the rest
    };

    // HEIGHT x WIDTH tiles of sums; register 2 i + j has those of row tile i and column tile j.
    template <int HEIGHT, int WIDTH>
    void run(const Factors& at, float* sums, bool add) {
      begin<0, HEIGHT, WIDTH>(sums, add);
      const char *a = at.a, *b = at.b;
      for (int step = 0; step < at.steps; step++) {
        if (HEIGHT == 1) fetch(b + AHEAD);
        one_step<HEIGHT, WIDTH>(a, at.stride, b);
        a += DEPTH * sizeof(bf16);
        b += VECS * TILE * sizeof(bf16);
      }
      if (at.rest) one_step<HEIGHT, WIDTH>(at.rest, DEPTH * sizeof(bf16), b);
      end<0, HEIGHT, WIDTH>(sums);
    }

    template <int HEIGHT, int WIDTH>
    [[gnu::always_inline]] void one_step(const char* a, size_t stride, const char* b) {
      tiles_.template load<6>(b, 64);
      if (WIDTH == 2) tiles_.template load<7>(b + TILE * sizeof(bf16), 64);
      tiles_.template load<4>(a, stride);
      tiles_.template multiply<0, 4, 6>();
      if (WIDTH == 2) tiles_.template multiply<1, 4, 7>();
      if (HEIGHT == 2) {
        tiles_.template load<5>(a + LANES * stride, stride);
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

    static void fetch(const char* from) {
      for (size_t i = 0; i < VECS * TILE * sizeof(bf16); i += 64) __builtin_prefetch(from + i);
    }

    void configure(int first, int second) {
      if (first == first_ && second == second_) return;
      first_ = first, second_ = second;
      tiles_.configure(TileShapes(first, second));
    }

    const TilePanels& panels_;
    [[no_unique_address]] Tiles tiles_;
    int first_ = 0, second_ = 0;  // rows that registers are configured for
  };

 private:
  static constexpr int TILE = LANES * DEPTH;  // elements
  static constexpr int STRETCH = 8;           // steps whose weights stay in the first level
  static constexpr int AHEAD = 4096;          // bytes that weights of few rows are fetched ahead

  size_t size() const { return static_cast<size_t>(steps_) * VECS * TILE; }

  int steps_;
};

}  // namespace rootlace
