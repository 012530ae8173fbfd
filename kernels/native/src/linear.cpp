#include "linear.h"

#include <algorithm>
#include <utility>

#include "tile.h"

namespace rootlace {
namespace {

// Columns of a panel: what the largest tile for AVX-512 takes at once.
constexpr int PANEL_VECS = 3;
constexpr int PANEL = PANEL_VECS * LANES;

// A panel is gone through in stretches of its depth that stay in the second level of cache. Where
// only a few tiles of rows need them, in the first: these would wait for the second.
constexpr int64_t STRETCH_BYTES = 192 << 10, SHORT_STRETCH_BYTES = 18 << 10;
// Rows of x that are multiplied by a panel together: what a task's sums are kept for.
constexpr int MOST_ROWS = 96;
// Rows of x that are taken through all weights before the next: they stay in the second level; in
// the third if weights are too large for it and would be read from memory each time.
constexpr int64_t GROUP_BYTES = 256 << 10, LARGE_GROUP_BYTES = 4 << 20, LARGE_WEIGHTS = 16 << 20;
// How far ahead of a lone tile its weights are fetched.
constexpr int LONE_AHEAD = 4096;

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// How weights lie in memory. Panels one behind the other, each [words of the inputs][PANEL] 32-bit
// words. Gated: panel 2i has gate's columns i * PANEL and on, panel 2i + 1 the same of up.
template <class T>
struct Packing {
  int inputs, columns;  // columns of the result: of gate and of up, if gated
  int parts;            // panels for the same columns: 1, 2 if gated
  int panels;           // of each part
  int words;            // 32-bit words of an input vector
  Packing(int outputs, int inputs, bool gated)
      : inputs(inputs),
        columns(gated ? outputs / 2 : outputs),
        parts(gated ? 2 : 1),
        panels(ceil_div(columns, PANEL)),
        words(ceil_div(inputs, STEP<T>)) {}
  static constexpr size_t ROW = static_cast<size_t>(PANEL) * STEP<T>;  // elements
  size_t panel_size() const { return words * ROW; }                    // elements
  size_t bytes() const { return panel_size() * panels * parts * sizeof(T); }
};

template <class T>
void pack_panel(const Packing<T>& packing, const T* weights, int index, T* packed) {
  int first = index / packing.parts * PANEL;
  const T* rows = weights + (static_cast<size_t>(index % packing.parts) * packing.columns + first) *
                                packing.inputs;
  int count = std::min(PANEL, packing.columns - first);
  T* panel = packed + index * packing.panel_size();
  std::memset(static_cast<void*>(panel), 0, packing.panel_size() * sizeof(T));
  // A few inputs of all rows at a time: they are read once and written as whole lines.
  constexpr int CHUNK = 64 / sizeof(T);
  for (int begin = 0; begin < packing.inputs; begin += CHUNK) {
    int end = std::min(begin + CHUNK, packing.inputs);
    for (int column = 0; column < count; column++) {
      const T* row = rows + static_cast<size_t>(column) * packing.inputs;
      for (int k = begin; k < end; k++)
        panel[k / STEP<T> * Packing<T>::ROW + column * STEP<T> + k % STEP<T>] = row[k];
    }
  }
}

template <class T>
using TileFunction = void (*)(const T* a, size_t lda, const T* b, int depth, float* c, size_t ldc,
                              bool add, Ahead ahead);

template <class T, int ROWS, int VECS>
void one_tile(const T* a, size_t lda, const T* b, int depth, float* c, size_t ldc, bool add,
              Ahead ahead) {
  tile<ROWS, VECS>(a, lda, b, Packing<T>::ROW, depth, c, ldc, add, ahead);
}

// How many rows tiles of so many vectors have at most.
constexpr int tile_rows(int vecs) {
  int rows = TILE_ROWS;
  while (tile_vecs(rows) < vecs) rows--;
  return rows;
}

// Tiles of VECS vectors by rows - 1.
template <class T, int VECS, class Rows = std::make_integer_sequence<int, tile_rows(VECS)>>
struct Tiles;
template <class T, int VECS, int... ROWS>
struct Tiles<T, VECS, std::integer_sequence<int, ROWS...>> {
  static constexpr TileFunction<T> all[] = {one_tile<T, ROWS + 1, VECS>...};
};

template <class T>
TileFunction<T> tile_of(int rows, int vecs) {
  return (vecs == 3   ? Tiles<T, 3>::all
          : vecs == 2 ? Tiles<T, 2>::all
                      : Tiles<T, 1>::all)[rows - 1];
}

// The work of one `linear`: units of some rows x some columns, numbered so that those with weights
// or rows in common are near; tasks are runs of units.
template <class T>
struct Plan {
  Packing<T> packing;
  int rows, threads;
  int unit_vecs;   // columns of a unit: a panel's, or fewer where there are few panels
  int unit_rows;   // rows of a unit
  int group_rows;  // rows of the units that come before those of the next rows
  int column_units, units;

  Plan(const Packing<T>& packing, int rows, int threads)
      : packing(packing), rows(rows), threads(threads) {
    int vecs = ceil_div(packing.columns, LANES);
    bool scarce = packing.panels < 6 * threads && rows <= 2 * TILE_ROWS;
    unit_vecs = scarce ? 1 : PANEL_VECS;
    column_units = unit_vecs == 1 ? vecs : packing.panels;
    // Row groups, of about the same size each.
    int64_t bytes = packing.bytes() > LARGE_WEIGHTS ? LARGE_GROUP_BYTES : GROUP_BYTES;
    int most_rows = std::max<int64_t>(MOST_ROWS, bytes / (packing.inputs * sizeof(T)));
    int groups = ceil_div(rows, most_rows);
    group_rows = round_rows(ceil_div(rows, groups));
    int blocks = ceil_div(group_rows, MOST_ROWS);
    int most = ceil_div(group_rows, 2 * TILE_ROWS);
    int wanted = ceil_div(16 * threads, static_cast<int64_t>(column_units) * groups);
    unit_rows = round_rows(ceil_div(group_rows, std::max(blocks, std::min(most, wanted))));
    units = column_units * (rows / group_rows * ceil_div(group_rows, unit_rows) +
                            ceil_div(rows % group_rows, unit_rows));
  }

  static int round_rows(int rows) { return ceil_div(rows, TILE_ROWS) * TILE_ROWS; }

  // Tasks are large at first and small at the end: few borders, and all threads end together.
  // In every round each thread may take one; a round is a half or a quarter of what is left.
  int share(int left) const {
    return std::max(1, left / (threads * (units >= 64 * threads ? 4 : 2)));
  }
  int tasks() const {
    if (threads == 1) return std::min(units, 1);
    int count = 0;
    for (int left = units; left > 0;) {
      int size = share(left);
      int round = std::min(threads, ceil_div(left, size));
      count += round;
      left -= round * size;
    }
    return count;
  }
  void task(int index, int& begin, int& end) const {
    begin = 0, end = units;
    if (threads == 1) return;
    for (int left = units;;) {
      int size = share(left);
      int round = std::min(threads, ceil_div(left, size));
      if (index < round) {
        begin += index * size;
        end = std::min(begin + size, units);
        return;
      }
      index -= round, begin += round * size, left -= round * size;
    }
  }

  struct Unit {
    int row, rows, panel, vec, vecs;  // `vec`: the first of the panel
    int count;                        // units taken together
  };
  // The unit of that number, with those that follow it below `end` if they are of its panel.
  Unit unit(int index, int end) const {
    int full = column_units * ceil_div(group_rows, unit_rows);
    int group = index / full;
    int row = group * group_rows;
    int in_group = std::min(group_rows, rows - row);
    int blocks = ceil_div(in_group, unit_rows);
    Unit unit;
    bool alone = unit_vecs == PANEL_VECS || units > column_units;
    unit.count = alone ? 1 : std::min(end - index, PANEL_VECS - index % PANEL_VECS);
    index -= group * full;
    unit.row = row + index % blocks * unit_rows;
    unit.rows = std::min(unit_rows, row + in_group - unit.row);
    int first = index / blocks * unit_vecs;
    unit.panel = first / PANEL_VECS;
    unit.vec = first % PANEL_VECS;
    unit.vecs = std::min(unit_vecs * unit.count, ceil_div(packing.columns, LANES) - first);
    return unit;
  }
};

// Rows of x that have a use for some columns, side by side.
template <class T>
struct Gathered {
  const int64_t* masks;  // addresses; 0: all columns
  T* memory;             // [MOST_ROWS, inputs]
  int count = 0, copied = 0;
  int chosen[MOST_ROWS] = {}, held[MOST_ROWS] = {};  // the rows that are to be, and are, there

  // Those of `rows` rows from `row` on that may choose one of `width` columns; returns how many.
  // Those chosen last come first and in the same order: most stay where they are.
  int choose(int row, int rows, int column, int width) {
    bool seen[MOST_ROWS] = {};
    int last = count;
    count = 0;
    for (int i = 0; i < last; i++) {
      int known = chosen[i] - row;
      if (known < 0 || known >= rows) continue;
      seen[known] = true;
      if (any(chosen[i], column, width)) chosen[count++] = chosen[i];
    }
    for (int i = 0; i < rows; i++)
      if (!seen[i] && any(row + i, column, width)) chosen[count++] = row + i;
    return count;
  }

  void copy(const T* x, size_t ldx, int inputs) {
    for (int i = 0; i < count; i++) {
      if (i < copied && held[i] == chosen[i]) continue;
      held[i] = chosen[i];
      std::memcpy(memory + static_cast<size_t>(i) * inputs, x + chosen[i] * ldx,
                  inputs * sizeof(T));
    }
    copied = std::max(copied, count);
  }

 private:
  bool any(int row, int column, int width) const {
    if (!masks[row]) return true;
    const auto* words = reinterpret_cast<const uint32_t*>(static_cast<intptr_t>(masks[row]));
    int end = column + width;
    for (int at = column; at < end;) {
      int stop = std::min(end, (at / 32 + 1) * 32);
      if (words[at / 32] >> at % 32 << (32 - (stop - at))) return true;
      at = stop;
    }
    return false;
  }
};

template <class T>
struct Product {
  const T* x;
  size_t ldx;
  const RlLinear& weights;
  Epilogue epilogue;
  void* out;
  size_t ldo;

  void run(const Plan<T>& plan, int begin, int end) const {
    alignas(64) float sums[2][MOST_ROWS * PANEL];
    for (int i = begin; i < end;) {
      auto unit = plan.unit(i, end);
      i += unit.count;
      for (int part = 0; part < plan.packing.parts; part++)
        multiply(plan.packing, unit, part, sums[part]);
      for (int row = 0; row < unit.rows; row++) finish(plan.packing, unit, row, unit.row + row, sums);
    }
  }

  // The same of the rows of each unit whose masks have a bit in its columns.
  void run_among(const Plan<T>& plan, int begin, int end, Gathered<T> gathered) const {
    alignas(64) float sums[2][MOST_ROWS * PANEL];
    Product few{gathered.memory, static_cast<size_t>(weights.inputs), weights, epilogue, out, ldo};
    for (int i = begin; i < end;) {
      auto unit = plan.unit(i, end);
      i += unit.count;
      int column = unit.panel * PANEL + unit.vec * LANES;
      int width = std::min(unit.vecs * LANES, plan.packing.columns - column);
      int row = unit.row, rows = unit.rows;
      unit.rows = gathered.choose(row, rows, column, width);
      if (!unit.rows) continue;
      bool all = unit.rows == rows;
      if (!all) {
        gathered.copy(x, ldx, weights.inputs);
        unit.row = 0;
      }
      (all ? *this : few).multiply(plan.packing, unit, 0, sums[0]);
      for (int at = 0; at < unit.rows; at++)
        finish(plan.packing, unit, at, all ? row + at : gathered.chosen[at], sums);
    }
  }

  // sums[unit.rows, PANEL] = the unit's rows of x times its columns of one part.
  void multiply(const Packing<T>& packing, const typename Plan<T>::Unit& unit, int part,
                float* sums) const {
    const T* panel = static_cast<const T*>(weights.packed) +
                     (unit.panel * packing.parts + part) * packing.panel_size() +
                     unit.vec * LANES * STEP<T>;
    bool few = unit.rows <= 4 * TILE_ROWS;
    int stretches =
        ceil_div(packing.panel_size() * sizeof(T), few ? SHORT_STRETCH_BYTES : STRETCH_BYTES);
    if (one_pass(unit)) stretches = 1;
    int steps = ceil_div(ceil_div(packing.words, stretches), AHEAD_STEPS) * AHEAD_STEPS;
    for (int step = 0; step < packing.words; step += steps) {
      int k = step * STEP<T>;
      multiply(unit, x + unit.row * ldx + k, panel + step * Packing<T>::ROW,
               std::min(steps * STEP<T>, packing.inputs - k), sums, step > 0);
    }
  }

  static bool one_pass(const typename Plan<T>::Unit& unit) {
    return unit.rows <= TILE_ROWS && unit.vecs <= tile_vecs(unit.rows);
  }

  // The same for a stretch of the inputs.
  void multiply(const typename Plan<T>::Unit& unit, const T* a, const T* b, int depth, float* sums,
                bool add) const {
    int tiles = ceil_div(unit.rows, TILE_ROWS);
    int vecs = std::min(unit.vecs, tile_vecs(ceil_div(unit.rows, tiles)));
    int passes = tiles * ceil_div(unit.vecs, vecs);
    // The lines of the next stretch, behind this one in memory, are fetched meanwhile: as many in
    // each pass. Of a part of a panel they are not in a row.
    Ahead ahead;
    int lines = unit.vecs == PANEL_VECS ? AHEAD_STEPS * PANEL_VECS : 0;
    if (passes > 1) {
      ahead.from = reinterpret_cast<const char*>(b + depth / STEP<T> * Packing<T>::ROW);
      ahead.lines = ceil_div(lines, passes);
    } else if (unit.rows > 1) {
      ahead = {reinterpret_cast<const char*>(b) + LONE_AHEAD, lines, true};
    }
    int fetched = depth / STEP<T> / AHEAD_STEPS * ahead.lines, left = lines;
    for (int vec = 0; vec < unit.vecs; vec += vecs) {
      int width = std::min(vecs, unit.vecs - vec);
      for (int i = 0, row = 0; i < tiles; i++) {
        int count = unit.rows / tiles + (i < unit.rows % tiles);
        tile_of<T>(count, width)(a + row * ldx, ldx, b + vec * LANES * STEP<T>, depth,
                                 sums + row * PANEL + vec * LANES, PANEL, add, ahead);
        row += count;
        ahead.from += fetched * 64;
        left -= ahead.lines;
        if (left <= 0) ahead.lines = 0;
      }
    }
  }

  // What was summed up as `row`, to row `to` of the result.
  void finish(const Packing<T>& packing, const typename Plan<T>::Unit& unit, int row, int to,
              float (*sums)[MOST_ROWS * PANEL]) const {
    for (int vec = 0; vec < unit.vecs; vec++) {
      int column = unit.panel * PANEL + (unit.vec + vec) * LANES;
      int count = std::min(LANES, packing.columns - column);
      size_t at = to * ldo + column;
      Vec y = load(sums[0] + row * PANEL + vec * LANES) + bias(column, count);
      switch (epilogue) {
        case Epilogue::STORE:
          put(static_cast<T*>(out) + at, y, count);
          break;
        case Epilogue::FLOAT32:
          put(static_cast<float*>(out) + at, y, count);
          break;
        case Epilogue::ADD: {
          float* residual = static_cast<float*>(out) + at;
          put(residual, get(residual, count) + y, count);
          break;
        }
        case Epilogue::SILU_MUL: {
          Vec up = load(sums[1] + row * PANEL + vec * LANES) + bias(packing.columns + column, count);
          put(static_cast<T*>(out) + at, y / (1.0f + exp(-y)) * up, count);
          break;
        }
      }
    }
  }

  Vec bias(int column, int count) const {
    return weights.bias ? get(weights.bias + column, count) : Vec{};
  }

  static Vec get(const float* p, int count) {
    if (count == LANES) return load(p);
    Vec v{};
    std::memcpy(&v, p, count * sizeof *p);
    return v;
  }

  template <class Out>
  static void put(Out* p, Vec v, int count) {
    if (count == LANES) return store(p, v);
    Out all[LANES];
    store(all, v);
    std::memcpy(p, all, count * sizeof *p);
  }
};

}  // namespace

template <class T>
void linear(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights,
            Epilogue epilogue, void* out, size_t ldo) {
  if (rows <= 0) return;
  Packing<T> packing(weights.outputs, weights.inputs, epilogue == Epilogue::SILU_MUL);
  Plan<T> plan(packing, rows, crew.size());
  Product<T> product{x, ldx, weights, epilogue, out, ldo};
  crew.each(plan.tasks(), [&](int index) {
    int begin, end;
    plan.task(index, begin, end);
    product.run(plan, begin, end);
  });
}

template <class T>
void linear_among(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights,
                  const int64_t* masks, float* out, size_t ldo) {
  if (rows <= 0) return;
  Packing<T> packing(weights.outputs, weights.inputs, false);
  Plan<T> plan(packing, rows, crew.size());
  Product<T> product{x, ldx, weights, Epilogue::FLOAT32, out, ldo};
  crew.each(plan.tasks(), [&](int index) {
    int begin, end;
    plan.task(index, begin, end);
    size_t bytes = static_cast<size_t>(std::min(rows, MOST_ROWS)) * weights.inputs * sizeof(T);
    product.run_among(plan, begin, end, {masks, static_cast<T*>(crew.scratch(bytes))});
  });
}

template void linear_among<float>(Crew&, const float*, size_t, int, const RlLinear&, const int64_t*,
                                  float*, size_t);
template void linear_among<bf16>(Crew&, const bf16*, size_t, int, const RlLinear&, const int64_t*,
                                 float*, size_t);
template void linear<float>(Crew&, const float*, size_t, int, const RlLinear&, Epilogue, void*,
                            size_t);
template void linear<bf16>(Crew&, const bf16*, size_t, int, const RlLinear&, Epilogue, void*,
                           size_t);

}  // namespace rootlace

namespace {

using namespace rootlace;

template <class T>
void pack(Team& team, const void* weights, int outputs, int inputs, bool gated, void* packed) {
  Packing<T> packing(outputs, inputs, gated);
  team.run([&](Crew& crew) {
    crew.each(packing.panels * packing.parts, [&](int index) {
      pack_panel(packing, static_cast<const T*>(weights), index, static_cast<T*>(packed));
    });
  });
}

template <class T>
void multiply(Team& team, Epilogue epilogue, const void* x, int rows, const RlLinear* weights,
              int count, void* out) {
  team.run([&](Crew& crew) {
    for (int i = 0; i < count; i++) {
      int columns = weights[i].outputs / (epilogue == Epilogue::SILU_MUL ? 2 : 1);
      linear(crew, static_cast<const T*>(x), weights[i].inputs, rows, weights[i], epilogue, out,
             columns);
    }
  });
}

}  // namespace

extern "C" {

int64_t rl_packed_bytes(int32_t dtype, int32_t outputs, int32_t inputs, int32_t gated) {
  return dtype == RL_FLOAT32 ? Packing<float>(outputs, inputs, gated).bytes()
                             : Packing<bf16>(outputs, inputs, gated).bytes();
}

void rl_pack(Team* team, int32_t dtype, const void* weights, int32_t outputs, int32_t inputs,
             int32_t gated, void* packed) {
  (dtype == RL_FLOAT32 ? pack<float> : pack<bf16>)(*team, weights, outputs, inputs, gated, packed);
}

void rl_linear(Team* team, int32_t dtype, int32_t epilogue, const void* x, int32_t rows,
               const RlLinear* weights, int32_t count, void* out) {
  (dtype == RL_FLOAT32 ? multiply<float> : multiply<bf16>)(
      *team, static_cast<Epilogue>(epilogue), x, rows, weights, count, out);
}
}
