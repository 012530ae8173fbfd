#include "linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "activations.h"
#include "isa/fetch.h"
#include "guard.h"
#include "mask.h"
#include "panels.h"

namespace rootlace {
namespace {

// Rows of x go through all weights in groups that stay in the second level of cache. Weights of
// more bytes than this would be read from memory for each group: groups are larger then, and stay
// in the third level.
constexpr int64_t LARGE_WEIGHTS = 16 << 20;

// The work of one `linear`: units of some rows x some columns, numbered so that those with weights
// or rows in common are near; tasks are runs of units.
template <class T>
struct Plan {
  using Packing = Panels<T>;
  Packing packing;
  int rows, threads;
  int unit_vecs;   // columns of a unit: a panel's, or fewer where there are few panels
  int unit_rows;   // rows of a unit
  int group_rows;  // rows of the units that come before those of the next rows
  int column_units, units;

  Plan(const Packing& packing, int rows, int threads)
      : packing(packing), rows(rows), threads(threads) {
    int vecs = ceil_div(packing.columns, LANES);
    // A few panels are cut where, with whole ones, the largest share would be larger by more than a
    // tenth.
    int whole = ceil_div(packing.panels, threads) * Packing::VECS;
    bool uneven = 10 * whole > 11 * ceil_div(vecs, threads);
    bool scarce = packing.panels < 6 * threads && rows <= 2 * Packing::ROWS && uneven;
    unit_vecs = scarce ? 1 : Packing::VECS;
    column_units = unit_vecs == 1 ? vecs : packing.panels;
    // Row groups, of about the same size each.
    bool large = packing.bytes() > LARGE_WEIGHTS;
    int64_t bytes = large ? Packing::LARGE_GROUP_BYTES : Packing::GROUP_BYTES;
    int most_rows = std::max<int64_t>(Packing::MOST_ROWS, bytes / (packing.inputs * sizeof(T)));
    int groups = ceil_div(rows, most_rows);
    group_rows = round_rows(ceil_div(rows, groups));
    int blocks = ceil_div(group_rows, Packing::MOST_ROWS);
    int most = ceil_div(group_rows, 2 * Packing::ROWS);
    int wanted = ceil_div(16 * threads, static_cast<int64_t>(column_units) * groups);
    unit_rows = round_rows(ceil_div(group_rows, std::max(blocks, std::min(most, wanted))));
    units = column_units * (rows / group_rows * ceil_div(group_rows, unit_rows) +
                            ceil_div(rows % group_rows, unit_rows));
  }

  static int round_rows(int rows) { return ceil_div(rows, Packing::ROWS) * Packing::ROWS; }

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
    bool alone = unit_vecs == Packing::VECS || units > column_units;
    unit.count = alone ? 1 : std::min(end - index, Packing::VECS - index % Packing::VECS);
    index -= group * full;
    unit.row = row + index % blocks * unit_rows;
    unit.rows = std::min(unit_rows, row + in_group - unit.row);
    int first = index / blocks * unit_vecs;
    unit.panel = first / Packing::VECS;
    unit.vec = first % Packing::VECS;
    unit.vecs = std::min(unit_vecs * unit.count, ceil_div(packing.columns, LANES) - first);
    return unit;
  }
};

// Copies, side by side, of those rows of x whose masks allow some of the columns at hand.
template <class T>
struct Gathered {
  static constexpr int MOST_ROWS = Panels<T>::MOST_ROWS;
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
    const int32_t* mask = mask_at(masks[row]);
    int end = column + width;
    for (int at = column; at < end;) {
      int stop = std::min(end, (at / MASK_WORD + 1) * MASK_WORD);
      if (bits_from(mask, at) << (MASK_WORD - (stop - at))) return true;
      at = stop;
    }
    return false;
  }
};

// Where the rows of a unit are in the result: one behind the other, or those that were chosen, which
// have logits.
struct InOrder {
  static constexpr bool ANY_EPILOGUE = true;
  int first;
  int operator()(int at) const { return first + at; }
};
struct Chosen {
  static constexpr bool ANY_EPILOGUE = false;
  const int* rows;
  int operator()(int at) const { return rows[at]; }
};

template <class T>
struct Product {
  using Packing = Panels<T>;
  using Multiplier = typename Packing::Multiplier;
  using Sums = float[Packing::MOST_ROWS * Packing::COLUMNS];
  static constexpr int PANEL = Packing::COLUMNS;

  const T* x;
  size_t ldx;
  const RlLinear& weights;
  const Codes& codes;
  Epilogue epilogue;
  void* out;
  size_t ldo;
  Added added;

  void run(Multiplier& multiplier, const Plan<T>& plan, int begin, int end) const {
    alignas(64) Sums sums[2];
    for (int i = begin; i < end;) {
      auto unit = plan.unit(i, end);
      i += unit.count;
      multiply(multiplier, unit, x + unit.row * ldx, ldx, unit.row, sums,
               finishing(plan.packing, unit, InOrder{unit.row}, sums));
    }
  }

  // The same of the rows of each unit whose masks have a bit in its columns.
  void run_among(Multiplier& multiplier, const Plan<T>& plan, int begin, int end,
                 Gathered<T> gathered) const {
    alignas(64) Sums sums[2];
    for (int i = begin; i < end;) {
      auto unit = plan.unit(i, end);
      i += unit.count;
      int column = unit.panel * PANEL + unit.vec * LANES;
      int width = std::min(unit.vecs * LANES, plan.packing.columns - column);
      int rows = unit.rows;
      unit.rows = gathered.choose(unit.row, rows, column, width);
      if (!unit.rows) continue;
      if (unit.rows == rows) {
        multiply(multiplier, unit, x + unit.row * ldx, ldx, unit.row, sums,
                 finishing(plan.packing, unit, InOrder{unit.row}, sums));
        continue;
      }
      gathered.copy(x, ldx, weights.inputs);
      multiply(multiplier, unit, gathered.memory, weights.inputs, -1, sums,
               finishing(plan.packing, unit, Chosen{gathered.chosen}, sums));
    }
  }

  // What a multiplier calls with the rows of a unit that are summed up. One that has time for it
  // has the places of these rows fetched before.
  template <class Place>
  struct Finishing {
    const Product& product;
    const Packing& packing;
    const typename Plan<T>::Unit& unit;
    Place place;
    const Sums* sums;

    void operator()(int row, int stop) const {
      product.finish(packing, unit, row, stop, place, sums);
    }

    // The result's lines, to write there: stores that find none of them wait for one another.
    void fetch(int row, int stop) const {
      const bool wide = product.epilogue == Epilogue::FLOAT32 || product.epilogue == Epilogue::ADD;
      const size_t size = wide ? sizeof(float) : sizeof(T);
      const int column = unit.panel * PANEL + unit.vec * LANES;
      const size_t width = std::min(unit.vecs * LANES, packing.columns - column) * size;
      for (; row < stop; row++) {
        const char* to = static_cast<const char*>(product.out);
        to += (place(row) * product.ldo + column) * size;
        for (size_t i = 0; i < width; i += 64) fetch_to_write(to + i);
      }
    }
  };
  template <class Place>
  Finishing<Place> finishing(const Packing& packing, const typename Plan<T>::Unit& unit, Place place,
                             const Sums* sums) const {
    return {*this, packing, unit, place, sums};
  }

  template <class Finish>
  void multiply(Multiplier& multiplier, const typename Plan<T>::Unit& unit, const T* a, size_t lda,
                int row, Sums* sums, Finish&& finish) const {
    multiplier.multiply({a, lda, row, unit.rows}, {weights.packed, codes}, unit.panel, unit.vec,
                        unit.vecs, *sums, finish);
  }

  // What was summed up as the rows row : stop of a unit, to the rows place(row) of the result.
  template <class Place>
  void finish(const Packing& packing, const typename Plan<T>::Unit& unit, int row, int stop,
              Place place, const Sums* sums) const {
    int column = unit.panel * PANEL + unit.vec * LANES;
    int width = std::min(unit.vecs * LANES, packing.columns - column);
    const bool whole = width % LANES == 0;
    const float* const biases = weights.bias ? weights.bias + column : nullptr;
    const float factor = weights.factor;
    const float* more = nullptr;  // what is added to the row
    auto each = [&](auto&& put) {
      for (; row < stop; row++) {
        const size_t to = place(row) * ldo;
        const int from = row * PANEL;
        more = added.of(place(row));
        if (whole && !more)
          for (int done = 0; done < width; done += LANES) {
            Vec y = load(sums[0] + from + done);
            if (biases) y += load(biases + done);
            put(to, column + done, y, from + done, LANES);
          }
        else
          for (int done = 0; done < width; done += LANES) {
            int count = std::min(LANES, width - done);
            Vec y = load(sums[0] + from + done);
            if (weights.bias || !whole) y += bias(column + done, count);
            if (more) y += get(more + column + done, count);
            put(to, column + done, y, from + done, count);
          }
      }
    };
    const auto logits = [&](size_t at, int to, Vec y, int, int count) {
      put(static_cast<float*>(out) + at + to, y * factor, count);
    };
    if constexpr (!Place::ANY_EPILOGUE) return each(logits);
    const auto activated = [&](auto activation) {
      each([&](size_t at, int to, Vec y, int, int count) {
        put(static_cast<T*>(out) + at + to, activation(y), count);
      });
    };
    const auto gated = [&](auto activation) {
      each([&](size_t at, int to, Vec y, int from, int count) {
        Vec up = load(sums[1] + from);
        if (weights.bias) up += bias(packing.columns + to, count);
        if (more) up += get(more + packing.columns + to, count);
        put(static_cast<T*>(out) + at + to, activation(y) * up, count);
      });
    };
    switch (epilogue) {
      case Epilogue::STORE:
        return activated([](Vec y) { return y; });
      case Epilogue::FLOAT32:
        return each(logits);
      case Epilogue::ADD:
        return each([&](size_t at, int to, Vec y, int, int count) {
          float* residual = static_cast<float*>(out) + at + to;
          put(residual, get(residual, count) + y * factor, count);
        });
      case Epilogue::SILU_MUL:
        return gated([](Vec y) { return silu<T>(y); });
      case Epilogue::GELU_MUL:
        return gated([](Vec y) { return gelu_tanh<T>(y); });
      case Epilogue::CLAMPED_MUL:
        return each([&](size_t at, int to, Vec y, int from, int count) {
          Vec up = load(sums[1] + from);
          if (weights.bias) up += bias(packing.columns + to, count);
          y = y > weights.limit ? splat(weights.limit) : y;
          up = up > weights.limit ? splat(weights.limit) : up;
          up = up < -weights.limit ? splat(-weights.limit) : up;
          put(static_cast<T*>(out) + at + to, logistic<T>(y, y * weights.alpha) * (up + 1.0f), count);
        });
      case Epilogue::RELU:
        return activated([](Vec y) { return relu(y); });
      case Epilogue::GELU:
        return activated([](Vec y) { return gelu<T>(y); });
      case Epilogue::GELU_TANH:
        return activated([](Vec y) { return gelu_tanh<T>(y); });
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
            Epilogue epilogue, void* out, size_t ldo, const Added& added) {
  if (rows <= 0) return;
  Panels<T> packing(weights.outputs, weights.inputs, is_gated(epilogue));
  Plan<T> plan(packing, rows, crew.size());
  const Codes codes(packing, weights.schemes);
  Product<T> product{x, ldx, weights, codes, epilogue, out, ldo, added};
  void* scratch = crew.scratch(Panels<T>::Multiplier::bytes(codes));
  typename Panels<T>::Multiplier multiplier(packing, scratch);
  crew.each(plan.tasks(), [&](int index) {
    int begin, end;
    plan.task(index, begin, end);
    product.run(multiplier, plan, begin, end);
  });
}

template <class T>
void linear_grouped(Crew& crew, const T* x, size_t ldx, const RowGroup* groups,
                    RlLinear RlExpert::*weights, Epilogue epilogue, T* out, size_t ldo) {
  if (!groups->expert) return;
  const RlLinear& first = groups->expert->*weights;
  const Panels<T> packing(first.outputs, first.inputs, is_gated(epilogue));
  int count = 0;
  size_t own = 0;
  for (; groups[count].expert; count++) {
    const Codes codes(packing, (groups[count].expert->*weights).schemes);
    own = std::max(own, Panels<T>::Multiplier::bytes(codes));
  }
  own = (own + 63) / 64 * 64;
  char* scratch = static_cast<char*>(crew.scratch(own + count * sizeof(int)));
  int* ends = reinterpret_cast<int*>(scratch + own);  // of each group's tasks
  for (int i = 0, tasks = 0; i < count; i++)
    ends[i] = tasks += Plan<T>(packing, groups[i].rows, crew.size()).tasks();
  typename Panels<T>::Multiplier multiplier(packing, scratch);
  crew.each(ends[count - 1], [&](int index) {
    const int at = static_cast<int>(std::upper_bound(ends, ends + count, index) - ends);
    const RowGroup& group = groups[at];
    const RlLinear& own = group.expert->*weights;
    const Codes codes(packing, own.schemes);
    const Plan<T> plan(packing, group.rows, crew.size());
    Product<T> product{x + group.first * ldx, ldx, own, codes, epilogue,
                       out + group.first * ldo, ldo};
    int begin, end;
    plan.task(index - (at ? ends[at - 1] : 0), begin, end);
    product.run(multiplier, plan, begin, end);
  });
}

template <class T>
void linear_among(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights,
                  const int64_t* masks, float* out, size_t ldo) {
  if (rows <= 0) return;
  Panels<T> packing(weights.outputs, weights.inputs, false);
  Plan<T> plan(packing, rows, crew.size());
  const Codes codes(packing, weights.schemes);
  Product<T> product{x, ldx, weights, codes, Epilogue::FLOAT32, out, ldo, {}};
  size_t few = static_cast<size_t>(std::min(rows, Panels<T>::MOST_ROWS)) * weights.inputs;
  size_t own = (Panels<T>::Multiplier::bytes(codes) + 63) / 64 * 64;
  char* scratch = static_cast<char*>(crew.scratch(own + few * sizeof(T)));
  T* gathered = reinterpret_cast<T*>(scratch + own);
  typename Panels<T>::Multiplier multiplier(packing, scratch);
  crew.each(plan.tasks(), [&](int index) {
    int begin, end;
    plan.task(index, begin, end);
    product.run_among(multiplier, plan, begin, end, {masks, gathered});
  });
}

template <class T>
void put_in_order(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights, T* to,
                  size_t ldto) {
  crew.each(rows, [&](int row) {
    for (int i = 0; i < weights.inputs; i++) to[row * ldto + i] = x[row * ldx + weights.order[i]];
  });
}

template void put_in_order<float>(Crew&, const float*, size_t, int, const RlLinear&, float*, size_t);
template void put_in_order<bf16>(Crew&, const bf16*, size_t, int, const RlLinear&, bf16*, size_t);
template void linear_among<float>(Crew&, const float*, size_t, int, const RlLinear&, const int64_t*,
                                  float*, size_t);
template void linear_among<bf16>(Crew&, const bf16*, size_t, int, const RlLinear&, const int64_t*,
                                 float*, size_t);
template void linear_grouped<float>(Crew&, const float*, size_t, const RowGroup*,
                                    RlLinear RlExpert::*, Epilogue, float*, size_t);
template void linear_grouped<bf16>(Crew&, const bf16*, size_t, const RowGroup*,
                                   RlLinear RlExpert::*, Epilogue, bf16*, size_t);
template void linear<float>(Crew&, const float*, size_t, int, const RlLinear&, Epilogue, void*,
                            size_t, const Added&);
template void linear<bf16>(Crew&, const bf16*, size_t, int, const RlLinear&, Epilogue, void*,
                           size_t, const Added&);

}  // namespace rootlace

namespace {

using namespace rootlace;

template <class T>
void pack(Team& team, const void* weights, int outputs, int inputs, bool gated, void* packed) {
  Panels<T> packing(outputs, inputs, gated);
  team.run([&](Crew& crew) {
    crew.each(packing.panels * packing.parts, [&](int index) {
      packing.pack(static_cast<const T*>(weights), index, static_cast<T*>(packed));
    });
  });
}

template <class T>
void multiply(Team& team, Epilogue epilogue, const void* x, int64_t ldx, int rows,
              const RlLinear* weights, int count, void* out) {
  const bool orders =
      std::any_of(weights, weights + count, [](const RlLinear& one) { return one.order != nullptr; });
  std::vector<T> ordered(orders ? static_cast<size_t>(rows) * weights[0].inputs : 0);
  team.run([&](Crew& crew) {
    for (int i = 0; i < count; i++) {
      int columns = weights[i].outputs / (is_gated(epilogue) ? 2 : 1);
      const T* from = static_cast<const T*>(x);
      size_t apart = ldx;
      if (weights[i].order) {
        put_in_order(crew, from, ldx, rows, weights[i], ordered.data(), weights[i].inputs);
        from = ordered.data(), apart = weights[i].inputs;
      }
      linear(crew, from, apart, rows, weights[i], epilogue, out, columns);
    }
  });
}

}  // namespace

extern "C" {

int64_t rl_packed_bytes(int32_t dtype, int32_t outputs, int32_t inputs, int32_t gated) {
  return dtype == RL_FLOAT32 ? Panels<float>(outputs, inputs, gated).bytes()
                             : Panels<bf16>(outputs, inputs, gated).bytes();
}

int32_t rl_pack(Team* team, int32_t dtype, const void* weights, int32_t outputs, int32_t inputs,
                int32_t gated, void* packed) {
  auto one = dtype == RL_FLOAT32 ? pack<float> : pack<bf16>;
  return guarded([&] { one(*team, weights, outputs, inputs, gated, packed); });
}

int32_t rl_linear(Team* team, int32_t dtype, int32_t epilogue, const void* x, int64_t ldx,
                  int32_t rows, const RlLinear* weights, int32_t count, void* out) {
  auto one = dtype == RL_FLOAT32 ? multiply<float> : multiply<bf16>;
  return guarded(
      [&] { one(*team, static_cast<Epilogue>(epilogue), x, ldx, rows, weights, count, out); });
}
}
