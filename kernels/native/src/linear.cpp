#include "linear.h"

#include <algorithm>
#include <vector>

#include "guard.h"
#include "product.h"
#include "rows.h"

namespace rootlace {
namespace {

// Up to so many numbers each thread makes the integers of all rows itself instead of waiting for others. A late
// thread may read rows that are being overwritten; no task is left then to use its integers.
constexpr int64_t FEW_NUMBERS = 16384;

// x[rows, inputs] as it is, and as integers for both kinds of codes.
template <class T>
struct Factors {
  PlainFactors<T> plain;
  ByteFactors bytes;
  ShortFactors shorts;

  // Calls use(the factors that multiply such codes).
  template <class Use>
  void with(const Codes& codes, Use&& use) const {
    if constexpr (Panels<T>::GROUPS)
      if (codes.grouped()) return use(shorts);
    if constexpr (Panels<T>::BYTES)
      if (codes.as_bytes()) return use(bytes);
    use(plain);
  }
};

// Kinds of factors that a call's products need.
struct Kinds {
  bool bytes = false, shorts = false;

  void add(const Codes& codes) {
    bytes = bytes || codes.as_bytes();
    shorts = shorts || codes.grouped();
  }
};

size_t integer_bytes(Kinds kinds, size_t rows, int inputs) {
  return (kinds.bytes ? (ByteRows::bytes(rows, inputs) + 63) / 64 * 64 : 0) +
         (kinds.shorts ? ShortRows::bytes(rows, inputs) : 0);
}

// Calls run(factors of x[rows, inputs], `own` bytes of scratch).
template <class T, class Run>
void with_factors(Crew& crew, const T* x, size_t ldx, int rows, int inputs, Kinds kinds, size_t own,
                  Run&& run) {
  Factors<T> factors{{x, ldx}, {}, {}};
  const bool few = static_cast<int64_t>(rows) * inputs <= FEW_NUMBERS;
  own = (own + 63) / 64 * 64;
  char* scratch =
      static_cast<char*>(crew.scratch(own + (few ? integer_bytes(kinds, rows, inputs) : 0)));
  if constexpr (Panels<T>::BYTES)
    if (kinds.bytes || kinds.shorts) {
      char* memory = few ? scratch + own : static_cast<char*>(crew.shared());
      factors.bytes = {ByteRows(memory, rows, inputs)};
      memory += integer_bytes({kinds.bytes, false}, rows, inputs);
      factors.shorts = {ShortRows(memory, inputs)};
      const auto put = [&](int row) {
        const bf16* from = x + row * ldx;
        if (kinds.bytes) factors.bytes.put(row, from, inputs, Panels<T>::BYTE_SHIFT);
        if (kinds.shorts) factors.shorts.put(row, from);
      };
      if (few)
        for (int row = 0; row < rows; row++) put(row);
      else
        each_row(crew, rows, put);
    }
  run(factors, scratch);
}

}  // namespace

template <class T>
size_t shared_bytes(size_t rows, int inputs) {
  return integer_bytes({Panels<T>::BYTES, Panels<T>::GROUPS}, rows, inputs);
}

template <class T>
void linear(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights,
            Epilogue epilogue, void* out, size_t ldo, const Added<T>& added) {
  if (rows <= 0) return;
  using Packing = Panels<T>;
  const Packing packing(weights.outputs, weights.inputs, is_gated(epilogue));
  const Codes codes(packing, weights.schemes);
  const auto multiply = [&](const auto& factors, char* scratch) {
    const Product<T, std::decay_t<decltype(factors)>> product{
        factors, weights, codes, epilogue, out, ldo, added};
    const Plan<Packing> plan = product.plan(packing, rows, crew.size());
    typename Packing::Multiplier multiplier(packing, scratch);
    crew.each(plan.tasks(), [&](int index) {
      int begin, end;
      plan.task(index, begin, end);
      product.run(multiplier, plan, begin, end);
    });
  };
  Kinds kinds;
  kinds.add(codes);
  with_factors(crew, x, ldx, rows, weights.inputs, kinds, Packing::Multiplier::bytes(codes),
               [&](const Factors<T>& factors, char* scratch) {
                 factors.with(codes, [&](const auto& own) { multiply(own, scratch); });
               });
}

template <class T>
void linear_grouped(Crew& crew, const T* x, size_t ldx, const RowGroup* groups,
                    RlLinear RlExpert::*weights, Epilogue epilogue, T* out, size_t ldo) {
  if (!groups->expert) return;
  using Packing = Panels<T>;
  const RlLinear& first = groups->expert->*weights;
  const Packing packing(first.outputs, first.inputs, is_gated(epilogue));
  const auto codes_of = [&](int group) {
    return Codes(packing, (groups[group].expert->*weights).schemes);
  };
  int count = 0;
  size_t own = 0;
  Kinds kinds;  // of all groups: experts may have different schemes
  for (; groups[count].expert; count++) {
    const Codes codes = codes_of(count);
    own = std::max(own, Packing::Multiplier::bytes(codes));
    kinds.add(codes);
  }
  own = (own + 63) / 64 * 64;
  const auto product_of = [&](int at, const auto& factors, const Codes& codes) {
    return Product<T, std::decay_t<decltype(factors)>>{
        factors.from(groups[at].first), groups[at].expert->*weights, codes, epilogue,
        out + groups[at].first * ldo,   ldo,                         {}};
  };
  const RowGroup& last = groups[count - 1];
  const auto multiply = [&](const Factors<T>& factors, char* scratch) {
    int* ends = reinterpret_cast<int*>(scratch + own);  // end of each group's tasks
    typename Packing::Multiplier multiplier(packing, scratch);
    const auto each_kind = [&](int at, auto&& use) {
      const Codes codes = codes_of(at);
      factors.with(codes, [&](const auto& own) { use(product_of(at, own, codes)); });
    };
    for (int i = 0, tasks = 0; i < count; i++)
      each_kind(i, [&](const auto& product) {
        ends[i] = tasks += product.plan(packing, groups[i].rows, crew.size()).tasks();
      });
    crew.each(ends[count - 1], [&](int index) {
      const int at = static_cast<int>(std::upper_bound(ends, ends + count, index) - ends);
      each_kind(at, [&](const auto& product) {
        const Plan<Packing> plan = product.plan(packing, groups[at].rows, crew.size());
        int begin, end;
        plan.task(index - (at ? ends[at - 1] : 0), begin, end);
        product.run(multiplier, plan, begin, end);
      });
    });
  };
  with_factors(crew, x, ldx, last.first + last.rows, packing.inputs, kinds,
               own + count * sizeof(int), multiply);
}

template <class T>
void linear_by_head(Crew& crew, const T* x, size_t ldx, size_t apart, int rows,
                    const RlLinear* weights, int heads, T* out, size_t ldo, size_t out_apart) {
  if (rows <= 0) return;
  using Packing = Panels<T>;
  const Packing packing(weights->outputs, weights->inputs, false);
  const Codes codes(packing, nullptr);
  const auto product_of = [&](int head) {
    return Product<T, PlainFactors<T>>{
        {x + head * apart, ldx}, weights[head], codes, Epilogue::STORE, out + head * out_apart, ldo,
        {}};
  };
  // A head is small: it is one task if there are enough heads for all threads.
  const int threads = heads >= crew.size() ? 1 : crew.size();
  const Plan<Packing> plan = product_of(0).plan(packing, rows, threads);
  const int tasks = plan.tasks();
  typename Packing::Multiplier multiplier(packing, crew.scratch(Packing::Multiplier::bytes(codes)));
  crew.each(heads * tasks, [&](int index) {
    int begin, end;
    plan.task(index % tasks, begin, end);
    product_of(index / tasks).run(multiplier, plan, begin, end);
  });
}

template <class T>
void linear_among(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights,
                  const int64_t* masks, float* out, size_t ldo) {
  if (rows <= 0) return;
  using Packing = Panels<T>;
  const Packing packing(weights.outputs, weights.inputs, false);
  const Codes codes(packing, weights.schemes);
  const size_t own = (Packing::Multiplier::bytes(codes) + 63) / 64 * 64;
  const size_t few = std::min(rows, Packing::MOST_ROWS);
  const size_t row = std::max({weights.inputs * sizeof(T), 2 * spread<int8_t>(weights.inputs),
                               ShortRows::bytes(1, weights.inputs)});
  const auto multiply = [&](const auto& factors, char* scratch) {
    const Product<T, std::decay_t<decltype(factors)>> product{
        factors, weights, codes, Epilogue::FLOAT32, out, ldo, {}};
    auto* gathered = reinterpret_cast<std::decay_t<decltype(*factors.at)>*>(scratch + own);
    const Plan<Packing> plan = product.plan(packing, rows, crew.size());
    typename Packing::Multiplier multiplier(packing, scratch);
    crew.each(plan.tasks(), [&](int index) {
      int begin, end;
      plan.task(index, begin, end);
      product.run_among(multiplier, plan, begin, end, {masks, gathered});
    });
  };
  Kinds kinds;
  kinds.add(codes);
  with_factors(crew, x, ldx, rows, weights.inputs, kinds, own + few * row,
               [&](const Factors<T>& factors, char* scratch) {
                 factors.with(codes, [&](const auto& own) { multiply(own, scratch); });
               });
}

template <class T>
void put_in_order(Crew& crew, const T* x, size_t ldx, int rows, const RlLinear& weights, T* to,
                  size_t ldto) {
  crew.each(rows, [&](int row) {
    for (int i = 0; i < weights.inputs; i++) to[row * ldto + i] = x[row * ldx + weights.order[i]];
  });
}

template size_t shared_bytes<float>(size_t, int);
template size_t shared_bytes<bf16>(size_t, int);
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
template void linear_by_head<float>(Crew&, const float*, size_t, size_t, int, const RlLinear*, int,
                                    float*, size_t, size_t);
template void linear_by_head<bf16>(Crew&, const bf16*, size_t, size_t, int, const RlLinear*, int,
                                   bf16*, size_t, size_t);
template void linear<float>(Crew&, const float*, size_t, int, const RlLinear&, Epilogue, void*,
                            size_t, const Added<float>&);
template void linear<bf16>(Crew&, const bf16*, size_t, int, const RlLinear&, Epilogue, void*,
                           size_t, const Added<bf16>&);

}  // namespace rootlace

namespace {

using namespace rootlace;

template <class T>
void pack(Team& team, const void* weights, int outputs, int inputs, bool gated, void* packed) {
  const Panels<T> packing(outputs, inputs, gated);
  team.run([&](Crew& crew) {
    crew.each(packing.panels * packing.parts, [&](int index) {
      packing.pack(static_cast<const T*>(weights), index, static_cast<T*>(packed));
    });
  });
}

template <class T>
int64_t packed_bytes(int outputs, int inputs, bool gated) {
  return Panels<T>(outputs, inputs, gated).bytes();
}

template <class T>
void multiply(Team& team, Epilogue epilogue, const void* x, int64_t ldx, int rows,
              const RlLinear* weights, int count, void* out) {
  const bool orders =
      std::any_of(weights, weights + count, [](const RlLinear& one) { return one.order != nullptr; });
  std::vector<T> ordered(orders ? static_cast<size_t>(rows) * weights[0].inputs : 0);
  const size_t shared = shared_bytes<T>(rows, weights[0].inputs);
  team.run(shared, [&](Crew& crew) {
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
  auto one = dtype == RL_FLOAT32 ? packed_bytes<float> : packed_bytes<bf16>;
  return one(outputs, inputs, gated);
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
