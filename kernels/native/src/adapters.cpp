#include "adapters.h"

#include <algorithm>
#include <cstring>

#include "vec.h"

namespace rootlace {

void AdapterGroups::find(const int32_t* adapters, const int32_t* tokens, int count) {
  groups.clear();
  rows.clear();
  places.clear();
  if (!adapters) return;
  auto of = [&](int row) { return adapters[tokens ? tokens[row] : row]; };
  for (int row = 0; row < count; row++)
    if (of(row) >= 0) rows.push_back(row);
  std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return of(a) < of(b); });
  places.assign(count, -1);
  for (int at = 0; at < static_cast<int>(rows.size()); at++) {
    places[rows[at]] = at;
    const int adapter = of(rows[at]);
    if (groups.empty() || groups.back().adapter != adapter) groups.push_back({adapter, at, at});
    groups.back().end = at + 1;
  }
}

template <class T>
Added adapt(Crew& crew, const T* x, size_t ldx, const AdapterGroups& found, const RlLowRank* parts,
            size_t apart, const AdapterMemory<T>& memory) {
  auto part_of = [&](const AdapterGroups::Group& group) -> const RlLowRank& {
    return parts[group.adapter * apart];
  };
  int inputs = 0, outputs = 0;
  for (const auto& group : found.groups)
    if (const RlLowRank& part = part_of(group); part.a.packed)
      inputs = part.a.inputs, outputs = part.b.outputs;
  if (!outputs) return {};
  crew.each(static_cast<int>(found.groups.size()), [&](int index) {
    const auto& group = found.groups[index];
    const bool changes = part_of(group).a.packed;
    for (int at = group.begin; at < group.end; at++) {
      if (changes)
        std::memcpy(static_cast<void*>(memory.gathered + at * memory.gathered_stride),
                    x + found.rows[at] * ldx, inputs * sizeof(T));
      else  // the number that changes no other
        std::fill_n(memory.values + at * memory.values_stride, outputs, -0.0f);
    }
  });
  for (const auto& group : found.groups) {
    const RlLowRank& part = part_of(group);
    if (!part.a.packed) continue;
    const int count = group.end - group.begin;
    T* inner = memory.inner + group.begin * memory.inner_stride;
    linear(crew, memory.gathered + group.begin * memory.gathered_stride, memory.gathered_stride,
           count, part.a, Epilogue::STORE, inner, memory.inner_stride);
    linear(crew, inner, memory.inner_stride, count, part.b, Epilogue::FLOAT32,
           memory.values + group.begin * memory.values_stride, memory.values_stride);
  }
  return {memory.values, memory.values_stride, found.places.data()};
}

template Added adapt<float>(Crew&, const float*, size_t, const AdapterGroups&, const RlLowRank*,
                            size_t, const AdapterMemory<float>&);
template Added adapt<bf16>(Crew&, const bf16*, size_t, const AdapterGroups&, const RlLowRank*,
                           size_t, const AdapterMemory<bf16>&);

}  // namespace rootlace
