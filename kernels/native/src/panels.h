// Which panels this library's instruction set multiplies with.
#pragma once

#include <type_traits>

#include "api.h"
#include "isa/isa.h"
#include "tile_panels.h"
#include "vector_panels.h"

namespace rootlace {

template <class T>
using Panels = std::conditional_t<std::is_same_v<T, bf16> && HAS_TILES, TilePanels<TileUnit>,
                                  VectorPanels<T>>;

// use(panels of weights[outputs, inputs] that are on this RlPath).
template <class T, class Use>
auto with_panels(int32_t path, int outputs, int inputs, bool gated, Use&& use) {
  if constexpr (Panels<T>::TILES)
    if (path == RL_VECTORS) return use(VectorPanels<T>(outputs, inputs, gated));
  return use(Panels<T>(outputs, inputs, gated));
}

template <class T, class Use>
auto with_panels(const RlLinear& weights, bool gated, Use&& use) {
  return with_panels<T>(weights.path, weights.outputs, weights.inputs, gated, use);
}

}  // namespace rootlace
