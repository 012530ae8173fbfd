// One product: rows of factors times panels of weights, with its epilogue.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "activations.h"
#include "byte_rows.h"
#include "isa/fetch.h"
#include "linear.h"
#include "mask.h"
#include "panels.h"
#include "product_plan.h"
#include "short_rows.h"

namespace rootlace {

// Contiguous copies of the rows of x whose masks allow some column of a unit.
template <class T, int MOST_ROWS>
struct Gathered {
  const int64_t* masks;  // addresses; 0: all columns
  T* memory;             // [MOST_ROWS, inputs]
  int count = 0, copied = 0;
  int chosen[MOST_ROWS] = {}, held[MOST_ROWS] = {};  // rows to multiply; rows in `memory`

  // Chooses, of `rows` rows from `row` on, those that allow one of `width` columns; returns their number. Rows chosen
  // last time come first, in the same order, so that most copies stay in place.
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

// Maps from a unit's rows to rows of the result: all in order, or chosen rows of logits.
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

// Factors of a product: rows of x as they are, or as integers. A row of x has ROWS rows of factors.
template <class T>
struct PlainFactors {
  using Number = T;
  static constexpr int ROWS = 1;
  const T* at;
  size_t stride;

  PlainFactors from(int row) const { return {at + row * stride, stride}; }
};
struct ByteFactors : ByteRows {
  using Number = int8_t;
  static constexpr int ROWS = 2;

  ByteFactors from(int row) const { return {ByteRows::from(row)}; }
};

struct ShortFactors : ShortRows {
  using Number = int16_t;
  static constexpr int ROWS = 1;

  ShortFactors from(int row) const { return {ShortRows::from(row)}; }
};

template <class T, class X>
struct Product {
  using Packing = Panels<T>;
  using Multiplier = typename Packing::Multiplier;
  using Unit = typename Plan<Packing>::Unit;
  using Number = typename X::Number;
  using Sums = float[Packing::MOST_ROWS * Packing::COLUMNS];
  static constexpr bool PLAIN = std::is_same_v<Number, T>, BYTES = std::is_same_v<Number, int8_t>;
  using Gathered = rootlace::Gathered<Number, Packing::MOST_ROWS / X::ROWS>;
  static constexpr int PANEL = Packing::COLUMNS;

  X x;
  const RlLinear& weights;
  const Codes& codes;
  Epilogue epilogue;
  void* out;
  size_t ldo;
  Added<T> added;

  // Adapters' additions to the rows of a unit.
  struct Low {
    Sums sums[2];
    bool has[Packing::MOST_ROWS];  // whether a row has an addition
  };

  // Divides `rows` rows of x into units, whose rows are rows of factors.
  static Plan<Packing> plan(const Packing& packing, int rows, int threads) {
    return {packing, X::ROWS * rows, threads, sizeof(Number)};
  }

  void run(Multiplier& multiplier, const Plan<Packing>& plan, int begin, int end) const {
    if (added.inner) return run_adapted(multiplier, plan, begin, end);
    alignas(64) Sums sums[2];
    for (int i = begin; i < end;) {
      auto unit = plan.unit(i, end);
      i += unit.count;
      whole(multiplier, plan.packing, unit, sums);
    }
  }

  // The same with adapters. Additions to a unit are computed just before the unit: for all of y at once they would be
  // written to memory and read again.
  [[gnu::noinline]] void run_adapted(Multiplier& multiplier, const Plan<Packing>& plan, int begin,
                                     int end) const {
    alignas(64) Sums sums[2];
    alignas(64) Low low;
    for (int i = begin; i < end;) {
      auto unit = plan.unit(i, end);
      i += unit.count;
      const bool any = make_low(plan.packing, unit, low);
      if (any) multiplier.forget();
      whole(multiplier, plan.packing, unit, sums, any ? &low : nullptr);
    }
  }

  // Computes the additions to a unit's rows; returns whether there are any.
  bool make_low(const Packing& packing, const Unit& unit, Low& low) const {
    struct Nothing {
      void operator()(int, int) const {}
      void fetch(int, int) const {}
    };
    const int first = unit.row / X::ROWS, rows = unit.rows / X::ROWS;
    bool any = false;
    for (int at = 0, end; at < rows; at = end) {
      const RlLinear* b = added.of(first + at);
      // Rows of one adapter are neighbours in `inner`, in their order.
      for (end = at + 1; end < rows && added.of(first + end) == b; end++) {}
      std::fill(low.has + at, low.has + end, b != nullptr);
      if (!b) continue;
      any = true;
      const Packing own(b->outputs, b->inputs, packing.parts == 2);
      const Codes none(own, nullptr);
      Multiplier multiplier(own, low.sums);
      const T* from = added.inner + added.places[first + at] * added.stride;
      multiplier.multiply(Rows<T>{from, added.stride, -1, end - at}, PackedWeights{b->packed, none},
                          unit.panel, unit.vec, unit.vecs, low.sums[0] + at * PANEL, Nothing{});
    }
    return any;
  }

  // The same for the rows of each unit whose masks allow one of its columns.
  void run_among(Multiplier& multiplier, const Plan<Packing>& plan, int begin, int end,
                 Gathered gathered) const {
    alignas(64) Sums sums[2];
    for (int i = begin; i < end;) {
      auto unit = plan.unit(i, end);
      i += unit.count;
      int column = unit.panel * PANEL + unit.vec * LANES;
      int width = std::min(unit.vecs * LANES, plan.packing.columns - column);
      int rows = unit.rows;
      unit.rows = X::ROWS * gathered.choose(unit.row / X::ROWS, rows / X::ROWS, column, width);
      if (!unit.rows) continue;
      if (unit.rows == rows) {
        whole(multiplier, plan.packing, unit, sums);
        continue;
      }
      const size_t own = gathered_stride();
      gathered.copy(x.at, X::ROWS * x.stride, X::ROWS * own);
      multiply(multiplier, unit, gathered.memory, own, -1, sums,
               finishing(plan.packing, unit, Chosen{gathered.chosen}, sums));
    }
  }

  // Returns the distance of gathered rows of factors, in elements.
  size_t gathered_stride() const { return PLAIN ? weights.inputs : x.stride; }

  void whole(Multiplier& multiplier, const Packing& packing, const Unit& unit,
             Sums* sums, const Low* low = nullptr) const {
    multiply(multiplier, unit, x.at + unit.row * x.stride, x.stride, unit.row, sums,
             finishing(packing, unit, InOrder{unit.row / X::ROWS}, sums, low));
  }

  // Scales of a unit's outputs, for `as_bytes` codes.
  struct Scales {
    Vec at[2][BYTES ? Packing::VECS : 1];
  };

  // Callback of a multiplier for a unit's rows whose sums are complete. Multipliers with time for it call `fetch`
  // before.
  template <class Place>
  struct Finishing {
    const Product& product;
    const Packing& packing;
    const Unit& unit;
    Place place;
    const Sums* sums;
    Scales scales;
    const Low* low;

    void operator()(int row, int stop) const {
      product.finish(packing, unit, row / X::ROWS, stop / X::ROWS, place, sums, scales, low);
    }

    // Fetches the result's lines for writing: stores that miss the cache wait for one another.
    void fetch(int row, int stop) const {
      const bool wide = product.epilogue == Epilogue::FLOAT32 || product.epilogue == Epilogue::ADD;
      const size_t size = wide ? sizeof(float) : sizeof(T);
      const int column = unit.panel * PANEL + unit.vec * LANES;
      const size_t width = std::min(unit.vecs * LANES, packing.columns - column) * size;
      for (row /= X::ROWS, stop /= X::ROWS; row < stop; row++) {
        const char* to = static_cast<const char*>(product.out);
        to += (place(row) * product.ldo + column) * size;
        for (size_t i = 0; i < width; i += 64) fetch_to_write(to + i);
      }
    }
  };
  template <class Place>
  Finishing<Place> finishing(const Packing& packing, const Unit& unit, Place place,
                             const Sums* sums, const Low* low = nullptr) const {
    return {*this, packing, unit, place, sums, scales_of(packing, unit), low};
  }

  Scales scales_of(const Packing& packing, const Unit& unit) const {
    Scales scales;
    if constexpr (BYTES)
      for (int part = 0; part < packing.parts; part++) {
        Groups groups[Packing::VECS];
        packed().vectors_of(unit.panel, part, unit.vec, unit.vecs, groups);
        for (int i = 0; i < unit.vecs; i++) scales.at[part][i] = groups[i].scales();
      }
    return scales;
  }

  template <class Finish>
  void multiply(Multiplier& multiplier, const Unit& unit, const Number* a,
                size_t lda, int row, Sums* sums, Finish&& finish) const {
    const Rows<Number> rows{a, lda, row, unit.rows};
    if constexpr (PLAIN)
      multiplier.multiply(rows, packed(), unit.panel, unit.vec, unit.vecs, *sums, finish);
    else if constexpr (!BYTES)
      multiplier.multiply_groups(rows, packed(), unit.panel, unit.vec, unit.vecs, *sums, finish);
    else
      multiplier.multiply_bytes(rows, packed(), unit.panel, unit.vec, unit.vecs, *sums, finish);
  }

  PackedWeights packed() const { return {weights.packed, codes}; }

  // Writes the sums of a unit's rows row : stop, after the epilogue, to rows place(row) of the result.
  template <class Place>
  void finish(const Packing& packing, const Unit& unit, int row, int stop,
              Place place, const Sums* sums, const Scales& scales, const Low* low) const {
    int column = unit.panel * PANEL + unit.vec * LANES;
    int width = std::min(unit.vecs * LANES, packing.columns - column);
    const bool whole = width % LANES == 0;
    const auto sum = [&](int part, int at, int done) {
      const float* own = sums[part] + X::ROWS * at * PANEL + done;
      if constexpr (!BYTES)
        return load(own);
      else
        return rounded(x.joined(place(at), own, own + PANEL) * scales.at[part][done / LANES]);
    };
    const float* const biases = weights.bias ? weights.bias + column : nullptr;
    const float factor = weights.factor;
    bool more = false;  // whether an adapter adds to the row
    const auto add_low = [&](Vec& y, int part, int done) {
      if (more) y += load(low->sums[part] + row * PANEL + done);
    };
    auto each = [&](auto&& put) {
      for (; row < stop; row++) {
        const size_t to = place(row) * ldo;
        more = low && low->has[row];
        if (whole && !more)
          for (int done = 0; done < width; done += LANES) {
            Vec y = sum(0, row, done);
            if (biases) y += load(biases + done);
            put(to, column + done, y, done, LANES);
          }
        else
          for (int done = 0; done < width; done += LANES) {
            int count = std::min(LANES, width - done);
            Vec y = sum(0, row, done);
            if (weights.bias || !whole) y += bias(column + done, count);
            add_low(y, 0, done);
            put(to, column + done, y, done, count);
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
      each([&](size_t at, int to, Vec y, int done, int count) {
        Vec up = sum(1, row, done);
        if (weights.bias) up += bias(packing.columns + to, count);
        add_low(up, 1, done);
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
        return each([&](size_t at, int to, Vec y, int done, int count) {
          Vec up = sum(1, row, done);
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

}  // namespace rootlace
