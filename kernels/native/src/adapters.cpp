#include "adapters.h"

#include <algorithm>
#include <cstring>

#include "rows.h"
#include "vec.h"

namespace rootlace {

void AdapterGroups::find(const int32_t* of_tokens, const int32_t* tokens, int count) {
  groups.clear();
  rows.clear();
  places.clear();
  adapters.clear();
  if (!of_tokens) return;
  for (int row = 0; row < count; row++) {
    adapters.push_back(of_tokens[tokens ? tokens[row] : row]);
    if (adapters[row] >= 0) rows.push_back(row);
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [&](int a, int b) { return adapters[a] < adapters[b]; });
  places.assign(count, -1);
  for (int at = 0; at < static_cast<int>(rows.size()); at++) {
    places[rows[at]] = at;
    const int adapter = adapters[rows[at]];
    if (groups.empty() || groups.back().adapter != adapter) groups.push_back({adapter, at, at});
    groups.back().end = at + 1;
  }
}

template <class T>
Added<T> adapt(Crew& crew, const T* x, size_t ldx, const AdapterGroups& found,
               const RlLowRank* parts, size_t apart, const AdapterMemory<T>& memory) {
  bool any = false, gathers = false;
  // A group's rows that are contiguous in x are read there.
  const auto together = [&](const AdapterGroups::Group& group) {
    return found.rows[group.end - 1] - found.rows[group.begin] == group.end - group.begin - 1;
  };
  int inputs = 0;
  for (const auto& group : found.groups)
    if (const RlLinear& a = parts[group.adapter * apart].a; a.packed)
      any = true, gathers = gathers || !together(group), inputs = a.inputs;
  if (!any) return {};
  if (gathers)
    each_row(crew, static_cast<int>(found.rows.size()), [&](int at) {
      std::memcpy(static_cast<void*>(memory.gathered + at * memory.gathered_stride),
                  x + found.rows[at] * ldx, inputs * sizeof(T));
    });
  for (const auto& group : found.groups) {
    const RlLinear& a = parts[group.adapter * apart].a;
    if (!a.packed) continue;
    const bool there = together(group);
    const T* from = there ? x + found.rows[group.begin] * ldx
                          : memory.gathered + group.begin * memory.gathered_stride;
    linear(crew, from, there ? ldx : memory.gathered_stride, group.end - group.begin, a,
           Epilogue::STORE, memory.inner + group.begin * memory.inner_stride, memory.inner_stride);
  }
  return {memory.inner, memory.inner_stride, found.places.data(), found.adapters.data(), parts,
          apart};
}

template Added<float> adapt<float>(Crew&, const float*, size_t, const AdapterGroups&,
                                   const RlLowRank*, size_t, const AdapterMemory<float>&);
template Added<bf16> adapt<bf16>(Crew&, const bf16*, size_t, const AdapterGroups&,
                                 const RlLowRank*, size_t, const AdapterMemory<bf16>&);

}  // namespace rootlace
