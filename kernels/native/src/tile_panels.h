// Weights in panels for a tile unit, and products with these panels in bfloat16 or integers.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "codes.h"
#include "isa/amx.h"
#include "isa/fetch.h"
#include "tile_bytes.h"
#include "tile_codes.h"
#include "vec.h"
#include "vector_panels.h"

namespace rootlace {

// Weights in panels, one behind the other, each [steps of the inputs][VECS] tiles. A row of a tile is a pair of
// inputs of LANES columns, zero behind the last input. Gated as in VectorPanels.
//
// Sums run over the inputs in steps of DEPTH, in order, so a row's bits do not depend on other rows.
template <class Tiles>
class TilePanels {
 public:
  static constexpr bool TILES = true, BYTES = true, GROUPS = false;
  static constexpr int BYTE_SHIFT = 0;
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
    // Methods as in VectorPanels::Multiplier. Rows of x are read in place, quickly if they lie an odd number of cache
    // lines apart (rows.h).
    static size_t bytes(const Codes& codes) {
      if (!codes) return 0;
      const size_t steps = codes.parts[0].chunks * CHUNK / DEPTH;
      return (STRETCH * (VECS + 1) + steps * (ROWS / LANES)) * TILE * sizeof(bf16);
    }

    Multiplier(const TilePanels& panels, void* memory)
        : panels_(panels),
          unpacked_(static_cast<bf16*>(memory)),
          columns_(unpacked_ + STRETCH * VECS * TILE),
          paired_(columns_ + STRETCH * TILE) {}
    ~Multiplier() {
      if (first_) tiles_.release();
    }
    Multiplier(const Multiplier&) = delete;
    Multiplier& operator=(const Multiplier&) = delete;

    // Call this after another multiplier of the thread, which has configured the unit for itself.
    void forget() { first_ = 0; }

    // Multiplies by `as_bytes` codes: rows are int8, and `sums` holds int32.
    template <class Finish>
    void multiply_bytes(const Rows<int8_t>& x, const PackedWeights& weights, int panel, int vec,
                        int vecs, float* sums, Finish&& finish) {
      for (int part = 0; part < panels_.parts; part++, sums += MOST_ROWS * COLUMNS) {
        const CodeLayout& layout = weights.codes.parts[part];
        const char* from = weights.part(panel, part) + layout.byte(0, vec, 0);
        const int all = layout.chunks * CHUNK / BYTE_DEPTH, most = x.count > ROWS ? STRETCH : all;
        for (int step = 0; step < all; step += most) {
          const Packed b{from + static_cast<size_t>(step) * VECS * TILE_BYTES};
          const int steps = std::min(most, all - step);
          blocks(x, Stretch{b, step, steps, true, part + 1 == panels_.parts, all}, vecs, sums, finish);
        }
      }
      finish_last(x.count, finish);
    }

    template <class Finish>
    void multiply(const Rows<bf16>& x, const PackedWeights& weights, int panel, int vec, int vecs,
                  float* sums, Finish&& finish) {
      const bool codes = static_cast<bool>(weights.codes);
      const int all = panels_.steps_;
      const int most = x.count > ROWS ? STRETCH : all;
      for (int part = 0; part < panels_.parts; part++, sums += MOST_ROWS * COLUMNS) {
        Groups groups[VECS];
        if (codes) weights.vectors_of(panel, part, vec, vecs, groups);
        const bool by_column = codes && weights.codes.parts[part].by_column;
        if (by_column)
          for (int i = 0; i < vecs; i++) by_column_[i].begin(groups[i]);
        if (by_column && x.count <= ROWS) {
          multiply_turned(x, vecs, sums);
          continue;
        }
        const bool last = part + 1 == panels_.parts;
        const auto unpack = [&](int steps) {
          by_column ? unpack_columns(vecs, steps)
                    : unpack_tiles(groups, vecs, steps, unpacked_, VECS * TILE);
          return reinterpret_cast<const char*>(unpacked_);
        };
        if (codes && x.count <= ROWS) {
          const auto weights_of = [&](int step) {
            const int in = step % SOME_STEPS;
            if (!in) unpack(std::min(SOME_STEPS, all - step));
            return reinterpret_cast<const char*>(unpacked_ + in * VECS * TILE);
          };
          blocks(x, Stretch{weights_of, 0, all, false, last, all}, vecs, sums, finish);
          continue;
        }
        const char* from = reinterpret_cast<const char*>(
            static_cast<const bf16*>(weights.packed) +
            (panel * panels_.parts + part) * panels_.size() + vec * TILE);
        for (int step = 0; step < all; step += most) {
          const int steps = std::min(most, all - step);
          const Packed b{codes ? unpack(steps) : from + static_cast<size_t>(step) * VECS * TILE_BYTES};
          blocks(x, Stretch{b, step, steps, !codes, last, all}, vecs, sums, finish);
        }
      }
      finish_last(x.count, finish);
    }

   private:
    // Address of a step's weights that lie in order.
    struct Packed {
      const char* at;
      const char* operator()(int step) const {
        return at + static_cast<size_t>(step) * VECS * TILE_BYTES;
      }
    };

    // Some steps of a panel's part, which has `all` steps. weights(i): address of the i-th one's weights; called in
    // order.
    template <class Weights>
    struct Stretch {
      Weights weights;
      int step, steps;
      bool fetched_ahead, last_part;
      int all;
    };
    template <class Weights>
    Stretch(Weights, int, int, bool, bool, int) -> Stretch<Weights>;

    // Multiplies the rows by a stretch. In the last stretch the rows before are finished while the unit computes, and
    // the result's lines for the present rows are fetched.
    template <class T, class Weights, class Finish>
    void blocks(const Rows<T>& x, const Stretch<Weights>& stretch, int vecs, float* sums,
                Finish& finish) {
      const int steps = stretch.steps;
      const bool last = stretch.last_part && stretch.step + steps == stretch.all;
      for (int row = 0; row < x.count; row += ROWS) {
        const Factors at = factors(x, row, stretch, sums);
        if (last)
          block<T>(at, stretch.weights, vecs, [&](int begin, int end) {
            begin = begin * ROWS / steps, end = end * ROWS / steps;
            if (row) finish(row - ROWS + begin, row - ROWS + end);
            finish.fetch(std::min(row + begin, x.count), std::min(row + end, x.count));
          });
        else
          block<T>(at, stretch.weights, vecs, [](int, int) {});
      }
      if (last && stretch.fetched_ahead && x.count <= ROWS) fetch_next(stretch.weights(steps) + AHEAD);
    }

    // Fetches weights of the next panel: memory would idle while sums of few rows are finished.
    static void fetch_next(const char* from) {
      for (int i = 0; i < NEXT_LINES; i++) __builtin_prefetch(from + i * 64, 0, 2);
    }

    template <class Finish>
    static void finish_last(int rows, Finish& finish) {
      finish(rows <= ROWS ? 0 : (rows - 1) / ROWS * ROWS, rows);
    }

    // Arguments of `block`: up to ROWS rows, and some steps of a panel.
    struct Factors {
      const char* a;
      size_t stride;  // bytes between rows of a
      int rows, steps;
      const char* rest;  // the rows' inputs of the last step, if it is not whole
      float* sums;
      bool add;
      const float* next;  // sums of the next block, to be fetched
      // Weights that each step fetches: address, lines, whether to the first level of cache.
      const char* soon;
      int lines;
      bool near;
    };

    // Unpacks the next steps of `by_column` codes to tiles as weights that are numbers have them.
    void unpack_columns(int vecs, int steps) {
      for (int i = 0; i < vecs; i++) {
        by_column_[i].unpack(steps, columns_, TILE);
        for (int at = 0; at < steps; at++)
          transpose(columns_ + at * TILE, DEPTH, LANES, unpacked_ + (at * VECS + i) * TILE, DEPTH);
      }
    }

    // Transposes 16 rows of `width` words, `stride` numbers apart, into `width` rows of 16 words.
    template <class T>
    static void transpose(const T* from, size_t stride, int width, T* to, size_t stride_to) {
      const int32_t* rows[LANES];
      for (int i = 0; i < LANES; i++) rows[i] = reinterpret_cast<const int32_t*>(from + i * stride);
      Isa::transpose16(rows, 0, width, reinterpret_cast<int32_t*>(to),
                       stride_to * sizeof(T) / sizeof(int32_t));
    }

    // Multiplies up to ROWS rows by `by_column` codes. Weights are the left factor, so the sums come out transposed,
    // with the same bits.
    void multiply_turned(const Rows<bf16>& x, int vecs, float* sums) {
      const int first = std::min(x.count, LANES), second = x.count - first;
      put_in_pairs(x);
      configure(first, second, true);
      tiles_.template zero<0>();
      tiles_.template zero<1>();
      if (second) tiles_.template zero<2>();
      if (second) tiles_.template zero<3>();
      const char* pairs = reinterpret_cast<const char*>(in_pairs_);
      const size_t stride = pair_stride_, block = stride * LANES;
      for (int step = 0; step < panels_.steps_; step += SHORT_STRETCH) {
        const int end = std::min(step + SHORT_STRETCH, panels_.steps_);
        for (int i = 0; i < vecs; i++)
          by_column_[i].unpack(end - step, unpacked_ + i * TILE, VECS * TILE);
        const bf16* weights = unpacked_;
        for (int at = step; at < end; at++, weights += VECS * TILE) {
          tiles_.template load<6>(pairs, stride);
          tiles_.template load<4>(weights, 64);
          tiles_.template multiply<0, 4, 6>();
          tiles_.template load<5>(weights + TILE, 64);
          tiles_.template multiply<1, 5, 6>();
          pairs += block;
          if (!second) continue;
          tiles_.template load<7>(pairs, stride);
          tiles_.template multiply<2, 4, 7>();
          tiles_.template multiply<3, 5, 7>();
          pairs += block;
        }
      }
      put_turned<0>(first, sums);
      if (vecs == VECS) put_turned<1>(first, sums + LANES);
      if (second) put_turned<2>(second, sums + LANES * COLUMNS);
      if (second && vecs == VECS) put_turned<3>(second, sums + LANES * COLUMNS + LANES);
    }

    template <int R>
    void put_turned(int rows, float* sums) {
      if (rows == 1) return tiles_.template store<R>(sums, sizeof *sums);
      alignas(64) float turned[LANES * LANES];
      tiles_.template store<R>(turned, 64);
      transpose(turned, LANES, rows, sums, COLUMNS);
    }

    // Arranges up to ROWS rows as right factors: for each step and 16 rows, 16 rows of pairs of inputs.
    void put_in_pairs(const Rows<bf16>& x) {
      in_pairs_ = x.at, pair_stride_ = 2 * sizeof(bf16);
      if (x.count == 1 && panels_.inputs % DEPTH == 0) return;
      in_pairs_ = paired_, pair_stride_ = 64;
      if (x.row >= 0 && x.at == paired_rows_ && x.count == paired_count_) return;
      paired_rows_ = x.at, paired_count_ = x.count;
      bf16* to = paired_;
      for (int step = 0; step < panels_.steps_; step++)
        for (int row = 0; row < x.count; row += LANES, to += TILE) {
          const int width = std::min(DEPTH, panels_.inputs - step * DEPTH) / 2;
          if (width < LANES) std::memset(static_cast<void*>(to), 0, TILE * sizeof(bf16));
          const int32_t* rows[LANES];
          for (int i = 0; i < LANES; i++)
            rows[i] = reinterpret_cast<const int32_t*>(
                x.at + std::min(row + i, x.count - 1) * x.stride + step * DEPTH);
          Isa::transpose16(rows, 0, width, reinterpret_cast<int32_t*>(to), LANES);
        }
    }

    template <class T, class Weights>
    Factors factors(const Rows<T>& x, int row, const Stretch<Weights>& stretch, float* sums) {
      Factors at;
      at.rows = std::min(ROWS, x.count - row);
      at.steps = stretch.steps;
      at.sums = sums + row * COLUMNS;
      at.next = sums + (row + ROWS < x.count ? row + ROWS : 0) * COLUMNS;
      at.add = stretch.step > 0;
      at.rest = nullptr;
      // A lone block fetches its own weights; of several blocks each fetches a part of the next stretch.
      const int blocks = ceil_div(x.count, ROWS);
      at.near = blocks == 1 && stretch.fetched_ahead;
      at.lines = stretch.fetched_ahead ? ceil_div(LINES, blocks) : 0;
      if constexpr (std::is_same_v<Weights, Packed>)
        at.soon = stretch.weights.at +
                  (blocks == 1 ? AHEAD : (STRETCH * LINES + row / ROWS * at.lines * STRETCH) * 64);
      const T* from = x.at + row * x.stride;
      at.a = reinterpret_cast<const char*>(from) + stretch.step * STEP_BYTES;
      at.stride = x.stride * sizeof(T);
      if constexpr (sizeof(T) == sizeof(bf16)) {
        if ((stretch.step + stretch.steps) * DEPTH <= panels_.inputs) return at;
        // Memory behind the last inputs belongs to something else, and may hold NaN.
        at.steps--;
        for (int i = 0; i < at.rows; i++)
          copy_step(from + i * x.stride, stretch.step + at.steps, rest_ + i * DEPTH);
        at.rest = reinterpret_cast<const char*>(rest_);
      }
      return at;
    }

    void copy_step(const bf16* row, int step, bf16* to) const {
      const int depth = std::min(DEPTH, panels_.inputs - step * DEPTH);
      std::memcpy(static_cast<void*>(to), row + step * DEPTH, depth * sizeof(bf16));
      std::memset(static_cast<void*>(to + depth), 0, (DEPTH - depth) * sizeof(bf16));
    }

    template <class T, class Weights, class Between>
    void block(const Factors& at, const Weights& weights, int vecs, Between&& between) {
      configure(std::min(at.rows, LANES), std::max(at.rows - LANES, 0));
      if (at.rows > LANES)
        vecs == VECS ? run<T, 2, 2>(at, weights, between) : run<T, 2, 1>(at, weights, between);
      else
        vecs == VECS ? run<T, 1, 2>(at, weights, between) : run<T, 1, 1>(at, weights, between);
    }

    // Computes HEIGHT x WIDTH tiles of sums; register 2 i + j has row tile i and column tile j.
    template <class T, int HEIGHT, int WIDTH, class Weights, class Between>
    void run(const Factors& at, const Weights& weights, Between&& between) {
      const Factors f = at;  // in registers: compilers do not know what asm statements write
      begin<0, HEIGHT, WIDTH>(f.sums, f.add);
      const char *a = f.a, *next = reinterpret_cast<const char*>(f.next);
      const char* soon = f.soon;
      for (int step = 0; step < f.steps; step++) {
        one_step<T, HEIGHT, WIDTH>(a, f.stride, weights(step));
        a += STEP_BYTES;
        fetch<WIDTH>(soon, f.lines, f.near);
        soon += f.lines * 64;
        if (HEIGHT == 2 && !f.near)
          for (int i = 0; i < SUM_LINES; i++, next += 64) fetch_to_write(next);
        between(step, step + 1);
      }
      if (f.rest) {
        one_step<T, HEIGHT, WIDTH>(f.rest, STEP_BYTES, weights(f.steps));
        between(f.steps, f.steps + 1);
      }
      end<0, HEIGHT, WIDTH>(f.sums);
    }

    template <class T, int HEIGHT, int WIDTH>
    [[gnu::always_inline]] void one_step(const char* a, size_t stride, const char* b) {
      tiles_.template load<6>(b, 64);
      // Few rows are multiplied by many panels, so they stay in the first level of cache, too.
      HEIGHT == 1 ? tiles_.template load<4>(a, stride) : tiles_.template load_once<4>(a, stride);
      product<T, 0, 4, 6>();
      if (WIDTH == 2) {
        tiles_.template load<7>(b + TILE_BYTES, 64);
        product<T, 1, 4, 7>();
      }
      if (HEIGHT == 2) {
        tiles_.template load_once<5>(a + LANES * stride, stride);
        product<T, 2, 5, 6>();
        if (WIDTH == 2) product<T, 3, 5, 7>();
      }
    }
    template <class T, int C, int A, int B>
    [[gnu::always_inline]] void product() {
      if constexpr (sizeof(T) == sizeof(bf16))
        tiles_.template multiply<C, A, B>();
      else
        tiles_.template multiply_bytes<C, A, B>();
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

    void configure(int first, int second, bool turned = false) {
      if (first == first_ && second == second_ && turned == turned_) return;
      first_ = first, second_ = second, turned_ = turned;
      tiles_.configure(turned ? TileShapes::turned(first, second) : TileShapes(first, second));
    }

    const TilePanels& panels_;
    bf16 *unpacked_, *columns_;  // tiles of a stretch; tiles of one vector, column by column
    bf16* paired_;               // `paired_count_` rows of x as right factors
    const bf16* paired_rows_ = nullptr;
    int paired_count_ = 0;
    const bf16* in_pairs_ = nullptr;  // right factors: `paired_`, or a single row of x itself
    size_t pair_stride_ = 0;
    TileCodes by_column_[VECS];  // codes of the present panel
    alignas(64) bf16 rest_[ROWS * DEPTH];
    [[no_unique_address]] Tiles tiles_;
    // Rows that registers are configured for, and whether rows are right factors.
    int first_ = 0, second_ = 0;
    bool turned_ = false;
  };

 private:
  static constexpr int TILE = LANES * DEPTH;  // elements
  static constexpr int STEP_BYTES = DEPTH * sizeof(bf16), TILE_BYTES = LANES * STEP_BYTES;
  static_assert(STEP_BYTES == BYTE_DEPTH);
  static constexpr int STRETCH = 16;          // steps whose weights stay in the first level of cache
  // Steps unpacked together for few rows: of codes of four bits, of eight.
  static constexpr int SHORT_STRETCH = 4, SOME_STEPS = 2;
  // Lines of a step's weights; bytes by which they are fetched ahead for few rows.
  static constexpr int LINES = VECS * TILE_BYTES / 64;
  static constexpr int AHEAD = 2048;
  static constexpr int NEXT_LINES = 64;
  // Lines of the next block's sums that are fetched in each step of a stretch.
  static constexpr int SUM_LINES = ROWS * COLUMNS * sizeof(float) / 64 / STRETCH;

  size_t size() const { return static_cast<size_t>(steps_) * VECS * TILE; }

  int steps_;
};

}  // namespace rootlace
